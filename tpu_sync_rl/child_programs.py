"""Child processes of the launcher: started together, followed line by line, ended together."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tpu_sync_rl.deadline import seconds_left

_TAIL_LINES = 40


class ChildFailedError(Exception):
    """A child ended with an error, or the children did not end in time; says what they logged."""


class ChildPrograms:
    """Processes that live no longer than this context, and whose failure is the failure of all.

    A child's stdin is a pipe that nothing is written to: it closes when this process ends, however
    that happens, so a child that calls `end_with_stdin` ends too. What a child prints goes to
    `<log_dir>/<name>.log`, except for lines that are JSON objects on its stdout: its events.

    Not thread-safe.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []
        # Events of a child, and None after its last.
        self._events: queue.SimpleQueue[tuple[str, dict[str, Any] | None]] = queue.SimpleQueue()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts `command` under a name that is not taken; returns at once."""
        with self._log_path(name).open("wb") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is the launcher's to handle.
            )
        self._processes[name] = process
        reader = threading.Thread(target=self._read, args=(name, process), daemon=True)
        reader.start()
        self._readers.append(reader)

    def events(self, deadline: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields names and events as they come, until every child has ended well.

        More may be started meanwhile.

        Args:
            deadline: on the clock of `time.monotonic`.

        Raises:
            ChildFailedError: a child ended with an error, or the deadline passed.
        """
        ended = 0
        while ended < len(self._processes):
            try:
                name, event = self._events.get(timeout=seconds_left(deadline))
            except queue.Empty:
                raise ChildFailedError(self._overdue()) from None
            if event is not None:
                yield name, event
                continue
            ended += 1
            status = self._processes[name].wait()
            if status:
                raise ChildFailedError(f"{name} {_told(status)}\n{self._tail(name)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        for reader in self._readers:
            reader.join()

    def _read(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        with process.stdout, self._log_path(name).open("ab", buffering=0) as log:
            for line in process.stdout:
                event = _parsed(line)
                if event is None:
                    with contextlib.suppress(OSError):  # a full disk costs the log, and no more
                        log.write(line)
                else:
                    self._events.put((name, event))
        self._events.put((name, None))

    def _log_path(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"

    def _tail(self, name: str) -> str:
        lines = self._log_path(name).read_text(errors="replace").splitlines()
        return "\n".join(
            [f"--- end of {self._log_path(name)}", *lines[-_TAIL_LINES:], f"--- {name}"]
        )

    def _overdue(self) -> str:
        names = [name for name, process in self._processes.items() if process.poll() is None]
        tails = "\n".join(self._tail(name) for name in names)
        return f"the time limit passed while {', '.join(names)} still ran\n{tails}"


def end_with_stdin() -> None:
    """Ends this process as soon as the other end of its stdin is closed. Starts a thread."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _told(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"failed with exit status {status}"
