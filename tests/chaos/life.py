"""One life of a program under test: its processes, what they tell, what is done to them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from programs import free_port

import tpu_sync_rl

from .place import TOKEN

_ROOT = Path(tpu_sync_rl.__file__).parents[1]
Event = dict[str, Any]


class Life:
    """Processes that were started together. One thread uses it; events come on others.

    Attributes:
        name: of the program.
        number: of the life, from 1.
        faulted: whether something was done to it that may end it.
        closing: whether it has been told to end by itself.
    """

    def __init__(
        self,
        name: str,
        number: int,
        commands: list[list[str]],
        *,
        devices: int,
        log_dir: Path,
        on_event: Callable[["Life", int, Event], None],
    ) -> None:
        self.name = name
        self.number = number
        self.faulted = False
        self.closing = False
        self.began = time.monotonic()
        self.begun: set[int] = set()  # processes that have begun to use the library
        self.connected: dict[int, float] = {}  # when each process was last taken in
        self._on_event = on_event
        self._log_dir = log_dir
        self._stopped: dict[int, float] = {}
        self._resumed: dict[int, float] = {}
        self.processes = []
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "GRPC_VERBOSITY": "NONE",
            "TSR_TOKEN": TOKEN,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "tests")]),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "PYTHONFAULTHANDLER": "1",
        }
        for index, command in enumerate(commands):
            with self._log_path(index).open("wb") as log:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
            self.processes.append(process)
            threading.Thread(target=self._read, args=(index, process), daemon=True).start()

    def __str__(self) -> str:
        return f"{self.name}#{self.number}"

    def alive(self, process: int) -> bool:
        """Whether a process has not ended."""
        return self.processes[process].poll() is None

    @property
    def all_alive(self) -> bool:
        """Whether no process has ended."""
        return all(map(self.alive, range(len(self.processes))))

    @property
    def is_up(self) -> bool:
        """Whether every process is alive, runs, and has been taken in for good."""
        whole = len(self.connected) == len(self.processes)
        return self.all_alive and whole and not self._stopped and not self.closing

    def running_since(self, process: int) -> float | None:
        """When a process was resumed last, or started; None where it is dead or stopped."""
        if not self.alive(process) or process in self._stopped:
            return None
        return self._resumed.get(process, self.began)

    def kill(self, process: int | None = None) -> None:
        """Ends a process, or all, as kill -9 does."""
        for index in self._indices(process):
            self.processes[index].kill()
            self.processes[index].wait()
            self._stopped.pop(index, None)

    def stop(self, process: int | None = None) -> None:
        """Stops a process, or all."""
        for index in self._indices(process):
            if self.alive(index):
                self.processes[index].send_signal(signal.SIGSTOP)
                self._stopped[index] = time.monotonic()

    def resume(self, process: int | None = None) -> None:
        """Lets a process, or all, go on."""
        for index in self._indices(process):
            if self._stopped.pop(index, None) is not None:
                self.processes[index].send_signal(signal.SIGCONT)
                self._resumed[index] = time.monotonic()

    def command(self, name: str, argument: Any = None) -> None:
        """Has every process do something; see `child.Child`."""
        for process in self.processes:
            assert process.stdin is not None
            # One that has ended, perhaps just now, obeys nobody.
            with contextlib.suppress(BrokenPipeError, ValueError):
                process.stdin.write(json.dumps([name, argument]).encode() + b"\n")
                process.stdin.flush()

    def close(self) -> None:
        """Kills what is left and lets go of the pipes."""
        self.kill()
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def dump_stacks(self, process: int) -> str:
        """Has a process that hangs print its stacks; its log."""
        self.processes[process].send_signal(signal.SIGABRT)
        self.processes[process].wait(20)
        return self.log(process, 12_000)

    def ended_by_jax(self, process: int) -> bool:
        """Whether JAX ended a process: it aborts one whose program has lost another."""
        if self.processes[process].poll() != -signal.SIGABRT:
            return False
        others = [x for index, x in enumerate(self.processes) if index != process]
        return any(map(_ends_soon, others))

    def log(self, process: int, most: int = 3000) -> str:
        """What a process printed: the end of it, and where it began to end."""
        text = self._log_path(process).read_text(errors="replace")
        if len(text) <= most:
            return text
        return f"{text[: most // 4]}\n…\n{text[-3 * most // 4 :]}"

    def _indices(self, process: int | None) -> list[int]:
        return list(range(len(self.processes))) if process is None else [process]

    def _log_path(self, process: int) -> Path:
        return self._log_dir / f"{self.name}-{self.number}-{process}.log"

    def _read(self, index: int, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.startswith(b"{") and line.endswith(b"}\n"):  # else it died meanwhile
                    event = json.loads(line)
                    self.begun.add(index)
                    if event["kind"] == "connected":
                        self.connected[index] = event["at"]
                    self._on_event(self, index, event)


def _ends_soon(process: "subprocess.Popen[bytes]") -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
        return True
    return False


def program_commands(
    prefix: list[str], role: str, num_processes: int, options: dict[str, Any]
) -> list[list[str]]:
    """Runs the module `role` of this package in so many processes of one JAX program."""
    port = free_port()
    commands = []
    for index in range(num_processes):
        several = num_processes > 1
        distributed = [f"127.0.0.1:{port}", num_processes, index] if several else None
        text = json.dumps({**options, "distributed": distributed})
        commands.append([*prefix, sys.executable, "-m", f"chaos.{role}", text])
    return commands
