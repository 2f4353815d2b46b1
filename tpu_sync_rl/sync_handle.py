"""What `sync_weights(wait=None)` returns: a call that goes on by itself."""

import time
from collections.abc import Callable

from tpu_sync_rl.errors import SyncTimeoutError
from tpu_sync_rl.maker_process import MakerProcess
from tpu_sync_rl.options import checked_timeout
from tpu_sync_rl.report import Report


class SyncHandle:
    """A published version whose way to the samplers is still under way.

    Made by a session. Its methods may be called from any thread.

    Example:
        >>> import jax.numpy as jnp, tpu_sync_rl as tsr
        >>> with tsr.connect_trainer() as session:
        ...     handle = tsr.sync_weights({"w": jnp.zeros(4)}, to=session, wait=None)
        ...     report = handle.result(timeout=10)
        >>> handle.done(), report.version == handle.version == 1
        (True, True)

    Attributes:
        version: what was published.
    """

    def __init__(
        self,
        version: int,
        deadline: float,
        *,
        is_over: Callable[[float], bool],
        finish: Callable[[], Report],
    ) -> None:
        """A call that has until `deadline`, on the clock of time.monotonic().

        Args:
            version: what was published.
            deadline: of the call.
            is_over: waits until the moment that it is given; whether the call is over then.
            finish: waits until `deadline`, and reports or raises.
        """
        self._maker = MakerProcess(self)
        self.version = version
        self._deadline = deadline
        self._is_over = is_over
        self._finish = finish

    def done(self) -> bool:
        """Whether `result` would return or raise at once. Never blocks."""
        self._maker.check()
        return self._is_over(time.monotonic())

    def result(self, timeout: float | None = None) -> Report:
        """Waits until every live replica has prepared the version, and reports.

        Args:
            timeout: seconds; None for what is left of the call's own.

        Raises:
            SyncTimeoutError: lists which replica lacks what. The version stays announced, or was
                never announced and may be published again: the text says which.
            SyncError: the call ended in another way, in all processes of the program alike.
        """
        self._maker.check()
        soon = time.monotonic() + checked_timeout(timeout, float("inf"))
        if soon < self._deadline and not self._is_over(soon):
            raise SyncTimeoutError(f"version {self.version} is still on its way to samplers")
        return self._finish()
