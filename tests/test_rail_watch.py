"""What is told of rails that carry nothing: once to the log, as it is to the coordinator."""

import logging

import pytest

from tpu_sync_rl import rail_watch
from tpu_sync_rl.messages import Held
from tpu_sync_rl.rail_watch import RailWatch
from tpu_sync_rl.sampler_messages import Hindered
from tpu_sync_rl.session_log import SessionLog
from tpu_sync_rl.transport import Trouble

HELD = Held("A", 7)
STALLED = Trouble(0, "a-x", 2, 6_291_456, 3.2, 0, "")
LOST = Trouble(0, "a-x", 0, 0, 0.0, 2, "Connection timed out (ETIMEDOUT)")


class Rails:
    """A dialler's rails, and what is wrong with them."""

    def __init__(self) -> None:
        self.wrong: list[Trouble] = []

    def troubles(self) -> list[Trouble]:
        return self.wrong

    def way(self, process: int, rail: str) -> str:
        return f"trainer process {process}, rail {rail}"


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(rail_watch, "_TOLD_EVERY_S", 0.0)
    rails, sent = Rails(), []
    watch = RailWatch(HELD, SessionLog("policy", "s", 0), sent.append)

    def look(*wrong: Trouble) -> list[Hindered]:
        rails.wrong = list(wrong)
        watch.look(rails)
        new = sent.copy()
        sent.clear()
        return new

    return look


def test_streams_that_get_nothing_are_told_of_and_so_is_the_end_of_that(watched, caplog):
    caplog.set_level(logging.INFO, "tpu_sync_rl")
    assert watched() == []
    [told] = watched(STALLED)
    assert told.held == HELD
    assert told.text.startswith(
        "reads from trainer process 0, rail a-x: 2 streams get nothing, for 3 s, with 6.291 MB "
        "asked for"
    )
    assert "large packets vanish, python -m tpu_sync_rl.doctor" in told.text
    [again] = watched(STALLED._replace(stalled_s=4.3))
    assert "for 4 s" in again.text
    assert watched() == [Hindered(HELD, "")]
    [record] = caplog.records
    assert (record.levelname, record.version) == ("INFO", 7)
    assert "rail a-x: 2 streams get nothing" in record.getMessage()


def test_each_loss_is_logged_with_its_reason(watched, caplog):
    caplog.set_level(logging.INFO, "tpu_sync_rl")
    [told] = watched(LOST)
    assert told.text.endswith(
        ": 2 streams were lost, the last since: Connection timed out (ETIMEDOUT)"
    )
    assert watched(LOST) == []
    watched(LOST._replace(num_lost=3))
    assert len(caplog.records) == 2


def test_other_rails_are_told_of_as_well(watched):
    [told] = watched(STALLED, LOST._replace(source_process=1, rail="b-y"))
    assert "trainer process 0, rail a-x: 2 streams get nothing" in told.text
    assert "; trainer process 1, rail b-y: 2 streams were lost" in told.text


def test_coordinator_is_told_no_more_than_once_a_second(monkeypatch):
    sent = []
    rails = Rails()
    rails.wrong = [STALLED]
    watch = RailWatch(HELD, SessionLog("policy", "s", 0), sent.append)
    now = 100.0
    monkeypatch.setattr(rail_watch.time, "monotonic", lambda: now)
    watch.look(rails)
    now, rails.wrong = 100.9, [LOST]
    watch.look(rails)
    assert len(sent) == 1
    now = 101.0
    watch.look(rails)
    assert len(sent) == 2
