"""The source's ends of rails: listens, has diallers prove themselves, gives connections."""

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tpu_sync_rl import authentication, handshake, same_host
from tpu_sync_rl.addresses import is_loopback, split_address
from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.handshake import Code, Hello
from tpu_sync_rl.nics import Nic, find_nics, loopback
from tpu_sync_rl.options import Options
from tpu_sync_rl.rails import HANDSHAKE_S, Connection, new_socket, tune
from tpu_sync_rl.report import UNKNOWN_LINE, Line
from tpu_sync_rl.same_host import NotSharedError
from tpu_sync_rl.session_log import SessionLog
from tpu_sync_rl.threads import start_thread

MAX_HALF_OPEN = 64

_BACKLOG = 128


@dataclass(slots=True, eq=False)
class _HalfOpen:
    """An accepted connection that has not proved anything yet."""

    connection: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    nonce: bytes = field(default_factory=authentication.new_nonce)
    hello: Hello | None = None
    ring_fd: int = -1

    def receive(self, nbytes: int) -> bytes:
        """What has come, at most `nbytes`; keeps the memory that comes along with a proof."""
        if self.hello is None or self.connection.family != socket.AF_UNIX:
            return self.connection.recv(nbytes)
        part, fd = same_host.receive(self.connection, nbytes)
        if fd >= 0:
            self.close_ring()
            self.ring_fd = fd
        return part

    def close_ring(self) -> None:
        """Lets go of the memory, where there is some."""
        if self.ring_fd >= 0:
            os.close(self.ring_fd)
        self.ring_fd = -1


class ListeningAt(NamedTuple):
    """Where one NIC listens; a `rails.Address`."""

    nic: str
    host: str
    port: int
    line: Line


