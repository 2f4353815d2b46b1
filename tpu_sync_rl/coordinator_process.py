"""A coordinator in a child process that lives no longer than the process that started it."""

import contextlib
import math
import os
import select
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from tpu_sync_rl.addresses import check_exposure, join_address
from tpu_sync_rl.deadline import seconds_left
from tpu_sync_rl.descriptors import check_descriptors
from tpu_sync_rl.errors import SyncError, SyncTimeoutError
from tpu_sync_rl.own_module import own_command
from tpu_sync_rl.session_log import SessionLog
from tpu_sync_rl.threads import start_thread
from tpu_sync_rl.tls import TLS, Files, check_tls

_DESCRIPTORS = 8  # pipes to the child, for a moment
_START_S = 30.0
_LOOK_S = 1.0  # from one look at whether it is stopped to the next
_STOP_S = 1.0
_FIRST_PAUSE_S = 0.05  # before it is started again
_MOST_PAUSE_S = 2.0


class CoordinatorProcess:
    """A coordinator in a child process, bound to the life of this one. See `start_coordinator`.

    When the child dies before `stop`, or is stopped for too long, a thread starts another at the
    same address: clients find it there and tell it what it has to know.

    Attributes:
        address: where it listens, "host:port".
    """

    def __init__(
        self,
        command: Sequence[str],
        host: str,
        port: int,
        token: bytes,
        log: SessionLog,
        *,
        patience_s: float,
        deadline: float,
    ) -> None:
        """Starts the first child and waits until it listens; raises as `start_coordinator` does."""
        self._command = list(command)
        self._environment = _child_environment(token)
        self._host = host
        self._patience_s = patience_s
        self._log = log
        self._stopped = threading.Event()
        # Held while there might be a child that nobody knows; guards _process.
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        listening: Future[int] = Future()
        # The child is bound to the thread that starts it, and that one to this process.
        start_thread("tsr-coordinator-watch", partial(self._run, port, deadline, listening))
        try:
            self.address = join_address(host, listening.result())
        except BaseException:
            self.stop()
            raise

    def stop(self, patience_s: float = _STOP_S) -> None:
        """Ends the process and waits for its end; its port is free then. Idempotent.

        It has `patience_s` to end by itself.
        """
        with self._starting:
            self._stopped.set()
            process = self._process
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return
        process.kill()
        process.wait()

    def _run(self, port: int, deadline: float, listening: "Future[int]") -> None:
        try:
            process, ready_fd = self._spawn(port)
            port = _listening_port(ready_fd, deadline)
        except BaseException as error:
            listening.set_exception(error)
            return
        listening.set_result(port)
        address, pause_s = join_address(self._host, port), _FIRST_PAUSE_S
        while True:
            code = self._end_of(process)
            if self._stopped.wait(pause_s):
                return
            self._log.warning(f"coordinator {address} ended with {code}; it is started again")
            try:
                process, ready_fd = self._spawn(port)
                _listening_port(ready_fd, time.monotonic() + _START_S)
                pause_s = _FIRST_PAUSE_S
            except SyncError as error:
                if self._stopped.is_set():
                    return
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)
                self._log.warning(f"coordinator {address}: {error}")
                process.kill()

    def _end_of(self, process: "subprocess.Popen[bytes]") -> int:
        """Waits for a child to end, and returns its code; kills it where somebody stopped it."""
        with contextlib.ExitStack() as stack:
            pidfd = None
            # It has ended, a sandbox denies it, or Python was built without.
            with contextlib.suppress(OSError, AttributeError):
                pidfd = os.pidfd_open(process.pid)
                stack.callback(os.close, pidfd)
            runs_at = time.monotonic()  # seen last
            while not _ends_within(_LOOK_S, process, pidfd):
                if not _is_stopped(process.pid):
                    runs_at = time.monotonic()
                elif time.monotonic() - runs_at > self._patience_s:
                    process.kill()
        return process.wait()

    def _spawn(self, port: int) -> "tuple[subprocess.Popen[bytes], int]":
        """A child, and the fd on which it says where it listens.

        Raises:
            SyncError: it is stopped, or the system gives no process or descriptor.
        """
        try:
            read_fd, write_fd = os.pipe()
        except OSError as error:
            raise _not_started(error) from error
        address = join_address(self._host, port)
        try:
            with self._starting:
                if self._stopped.is_set():
                    raise SyncError("it is stopped")
                process = self._process = subprocess.Popen(
                    [*self._command, "--address", address, "--ready_fd", str(write_fd)],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[write_fd],
                    start_new_session=True,
                )
        except BaseException as error:
            os.close(read_fd)
            if isinstance(error, OSError):
                raise _not_started(error) from error
            raise
        finally:
            os.close(write_fd)
        return process, read_fd


