"""What the log says of what happened."""

import logging

import jax.numpy as jnp
import pytest
import streams

import tpu_sync_rl as tsr
from tpu_sync_rl.errors import VersionError
from tpu_sync_rl.journal import Journal
from tpu_sync_rl.messages import Held, Outcome, TrainerUp
from tpu_sync_rl.process_stats import ProcessStats
from tpu_sync_rl.report import RailReport
from tpu_sync_rl.sampler_messages import (
    Abandon,
    FetchFailed,
    FleetCommit,
    JobEnded,
    Prepared,
    Refuse,
    SamplerOutcome,
    Withdrawn,
)
from tpu_sync_rl.trainer_messages import Announced, JobClosed, Pins, PublishOutcome

HELD = Held("life", 7)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, "tpu_sync_rl")

    def take():
        records = [(record.levelname, record.getMessage()) for record in caplog.records]
        caplog.clear()
        return records

    return take


def journal(role="sampler", process_index=0, token=b"a very secret token"):
    options = streams.options(token, 10.0)
    return Journal(options, role, "life" if role == "trainer" else "s", process_index)


def published(lost=(), refused=None):
    return PublishOutcome(0, Outcome("", "", HELD), {}, {}, list(lost), refused or {})


@pytest.mark.parametrize("role", ["trainer", "sampler"])
def test_program_without_leaves_is_warned_of_once(log, role):
    one, other = journal(role), journal(role, process_index=1)
    for _ in range(2):
        one.counted(0)
        other.counted(0)
    ((level, text),) = log()
    assert level == "WARNING"
    assert "has no leaves, so that nothing is moved" in text
    journal(role).counted(1)
    assert log() == []


def test_short_token_is_warned_of_once_in_a_program(log):
    for process_index in range(2):
        journal(process_index=process_index, token=b"very-secret")
    ((level, text),) = log()
    assert level == "WARNING"
    assert "its token is shorter than 16 bytes" in text
    assert "very-secret" not in text
    journal(token=b"")
    journal(token=b"16 random bytes!")
    assert log() == []


def test_stream_to_the_coordinator_is_spoken_of(log):
    sampler = journal()
    sampler.on_joined("10.0.0.2:1")
    sampler.on_stream_lost("unavailable: reset")
    sampler.on_joined("10.0.0.2:1")
    sampler.on_refused(VersionError("a newer session"))
    assert log() == [
        ("INFO", "policy, s[0]: joined, at the coordinator 10.0.0.2:1"),
        ("WARNING", "policy, s[0]: lost the coordinator, and dials it again: unavailable: reset"),
        ("INFO", "policy, s[0]: joined again, at the coordinator 10.0.0.2:1"),
        ("WARNING", "policy, s[0]: ended by the coordinator: a newer session"),
    ]


@pytest.mark.parametrize(
    ("message", "level", "text"),
    [
        (Refuse("d", "w: shape"), "WARNING", "does not fit the trainer, and is refused:\nw: shape"),
        (
            FetchFailed(HELD, "PeerLostError", "gone"),
            "WARNING",
            "version 7: not received, but tried again: PeerLostError: gone",
        ),
    ],
)
def test_what_a_sampler_says_is_logged(log, message, level, text):
    journal().sent(message)
    [(seen_level, seen)] = log()
    assert seen_level == level
    assert seen.endswith(text)


@pytest.mark.parametrize(
    ("message", "level", "text"),
    [
        (TrainerUp("life", 1, "d", b"", [[]], [b""]), "INFO", "incarnation life, processes: 1"),
        (Abandon(HELD), "WARNING", "version 7: is not received any further"),
        (
            JobEnded(3, "the trainer has closed"),
            "INFO",
            "the job has ended: the trainer has closed",
        ),
        (SamplerOutcome(0, Outcome("", "", HELD), [], 0), "DEBUG", "version 7: taken"),
        (Announced(0, 7), "DEBUG", "version 7: announced"),
        (Withdrawn(HELD, "two was late"), "WARNING", "takes it: two was late"),
        (FleetCommit(HELD), "DEBUG", "version 7: committed by the fleet"),
        (Pins(7, [], 0), "DEBUG", "version 7: let go"),
        (JobClosed(), "INFO", "the job is closed"),
    ],
)
def test_what_the_coordinator_says_is_logged_once(log, message, level, text):
    journal().on_message(message)
    [(seen_level, seen)] = log()
    assert seen_level == level
    assert text in seen


def test_failure_that_comes_again_and_again_is_a_warning_once(log):
    sampler = journal()
    for text in ("gone", "gone", "silent"):
        sampler.sent(FetchFailed(HELD, "PeerLostError", text))
        sampler.on_message(Abandon(HELD))  # that it failed is no news here
    assert [level for level, _ in log()] == ["WARNING", "DEBUG", "WARNING"]


def test_trouble_on_a_rail_is_told_with_the_version(log):
    rails = {"a-b": RailReport(nbytes=4, num_retries=3, num_lost=2), "c-d": RailReport(nbytes=4)}
    journal().sent(Prepared(HELD, ProcessStats(8, 8, {"total": 0.5}, rails)))
    assert log() == [
        ("WARNING", "policy, s[0], version 7: rail a-b lost 2 streams"),
        ("INFO", "policy, s[0], version 7: 3 chunks asked for again, on a-b"),
        ("DEBUG", "policy, s[0], version 7: prepared: 8 B in 0.500 s"),
    ]


def test_replicas_that_are_lost_or_refused_are_named_once_and_by_one_process(log):
    first, second = journal("trainer"), journal("trainer", 1)
    for _ in range(2):
        for process in (first, second):
            process.on_message(published(refused={"s-1": "w: shape"}))
    first.on_message(published(lost=["s-0"]))
    assert log() == [
        (
            "WARNING",
            "policy, trainer[0], version 7: replica 's-1' does not fit, and is refused:\nw: shape",
        ),
        ("WARNING", "policy, trainer[0], version 7: replica 's-0' is lost"),
    ]


def test_sessions_log_their_life_and_never_the_token(log):
    params = {"w": jnp.arange(4.0)}
    options = {"token": "a very secret token", "timeout": 60}
    with (
        tsr.connect_trainer(**options) as trainer,
        tsr.connect_sampler(
            **options, coordinator=trainer.coordinator, replica="s", like=params
        ) as sampler,
    ):
        trainer.sync_weights(params)
        sampler.sync_weights()
    records = log()
    text = "\n".join(message for _, message in records)
    for said in ("trainer[0]: joined", "s[0]: joined", "version 1: prepared", "version 1: taken"):
        assert said in text
    assert not [message for level, message in records if level == "WARNING"]
    assert "very secret" not in text
