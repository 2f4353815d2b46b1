"""What `sync_weights(wait=None)` returns: a call that goes on by itself."""

import time
from collections.abc import Callable

from tpu_sync_rl.calls import Call, Calls
from tpu_sync_rl.errors import SyncTimeoutError
from tpu_sync_rl.messages import PublishOutcome
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
        calls: Calls[PublishOutcome],
        call: Call[PublishOutcome],
        version: int,
        deadline: float,
        finish: Callable[[], Report],
    ) -> None:
        """`finish` waits until `deadline`, that of the call, and reports or raises."""
        self.version = version
        self._calls = calls
        self._call = call
        self._deadline = deadline
        self._finish = finish

    def done(self) -> bool:
        """Whether `result` would return or raise at once. Never blocks."""
        return self._calls.is_over(self._call)

    def result(self, timeout: float | None = None) -> Report:
        """Waits until every live replica has prepared the version, and reports.

        Args:
            timeout: seconds; None for what is left of the call's own.

        Raises:
            SyncTimeoutError: lists which replica lacks what. The version stays announced, or was
                never announced and may be published again: the text says which.
            SyncError: the call ended in another way, in all processes of the program alike.
        """
        soon = time.monotonic() + checked_timeout(timeout, float("inf"))
        if soon < self._deadline and self._calls.wait(self._call, soon) is None:
            raise SyncTimeoutError(f"version {self.version} is still on its way to samplers")
        return self._finish()
