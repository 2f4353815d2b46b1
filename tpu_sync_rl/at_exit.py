"""What ends by itself when the interpreter exits, for whoever did not close it."""

import atexit
import os
import weakref
from collections.abc import Callable


class AtExit:
    """Has a method called when the interpreter exits, unless its object is gone by then.

    Forks of this process leave it to this one, though they have its exit handlers, too.

    Threads that go on until the end are taken away wherever they are; one that is in native code
    then, as those are that move bytes or copy to devices, aborts the whole process.
    """

    def __init__(self, method: Callable[[], object]) -> None:
        """Keeps the object of `method` from nothing."""
        self._method = weakref.WeakMethod(method)
        self._pid = os.getpid()
        atexit.register(self._call)

    def cancel(self) -> None:
        """Leaves the method alone: it has been called, or need not be."""
        atexit.unregister(self._call)

    def _call(self) -> None:
        method = self._method()
        if method is not None and os.getpid() == self._pid:
            method()
