import threading
import time

import pytest

from tpu_sync_rl.calls import Calls
from tpu_sync_rl.errors import JobEndedError, SyncError


def soon() -> float:
    return time.monotonic() + 20


def test_waiting_call_gets_its_decision_from_another_thread():
    calls: Calls[str] = Calls()
    call = calls.open(3)
    assert calls.numbers() == [3] and not calls.is_over(call)
    thread = threading.Thread(target=calls.decide, args=(3, "taken"))
    thread.start()
    assert calls.wait(call, soon()) == "taken"
    thread.join()
    assert calls.is_over(call) and calls.numbers() == []


def test_decision_that_comes_before_its_call_is_kept():
    calls: Calls[str] = Calls()
    calls.decide(0, "early")
    assert calls.wait(calls.open(0), deadline=0.0) == "early"


def test_call_without_a_decision_keeps_its_number():
    calls: Calls[str] = Calls()
    first = calls.open(0)
    assert calls.wait(first, deadline=0.0) is None
    calls.decide(0, "late")
    assert calls.wait(calls.open(0), deadline=0.0) == "late"


def test_deadline_asks_for_a_decision_and_still_takes_it():
    calls: Calls[str] = Calls()
    call = calls.open(0)
    assert calls.wait(call, 0.0, past_deadline=lambda: calls.decide(0, "too late")) == "too late"


def test_decisions_are_kept_until_they_are_forgotten():
    calls: Calls[str] = Calls()
    for number in range(4):
        calls.open(number)
        calls.decide(number, str(number))
    calls.forget(2)
    assert calls.decisions() == ["2", "3"]


def test_end_holds_from_a_call_on_and_spares_decided_ones():
    calls: Calls[str] = Calls()
    calls.decide(1, "last")
    calls.end(JobEndedError("the trainer has closed"), first=2)
    assert calls.wait(calls.open(1), soon()) == "last"
    calls.raise_if_ended(1)
    with pytest.raises(JobEndedError, match="the trainer has closed"):
        calls.wait(calls.open(2), soon())
    calls.end(SyncError("closed here"))
    with pytest.raises(SyncError, match="closed here"):
        calls.raise_if_ended(0)
