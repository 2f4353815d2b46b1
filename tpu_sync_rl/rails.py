"""Rails between sampler and trainer processes: listens, dials, authenticates, gives descriptors."""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tpu_sync_rl import authentication, handshake
from tpu_sync_rl.errors import AuthError, PeerLostError, SyncError
from tpu_sync_rl.handshake import Code, Hello
from tpu_sync_rl.nics import LOOPBACK, Nic, find_nics
from tpu_sync_rl.options import Options, is_loopback, join_address, split_address

MAX_HALF_OPEN = 64
HANDSHAKE_S = 5.0

_BACKLOG = 128


class Address(Protocol):
    """Where one NIC of a process listens; `messages.Address` is one."""

    @property
    def nic(self) -> str:
        """Name of the NIC."""

    @property
    def host(self) -> str:
        """IP address."""

    @property
    def port(self) -> int:
        """TCP port."""


@dataclass(frozen=True, slots=True)
class Rail:
    """A pair of a local NIC and a remote NIC that listens."""

    local: Nic
    remote_nic: str
    host: str
    port: int

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"{self.local.name}-{self.remote_nic}"


def pair(options: Options, addresses: Sequence[Address]) -> list[Rail]:
    """Pairs the local NICs with those that `addresses` name: each of both sides is in a rail.

    NICs of one subnet go together, others by their order. Local NICs without a route to any of
    them are left out, unless `options.nics` names them or no NIC has one.

    Raises:
        ValueError: `options.nics` names what is no NIC here.
    """
    loopback = all(is_loopback(address.host) for address in addresses)
    nics = [LOOPBACK] if loopback else find_nics(options.nics)
    if options.nics is None:
        nics = [nic for nic in nics if any(nic.reaches(a.host) for a in addresses)] or nics
    pairs: list[tuple[Nic, Address]] = []
    for index, address in enumerate(addresses):
        near = [nic for nic in nics if nic.is_beside(address.host)] or nics
        pairs.append((near[index % len(near)], address))
    for index, nic in enumerate(nics):
        if all(nic is not paired for paired, _ in pairs):
            near_addresses = [a for a in addresses if nic.is_beside(a.host)] or addresses
            pairs.append((nic, near_addresses[index % len(near_addresses)]))
    return [Rail(nic, address.nic, address.host, address.port) for nic, address in pairs]


def dial(
    rail: Rail, options: Options, *, incarnation: str, sink: int, timeout_s: float = HANDSHAKE_S
) -> int:
    """Opens an authenticated connection over `rail`; the caller owns the descriptor.

    Blocks for at most about `timeout_s`. May be called from any thread.

    Raises:
        AuthError: the peer has another token than we.
        PeerLostError: nobody listens there, it does not answer, or it is of another job or
            incarnation.
    """
    peer = f"the trainer at {join_address(rail.host, rail.port)} ({rail.name})"
    deadline = time.monotonic() + timeout_s
    hello = Hello(
        authentication.new_nonce(), handshake.target(options.job, incarnation), sink, rail.name
    )
    family = socket.AF_INET6 if ":" in rail.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        _tune(connection, options)
        try:
            connection.bind((rail.local.host, 0))
            connection.settimeout(timeout_s)
            connection.connect((rail.host, rail.port))
            connection.sendall(hello.encode())
            code, challenge = _receive_answer(connection, deadline)
            if code != Code.OK:
                raise PeerLostError("it belongs to another job or incarnation")
            ours, theirs = handshake.proofs(
                options.token, hello, challenge, job=options.job, incarnation=incarnation
            )
            connection.sendall(ours)
            code, proof = _receive_answer(connection, deadline)
        except OSError as error:
            raise PeerLostError(f"{peer}: {error}") from error
        if code != Code.OK:
            raise AuthError(f"{peer} refused our token")
        if not authentication.matches(proof, theirs):
            raise AuthError(f"{peer} does not have our token")
        connection.settimeout(None)
        return connection.detach()


def _receive_answer(connection: socket.socket, deadline: float) -> tuple[int, bytes]:
    received = b""
    while len(received) < handshake.ANSWER_NBYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(handshake.ANSWER_NBYTES - len(received))
        if not part:
            raise PeerLostError("it closed the connection during the handshake")
        received += part
    return handshake.decode_answer(received)