class Listener:
    """Listens on every NIC of a process, and gives away connections that proved themselves.

    One thread of its own holds all handshakes, none of which waits for another. At most
    `MAX_HALF_OPEN` are under way, and one more ends the oldest of those that have not said yet
    which incarnation they want, which strangers don't know.

    Attributes:
        addresses: NIC, host and port of each socket.
        ticket_secret: what the tickets to it are made of, as long as it lives.
    """

    def __init__(
        self,
        options: Options,
        *,
        coordinator: str,
        incarnation: str,
        on_stream: Callable[[Connection, int, str], None],
        log: SessionLog,
    ) -> None:
        """Listens on a free port of each NIC, and to processes of this host, unless told "tcp".

        Loopback alone where there is no token (and not `insecure`), or the coordinator can't be
        reached from other machines either.

        Args:
            options: of the session.
            coordinator: its address, "host:port".
            incarnation: whose versions are served; diallers of another one are turned away.
            on_stream: called with (connection, sink, rail) on the listener's thread.
            log: is told why TCP takes the place of shared memory.

        Raises:
            ValueError: `options.nics` names what is no NIC here.
            SyncError: an address can't be listened on, or there is no thread left.
        """
        self._options = options
        self._incarnation = incarnation
        self._on_stream = on_stream
        self._log = log
        self._half_open: dict[_HalfOpen, None] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        self._wake, wake = socket.socketpair()
        self._listening: list[socket.socket] = []
        self.addresses: list[ListeningAt] = []
        self.ticket_secret = authentication.new_ticket_secret()
        self._selector.register(wake, selectors.EVENT_READ, None)
        only_here = is_loopback(split_address(coordinator)[0])
        if only_here or not (options.token or options.insecure):
            nics = [loopback()]
        else:
            nics = find_nics(options.nics)
        try:
            for nic in nics:
                try:
                    self._listen(nic)
                except OSError as error:
                    if all(at.nic != nic.name for at in self.addresses):
                        raise
                    self._log.info(f"does not listen on {nic.host}, too ({nic.name}): {error}")
            if options.same_host == "auto":
                self._listen_here()
        except ValueError:
            self._close_sockets()
            raise
        except OSError as error:
            self._close_sockets()
            raise SyncError(f"can't listen on {nic.host} ({nic.name}): {error}") from error
        try:
            self._thread = start_thread("tsr-listener", self._run)
        except SyncError:
            self._close_sockets()
            raise

    def close(self) -> None:
        """Stops listening and ends the handshakes under way. May be called twice."""
        with contextlib.suppress(OSError):  # closed already
            self._wake.send(b"x")
        self._thread.join()

    def _listen(self, nic: Nic) -> None:
        port = self._listen_at(nic, 0, "")
        if nic.shares_subnet:
            # What comes in by this NIC goes out by it, for it is taken by the socket that is bound
            # to it. What comes in by another one, which answers for this one, is taken as before.
            with contextlib.suppress(OSError):
                self._listen_at(nic, port, nic.name)
        self.addresses.append(ListeningAt(nic.name, nic.host, port, nic.line))

    def _listen_at(self, nic: Nic, port: int, device: str) -> int:
        listening = new_socket(nic.host, device)
        self._listening.append(listening)
        tune(listening, self._options, nic.host)
        if nic.shares_subnet:
            with contextlib.suppress(OSError):
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((nic.host, port))
        self._start_listening(listening)
        taken: int = listening.getsockname()[1]
        return taken

    def _listen_here(self) -> None:
        try:
            listening, host = same_host.bind()
            self._listening.append(listening)
            self._start_listening(listening)
        except OSError as error:
            self._log.info(f"processes of this host are served by TCP, not by memory: {error}")
            return
        self.addresses.append(ListeningAt(same_host.NIC, host, 0, UNKNOWN_LINE))

    def _start_listening(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        listening.listen(_BACKLOG)
        self._selector.register(listening, selectors.EVENT_READ, listening)

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
        if connection.family == socket.AF_UNIX and not same_host.is_same_user(connection):
            connection.close()
            return
        if len(self._half_open) == MAX_HALF_OPEN:
            strangers = (h for h in self._half_open if h.hello is None)
            self._drop(next(strangers, next(iter(self._half_open))))
        connection.setblocking(False)
        half_open = _HalfOpen(connection, time.monotonic() + HANDSHAKE_S)
        self._half_open[half_open] = None
        self._selector.register(connection, selectors.EVENT_READ, half_open)

    def _advance(self, half_open: _HalfOpen) -> None:
        if half_open not in self._half_open:  # dropped by an event before this one
            return
        wanted = handshake.HELLO_NBYTES if half_open.hello is None else handshake.PROOF_NBYTES
        try:
            part = half_open.receive(wanted - len(half_open.received))
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
        except (OSError, ValueError, MemoryError):  # it broke off, or is no peer of ours
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
            authentication.ticket(self.ticket_secret, hello.sink),
            hello,
            half_open.nonce,
            job=self._options.job,
            incarnation=self._incarnation,
        )
        if not authentication.matches(proof, theirs):
            half_open.connection.send(handshake.encode_answer(Code.REFUSED))
            self._drop(half_open)
            return
        if half_open.connection.family == socket.AF_UNIX:
            try:
                same_host.check_ring(half_open.ring_fd)
            except NotSharedError as error:
                self._log.info(f"sink {hello.sink} is served by TCP, not by memory: {error}")
                half_open.connection.send(handshake.encode_answer(Code.NOT_SHARED))
                self._drop(half_open)
                return
        half_open.connection.send(handshake.encode_answer(Code.OK, ours))
        self._forget(half_open)
        connection = Connection(half_open.connection.detach(), half_open.ring_fd)
        # Whoever takes streams has just been closed, or refuses what it is to share.
        with contextlib.suppress(SyncError):
            self._on_stream(connection, hello.sink, hello.rail)

    def _forget(self, half_open: _HalfOpen) -> None:
        self._half_open.pop(half_open, None)
        self._selector.unregister(half_open.connection)

    def _drop(self, half_open: _HalfOpen) -> None:
        self._forget(half_open)
        half_open.connection.close()
        half_open.close_ring()

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
