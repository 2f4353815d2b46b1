"""What the programs under test share: the pipe to the checker, calls that are timed, commands."""

import json
import math
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from tpu_sync_rl.client import CoordinatorClient

T = TypeVar("T")

_TICK_S = 0.05
_LATE_S = 0.9  # after its deadline, which is what promises allow a call less a moment


class Child:
    """One process of a program. Events go out as JSON lines, commands come in as such.

    The process ends with the pipe that its commands come from, so nothing outlives a run.
    """

    def __init__(self) -> None:
        self.options: dict[str, Any] = json.loads(sys.argv[1])
        self._events = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # whatever else is printed goes to the log
        self._lock = threading.Lock()
        self._lags: list[tuple[float, float]] = []
        self._ticked_at = time.monotonic()
        self._late_at = math.inf  # when the call under way is late
        self.closing = threading.Event()
        self.quiet = threading.Event()
        self._duplicates = 0.0
        self._rng = random.Random(self.options["seed"])
        self._duplicate_messages()
        threading.Thread(target=self._obey, daemon=True).start()
        threading.Thread(target=self._measure_lag, daemon=True).start()

    def join_program(self) -> None:
        """Joins the other processes of this program, if there are any."""
        import jax

        if self.options["distributed"] is not None:
            address, count, index = self.options["distributed"]
            jax.distributed.initialize(address, count, index)

    def tell(self, kind: str, **fields: Any) -> None:
        """Tells the checker something. From any thread."""
        line = json.dumps({"kind": kind, "at": time.monotonic(), **fields})
        with self._lock:
            print(line, file=self._events)

    def timed(self, call: str, timeout_s: float, function: Callable[[], T]) -> T:
        """Calls `function`, which has `timeout_s` to return or raise, and tells when it did."""
        began = time.monotonic()
        self.tell("enter", call=call, deadline=began + timeout_s)
        error: BaseException | None = None
        self._late_at = began + timeout_s + _LATE_S
        try:
            return function()
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._late_at = math.inf
            self.tell(
                "leave",
                call=call,
                deadline=began + timeout_s,
                error="" if error is None else type(error).__name__,
                text="" if error is None else str(error)[:1000],
                lag_s=self._lag_since(began),
            )

    def end(self, kind: str) -> NoReturn:
        """Tells why this process ends, and ends it; JAX would wait for the rest of its program."""
        self.tell(kind)
        os._exit(0)

    # --- commands

    def _obey(self) -> None:
        real, real_ns = time.time, time.time_ns
        for line in sys.stdin:
            command, argument = json.loads(line)
            if command == "duplicate":
                self._duplicates = argument
            elif command == "close":
                self.closing.set()
            elif command == "quiet":
                (self.quiet.set if argument else self.quiet.clear)()
            elif command == "clock":
                time.time = lambda by=argument: real() + by  # type: ignore[misc]
                time.time_ns = lambda by=argument: real_ns() + int(by * 1e9)  # type: ignore[misc]
        os._exit(0)

    def _duplicate_messages(self) -> None:
        """Has messages of the control connection come twice, as around a break, while told to."""
        send, init = CoordinatorClient.send, CoordinatorClient.__init__

        def send_often(client: CoordinatorClient, message: Any) -> None:
            for _ in range(self._num_copies()):
                send(client, message)

        def init_hearing_often(client: CoordinatorClient, *args: Any, **options: Any) -> None:
            on_message = options["on_message"]

            def hear(message: Any) -> None:
                for _ in range(self._num_copies()):
                    on_message(message)

            init(client, *args, **{**options, "on_message": hear})

        CoordinatorClient.send = send_often  # type: ignore[method-assign]
        CoordinatorClient.__init__ = init_hearing_often  # type: ignore[method-assign]

    def _num_copies(self) -> int:
        return 2 if self._rng.random() < self._duplicates else 1

    # --- how loaded the machine is

    def _measure_lag(self) -> None:
        """Notes by how much sleeps of this process are too long: it had no core, or was stopped.

        Has a call that is late say to the log where it is.
        """
        while True:
            self._ticked_at = time.monotonic()
            time.sleep(_TICK_S)
            now = time.monotonic()
            if now - self._ticked_at > 2 * _TICK_S:
                self._lags = [*self._lags[-99:], (now, now - self._ticked_at - _TICK_S)]
            if now > self._late_at:
                self._late_at = math.inf
                _print_stacks()

    def _lag_since(self, began: float) -> float:
        # What goes on now, too: the caller may get a core before the one who notes it.
        under_way_s = max(0.0, time.monotonic() - self._ticked_at - 2 * _TICK_S)
        return under_way_s + sum(lag_s for at, lag_s in self._lags if at >= began)


def _print_stacks() -> None:
    """Of all threads. With the GIL, unlike `faulthandler`, which may crash on threads that run."""
    for frame in sys._current_frames().values():
        traceback.print_stack(frame)
        print(file=sys.stderr, flush=True)


def run(program: Callable[[Child], NoReturn]) -> NoReturn:
    """Runs a program in this process, which ends at once however that ends."""
    child = Child()
    try:
        child.join_program()
        program(child)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
