"""The versions that a sampler process serves to other replicas, where the trainer is no source."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.listener import Listener
from tpu_sync_rl.messages import Address, Held
from tpu_sync_rl.options import Options, Staging
from tpu_sync_rl.program import Program
from tpu_sync_rl.receiver import Receiver
from tpu_sync_rl.sampler_messages import Offer, Serve
from tpu_sync_rl.session_log import SessionLog
from tpu_sync_rl.source import Source
from tpu_sync_rl.threads import start_thread
from tpu_sync_rl.trace import Trace
from tpu_sync_rl.trainer_messages import Pins, PinsKept

_PIN_S = 10.0  # at most; the arrays are computed already


class _Server:
    """Serves versions of one incarnation, as a trainer process does, at addresses of its own.

    What it takes in threads and sockets is there from the first version on, whatever comes after.
    """

    def __init__(
        self,
        options: Options,
        program: Program,
        staging: Staging,
        coordinator: str,
        send: Callable[[Offer], None],
        log: SessionLog,
        incarnation: str,
    ) -> None:
        """Starts nothing yet."""
        self.incarnation = incarnation
        self._options = options
        self._staging = staging
        self._coordinator = coordinator
        self._send = send
        self._log = log
        self._listener: Listener | None = None
        untraced = Trace(None, name="", process=0)
        self._source = Source(
            options, program, staging, untraced, self._answer, max_pinned=None, keeps_newest=False
        )

    def begin(self, version: int, arrays: dict[str, Any]) -> None:
        """Pins `arrays`, copies nothing on CPU, and listens.

        Raises:
            RuntimeError, SyncError, TypeError, ValueError: some of them can't be read, or there is
                no socket or memory for that.
        """
        try:
            self._source.pin(arrays, version, time.monotonic() + _PIN_S)
            if self._source.is_staged and self._staging.max_host_nbytes is not None:
                raise ValueError("generations may fill max_host_nbytes, without a snapshot")
            self._source.land(version)
            if self._listener is None:
                self._listener = Listener(
                    self._options,
                    coordinator=self._coordinator,
                    incarnation=self.incarnation,
                    on_stream=self._source.add_connection,
                    log=self._log,
                )
        except BaseException:
            self.withdraw(version)
            raise

    def on_message(self, message: Serve) -> None:
        """Takes what the coordinator says; answers later, on another thread."""
        self._source.on_pins(Pins(message.held.version, message.sinks, message.ask))

    def withdraw(self, version: int) -> None:
        """Lets go of the arrays of a version; whoever still reads them is cut off."""
        self._source.let_go(version)

    def close(self) -> None:
        """Ends everything."""
        if self._listener is not None:
            self._listener.close()
        self._source.close()

    def _answer(self, kept: PinsKept) -> None:
        manifest = self._source.manifest
        assert manifest is not None and self._listener is not None
        held = Held(self.incarnation, kept.version)
        addresses = [Address(*address) for address in self._listener.addresses]
        secret = self._listener.ticket_secret
        self._send(Offer(held, kept.ask, kept.kept, manifest.encoded, addresses, secret))


class Offers:
    """What one sampler process serves; nothing, and at no cost, until it is asked.

    A version is served from the arrays that it became, prepared or taken, as long as somebody
    reads it. One thread of its own does the work. All methods may be called from any thread.
    """

    def __init__(
        self,
        options: Options,
        program: Program,
        staging: Staging,
        *,
        coordinator: str,
        receiver: Receiver,
        send: Callable[[Offer], None],
        log: SessionLog,
    ) -> None:
        """Starts nothing.

        Args:
            options: of the session.
            program: that this process is of.
            coordinator: its address, "host:port".
            staging: how a version passes from devices to host memory.
            receiver: has the versions that are prepared and not taken.
            send: tells the coordinator.
            log: of the session.
        """
        self._agent = program.agent
        self._new_server = partial(_Server, options, program, staging, coordinator, send, log)
        self._receiver = receiver
        self._taken: tuple[Held, list[weakref.ref[Any]]] | None = None
        self._send = send
        self._server: _Server | None = None  # of the last incarnation that was asked for
        self._lock = threading.Lock()
        self._offered: set[Held] = set()  # guarded by _lock; what the server has now
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        receiver.on_shortage = self.withdraw

    def take(self, held: Held, arrays: Sequence[Any]) -> None:
        """From now on the application has `arrays`, which are `held`; keeps none of them alive."""
        self._taken = held, [weakref.ref(array) for array in arrays]

    def on_message(self, message: Serve) -> None:
        """Takes what the coordinator says; returns at once."""
        if self._thread is None:
            try:
                self._thread = start_thread("tsr-offers", self._run)
            except SyncError:  # another source is found, and this one may be asked again
                if message.ask:
                    self._send(Offer(message.held, message.ask, False))
                return
        self._commands.put(partial(self._serve, message))

    def end(self) -> None:
        """Ends what is served now; returns at once."""
        if self._thread is not None:
            self._commands.put(self._end_all)

    def withdraw(self) -> None:
        """Lets go of versions that only their readers still need: their memory is wanted."""
        with self._lock:
            offered = list(self._offered)
        for held in offered:
            if self._find(held) is None:
                self._end(held)

    def close(self) -> None:
        """Ends everything."""
        if self._thread is not None:
            self.end()
            self._commands.put(None)
            self._thread.join()
        if self._server is not None:
            self._server.close()

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            command()

    def _serve(self, message: Serve) -> None:
        held = message.held
        if message.ask and held not in self._offered:
            self._begin(held)
        if held in self._offered and message.sinks:
            assert self._server is not None
            self._server.on_message(message)
        elif held in self._offered:
            self._end(held)
        elif message.ask:
            self._send(Offer(held, message.ask, False))

    def _find(self, held: Held) -> dict[str, Any] | None:
        """The arrays of `held` under the trainer's keys, where all are there."""
        if self._agent != "process":
            return None  # an agent's memory is used again as soon as it is copied, read or not
        received, taken = self._receiver.prepared.get(held), self._taken
        arrays = None if received is None else received.leaves
        if arrays is None and taken is not None and taken[0] == held:
            arrays = [reference() for reference in taken[1]]
        keys = self._receiver.trainer_keys(held.incarnation)
        if keys is None or arrays is None or any(array is None for array in arrays):
            return None
        return dict(zip(keys, arrays, strict=True))

    def _begin(self, held: Held) -> None:
        arrays = self._find(held)
        if arrays is None:
            return
        if self._server is not None and self._server.incarnation != held.incarnation:
            self._end_all()
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = self._new_server(held.incarnation)
        try:
            self._server.begin(held.version, arrays)
        except (RuntimeError, SyncError, TypeError, ValueError):  # donated meanwhile, for one
            return
        with self._lock:
            self._offered.add(held)

    def _end(self, held: Held) -> None:
        with self._lock:
            self._offered.discard(held)
        if self._server is not None and self._server.incarnation == held.incarnation:
            self._server.withdraw(held.version)

    def _end_all(self) -> None:
        for held in list(self._offered):
            self._end(held)
