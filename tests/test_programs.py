"""Trainers and replicas of several processes, over loopback."""

from pathlib import Path

import pytest
from programs import Program

pytestmark = pytest.mark.end_to_end

VERSIONS = [0, 1, 2, 5]


@pytest.mark.parametrize("verify", ["wire", "full"])
def test_two_process_trainer_feeds_replicas_of_one_and_two_processes(
    tmp_path: Path, verify: str
) -> None:
    address_file = str(tmp_path / "address")
    with (
        Program("trainer", processes=2, devices=2, mesh=[2, 2], address_file=address_file,
                versions=VERSIONS, min_replicas=2, wait="committed") as trainer,
        Program("sampler", processes=1, devices=4, mesh=[1, 4], address_file=address_file,
                replica="one", verify=verify) as one,
        Program("sampler", processes=2, devices=2, mesh=[4, 1], address_file=address_file,
                replica="two", verify=verify) as two,
    ):  # fmt: skip
        reports = trainer.results()
        assert reports[0] == reports[1]
        assert [report[0] for report in reports[0]] == VERSIONS
        assert all(
            report[1:] == [{"one": report[0], "two": report[0]}, []] for report in reports[0]
        )
        assert one.results() == [VERSIONS]
        assert two.results() == [VERSIONS, VERSIONS]


def test_processes_pass_versions_through_pinned_host_memory(tmp_path: Path) -> None:
    address_file = str(tmp_path / "address")
    with (
        Program("trainer", processes=2, devices=2, mesh=[2, 2], address_file=address_file,
                versions=VERSIONS, min_replicas=1, wait="committed",
                staging="pinned_host") as trainer,
        Program("sampler", processes=2, devices=2, mesh=[4, 1], address_file=address_file,
                replica="two", staging="pinned_host") as two,
    ):  # fmt: skip
        expected = [[version, {"two": version}, []] for version in VERSIONS]
        assert trainer.results() == [expected, expected]
        assert two.results() == [VERSIONS, VERSIONS]


def test_calls_of_a_replica_end_alike_in_its_processes(tmp_path: Path) -> None:
    """Processes call at different times while versions are published without waiting."""
    address_file = str(tmp_path / "address")
    versions = list(range(1, 31))
    with (
        Program("trainer", devices=4, mesh=[2, 2], address_file=address_file, versions=versions,
                min_replicas=1, wait="received", most_pause_s=0.05) as trainer,
        Program("sampler", processes=2, devices=2, mesh=[1, 4], address_file=address_file,
                replica="two", most_pause_s=0.1) as two,
    ):  # fmt: skip
        trainer.results()
        first, second = two.results()
        assert first == second
        assert first == sorted(set(first)) and first[-1] == versions[-1]


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["replica", "fleet"])
def test_programs_go_on_whenever_their_coordinator_dies(tmp_path: Path, commit: str) -> None:
    address_file = str(tmp_path / "address")
    versions = list(range(1, 21))
    with (
        Program("trainer", processes=2, devices=2, mesh=[2, 2], address_file=address_file,
                versions=versions, min_replicas=2, wait="committed", most_pause_s=0.1,
                commit=commit, coordinator_dies=5) as trainer,
        Program("sampler", processes=1, devices=4, mesh=[1, 4], address_file=address_file,
                replica="one", most_pause_s=0.1) as one,
        Program("sampler", processes=2, devices=2, mesh=[4, 1], address_file=address_file,
                replica="two", most_pause_s=0.1) as two,
    ):  # fmt: skip
        reports = trainer.results()
        assert reports[0] == reports[1]
        assert reports[0] == [[v, {"one": v, "two": v}, []] for v in versions]
        assert one.results() == [versions]
        assert two.results() == [versions, versions]


@pytest.mark.parametrize("side", ["trainer", "sampler"])
def test_connecting_without_the_rest_of_a_program_ends_at_the_deadline(
    tmp_path: Path, side: str
) -> None:
    done_file = str(tmp_path / "done")
    with Program("alone", processes=2, devices=2, side=side, done_file=done_file) as program:
        (first, second), _ = program.results()
    seconds, text = first
    assert 2 <= seconds < 20  # it ends; how soon is up to the machine
    assert "some other process of this program did not connect in time" in text
    assert second[1] == text  # it waits for no collective that the other one may take for the first