def _tune(connection: socket.socket, options: Options) -> None:
    """Sets what a data connection needs; those that a socket accepts inherit it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Otherwise the kernel holds what was sent to a peer that is gone for a quarter of an hour.
    lost_after_ms = int(options.peer_timeout_s * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_after_ms)
    if options.congestion is not None:
        name = options.congestion.encode()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)


@dataclass(slots=True, eq=False)
class _HalfOpen:
    """An accepted connection that has not proved anything yet."""

    connection: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    nonce: bytes = field(default_factory=authentication.new_nonce)
    hello: Hello | None = None


class Listener:
    """Listens on every NIC of a trainer process, and gives away connections that proved themselves.

    One thread of its own holds all handshakes, none of which waits for another. At most
    `MAX_HALF_OPEN` are under way; one more ends the oldest.
    """

    def __init__(
        self,
        options: Options,
        *,
        coordinator: str,
        incarnation: str,
        on_stream: Callable[[int, int, str], None],
    ) -> None:
        """Listens on a free port of each NIC.

        Loopback alone where there is no token (and not `insecure`), or the coordinator can't be
        reached from other machines either.

        Args:
            options: of the session.
            coordinator: its address, "host:port".
            incarnation: of this trainer; diallers of another one are turned away.
            on_stream: called with (fd, sink, rail) on the listener's thread; owns the descriptor.

        Raises:
            ValueError: `options.nics` names what is no NIC here.
            SyncError: an address can't be listened on.
        """
        self._options = options
        self._incarnation = incarnation
        self._on_stream = on_stream
        self._half_open: dict[_HalfOpen, None] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        self._wake, wake = socket.socketpair()
        self._listening: list[socket.socket] = []
        self.addresses: list[tuple[str, str, int]] = []  # NIC, host, port
        self._selector.register(wake, selectors.EVENT_READ, None)
        only_here = is_loopback(split_address(coordinator)[0])
        if only_here or not (options.token or options.insecure):
            nics = [LOOPBACK]
        else:
            nics = find_nics(options.nics)
        try:
            for nic in nics:
                self._listen(nic)
        except ValueError:
            self._close_sockets()
            raise
        except OSError as error:
            self._close_sockets()
            raise SyncError(f"can't listen on {nic.host} ({nic.name}): {error}") from error
        self._thread = threading.Thread(target=self._run, name="tsr-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and ends the handshakes under way. May be called twice."""
        with contextlib.suppress(OSError):  # closed already
            self._wake.send(b"x")
        self._thread.join()

    def _listen(self, nic: Nic) -> None:
        family = socket.AF_INET6 if ":" in nic.host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        self._listening.append(listening)
        listening.setblocking(False)
        _tune(listening, self._options)
        listening.bind((nic.host, 0))
        listening.listen(_BACKLOG)
        self._selector.register(listening, selectors.EVENT_READ, listening)
        self.addresses.append((nic.name, nic.host, listening.getsockname()[1]))

    def _run(self) -> None:
        try:
            while True:
                now = time.monotonic()
                for half_open in [h for h in self._half_open if h.deadline <= now]:
                    self._drop(half_open)
                oldest = next(iter(self._half_open), None)
                timeout_s = None if oldest is None else oldest.deadline - now
                for key, _ in self._selector.select(timeout_s):
                    if key.data is None:
                        return
                    if isinstance(key.data, _HalfOpen):
                        self._advance(key.data)
                    else:
                        self._accept(key.data)
        finally:
            self._close_sockets()

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError:  # it is gone again; or out of descriptors, which must not become a spin
            time.sleep(0.01)
            return
        if len(self._half_open) == MAX_HALF_OPEN:
            self._drop(next(iter(self._half_open)))
        connection.setblocking(False)
        half_open = _HalfOpen(connection, time.monotonic() + HANDSHAKE_S)
        self._half_open[half_open] = None
        self._selector.register(connection, selectors.EVENT_READ, half_open)

    def _advance(self, half_open: _HalfOpen) -> None:
        if half_open not in self._half_open:  # dropped by an event before this one
            return
        wanted = handshake.HELLO_NBYTES if half_open.hello is None else handshake.PROOF_NBYTES
        try:
            part = half_open.connection.recv(wanted - len(half_open.received))
            half_open.received += part
            if not part:
                self._drop(half_open)
            elif len(half_open.received) == wanted:
                message = bytes(half_open.received)
                half_open.received.clear()
                if half_open.hello is None:
                    self._challenge(half_open, Hello.decode(message))
                else:
                    self._judge(half_open, half_open.hello, message)
        except BlockingIOError:
            return
        except (OSError, ValueError):  # it broke off, or is no peer of ours
            self._drop(half_open)

    def _challenge(self, half_open: _HalfOpen, hello: Hello) -> None:
        if hello.target != handshake.target(self._options.job, self._incarnation):
            half_open.connection.send(handshake.encode_answer(Code.OTHER_PEER))
            self._drop(half_open)
            return
        half_open.connection.send(handshake.encode_answer(Code.OK, half_open.nonce))
        half_open.hello = hello

    def _judge(self, half_open: _HalfOpen, hello: Hello, proof: bytes) -> None:
        theirs, ours = handshake.proofs(
            self._options.token,
            hello,
            half_open.nonce,
            job=self._options.job,
            incarnation=self._incarnation,
        )
        if not authentication.matches(proof, theirs):
            half_open.connection.send(handshake.encode_answer(Code.REFUSED))
            self._drop(half_open)
            return
        half_open.connection.send(handshake.encode_answer(Code.OK, ours))
        self._forget(half_open)
        with contextlib.suppress(SyncError):  # whoever takes streams has just been closed
            self._on_stream(half_open.connection.detach(), hello.sink, hello.rail)

    def _forget(self, half_open: _HalfOpen) -> None:
        self._half_open.pop(half_open, None)
        self._selector.unregister(half_open.connection)

    def _drop(self, half_open: _HalfOpen) -> None:
        self._forget(half_open)
        half_open.connection.close()

    def _close_sockets(self) -> None:
        for half_open in list(self._half_open):
            self._drop(half_open)
        for listening in self._listening:
            listening.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._wake.close()
