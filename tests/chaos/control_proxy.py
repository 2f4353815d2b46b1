"""A TCP proxy in front of the coordinator that delays, holds back or cuts what crosses it."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future

from tpu_sync_rl.bench import netns

_MOST_NBYTES = 1 << 16


class ControlProxy:
    """Listens on a free port of loopback. Its methods may be called from any thread."""

    def __init__(self, target: tuple[str, int], namespace: str | None) -> None:
        """Starts a thread, in `namespace` if there is one, and listens."""
        self._target = target
        self._namespace = namespace
        self._delay_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        ready: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        self.address = f"127.0.0.1:{ready.result(20)}"

    def delay(self, seconds: float) -> None:
        """Holds every piece back for so long, in either direction; 0 for not at all."""
        self._delay_s = seconds

    def hold(self, on: bool) -> None:
        """Lets nothing pass while it is on, though connections stay."""
        self._loop.call_soon_threadsafe(self._flowing.clear if on else self._flowing.set)

    def cut(self) -> None:
        """Breaks every connection off."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def close(self) -> None:
        """Ends the thread and every connection."""
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()

    def _run(self, ready: "Future[int]") -> None:
        if self._namespace is not None:
            netns.enter(self._namespace)
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve(ready))

    async def _serve(self, ready: "Future[int]") -> None:
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._flowing = asyncio.Event()
        self._flowing.set()
        server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        ready.set_result(server.sockets[0].getsockname()[1])
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            self._abort_all()

    def _abort_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            pumps = (self._pump(reader, far_writer), self._pump(far_reader, writer))
            await asyncio.wait(
                [asyncio.ensure_future(pump) for pump in pumps],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_MOST_NBYTES):
                await asyncio.sleep(self._delay_s)
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
