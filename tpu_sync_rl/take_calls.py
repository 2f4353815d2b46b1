"""The calls of one sampler process, which its replica's processes number alike."""

import time
from collections.abc import Callable

import msgspec

from tpu_sync_rl.calls import GRACE_S, Calls
from tpu_sync_rl.deadline import seconds_left
from tpu_sync_rl.messages import Message, Outcome
from tpu_sync_rl.sampler_messages import LeaveCall, SamplerOutcome, Take, Took


class TakeCalls(Calls[SamplerOutcome]):
    """Calls as `Calls` has them, entered one after the other.

    A call that is left without an outcome, by an interrupt or the deadline of this process, keeps
    its number for the next one. All methods may be called from any thread, but `outcome` and `took`
    from one at a time.

    Attributes:
        next_call: the number of the next call.
    """

    def __init__(self, process: int, send: Callable[[Message], None]) -> None:
        """Of process `process` of a replica; `send` tells the coordinator."""
        super().__init__()
        self._process = process
        self._send = send
        self._asked: tuple[Take, float] | None = None  # in the call under way, and its deadline
        self.next_call = 0

    def outcome(
        self, *, min_version: int | None, wait: bool, timeout_s: float, deadline: float
    ) -> SamplerOutcome | None:
        """Enters the next call and waits for its outcome; None where there is none in time.

        To be followed by `took`.
        """
        while True:
            take = Take(self.next_call, min_version, wait, timeout_s)
            decided = self._wait(take, deadline)
            if decided is None or not self._is_of_a_call_before(decided.outcome, take, deadline):
                return decided
            self.took()
            timeout_s = seconds_left(deadline)

    def took(self) -> None:
        """The outcome of the call has been returned, or raised."""
        number, self.next_call = self.next_call, self.next_call + 1
        self._send(Took(number))

    def enter_again(self) -> None:
        """Tells a coordinator that this process has joined anew of the call under way."""
        asked = self._asked
        if asked is not None:
            take, deadline = asked
            self._send(msgspec.structs.replace(take, timeout_s=seconds_left(deadline)))

    def _wait(self, take: Take, deadline: float) -> SamplerOutcome | None:
        call = self.open(take.call)
        self._asked = (take, deadline)
        self._send(take)
        decided: SamplerOutcome | None = None
        try:
            # The coordinator times this call by process 0's clock; another process's deadline
            # ends its own wait alone.
            own = deadline + (GRACE_S if self._process == 0 else 0.0)
            decided = self.wait(call, own)
        finally:
            self._asked = None
            if decided is None:  # nobody is here for an outcome: none is to be decided
                self._send(LeaveCall(take.call))
        return decided

    def _is_of_a_call_before(self, outcome: Outcome, take: Take, deadline: float) -> bool:
        """Whether an outcome came of a call that was left, and had this one's number.

        That one had a deadline and a `wait` of its own. Those of process 0 count.
        """
        if self._process != 0:
            return False
        if outcome.error == "Nothing":
            return take.wait
        return outcome.error == "SyncTimeoutError" and time.monotonic() < deadline
