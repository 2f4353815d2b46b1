"""Child processes that answer over pipes, one answer a word, until their pipe is closed."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

# Fresh memory costs more than most of what is measured: malloc is told to keep what it has.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(16 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
}
# Where peaks of memory are measured, it gives back at once what is free.
FREE_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}


class Pipe(Protocol):
    """What leads to a process: a `Connection`, or what does its work over a network."""

    def send(self, value: Any, /) -> None:
        """Says `value` to the other end."""

    def recv(self) -> Any:
        """What the other end says next. Raises EOFError when it has gone."""

    def close(self) -> None:
        """Tells the other end that nothing follows."""


class Processes:
    """Owns processes. They end when it is closed, or with this process.

    A context manager: leaving it cleanly waits until they have done what they were told; leaving it
    by an exception kills them.
    """

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._scripts: list[subprocess.Popen[bytes]] = []

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

    def start_script(self, python: str, script: Path, *arguments: object) -> Connection:
        """Runs a script by an interpreter of its own.

        Its first argument is the descriptor of its end of the pipe. What it prints is not shown.
        """
        pipe, theirs = multiprocessing.Pipe()
        words = [python, script, theirs.fileno(), *arguments]
        self._scripts.append(
            subprocess.Popen(
                list(map(str, words)),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for whoever owns the processes
            )
        )
        theirs.close()
        self._pipes.append(pipe)
        return pipe

    def pause(self) -> None:
        """Stops all of them, and what they started, so that they leave the machine to others."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets them go on."""
        self._signal(signal.SIGCONT)

    @property
    def pids(self) -> Sequence[int]:
        """Of all of them, in the order in which they started; scripts come last."""
        started = [process.pid for process in self._processes if process.pid is not None]
        return [*started, *(script.pid for script in self._scripts)]

    def close(self) -> None:
        """Tells all of them to end, then waits: programs of jax.distributed end together."""
        self.resume()
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()
        for script in self._scripts:
            script.wait()

    def kill(self) -> None:
        """Ends them at once."""
        for process in self._processes:
            process.kill()
        for script in self._scripts:
            script.kill()
        self.close()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            for member in _family(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, number)


def _family(pid: int) -> list[int]:
    """A process and all below it."""
    below: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # the thread has ended meanwhile
            below += map(int, path.read_text().split())
    return [pid, *(member for child in below for member in _family(child))]


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Lets processes that start meanwhile have `variables`; malloc reads its own at the start."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used: all its threads, no children."""
    return time.clock_gettime((~pid << 3) | 2)  # from linux/posix-timers.h: its CPUCLOCK_SCHED


def peak_mib(pid: int) -> float:
    """The most memory that a process has had resident so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{pid}/status has no VmHWM")


def answer(pipe: Pipe, what: str) -> Any:
    """What the process at the other end says next.

    Raises:
        RuntimeError: it has ended; `what` is what it was to do.
    """
    try:
        return pipe.recv()
    except EOFError:  # its traceback stands above, on the terminal
        raise RuntimeError(f"a program failed in {what}") from None


def words(pipe: Pipe) -> Iterator[Any]:
    """In a child: what it is told, until the other end is closed."""
    with contextlib.suppress(EOFError):
        while True:
            yield pipe.recv()


def _run(role: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever owns the processes
    role(pipe, *arguments)
