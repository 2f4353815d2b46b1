"""Child processes that answer over pipes, one answer a word, until their pipe is closed."""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


class Processes:
    """Owns processes. They end when it is closed, or with this process.

    A context manager: leaving it cleanly waits until they have done what they were told; leaving it
    by an exception kills them.
    """

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def start(self, role: Callable[..., None], *arguments: Any) -> Connection:
        """Runs `role(pipe, *arguments)` in a fresh process; returns our end of its pipe."""
        spawn = multiprocessing.get_context("spawn")
        pipe, theirs = spawn.Pipe()
        process = spawn.Process(target=_run, args=(role, theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._pipes.append(pipe)
        self._processes.append(process)
        return pipe

    def close(self) -> None:
        """Tells all of them to end, then waits: programs of jax.distributed end together."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()

    def kill(self) -> None:
        """Ends them at once."""
        for process in self._processes:
            process.kill()
        self.close()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


def answer(pipe: Connection, what: str) -> Any:
    """What the process at the other end says next.

    Raises:
        RuntimeError: it has ended; `what` is what it was to do.
    """
    try:
        return pipe.recv()
    except EOFError:  # its traceback stands above, on the terminal
        raise RuntimeError(f"a program failed in {what}") from None


def words(pipe: Connection) -> Iterator[Any]:
    """In a child: what it is told, until the other end is closed."""
    with contextlib.suppress(EOFError):
        while True:
            yield pipe.recv()


def _run(role: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever owns the processes
    role(pipe, *arguments)
