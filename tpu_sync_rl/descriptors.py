"""Whether a process has the file descriptors that it is about to need; gRPC aborts where not."""

import contextlib
import os
import resource

from tpu_sync_rl.errors import SyncError


class NoDescriptorError(SyncError, OSError):
    """The process has too few file descriptors left; OSError as well, as Python has it."""


def check_descriptors(what: str, needed: int) -> None:
    """Sees to it that there are `needed` descriptors for `what`, by having them for a moment.

    Raises:
        NoDescriptorError: there are fewer: says how many, and what to do.
    """
    had: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while len(had) < needed:
                had.append(os.open("/", os.O_PATH | os.O_CLOEXEC))
    finally:
        for descriptor in had:
            os.close(descriptor)
    if len(had) < needed:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise NoDescriptorError(
            f"{what} needs {needed} file descriptors, and this process has {len(had)} left: raise "
            f"`ulimit -n`, which is {soft} here (at most {hard}), or close some"
        )
