"""A TCP relay in front of a coordinator, which sees what passes and can be cut for a while."""

import contextlib
import socket
import threading
from collections.abc import Iterator

PATIENCE_S = 60.0


class TcpRelay:
    """Passes bytes between clients and the server at `server`; a context manager.

    Attributes:
        address: "host:port" for clients.
    """

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._changed = threading.Condition()
        self._is_cut = False
        self._sockets: list[socket.socket] = []
        self._passed = b""
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "TcpRelay":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._end_connections()

    def wait_for(self, message: str, number: int = 1) -> None:
        """Waits until `number` control messages of a type have passed, either way."""
        tag = bytes([0xA0 + len(message)]) + message.encode()  # as MessagePack has a short str
        with self._changed:
            assert self._changed.wait_for(lambda: self._passed.count(tag) >= number, PATIENCE_S)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Nobody reaches the server meanwhile."""
        with self._changed:
            self._is_cut = True
        self._end_connections()
        try:
            yield
        finally:
            with self._changed:
                self._is_cut = False

    def _end_connections(self) -> None:
        with self._changed:
            ended, self._sockets = self._sockets, []
        for end in ended:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with self._changed:
                    if self._is_cut:
                        client.close()
                        continue
                    server = socket.create_connection(self._server)
                    self._sockets += [client, server]
                threading.Thread(target=self._relay, args=(client, server), daemon=True).start()

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            answers = threading.Thread(target=self._pass_on, args=(server, client), daemon=True)
            answers.start()
            self._pass_on(client, server)
            answers.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                with self._changed:
                    self._passed += data
                    self._changed.notify_all()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
