"""A TCP proxy on the way of data connections that sees what each byte is, and may change it."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tpu_sync_rl import handshake

_FRAME = struct.Struct("<3sBIQQII")
_TABLE, _DIGEST = 1, 6
_TRAILER_NBYTES = 4
_OPENING_NBYTES = {
    "requests": handshake.HELLO_NBYTES + handshake.PROOF_NBYTES,
    "replies": 2 * handshake.ANSWER_NBYTES,
}

PARTS = {
    "requests": ("handshake", "header", "table", "digest"),
    "replies": ("handshake", "header", "payload", "trailer"),
}


@dataclass
class Part:
    """Bytes of one kind that lie next to each other on one direction of a connection.

    Attributes:
        connection: number of the connection, from 0.
        direction: "requests" or "replies".
        name: one of `PARTS`.
        offset: where in the handshake, header, payload, … `data` begins.
        data: the bytes; may be changed in place.
    """

    connection: int
    direction: str
    name: str
    offset: int
    data: bytearray


_FOLLOWING = {_TABLE: "table", _DIGEST: "digest"}

Change = Callable[[Part], None]


@dataclass
class _Parser:
    """Knows which part of the protocol the next byte of a direction is."""

    direction: str
    name: str = "handshake"
    offset: int = 0
    nbytes: int = 0
    header: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.nbytes = _OPENING_NBYTES[self.direction]

    def split(self, data: bytes, connection: int) -> Iterator[Part]:
        while data:
            piece, data = data[: self.nbytes - self.offset], data[self.nbytes - self.offset :]
            if self.name == "header":
                self.header += piece  # as it was sent: what is changed breaks nothing here
            yield Part(connection, self.direction, self.name, self.offset, bytearray(piece))
            self.offset += len(piece)
            if self.offset == self.nbytes:
                self._go_on()

    def _go_on(self) -> None:
        name, nbytes = "header", _FRAME.size
        if self.name == "header":
            _, kind, _, _, _, follow, _ = _FRAME.unpack(self.header)
            self.header.clear()
            if follow:
                name, nbytes = _FOLLOWING.get(kind, "payload"), follow
        elif self.name == "payload":
            name, nbytes = "trailer", _TRAILER_NBYTES
        self.name, self.nbytes, self.offset = name, nbytes, 0


class WireProxy:
    """Stands before a listener of a trainer. `change` is called for every part, on any thread."""

    def __init__(self, host: str, port: int, change: Change) -> None:
        self._target = (host, port)
        self._change = change
        self._listening = socket.socket()
        # Small, so that a source finds its connection full before a chunk is on its way.
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen()
        self.port = self._listening.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        """Ends every connection and thread."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listening.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()

    def _start(self, function: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                self._sockets += [near, far]
                far.connect(self._target)
                self._start(self._pump, near, far, number, "requests")
                self._start(self._pump, far, near, number, "replies")
                number += 1

    def _pump(
        self, source: socket.socket, sink: socket.socket, number: int, direction: str
    ) -> None:
        parser = _Parser(direction)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                for part in parser.split(data, number):
                    self._change(part)
                    sink.sendall(part.data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
