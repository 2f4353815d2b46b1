"""The log of one process of a job: what happened to whom, in the text and as fields."""

import contextlib
import logging
import warnings

_logger = logging.getLogger("tpu_sync_rl")


class SessionLog:
    """Writes to the logger `tpu_sync_rl`; the application says what becomes of that.

    INFO is for what changes seldom (who joins, who comes back), WARNING for what a user must know,
    DEBUG for each version. Records have the attributes job, replica (None on a trainer),
    process_index and version (None where it is about none). May be used from any thread. A handler
    that raises is warned of, by Python's `warnings`.
    """

    def __init__(self, job: str, replica: str | None, process_index: int) -> None:
        self._fields = {"job": job, "replica": replica, "process_index": process_index}
        self._place = f"{job}, {replica or 'trainer'}[{process_index}]"

    def debug(self, text: str, version: int | None = None) -> None:
        """Logs what happens with every version."""
        self._log(logging.DEBUG, text, version)

    def info(self, text: str, version: int | None = None) -> None:
        """Logs what changes seldom."""
        self._log(logging.INFO, text, version)

    def warning(self, text: str, version: int | None = None) -> None:
        """Logs what a user must know."""
        self._log(logging.WARNING, text, version)

    def _log(self, level: int, text: str, version: int | None) -> None:
        if not _logger.isEnabledFor(level):
            return
        about = "" if version is None else f", version {version}"
        fields = {**self._fields, "version": version}
        try:
            # The text is an argument: a name in it may hold a %.
            _logger.log(level, "%s%s: %s", self._place, about, text, extra=fields, stacklevel=3)
        except Exception as error:  # of the application's handlers; no sync is to fail for a log
            with contextlib.suppress(Warning):
                warnings.warn(
                    f"a handler of the log {_logger.name!r} fails: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
