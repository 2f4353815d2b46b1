"""A process's stream to the coordinator: dialled, proved, joined, and dialled again when lost."""

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import TypeVar

import grpc
import msgspec

from tpu_sync_rl import authentication, channel, errors, long_messages, software
from tpu_sync_rl.at_exit import AtExit
from tpu_sync_rl.deadline import seconds_left
from tpu_sync_rl.descriptors import check_descriptors
from tpu_sync_rl.errors import AuthError, SyncError, SyncTimeoutError
from tpu_sync_rl.greeting import Challenge, Credentials, Greeting, Proof, proofs
from tpu_sync_rl.journal import Journal
from tpu_sync_rl.maker_process import keep_for_ever
from tpu_sync_rl.message_codec import (
    MAX_FROM_COORDINATOR_NBYTES,
    SESSION_METHOD,
    FromCoordinator,
    decode_from_coordinator,
    encode,
)
from tpu_sync_rl.messages import JobStatus, Leave, Message, Refused
from tpu_sync_rl.options import Options
from tpu_sync_rl.sampler_messages import JoinSampler, SamplerJoined
from tpu_sync_rl.threads import start_thread
from tpu_sync_rl.trainer_messages import JoinTrainer, TrainerJoined

M = TypeVar("M", bound=Message)
_Outbox = SimpleQueue[bytes | None]

_FIRST_REDIAL_S = 0.1
_MOST_REDIAL_S = 1.0
GOODBYE_S = 0.5
# A trainer's take 24, with one sampler that reads over shared memory; each stream takes one more.
_SESSION_DESCRIPTORS = 32