def _not_started(error: OSError) -> SyncError:
    return SyncError(f"the coordinator's process could not be started: {error}")


def start_coordinator(
    host: str,
    port: int,
    *,
    token: bytes,
    peer_timeout: float,
    insecure: bool,
    tls: TLS | None = None,
    job: str = "policy",
    deadline: float = math.inf,
) -> CoordinatorProcess:
    """Starts a coordinator as a child process and waits until it listens.

    It imports no JAX and ends within a second of this process, however that ends. Ctrl-C in a
    terminal does not reach it. If it dies, or is stopped for `peer_timeout`, another takes its
    place.

    Args:
        host: name or address to listen on; without a token loopback only, unless `insecure`.
        port: 0 for a free one.
        token: the job's secret; given to the child in its environment.
        peer_timeout: seconds without a sign of life after which a process is lost.
        insecure: listen beyond loopback without a token.
        tls: its certificate and key; with a `ca`, clients have to show a certificate as well.
        job: of whoever starts it, for the log.
        deadline: `time.monotonic()` at which to give up; after 30 s in any case.

    Raises:
        SyncError: the address is in use or can't be listened on; or there is no process, thread
            or descriptor left.
        SyncTimeoutError: it did not listen in time.
        ValueError: it is not loopback and there is no token, or `tls` lacks something.
    """
    check_descriptors("starting a coordinator", _DESCRIPTORS)
    check_exposure(host, token=token, insecure=insecure)
    if tls is not None:
        check_tls(tls, serves=True)
    command = [*own_command("tpu_sync_rl.coordinator"), "--parent", str(os.getpid())]
    command += ["--peer_timeout", str(peer_timeout)]
    if insecure:
        command.append("--insecure")
    for name in Files._fields:
        path = getattr(tls, name, None)
        if path is not None:
            command += [f"--tls_{name}", os.fspath(path)]
    deadline = min(deadline, time.monotonic() + _START_S)
    return CoordinatorProcess(
        command,
        host,
        port,
        token,
        SessionLog(job, None, 0),
        patience_s=peer_timeout,
        deadline=deadline,
    )


def _ends_within(seconds: float, process: "subprocess.Popen[bytes]", pidfd: int | None) -> bool:
    """Waits for the end of a child, by its `pidfd` where there is one, for it wakes nobody up."""
    if pidfd is not None:
        return _is_readable(pidfd, seconds)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _is_readable(fd: int, timeout_s: float) -> bool:
    """Waits for something to read; unlike select, of any descriptor that a process can have."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _child_environment(token: bytes) -> dict[str, str]:
    environment = dict(os.environ)
    environment.pop("TSR_TOKEN_FILE", None)
    environment.pop("TSR_TOKEN", None)
    environment.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is reported as an error
    if token:
        environment["TSR_TOKEN"] = os.fsdecode(token)
    return environment


def _listening_port(ready_fd: int, deadline: float) -> int:
    """The port that a child listens on. Raises SyncError where it does not, or not in time."""
    received = b""
    try:
        while _is_readable(ready_fd, seconds_left(deadline)):
            piece = os.read(ready_fd, 4096)
            if not piece:
                break
            received += piece
        else:
            raise SyncTimeoutError("the coordinator process did not start in time")
    finally:
        os.close(ready_fd)
    line = received.decode().strip()
    if not line.isdecimal():
        raise SyncError(line or "the coordinator process ended before it listened")
    return int(line)
