"""Serves the streams of clients: handshakes, messages, time.

Clients keep one gRPC stream each (see `messages`). What is said on it goes into the pure state of a
`Job`. It imports no JAX.
"""

import asyncio
import errno
import logging
import socket
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import msgspec

from tpu_sync_rl import authentication, software
from tpu_sync_rl.addresses import join_address
from tpu_sync_rl.epochs import unix_ms
from tpu_sync_rl.errors import AuthError, SyncError
from tpu_sync_rl.greeting import Challenge, Credentials, Greeting, Proof, proofs
from tpu_sync_rl.job import Job
from tpu_sync_rl.keepalive import keepalive_options
from tpu_sync_rl.long_messages import PIECE_NBYTES, Joiner, is_part, split
from tpu_sync_rl.members import Member
from tpu_sync_rl.message_codec import (
    MAX_TO_COORDINATOR_NBYTES,
    SESSION_METHOD,
    ToCoordinator,
    decode_to_coordinator,
    encode_together,
)
from tpu_sync_rl.message_room import MessageRoom
from tpu_sync_rl.messages import ConnectedProcess, JobStatus, Leave, Message, Refused
from tpu_sync_rl.session_log import SessionLog
from tpu_sync_rl.tls import TLS, read_files

MAX_HANDSHAKE_NBYTES = 4096
MAX_HANDSHAKES = 64
HANDSHAKE_S = 5.0
MAX_UNFINISHED_NBYTES = 2 * MAX_TO_COORDINATOR_NBYTES  # of messages, on all streams
_TICK_S = 0.1
_FLUSH_S = 1.0
_ROLES = ("trainer", "sampler", "doctor")

_log = logging.getLogger(__name__)


