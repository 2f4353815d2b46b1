"""The calls of a session, numbered alike in all its processes, and what the coordinator decided."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from tpu_sync_rl.deadline import seconds_left
from tpu_sync_rl.errors import SyncError, SyncTimeoutError

T = TypeVar("T")

# How long after its deadline a call still waits for the decision, which the coordinator takes at
# that very moment, so that all processes of the program hear the same one.
GRACE_S = 0.7


@contextlib.contextmanager
def one_at_a_time(turn: threading.Lock, deadline: float) -> Iterator[None]:
    """Holds `turn` for one `sync_weights` of a session; SyncTimeoutError where another has it."""
    if not turn.acquire(timeout=seconds_left(deadline)):
        raise SyncTimeoutError("another sync_weights of this session is still running")
    try:
        yield
    finally:
        turn.release()


class Call(Generic[T]):
    """One call; `outcome` is None until it is decided."""

    __slots__ = ("number", "outcome")

    def __init__(self, number: int) -> None:
        self.number = number
        self.outcome: T | None = None


class Calls(Generic[T]):
    """Open calls, and decisions until they are forgotten.

    A decision may come before this process has entered its call. All methods may be called from
    any thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._open: dict[int, Call[T]] = {}
        self._decided: dict[int, T] = {}
        self._end: tuple[int, SyncError] | None = None

    def open(self, number: int) -> Call[T]:
        """Enters call `number`, or goes on with one that ended without a decision."""
        with self._changed:
            call = self._open.get(number) or Call(number)
            call.outcome = self._decided.get(number)
            if call.outcome is None:
                self._open[number] = call
            return call

    def numbers(self) -> list[int]:
        """Open calls that are not decided, ascending."""
        with self._changed:
            return sorted(self._open)

    def decisions(self) -> list[T]:
        """Those that another process of the program may not have heard yet."""
        with self._changed:
            return list(self._decided.values())

    def forget(self, below: int) -> None:
        """Drops decisions of calls below number `below`, which every process has heard."""
        with self._changed:
            self._decided = {n: x for n, x in self._decided.items() if n >= below}

    def decide(self, number: int, outcome: T) -> None:
        """Gives call `number` its outcome, whether or not it is open here yet."""
        with self._changed:
            self._decided[number] = outcome
            call = self._open.pop(number, None)
            if call is not None:
                call.outcome = outcome
            self._changed.notify_all()

    def end(self, error: SyncError, first: int = 0) -> None:
        """Makes calls from number `first` on raise `error`, unless they are decided."""
        with self._changed:
            if self._end is None or first < self._end[0]:
                self._end = (first, error)
            self._changed.notify_all()

    def raise_if_ended(self, number: int) -> None:
        """Raises what `end` said, when it holds for call `number`."""
        with self._changed:
            end = self._end
        if end is not None and number >= end[0]:
            raise type(end[1])(*end[1].args)

    def is_over(self, call: Call[T]) -> bool:
        """Whether waiting for `call` would not block."""
        with self._changed:
            ended = self._end is not None and call.number >= self._end[0]
            return ended or call.outcome is not None

    def wait(
        self, call: Call[T], deadline: float, past_deadline: Callable[[], None] | None = None
    ) -> T | None:
        """The outcome of `call`, or None where nobody decided it.

        Blocks until `deadline` (of time.monotonic()), then calls `past_deadline`, which asks for a
        decision, and blocks for `GRACE_S` more. Raises what `end` said.
        """
        if not self.is_over_by(call, deadline) and past_deadline is not None:
            past_deadline()
            self.is_over_by(call, time.monotonic() + GRACE_S)
        with self._changed:
            outcome = call.outcome
        if outcome is None:
            self.raise_if_ended(call.number)
        return outcome

    def is_over_by(self, call: Call[T], deadline: float) -> bool:
        """Waits for `call` until `deadline` (of time.monotonic()); whether it is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_over(call), seconds_left(deadline))
