"""What TCP sockets carry without us, from a process to another: native code on both ends."""

import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tpu_sync_rl import _native
from tpu_sync_rl.bench import _limits, netns
from tpu_sync_rl.bench.limit import Limit, stamp, touched
from tpu_sync_rl.bench.processes import Pipe, answer, words
from tpu_sync_rl.messages import Address
from tpu_sync_rl.options import check_congestion
from tpu_sync_rl.rails import Rail, pair_nics

WRITE_NBYTES = 1 << 20
# After which a socket that carries nothing is given up, as a struct timeval.
_TIMEOUT = struct.pack("ll", 120, 0)


@dataclass(frozen=True, slots=True)
class Connections:
    """Over what bytes go.

    Attributes:
        per_nic: how many, of each NIC of the sender.
        fresh: dialled for each sample, before it is timed; else those of the sample before.
    """

    per_nic: int
    fresh: bool

    def __str__(self) -> str:
        kind = "fresh" if self.fresh else "persistent"
        return f"{self.per_nic} {kind} connection{'s' * (self.per_nic > 1)}"


ALL = tuple(Connections(count, fresh) for count in (1, 2, 4) for fresh in (False, True))


class RawSockets(Limit[Connections]):
    """A sender and a receiver process.

    Args:
        nbytes: bytes of a sample, over all connections.
        congestion: TCP congestion control; None leaves the system's.
        hosts: addresses that the sender listens on, one per NIC; each carries as much.
        sender: network namespace of the sender; None for this one.
        receiver: that of the receiver.
        there: leads to a receiver on another host, instead of one here.
        ways: connections that are tried.

    Attributes:
        cpu_s_per_gbyte: CPU seconds of both processes for each GB of the last sample.

    Raises:
        ValueError: the kernel does not know the congestion control.
    """

    def __init__(
        self,
        nbytes: int,
        congestion: str | None,
        *,
        hosts: Sequence[str] = ("127.0.0.1",),
        sender: str | None = None,
        receiver: str | None = None,
        there: Pipe | None = None,
        ways: Sequence[Connections] = ALL,
    ) -> None:
        if congestion is not None:
            check_congestion(congestion)
        unit = WRITE_NBYTES * len(hosts) * max(way.per_nic for way in ways)
        self.nbytes = max(1, nbytes // unit) * unit
        self.cpu_s_per_gbyte = 0.0
        self._numbers = itertools.count(1)
        super().__init__()
        try:
            self._sender = self.start(_send, self.nbytes, congestion, hosts, sender)
            addresses = answer(self._sender, "listening")
            self._receiver = there or self.start(receive, None, receiver)
            self._receiver.send((self.nbytes, addresses))
            for pipe in (self._sender, self._receiver):
                answer(pipe, "touching memory")
            self.choose(ways)
        except BaseException:
            self.kill()
            raise

    def gbytes_per_s(self) -> float:
        """One sample: from the first write until the receiver has said that it has all.

        Raises:
            RuntimeError: what arrived is not what was sent, or a process failed.
        """
        self.start_sample()
        return self.finish_sample()

    def start_sample(self) -> None:
        """Begins such a sample, which may run beside that of another."""
        self._receiver.send((self.way.per_nic, self.way.fresh))
        answer(self._receiver, "dialling")
        self._sender.send((self.way.per_nic, self.way.fresh, next(self._numbers)))

    def finish_sample(self) -> float:
        """Waits for its end."""
        seconds, sender_cpu_s, sent = answer(self._sender, "sending")
        receiver_cpu_s, received = answer(self._receiver, "receiving")
        if received != sent:
            raise RuntimeError(f"{self.way}: the receiver has other bytes than the sender")
        self.cpu_s_per_gbyte = (sender_cpu_s + receiver_cpu_s) / self.nbytes * 1e9
        return float(self.nbytes / seconds / 1e9)

    def __enter__(self) -> "RawSockets":
        return self


def receive(pipe: Pipe, nics: Sequence[str] | None, namespace: str | None = None) -> None:
    """The receiver: dials the addresses that it is told over the rails that sessions would take."""
    if namespace is not None:
        netns.enter(namespace)
    nbytes, addresses = pipe.recv()
    rails = pair_nics(nics, [Address("", *address) for address in addresses])[: len(addresses)]
    memory = touched(nbytes)
    pipe.send(None)
    with _Kept(lambda per_nic: _dial(rails, per_nic)) as kept:
        for per_nic, fresh in words(pipe):
            with kept.connections(per_nic, fresh) as fds:
                pipe.send(None)
                began_cpu_s = time.process_time()
                _limits.receive(fds, memory, WRITE_NBYTES)
                cpu_s = time.process_time() - began_cpu_s
            pipe.send((cpu_s, _native.crc32c(memory)))


def _send(
    pipe: Connection,
    nbytes: int,
    congestion: str | None,
    hosts: Sequence[str],
    namespace: str | None,
) -> None:
    if namespace is not None:
        netns.enter(namespace)
    with contextlib.ExitStack() as exits:
        listeners = [exits.enter_context(socket.create_server((host, 0))) for host in hosts]
        for listener in listeners:
            if congestion is not None:  # what it accepts has the same
                name = congestion.encode()
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        pipe.send([listener.getsockname()[:2] for listener in listeners])
        memory = touched(nbytes)
        pipe.send(None)
        kept = exits.enter_context(_Kept(lambda per_nic: _accept(listeners, per_nic)))
        for per_nic, fresh, number in words(pipe):
            checksum = stamp(memory, number)
            with kept.connections(per_nic, fresh) as fds:
                began_cpu_s = time.process_time()
                seconds = _limits.send(fds, memory, WRITE_NBYTES)
                cpu_s = time.process_time() - began_cpu_s
            pipe.send((seconds, cpu_s, checksum))


def _dial(rails: Sequence[Rail], per_nic: int) -> list[socket.socket]:
    """Connections over all rails; each says which one it is."""
    connections = []
    for index, rail in enumerate(rail for rail in rails for _ in range(per_nic)):
        connection = socket.create_connection(
            (rail.host, rail.port), source_address=(rail.local.host, 0)
        )
        connection.send(bytes([index]))
        connections.append(connection)
    return connections


def _accept(listeners: Sequence[socket.socket], per_nic: int) -> list[socket.socket]:
    """Those connections, in the order in which they were dialled."""
    accepted = [listener.accept()[0] for listener in listeners for _ in range(per_nic)]
    return sorted(accepted, key=lambda connection: connection.recv(1))


class _Kept:
    """Open connections of one end, in sets by their number per NIC."""

    def __init__(self, open_connections: Callable[[int], list[socket.socket]]) -> None:
        self._open = open_connections
        self._sets: dict[int, list[socket.socket]] = {}

    @contextlib.contextmanager
    def connections(self, per_nic: int, fresh: bool) -> Iterator[list[int]]:
        """Descriptors of as many: of new ones, closed after that, or of those that are kept."""
        if fresh:
            opened = self._opened(per_nic)
            try:
                yield [connection.fileno() for connection in opened]
            finally:
                _close(opened)
        else:
            if per_nic not in self._sets:
                self._sets[per_nic] = self._opened(per_nic)
            yield [connection.fileno() for connection in self._sets[per_nic]]

    def _opened(self, per_nic: int) -> list[socket.socket]:
        opened = self._open(per_nic)
        for connection in opened:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, _TIMEOUT)
        return opened

    def __enter__(self) -> "_Kept":
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self._sets.values():
            _close(opened)


def _close(connections: Sequence[socket.socket]) -> None:
    for connection in connections:
        connection.close()