class CoordinatorClient:
    """One process's stream to the coordinator, for as long as its session lives.

    A thread of its own dials, reads and calls back; a stream that breaks is dialled again until
    `close`. `send`, `finish` and `close` may be called from any thread, also within a callback;
    no lock of the client is held while a callback runs. `journal` reads along.

    Args:
        address: "host:port" of the coordinator.
        options: those of the session; job, token and peer_timeout_s count here.
        role: "trainer", "sampler" or "doctor".
        name: a trainer's incarnation, a sampler's replica.
        process_index: of this process in its program.
        join: makes the message that opens each stream, with what this process holds then. What is
            sent after it began to run follows it on the stream, so nothing falls in between; what
            it speaks for may be sent as well.
        on_message: gets every message from `TrainerJoined` or `SamplerJoined` on, in order. When
            one of those two comes, a session sends again whatever its join does not carry. A
            doctor gets a `JobStatus`, and no more.
        on_refused: gets the coordinator's last word if it refuses this process after `start`; no
            other callback follows.
    """

    def __init__(
        self,
        address: str,
        options: Options,
        *,
        role: str,
        name: str,
        process_index: int,
        join: Callable[[], JoinTrainer | JoinSampler | Leave],
        on_message: Callable[[FromCoordinator], None],
        on_refused: Callable[[SyncError], None],
    ) -> None:
        check_descriptors("a session", _SESSION_DESCRIPTORS)
        self._address = address
        self._token = options.token
        self._channels = channel.Channels(address, options)
        versions = software.versions()
        self._greeting = Greeting(role, options.job, name, process_index, b"", versions)
        self.journal = Journal(options, role, name, process_index)
        self._join = join
        self._on_message = on_message
        self._on_refused = on_refused
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._outbox: _Outbox | None = None  # where messages go once the join is in it
        self._early: list[bytes] | None = None  # where they go while the join is being made
        self._stream: grpc.Call | None = None
        self._joined_once = False
        self._over = False  # closed, or there is no use in dialling again
        self._refusal: SyncError | None = None
        self._state = "no answer yet"
        self._thread: threading.Thread | None = None
        self._at_exit: AtExit | None = None

    @property
    def state(self) -> str:
        """How the stream is doing, for the text of an error."""
        with self._changed:
            return f"coordinator {self._address}: {self._state}"

    def start(self, deadline: float) -> None:
        """Dials until the coordinator takes this process in. Call once; blocks.

        Args:
            deadline: on the clock of `time.monotonic`.

        Raises:
            SyncTimeoutError: nobody answered at the address by then; says what was the matter.
            AuthError: the coordinator refused our token, or could not prove that it has it.
            SyncError: the coordinator refused this process, as the class that it named; or there
                is no thread left.
        """
        self._at_exit = AtExit(self.close)
        try:
            self._thread = start_thread("tsr-coordinator", self._run)
        except SyncError:
            self.close()
            raise
        with self._changed:
            self._changed.wait_for(lambda: self._joined_once or self._over, seconds_left(deadline))
            joined, refusal = self._joined_once, self._refusal
        if joined:
            return
        failure = self.state
        self.close()
        raise refusal or SyncTimeoutError(f"no coordinator answered in time; {failure}")

    def send(self, message: Message) -> None:
        """Queues a message and returns at once. While there is no stream it is dropped.

        The next join then speaks for it, or the session sends it again when it has joined.
        """
        self.journal.sent(message)
        data = encode(message)
        with self._changed:
            if self._outbox is not None:
                self._outbox.put(data)
            elif self._early is not None:
                self._early.append(data)

    def finish(self) -> None:
        """Says that nothing more is needed: a stream that ends is not dialled again."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def close(self, goodbye_s: float = GOODBYE_S) -> None:
        """Says goodbye and ends the stream and the thread, within a second or so. Idempotent.

        Waits up to `goodbye_s` for the coordinator to read that.
        """
        self.send(Leave())
        self.finish()
        with self._changed:
            if self._outbox is not None:
                self._outbox.put(None)
            self._outbox = self._early = None
        if self._at_exit is not None:
            self._at_exit.cancel()
        self.journal.close()
        if self._thread is None or threading.current_thread() is self._thread:
            return
        # The coordinator ends the stream when it has read the goodbye.
        self._thread.join(goodbye_s)
        with self._changed:
            stream = self._stream
        if stream is not None:
            stream.cancel()
        self._thread.join(GOODBYE_S)

    def _run(self) -> None:
        redial_s = _FIRST_REDIAL_S
        while True:
            refusal: SyncError | None = None
            failure = "it ended the stream"
            try:
                joined = self._hold_stream()
            except grpc.RpcError as error:
                joined = self._is_joined()
                failure = channel.failure(error, joined_once=self._has_joined_once())
                if channel.is_tls_flaw(failure):
                    refusal = AuthError(f"the coordinator at {self._address} and tls=: {failure}")
            except msgspec.DecodeError as error:
                joined, failure = self._is_joined(), f"it does not speak our protocol: {error}"
            except SyncError as error:
                refusal = error
            except (MemoryError, RuntimeError) as error:
                if not _is_for_want_of_resources(error):
                    refusal = SyncError(f"{type(error).__name__}: {error}")
                joined, failure = (
                    self._is_joined(),
                    f"this process lacks memory or threads: {error}",
                )
            except Exception as error:  # a callback's bug has to end calls, not to hang them
                refusal = SyncError(f"{type(error).__name__}: {error}")
            with self._changed:
                self._outbox = self._early = self._stream = None
                over, self._over = self._over, self._over or refusal is not None
                joined_once, self._refusal = self._joined_once, refusal
                redials = "; it is dialled again" if joined_once and not over else ""
                self._state = failure + redials if refusal is None else str(refusal)
                self._changed.notify_all()
            if over:
                return
            if refusal is not None:
                if joined_once:
                    self.journal.on_refused(refusal)
                    self._on_refused(refusal)
                return
            if joined:
                self.journal.on_stream_lost(failure)
            redial_s = _FIRST_REDIAL_S if joined else min(2 * redial_s, _MOST_REDIAL_S)
            with self._changed:
                if self._changed.wait_for(lambda: self._over, redial_s):
                    return

    def _is_joined(self) -> bool:
        with self._changed:
            return self._outbox is not None

    def _has_joined_once(self) -> bool:
        with self._changed:
            return self._joined_once

    def _hold_stream(self) -> bool:
        """Dials once and reads until the stream ends; whether it had joined.

        Raises:
            SyncError: the coordinator refused this process, or could not prove itself.
            grpc.RpcError, msgspec.DecodeError: the stream broke.
        """
        outbox: _Outbox = SimpleQueue()
        opened = self._channels.new()
        try:
            stream = opened.stream_stream(SESSION_METHOD)(_pieces(outbox))
        except RuntimeError:
            # There was no thread for the call, and the channel's end would wait for it for ever.
            keep_for_ever(opened)
            raise
        with opened:
            messages = _said(stream)
            with self._changed:
                self._stream = stream
                if self._over:
                    return False
            try:
                self._prove(messages, outbox)
                self._send_join(outbox)
                for message in messages:
                    if isinstance(message, Refused):
                        raise errors.by_name(message.error)(message.text)
                    self.journal.on_message(message)
                    self._on_message(message)
                    if isinstance(message, TrainerJoined | SamplerJoined | JobStatus):
                        self._note_joined()
                return self._is_joined()
            finally:
                outbox.put(None)
                stream.cancel()

    def _note_joined(self) -> None:
        self.journal.on_joined(self._address)
        with self._changed:
            self._joined_once = True
            self._state = "connected"
            self._changed.notify_all()

    def _prove(self, messages: Iterator[FromCoordinator], outbox: _Outbox) -> None:
        """The mutual handshake. Raises what `_hold_stream` raises."""
        greeting = msgspec.structs.replace(self._greeting, nonce=authentication.new_nonce())
        outbox.put(encode(greeting))
        challenge = _expect(messages, Challenge)
        if len(challenge.nonce) != authentication.NONCE_NBYTES:
            raise msgspec.DecodeError(f"a nonce of {len(challenge.nonce)} bytes")
        ours, theirs = proofs(self._token, greeting, challenge)
        outbox.put(encode(Credentials(ours)))
        try:
            proof = _expect(messages, Proof).mac
        except AuthError as error:
            if self._token:
                raise
            raise AuthError(
                f"the coordinator at {self._address} has a token and this process has no token: "
                "pass token= or set TSR_TOKEN or TSR_TOKEN_FILE"
            ) from error
        if not authentication.matches(proof, theirs):
            raise AuthError(f"the coordinator at {self._address} does not have our token")

    def _send_join(self, outbox: _Outbox) -> None:
        with self._changed:
            self._early = []
        join = encode(self._join())
        with self._changed:
            if self._over:
                return
            outbox.put(join)
            for data in self._early or ():
                outbox.put(data)
            self._outbox, self._early = outbox, None


def _is_for_want_of_resources(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "can't start new thread" in str(error)


def _pieces(outbox: _Outbox) -> Iterator[bytes]:
    """What is to be sent, until the outbox ends."""
    for data in iter(outbox.get, None):
        yield from long_messages.split(data)


def _said(pieces: Iterable[bytes]) -> Iterator[FromCoordinator]:
    """What the coordinator says, until the stream ends."""
    for data in long_messages.join(pieces, MAX_FROM_COORDINATOR_NBYTES):
        yield from decode_from_coordinator(data)


def _expect(messages: Iterator[FromCoordinator], kind: type[M]) -> M:
    """The next message, which has to be a `kind`."""
    message = next(messages, None)
    if message is None:
        raise msgspec.DecodeError(f"the stream ended in place of {kind.__name__}")
    if isinstance(message, Refused):
        raise errors.by_name(message.error)(message.text)
    if not isinstance(message, kind):
        raise msgspec.DecodeError(f"{type(message).__name__} in place of {kind.__name__}")
    return message
