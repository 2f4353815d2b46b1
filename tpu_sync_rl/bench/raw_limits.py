"""What the machine can do without us: raw TCP sockets and memcpy, in processes of their own.

Both move bytes between blocks of memory that were touched before, as a steady state has them.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np

from tpu_sync_rl.bench import netns
from tpu_sync_rl.bench.processes import Pipe, Processes, answer, words
from tpu_sync_rl.messages import Address
from tpu_sync_rl.options import check_congestion
from tpu_sync_rl.rails import pair_nics

NUM_CONNECTIONS = 2  # per NIC of the sender
WRITE_NBYTES = 1 << 20


class RawLimits(Processes):
    """A sender and a receiver process with open connections, measured one sample at a time.

    Args:
        nbytes: bytes of a sample, over all connections.
        congestion: TCP congestion control; None leaves the system's.
        hosts: addresses that the sender listens on, one per NIC; each carries as much.
        sender: network namespace of the sender; None for this one.
        receiver: that of the receiver.
        there: leads to a receiver on another host, instead of one here.

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
    ) -> None:
        if congestion is not None:
            check_congestion(congestion)
        num_connections = NUM_CONNECTIONS * len(hosts)
        share = max(WRITE_NBYTES, nbytes // num_connections // WRITE_NBYTES * WRITE_NBYTES)
        self.nbytes = share * num_connections
        super().__init__()
        try:
            self._sender = self.start(_sender, share, congestion, hosts, sender)
            addresses = answer(self._sender, "listening")
            if there is None:
                there = self.start(receive, None, receiver)
            there.send((share, addresses))
            for pipe in (there, self._sender):
                answer(pipe, "connecting")  # its memory is touched, its connections stand
        except BaseException:
            self.kill()
            raise

    def sockets_gbytes_per_s(self) -> float:
        """One sample: from the first write until the receiver has said that it has all."""
        self.start_sockets()
        return self.finish_sockets()

    def start_sockets(self) -> None:
        """Begins such a sample, which may run beside that of another."""
        self._sender.send("stream")

    def finish_sockets(self) -> float:
        """Waits for its end."""
        seconds: float = answer(self._sender, "a stream")
        return self.nbytes / seconds / 1e9

    def memcpy_gbytes_per_s(self) -> float:
        """One sample: a copy in one process, as many threads as there are connections."""
        self._sender.send("copy")
        seconds: float = answer(self._sender, "a copy")
        return self.nbytes / seconds / 1e9

    def __enter__(self) -> "RawLimits":
        return self


def receive(pipe: Pipe, nics: Sequence[str] | None, namespace: str | None = None) -> None:
    """The receiver: dials the addresses that it is told over the rails that sessions would take."""
    if namespace is not None:
        netns.enter(namespace)
    share, addresses = pipe.recv()
    rails = pair_nics(nics, [Address("", *address) for address in addresses])[: len(addresses)]
    with contextlib.ExitStack() as exits:
        for rail in rails:
            for _ in range(NUM_CONNECTIONS):
                connection = exits.enter_context(
                    socket.create_connection(
                        (rail.host, rail.port), source_address=(rail.local.host, 0)
                    )
                )
                arguments = (connection, _touched(share))
                threading.Thread(target=_receive, args=arguments, daemon=True).start()
        pipe.send("ready")
        for _ in words(pipe):
            pass


def _receive(connection: socket.socket, block: np.ndarray) -> None:
    """Fills `block` again and again, and says so each time, until the other end is gone."""
    with contextlib.suppress(OSError):
        while True:
            for start in range(0, len(block), WRITE_NBYTES):
                part = block.data[start : start + WRITE_NBYTES]
                if not connection.recv_into(part, 0, socket.MSG_WAITALL):
                    return
            connection.sendall(b".")


def _sender(
    pipe: Connection,
    share: int,
    congestion: str | None,
    hosts: Sequence[str],
    namespace: str | None,
) -> None:
    if namespace is not None:
        netns.enter(namespace)
    with contextlib.ExitStack() as exits:
        listeners = [exits.enter_context(socket.create_server((host, 0))) for host in hosts]
        for listener in listeners:
            _set_congestion(listener, congestion)
        pipe.send([listener.getsockname()[:2] for listener in listeners])
        connections = [
            exits.enter_context(listener.accept()[0])
            for listener in listeners
            for _ in range(NUM_CONNECTIONS)
        ]
        blocks, copies = ([_touched(share) for _ in connections] for _ in range(2))

        def send(i: int) -> None:
            block = blocks[i].data
            for start in range(0, share, WRITE_NBYTES):
                connections[i].sendall(block[start : start + WRITE_NBYTES])
            connections[i].recv(1)

        def copy(i: int) -> None:
            np.copyto(copies[i], blocks[i])

        pipe.send("ready")
        _serve(pipe, {"stream": send, "copy": copy}, len(connections))


def _serve(pipe: Connection, jobs: dict[str, Callable[[int], None]], num_threads: int) -> None:
    """Does what the pipe names, in all threads at once; answers with its seconds."""
    for word in words(pipe):
        began = time.monotonic()
        threads = [threading.Thread(target=jobs[word], args=(i,)) for i in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pipe.send(time.monotonic() - began)


def _touched(nbytes: int) -> np.ndarray:
    return np.ones(nbytes, np.uint8)


def _set_congestion(listener: socket.socket, congestion: str | None) -> None:
    """Chooses the congestion control of what `listener` accepts."""
    if congestion is not None:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
