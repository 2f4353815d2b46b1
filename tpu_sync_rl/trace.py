"""Stages of syncs as a Chrome trace, for chrome://tracing and Perfetto.

Format: the JSON array form of the Trace Event Format, whose closing bracket is optional, so that
the file of a program that was killed can be opened as well.
"""

import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path


class Trace:
    """Writes the stages of one process to a file. May be used from any thread."""

    def __init__(self, path: str | os.PathLike[str] | None, *, name: str, process: int) -> None:
        """Creates the file; `path` None writes nothing.

        Args:
            path: of process 0; other processes of the program append their index, as ".1".
            name: of the program.
            process: index of this process in it.

        Raises:
            OSError: the file can't be created.
        """
        self._lock = threading.Lock()
        self._file = None
        self._process = process
        self._separator = "\n"
        if path is not None:
            own = Path(path) if process == 0 else Path(f"{os.fspath(path)}.{process}")
            self._file = own.open("w", buffering=1)
            self._file.write("[")
            self._write("process_name", "M", args={"name": f"{name}, process {process}"})

    def stages(self, version: int, began_s: float, seconds: Iterable[tuple[str, float]]) -> None:
        """Adds stages that followed one another.

        Args:
            version: what they were of.
            began_s: when the first one began, on the clock of time.monotonic().
            seconds: name and duration of each.
        """
        if self._file is None:
            return
        # Wall-clock times let the traces of several hosts be laid side by side.
        at_s = began_s + time.time() - time.monotonic()
        for stage, spent_s in seconds:
            self._write(stage, "X", ts=at_s * 1e6, dur=spent_s * 1e6, args={"version": version})
            at_s += spent_s

    def close(self) -> None:
        """Ends the file. Idempotent."""
        with self._lock:
            if self._file is not None and not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()

    def _write(self, name: str, phase: str, **fields: object) -> None:
        event = {"name": name, "ph": phase, "pid": self._process, "tid": 0, **fields}
        with self._lock:
            if self._file is not None and not self._file.closed:
                self._file.write(self._separator + json.dumps(event))
                self._separator = ",\n"
