"""Threads of this library: why there is none, and what becomes of them when the interpreter exits.

They are daemons. Python takes these away as it exits, wherever they are; one that comes back from
native code then is unwound through C++ frames, which aborts the process. Our own native code holds
such a thread for good (csrc/py_gil.h), as all code does from Python 3.14 on. JAX's does not, so the
exit waits for threads that may be in it.
"""

import atexit
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from math import inf

from tpu_sync_rl.deadline import seconds_left
from tpu_sync_rl.errors import SyncError

_PATIENCE_S = 1.0  # with what JAX does, before it leaves the other processes of its program

_lock = threading.Lock()
_awaited: dict[threading.Thread, float] = {}  # guarded by _lock: how long an exit waits for each


class NoThreadError(SyncError, RuntimeError):
    """The system has no thread left; RuntimeError as well, as Python has it."""


def start_thread(
    name: str, run: Callable[[], object], *, exit_waits_s: float = 0.0
) -> threading.Thread:
    """Starts a daemon thread.

    Args:
        name: of the thread.
        run: what it does; it has to catch what that raises.
        exit_waits_s: how long the interpreter's exit waits for its end, at most. More than nothing
            where it may be within JAX; `inf` where JAX would not let the process end before.

    Raises:
        NoThreadError: the system has no thread left.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThreadError(
            f"this process could start no thread ({name}: {error}): it, its user or its container "
            "has as many as it may have; raise `ulimit -u`, or pids.max of its cgroup"
        ) from error
    if exit_waits_s > 0:
        with _lock:
            for ended in [other for other in _awaited if not other.is_alive()]:
                del _awaited[ended]
            _awaited[thread] = exit_waits_s
    return thread


@atexit.register
def _await_all() -> None:
    """Waits for threads that may be within JAX; where they don't come out, leaves its program.

    What waits for other processes of that ends when they are left, as JAX's own exit leaves them.
    """
    began = time.monotonic()
    with _lock:
        awaited = dict(_awaited)
    for thread, wait_s in awaited.items():
        thread.join(seconds_left(began + min(wait_s, _PATIENCE_S)))
    jax = sys.modules.get("jax")
    if jax is not None and any(awaited[x] == inf for x in awaited if x.is_alive()):
        with contextlib.suppress(Exception):  # it tells of it when it tries again, at its own exit
            jax.distributed.shutdown()
    for thread, wait_s in awaited.items():
        thread.join(seconds_left(began + wait_s))
