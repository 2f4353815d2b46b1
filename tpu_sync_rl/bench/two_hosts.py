"""How the two hosts of a benchmark speak: lines of JSON, once both have proved to have the token.

The trainer's host listens at the port after its coordinator's. The sampler's dials it once per role
that it plays, and is told what to do; what it is told and says are plain JSON types.
"""

import json
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from tpu_sync_rl import authentication
from tpu_sync_rl.addresses import check_exposure, port_after, split_address
from tpu_sync_rl.bench import programs, raw_sockets
from tpu_sync_rl.bench.cases import Settings
from tpu_sync_rl.errors import AuthError, SyncTimeoutError

ROLES = ("sockets", "sampler")

_HANDSHAKE_S = 5.0
_SILENT_S = 10  # after which the kernel asks whether the other host still lives
_RETRY_S = 0.2
_MAX_NBYTES = 1 << 24  # of a line


class HostPipe:
    """A pipe to a process on another host."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S)

    def send(self, value: Any, /) -> None:
        """Says `value`, of plain JSON types."""
        self._connection.sendall(json.dumps(value).encode() + b"\n")

    def recv(self) -> Any:
        """What the other end says next. Raises EOFError when it has gone."""
        try:
            line = self._lines.readline(_MAX_NBYTES)
        except OSError:  # a host that died without a word as well
            line = b""
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)

    def close(self) -> None:
        """Tells the other end that nothing follows."""
        self._lines.close()
        self._connection.close()

    def set_timeout(self, timeout_s: float | None) -> None:
        """Bounds each wait of those that follow, with TimeoutError; None lifts it."""
        self._connection.settimeout(timeout_s)

    def __enter__(self) -> "HostPipe":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SamplerHost:
    """The sampler's host, which has dialled in for each of its roles.

    Attributes:
        pipes: to each role of `ROLES`.

    Raises:
        ValueError: the host can be reached from others, and there is no token.
        SyncTimeoutError: nobody came who has the token.
    """

    def __init__(self, settings: Settings) -> None:
        address, token = _meeting(settings)
        self.pipes: dict[str, HostPipe] = {}
        deadline = time.monotonic() + programs.TIMEOUT_S
        with socket.create_server(address) as listener:
            while len(self.pipes) < len(ROLES):
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    self.close()
                    raise SyncTimeoutError(
                        f"no sampler's host dialled {address[0]}:{address[1]} with our token"
                    ) from None
                self._admit(HostPipe(connection), token)

    def close(self) -> None:
        """Lets the other host end."""
        for pipe in self.pipes.values():
            pipe.close()

    def __enter__(self) -> "SamplerHost":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _admit(self, pipe: HostPipe, token: bytes) -> None:
        """Keeps a pipe whose other end has the token, and closes any other."""
        pipe.set_timeout(_HANDSHAKE_S)
        nonce = authentication.new_nonce()
        try:
            hello = pipe.recv()
            role, nonces = str(hello["role"]), (bytes.fromhex(hello["nonce"]), nonce)
            pipe.send(nonce.hex())
            proof = bytes.fromhex(pipe.recv())
            expected = authentication.mac(token, "dialler", nonces, ["bench", role])
            if role in ROLES and authentication.matches(proof, expected):
                pipe.send(authentication.mac(token, "listener", nonces, ["bench", role]).hex())
                pipe.set_timeout(None)
                self.pipes[role] = pipe
                return
        except (EOFError, OSError, ValueError, TypeError, KeyError):
            pass
        pipe.close()


def serve(settings: Settings) -> None:
    """Is the sampler's host: plays all roles until the trainer's host ends.

    Raises:
        ValueError: the trainer's host can be reached from others, and there is no token.
        AuthError: it has another token.
        SyncTimeoutError: it did not answer in time.
    """
    address, token = _meeting(settings)
    deadline = time.monotonic() + programs.TIMEOUT_S
    with (
        _dial(address, token, "sockets", deadline) as sockets,
        _dial(address, token, "sampler", deadline) as pipe,
    ):
        arguments = (sockets, settings.sampler.nics)
        threading.Thread(target=_receive, args=arguments, daemon=True).start()
        num_devices = max(case.sampler.num_devices for case in settings.cases.values())
        begin = programs.Begin(num_devices, distributed=None, num_processes=1, index=0)
        programs.sampler(pipe, settings, begin, settings.trainer.coordinator, "sampler-0")


def _receive(pipe: HostPipe, nics: Sequence[str] | None) -> None:
    with pipe:  # so that the other host learns of a failure
        raw_sockets.receive(pipe, nics)


def _dial(address: tuple[str, int], token: bytes, role: str, deadline: float) -> HostPipe:
    while True:
        try:
            connection = socket.create_connection(address, _HANDSHAKE_S)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise SyncTimeoutError(
                    f"no trainer's host answered at {address[0]}:{address[1]}"
                ) from None
            time.sleep(_RETRY_S)
    pipe = HostPipe(connection)
    nonce = authentication.new_nonce()
    try:
        pipe.send({"role": role, "nonce": nonce.hex()})
        nonces = (nonce, bytes.fromhex(pipe.recv()))
        pipe.send(authentication.mac(token, "dialler", nonces, ["bench", role]).hex())
        expected = authentication.mac(token, "listener", nonces, ["bench", role])
        if not authentication.matches(bytes.fromhex(pipe.recv()), expected):
            raise EOFError
    except (EOFError, OSError):
        pipe.close()
        raise AuthError("the trainer's host has another token") from None
    pipe.set_timeout(None)
    return pipe


def _meeting(settings: Settings) -> tuple[tuple[str, int], bytes]:
    """Where the trainer's host listens, and the token. Raises ValueError where it may not."""
    host, port = split_address(settings.trainer.coordinator)
    token = settings.token or b""
    check_exposure(host, token=token, insecure=False)
    return (host, port_after(port)), token
