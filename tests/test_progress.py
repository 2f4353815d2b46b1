"""The summary of a run, and what makes it a failure."""

import pytest

from tpu_sync_rl.progress import Progress, failures, summarize

REPLICAS = ["sampler-0", "sampler-1"]


def version(number, reward, **changes):
    return {
        "event": "version",
        "version": number,
        "reward": reward,
        "sync_s": 0.5,
        "nbytes": 1000,
        "gbytes_per_s": 2.0,
        "samplers": dict.fromkeys(REPLICAS, number),
        "differing": [],
    } | changes


GOOD = [version(number, 0.1 * number) for number in range(4)]


def test_good_run_has_no_failures():
    summary = summarize([{"event": "start"}, *GOOD], REPLICAS)
    assert failures(summary, steps=3) == []
    assert summary["versions"] == 4
    assert summary["bitwise_equal"]
    assert summary["reward_first"] == pytest.approx(0.05)
    assert summary["reward_last"] == pytest.approx(0.25)
    assert summary["reward_versions"] == 2
    assert summary["nbytes_per_version"] == 1000
    assert summary["sync_seconds_median"] == 0.5


def test_resumed_run_counts_the_rewards_before_it():
    summary = summarize([{"event": "resume", "rewards": [0.0, 0.1]}, *GOOD[2:]], REPLICAS)
    assert summary["versions"] == 2
    assert summary["rewards"] == pytest.approx([0.0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        (GOOD[:3], "the last version is 2, not 3"),
        ([], "the last version is None, not 3"),
        ([*GOOD[:3], version(3, 0.3, differing=["sampler-1: kernel"])], "bit-equal"),
        ([*GOOD[:3], version(3, 0.3, samplers={"sampler-0": 3})], "bit-equal"),
        ([*GOOD[:3], version(3, 0.3, samplers={"sampler-0": 3, "sampler-1": 2})], "sampler-1"),
        ([version(number, 0.5 - 0.1 * number) for number in range(4)], "reward did not rise"),
    ],
)
def test_promise_that_was_not_kept_is_a_failure(events, failure):
    assert failure in "\n".join(failures(summarize(events, REPLICAS), steps=3))


def test_lines_are_plain_where_there_is_no_terminal(capsys):
    with Progress("a job", REPLICAS) as progress:
        progress.show(version(7, 0.25))
        progress.show(version(10, 0.25, samplers={"sampler-0": 10}))
        progress.say("[bold] is no markup")
    assert capsys.readouterr().out.splitlines() == [
        "per version: its training step, mean reward of the answers with it, time until every "
        "sampler had it, and the version that each sampler answered with",
        "step   7  reward 0.250  sync   500.0 ms  sampler-0 at  7, sampler-1 at  7",
        "step  10  reward 0.250  sync   500.0 ms  sampler-0 at 10, sampler-1 at  -",
        "[bold] is no markup",
    ]


def test_terminal_gets_a_table(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with Progress("a job", REPLICAS) as progress:
        assert "programs are starting" in capsys.readouterr().out
        progress.show(version(7, 0.25))
    table = capsys.readouterr().out
    assert "a job" in table
    for cell in ["sampler-1", "0.250", "500.0 ms", "per version"]:
        assert cell in table
