"""What the machine can do without us: raw TCP sockets and memcpy, in processes of their own.

Both move bytes between blocks of memory that were touched before, as a steady state has them.
"""

import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tpu_sync_rl.bench import netns
from tpu_sync_rl.bench.processes import Processes, answer, words
from tpu_sync_rl.options import check_congestion

NUM_CONNECTIONS = 2
WRITE_NBYTES = 1 << 20


class RawLimits(Processes):
    """A sender and a receiver process with open connections, measured one sample at a time.

    Args:
        nbytes: bytes of a sample, over all connections.
        congestion: TCP congestion control; None leaves the system's.
        host: address that the receiver listens on.
        sender: network namespace of the sender; None for this one.
        receiver: that of the receiver.

    Raises:
        ValueError: the kernel does not know the congestion control.
    """

    def __init__(
        self,
        nbytes: int,
        congestion: str | None,
        *,
        host: str = "127.0.0.1",
        sender: str | None = None,
        receiver: str | None = None,
    ) -> None:
        if congestion is not None:
            check_congestion(congestion)
        share = max(WRITE_NBYTES, nbytes // NUM_CONNECTIONS // WRITE_NBYTES * WRITE_NBYTES)
        self.nbytes = share * NUM_CONNECTIONS
        super().__init__()
        try:
            there = self.start(_receiver, share, congestion, (host, 0), receiver)
            address = answer(there, "listening")
            here = self.start(_sender, share, congestion, address, sender)
            for pipe in (there, here):
                answer(pipe, "connecting")  # its memory is touched, its connections stand
        except BaseException:
            self.kill()
            raise
        self._ends = (there, here)

    def sockets_gbytes_per_s(self) -> float:
        """One sample: from the word to go until the last byte is in the receiver's memory."""
        self.start_sockets()
        return self.finish_sockets()

    def start_sockets(self) -> None:
        """Begins such a sample, which may run beside that of another."""
        self._began = time.monotonic()
        for pipe in self._ends:
            pipe.send("stream")

    def finish_sockets(self) -> float:
        """Waits for its end."""
        ended: float = max(answer(pipe, "a stream") for pipe in self._ends)
        return self.nbytes / (ended - self._began) / 1e9

    def memcpy_gbytes_per_s(self) -> float:
        """One sample: a copy in one process, as many threads as there are connections."""
        self._ends[0].send("copy")
        seconds: float = answer(self._ends[0], "a copy")
        return self.nbytes / seconds / 1e9

    def __enter__(self) -> "RawLimits":
        return self


def _receiver(
    pipe: Connection, share: int, congestion: str | None, address: Any, namespace: str | None
) -> None:
    if namespace is not None:
        netns.enter(namespace)
    blocks = _touched(share)
    copies = _touched(share)
    with socket.create_server(address) as listener:
        _set_congestion(listener, congestion)
        pipe.send(listener.getsockname()[:2])
        connections = [listener.accept()[0] for _ in range(NUM_CONNECTIONS)]

    def receive(i: int) -> None:
        block = blocks[i].data
        for start in range(0, share, WRITE_NBYTES):
            connections[i].recv_into(block[start:], WRITE_NBYTES, socket.MSG_WAITALL)

    def copy(i: int) -> None:
        np.copyto(copies[i], blocks[i])

    _serve(pipe, {"stream": receive, "copy": copy})


def _sender(
    pipe: Connection, share: int, congestion: str | None, address: Any, namespace: str | None
) -> None:
    if namespace is not None:
        netns.enter(namespace)
    blocks = _touched(share)
    connections = []
    for _ in range(NUM_CONNECTIONS):
        connection = socket.socket()
        _set_congestion(connection, congestion)
        connection.connect(address)
        connections.append(connection)

    def send(i: int) -> None:
        block = blocks[i].data
        for start in range(0, share, WRITE_NBYTES):
            connections[i].sendall(block[start : start + WRITE_NBYTES])

    _serve(pipe, {"stream": send})


def _serve(pipe: Connection, jobs: dict[str, Callable[[int], None]]) -> None:
    """Does what the pipe names, on all connections at once, until the other end is gone."""
    pipe.send("ready")
    for word in words(pipe):
        began = time.monotonic()
        threads = [threading.Thread(target=jobs[word], args=(i,)) for i in range(NUM_CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended = time.monotonic()
        pipe.send(ended if word == "stream" else ended - began)


def _touched(nbytes: int) -> list[np.ndarray]:
    return [np.ones(nbytes, np.uint8) for _ in range(NUM_CONNECTIONS)]


def _set_congestion(connection: socket.socket, congestion: str | None) -> None:
    if congestion is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