class CoordinatorServer:
    """Serves streams of clients on one address. All methods belong to one asyncio loop."""

    def __init__(self, *, token: bytes, peer_timeout_s: float, tls: TLS | None = None) -> None:
        self._token = token
        self._peer_timeout_s = peer_timeout_s
        self._tls = tls
        self._jobs: dict[str, Job] = {}
        self._room = MessageRoom(MAX_UNFINISHED_NBYTES)
        self._handshakes: dict[asyncio.Timeout, None] = {}  # under way, oldest first
        self._server = grpc.aio.server(options=_server_options(peer_timeout_s))
        service, method = SESSION_METHOD.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )

    async def start(self, host: str, port: int) -> int:
        """Listens and returns the port.

        Raises:
            SyncError: the address is in use, or none of this machine's, or its name is unknown.
        """
        address = join_address(host, port)
        try:
            bound: int = self._add_port(address)
        except RuntimeError as error:
            why = _why_not_bound(host, port) or f"the address was in use ({error})"
            raise SyncError(f"the coordinator can't listen on {address}: {why}") from error
        await self._server.start()
        return bound

    def _add_port(self, address: str) -> Any:
        if self._tls is None:
            return self._server.add_insecure_port(address)
        certificate, key, ca = read_files(self._tls)
        credentials = grpc.ssl_server_credentials(
            [(key, certificate)], ca, require_client_auth=ca is not None
        )
        return self._server.add_secure_port(address, credentials)

    async def run(self) -> None:
        """Keeps time for the jobs, for ever."""
        while True:
            await asyncio.sleep(_TICK_S)
            for job in self._jobs.values():
                job.on_time(time.monotonic())

    async def stop(self) -> None:
        """Ends all streams and frees the port."""
        await self._server.stop(None)

    async def _serve(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        greeting = await self._prove(context)
        if greeting is None:
            return
        if greeting.role == "doctor":
            await _write(context, [self._status(greeting.job)])
            return
        outbox: asyncio.Queue[Message] = asyncio.Queue()
        member = Member(
            greeting.role,
            greeting.name,
            greeting.process_index,
            outbox.put_nowait,
            greeting.software,
        )
        job = self._jobs.setdefault(
            greeting.job,
            Job(greeting.job, patience_s=self._peer_timeout_s, clock_ms=unix_ms),
        )
        log = SessionLog(greeting.job, _replica(greeting), greeting.process_index)
        log.info("joined")
        goodbye = asyncio.Event()
        reader = asyncio.ensure_future(self._read(context, job, member, goodbye))
        writer = asyncio.ensure_future(_write_all(context, outbox))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if not writer.done() and not outbox.empty():
                await asyncio.wait((writer,), timeout=_FLUSH_S)
        finally:
            if goodbye.is_set():
                log.info("left")
            elif not writer.done():  # else it was told why it has to go
                log.warning("its connection ended without a goodbye")
            reader.cancel()
            writer.cancel()
            job.on_lost(member, time.monotonic())
            await asyncio.gather(reader, writer, return_exceptions=True)

    def _status(self, name: str) -> JobStatus:
        job = self._jobs.get(name)
        status = JobStatus(0, None, None, {}, []) if job is None else job.status()
        own = ConnectedProcess("coordinator", "", 0, software.versions())
        return msgspec.structs.replace(status, processes=[own, *status.processes])

    async def _prove(self, context: grpc.aio.ServicerContext) -> Greeting | None:
        """The mutual handshake; None when it failed, which the client has been told."""
        limit = asyncio.timeout(HANDSHAKE_S)
        try:
            async with limit:
                self._handshakes[limit] = None
                if len(self._handshakes) > MAX_HANDSHAKES:
                    self._end_oldest_handshake()
                return await self._exchange_proofs(context)
        except (SyncError, msgspec.DecodeError) as error:
            await _write(context, [_refusal(error)])
        except TimeoutError:  # no verdict: a client of ours tries again
            text = f"no handshake within {HANDSHAKE_S:g} s, or too many at once"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        finally:
            self._handshakes.pop(limit, None)
        return None

    def _end_oldest_handshake(self) -> None:
        oldest = next(iter(self._handshakes))
        del self._handshakes[oldest]
        if not oldest.expired():
            oldest.reschedule(0)  # that is now

    async def _exchange_proofs(self, context: grpc.aio.ServicerContext) -> Greeting:
        greeting = await _read_short(context)
        if not isinstance(greeting, Greeting) or greeting.role not in _ROLES:
            raise SyncError("a stream begins with the greeting of a trainer, a sampler or a doctor")
        if len(greeting.nonce) != authentication.NONCE_NBYTES:
            raise SyncError(f"a nonce has {authentication.NONCE_NBYTES} bytes")
        challenge = Challenge(authentication.new_nonce())
        await _write(context, [challenge])
        credentials = await _read_short(context)
        theirs, ours = proofs(self._token, greeting, challenge)
        if not isinstance(credentials, Credentials) or not authentication.matches(
            credentials.mac, theirs
        ):
            raise AuthError("the coordinator has another token than this process")
        await _write(context, [Proof(ours)])
        return greeting

    async def _read(
        self,
        context: grpc.aio.ServicerContext,
        job: Job,
        member: Member,
        goodbye: asyncio.Event,
    ) -> None:
        """Hands what comes to the job, until the stream ends or says goodbye."""
        joiner = Joiner(MAX_TO_COORDINATOR_NBYTES)
        try:
            while (piece := await context.read()) is not grpc.aio.EOF:
                if is_part(piece):
                    await self._room.take(joiner, len(piece))
                data = joiner.add(piece)
                if data is None:
                    continue
                message = decode_to_coordinator(data)
                del data
                self._room.give_back(joiner)
                job.on_message(member, message, time.monotonic())
                if isinstance(message, Leave):
                    goodbye.set()
                    return
        except SyncError as error:
            job.on_lost(member, time.monotonic())
            member.send(_refusal(error))
        except msgspec.DecodeError as error:
            text = f"{member.role} {member.name!r}, process {member.process_index}, sent {error}"
            _log.warning("job %r: %s", job.name, text)
            job.on_lost(member, time.monotonic())
            member.send(Refused("SyncError", text))
        except Exception as error:
            _log.exception("a message of %s %r", member.role, member.name)
            job.on_lost(member, time.monotonic())
            member.send(Refused("SyncError", f"the coordinator failed: {error!r}"))
        finally:
            self._room.give_back(joiner)


def _why_not_bound(host: str, port: int) -> str:
    """What keeps this machine from listening there, which gRPC does not tell; "" if nothing."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        return f"{host!r} is no name that resolves here ({reason}): check coordinator="
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "the address is in use"
            if error.errno == errno.EADDRNOTAVAIL:
                return f"{where[0]} is not an address of this machine"
            return error.strerror or str(error)
    return ""


async def _write(context: grpc.aio.ServicerContext, messages: Sequence[Message]) -> None:
    for piece in split(encode_together(messages)):
        await context.write(piece)


async def _write_all(context: grpc.aio.ServicerContext, outbox: "asyncio.Queue[Message]") -> None:
    """Sends what the job has to say, up to a refusal, which ends the stream."""
    refused = False
    while not refused:
        messages = [await outbox.get()]
        while not (refused := isinstance(messages[-1], Refused)) and not outbox.empty():
            messages.append(outbox.get_nowait())
        await _write(context, messages)


def _refusal(error: SyncError | msgspec.DecodeError) -> Refused:
    return Refused(
        type(error).__name__ if isinstance(error, SyncError) else "SyncError", str(error)
    )


def _replica(greeting: Greeting) -> str | None:
    return None if greeting.role == "trainer" else greeting.name


async def _read_short(context: grpc.aio.ServicerContext) -> ToCoordinator:
    data = await context.read()
    if data is grpc.aio.EOF:
        raise SyncError("the stream ended within its handshake")
    if len(data) > MAX_HANDSHAKE_NBYTES:
        raise SyncError(f"a handshake message of {len(data)} bytes")
    return decode_to_coordinator(data)


def _server_options(peer_timeout_s: float) -> list[tuple[str, int | str]]:
    return [
        *keepalive_options(peer_timeout_s),
        ("grpc.so_reuseport", 0),  # else a busy port is bound a second time, without a word
        ("grpc.max_receive_message_length", PIECE_NBYTES),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
        # Ends who connects and opens no stream; a client of ours has one all the time.
        ("grpc.max_connection_idle_ms", int(1000 * HANDSHAKE_S)),
        ("grpc.max_concurrent_streams", 4),
    ]
