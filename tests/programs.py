"""Programs of one or several JAX processes, for tests that need more than one.

A role is a function of `roles.py`. Each process of a program runs `python programs.py ROLE JSON`,
joins the others by jax.distributed, calls the role and writes what it returns to a file.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tpu_sync_rl


def free_port() -> int:
    """A port of loopback that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Program:
    """Processes of one JAX program that runs a role; a context manager that ends them all."""

    def __init__(
        self, role: str, *, processes: int = 1, devices: int = 2, **arguments: Any
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._name = f"{role} {arguments.get('replica', '')}".strip()
        address = f"127.0.0.1:{free_port()}"
        self.processes: list[subprocess.Popen[bytes]] = []
        for index in range(processes):
            options = {
                "role": role,
                "arguments": arguments,
                "distributed": [address, processes, index] if processes > 1 else None,
                "result": str(self._result(index)),
            }
            environment = {
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": str(Path(tpu_sync_rl.__file__).parents[1]),  # the one under test
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            }
            with self._log(index).open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, json.dumps(options)],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def results(self, timeout_s: float = 120.0) -> list[Any]:
        """What the role returned in each process; fails with the log of one that failed."""
        deadline = time.monotonic() + timeout_s
        for index, process in enumerate(self.processes):
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            assert code == 0, f"{self._name}, process {index} ended with {code}:\n" + self.log(
                index
            )
        return [json.loads(self._result(i).read_text()) for i in range(len(self.processes))]

    def log(self, index: int) -> str:
        """The end of what a process printed."""
        return self._log(index).read_text(errors="replace")[-6000:]

    def kill(self, index: int) -> None:
        """Ends one process as kill -9 does."""
        self.processes[index].send_signal(signal.SIGKILL)
        self.processes[index].wait()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._folder.cleanup()

    def _result(self, index: int) -> Path:
        return Path(self._folder.name) / f"result-{index}.json"

    def _log(self, index: int) -> Path:
        return Path(self._folder.name) / f"log-{index}.txt"


def wait_for_file(path: Path, timeout_s: float = 60.0) -> str:
    """The text of a file that another process writes at once, by renaming."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.02)
    return path.read_text()


def write_file(path: Path, text: str) -> None:
    """Writes a file so that a reader sees all of it or nothing."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


def main() -> None:
    options = json.loads(sys.argv[1])
    import jax

    if options["distributed"] is not None:
        address, count, index = options["distributed"]
        jax.distributed.initialize(address, count, index)
    import roles

    result = getattr(roles, options["role"])(**options["arguments"])
    write_file(Path(options["result"]), json.dumps(result))


if __name__ == "__main__":
    main()
