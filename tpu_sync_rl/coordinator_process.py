"""A coordinator in a child process that lives no longer than the process that started it."""

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from tpu_sync_rl.deadline import seconds_left
from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.options import check_exposure, join_address
from tpu_sync_rl.tls import TLS
from tpu_sync_rl.tls import check as check_tls

_START_S = 30.0
_STOP_S = 1.0


class CoordinatorProcess:
    """A coordinator in a child process, bound to the life of this one. See `start_coordinator`."""

    def __init__(self, process: "subprocess.Popen[bytes]", address: str) -> None:
        self._process = process
        self.address = address

    def stop(self) -> None:
        """Ends the process and waits for its end; its port is free then. Idempotent."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
            return
        self._process.kill()
        self._process.wait()


def start_coordinator(
    host: str,
    port: int,
    *,
    token: bytes,
    peer_timeout: float,
    insecure: bool,
    tls: TLS | None = None,
) -> CoordinatorProcess:
    """Starts a coordinator as a child process and waits until it listens.

    It imports no JAX and ends within a second of this process, however that ends. Ctrl-C in a
    terminal does not reach it.

    Args:
        host: name or address to listen on; without a token loopback only, unless `insecure`.
        port: 0 for a free one.
        token: the job's secret; given to the child in its environment.
        peer_timeout: seconds without a sign of life after which a process is lost.
        insecure: listen beyond loopback without a token.
        tls: its certificate and key; with a `ca`, clients have to show a certificate as well.

    Raises:
        SyncError: the address is in use or can't be listened on.
        ValueError: it is not loopback and there is no token, or `tls` lacks something.
    """
    check_exposure(host, token=token, insecure=insecure)
    if tls is not None:
        check_tls(tls, serves=True)
    command = [sys.executable, "-m", "tpu_sync_rl.coordinator"]
    command += ["--address", join_address(host, port), "--parent", str(os.getpid())]
    command += ["--peer_timeout", str(peer_timeout)]
    if insecure:
        command.append("--insecure")
    for name in ("certificate", "key", "ca"):
        path = getattr(tls, name, None)
        if path is not None:
            command += [f"--tls_{name}", os.fspath(path)]
    read_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(
            [*command, "--ready_fd", str(write_fd)],
            env=_child_environment(token),
            stdin=subprocess.DEVNULL,
            pass_fds=[write_fd],
            start_new_session=True,
        )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    coordinator = CoordinatorProcess(process, "")
    try:
        line = _read_line(read_fd, time.monotonic() + _START_S)
        if not line.isdecimal():
            raise SyncError(line or "the coordinator process ended before it listened")
        coordinator.address = join_address(host, int(line))
    except BaseException:
        coordinator.stop()
        raise
    finally:
        os.close(read_fd)
    return coordinator


def _child_environment(token: bytes) -> dict[str, str]:
    environment = dict(os.environ)
    environment.pop("TSR_TOKEN_FILE", None)
    environment.pop("TSR_TOKEN", None)
    environment.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is reported as an error
    if token:
        environment["TSR_TOKEN"] = os.fsdecode(token)
    # The child finds this very package, from whatever folder it is started.
    package = Path(__file__).resolve().parent.parent
    paths = [str(package), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def _read_line(fd: int, deadline: float) -> str:
    """What the child writes until it closes its end; raises SyncError when that takes too long."""
    received = b""
    while select.select([fd], [], [], seconds_left(deadline))[0]:
        piece = os.read(fd, 4096)
        if not piece:
            return received.decode().strip()
        received += piece
    raise SyncError(f"the coordinator process did not start within {_START_S:.0f} s")
