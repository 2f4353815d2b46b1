"""What belongs to the process that made it, and is left alone in the forks of that process.

A fork has the descriptors, locks and exit handlers of its parent, but none of its threads. Whatever
it closes, says or wakes is the parent's: a shared epoll set, a stream to the coordinator, a child.
"""

import ctypes
import functools
import os
import weakref
from collections.abc import Callable
from typing import ParamSpec

from tpu_sync_rl.errors import SyncError

P = ParamSpec("P")

_belongings: "weakref.WeakSet[object]" = weakref.WeakSet()


class MakerProcess:
    """The process that made a session: the only one that may use it, or end it.

    In its forks the session is kept for ever, so that nothing of it is finalized there: gRPC's
    destructors would tell the coordinator of it, and native ones wait for threads that are not
    there.
    """

    def __init__(self, made: object) -> None:
        """Of `made`, a session or what it gave away; keeps it from nothing in this process."""
        self._pid = os.getpid()
        _belongings.add(made)
        _watch_forks()

    @property
    def is_this(self) -> bool:
        """Whether it is the process that asks. Takes no lock, which a fork might find taken."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises SyncError in any other process."""
        if not self.is_this:
            raise SyncError(
                f"the session is of process {self._pid}, and process {os.getpid()} is a fork of "
                "that one, without its threads: call the session where it was made, or connect one "
                "in a process that is started afresh (multiprocessing's 'spawn')"
            )


def only_here(call: Callable[P, object]) -> Callable[P, None]:
    """Makes `call` do nothing in forks of this process."""
    pid = os.getpid()

    def called(*args: P.args, **kwargs: P.kwargs) -> None:
        if os.getpid() == pid:
            call(*args, **kwargs)

    return called


def keep_for_ever(thing: object) -> None:
    """Never lets `thing` be finalized, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_keep_belongings)


def _keep_belongings() -> None:
    for made in list(_belongings):
        keep_for_ever(made)
