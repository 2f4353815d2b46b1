"""The coordinator: a process that keeps the programs of jobs in step, and touches no weights.

    python -m tpu_sync_rl.coordinator --address=0.0.0.0:8476

Clients keep one gRPC stream each (see `messages`). What is said on it goes into the pure state of a
`Job`; this room only serves: handshakes, streams, time. It imports no JAX.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import msgspec

from tpu_sync_rl import authentication
from tpu_sync_rl import tls as tls_files
from tpu_sync_rl.errors import AuthError, SyncError
from tpu_sync_rl.job import Job
from tpu_sync_rl.long_messages import PIECE_NBYTES, Joiner, split
from tpu_sync_rl.members import Member
from tpu_sync_rl.message_codec import (
    MAX_MESSAGE_NBYTES,
    SESSION_METHOD,
    ToCoordinator,
    decode_to_coordinator,
    encode,
    identity,
)
from tpu_sync_rl.messages import (
    Challenge,
    Credentials,
    Greeting,
    Leave,
    Message,
    Proof,
    Refused,
)
from tpu_sync_rl.options import is_loopback, join_address, resolve_token, split_address
from tpu_sync_rl.tls import TLS

MAX_HANDSHAKE_NBYTES = 4096
MAX_HANDSHAKES = 64
HANDSHAKE_S = 5.0
_TICK_S = 0.1
_FLUSH_S = 1.0
_PARENT_POLL_S = 0.2

_DESCRIPTION = """\
Runs a coordinator until it is interrupted. Trainers and samplers connect to it and take their
versions in step; the weights themselves go from trainer to sampler, not through it. A trainer
runs one itself, unless it connects with host_coordinator=False.

All programs of a job, and this one, share a secret token: TSR_TOKEN, or the content of the file
that TSR_TOKEN_FILE names. Without one it listens on loopback alone.

example:
  TSR_TOKEN=secret python -m tpu_sync_rl.coordinator --address=0.0.0.0:8476
"""

_log = logging.getLogger(__name__)


class CoordinatorServer:
    """Serves streams of clients on one address. All methods belong to one asyncio loop."""

    def __init__(self, *, token: bytes, peer_timeout_s: float, tls: TLS | None = None) -> None:
        self._token = token
        self._peer_timeout_s = peer_timeout_s
        self._tls = tls
        self._jobs: dict[str, Job] = {}
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
            SyncError: the address is in use, or is none of this machine's.
        """
        try:
            bound: int = self._add_port(join_address(host, port))
        except RuntimeError as error:
            raise SyncError(
                f"the coordinator can't listen on {join_address(host, port)}: the address is in "
                f"use, or not one of this machine ({error})"
            ) from error
        await self._server.start()
        return bound

    def _add_port(self, address: str) -> Any:
        if self._tls is None:
            return self._server.add_insecure_port(address)
        certificate, key, ca = tls_files.read(self._tls)
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
        outbox: asyncio.Queue[Message] = asyncio.Queue()
        member = Member(greeting.role, greeting.name, greeting.process_index, outbox.put_nowait)
        job = self._jobs.setdefault(
            greeting.job, Job(greeting.job, patience_s=self._peer_timeout_s)
        )
        reader = asyncio.ensure_future(self._read(context, job, member))
        writer = asyncio.ensure_future(_write(context, outbox))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if not writer.done() and not outbox.empty():
                await asyncio.wait((writer,), timeout=_FLUSH_S)
        finally:
            reader.cancel()
            writer.cancel()
            job.on_lost(member, time.monotonic())
            await asyncio.gather(reader, writer, return_exceptions=True)

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
            await context.write(encode(Refused(type(error).__name__, str(error))))
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
        if not isinstance(greeting, Greeting) or greeting.role not in ("trainer", "sampler"):
            raise SyncError("a stream begins with the greeting of a trainer or a sampler")
        if len(greeting.nonce) != authentication.NONCE_NBYTES:
            raise SyncError(f"a nonce has {authentication.NONCE_NBYTES} bytes")
        nonces = (greeting.nonce, authentication.new_nonce())
        await context.write(encode(Challenge(nonces[1])))
        credentials = await _read_short(context)
        expected = authentication.mac(self._token, "dialler", nonces, identity(greeting))
        if not isinstance(credentials, Credentials) or not authentication.matches(
            credentials.mac, expected
        ):
            raise AuthError("the coordinator has another token than this process")
        proof = authentication.mac(self._token, "listener", nonces, identity(greeting))
        await context.write(encode(Proof(proof)))
        return greeting

    async def _read(self, context: grpc.aio.ServicerContext, job: Job, member: Member) -> None:
        """Hands what comes to the job, until the stream ends or says goodbye."""
        joiner = Joiner(MAX_MESSAGE_NBYTES)
        try:
            while (piece := await context.read()) is not grpc.aio.EOF:
                data = joiner.add(piece)
                if data is None:
                    continue
                message = decode_to_coordinator(data)
                job.on_message(member, message, time.monotonic())
                if isinstance(message, Leave):
                    return
        except (SyncError, msgspec.DecodeError) as error:
            name = type(error).__name__ if isinstance(error, SyncError) else "SyncError"
            job.on_lost(member, time.monotonic())
            member.send(Refused(name, str(error)))
        except Exception as error:
            _log.exception("a message of %s %r", member.role, member.name)
            job.on_lost(member, time.monotonic())
            member.send(Refused("SyncError", f"the coordinator failed: {error!r}"))


async def _write(context: grpc.aio.ServicerContext, outbox: "asyncio.Queue[Message]") -> None:
    """Sends what the job has to say, up to a refusal, which ends the stream."""
    while True:
        message = await outbox.get()
        for piece in split(encode(message)):
            await context.write(piece)
        if isinstance(message, Refused):
            return


async def _read_short(context: grpc.aio.ServicerContext) -> ToCoordinator:
    data = await context.read()
    if data is grpc.aio.EOF:
        raise SyncError("the stream ended within its handshake")
    if len(data) > MAX_HANDSHAKE_NBYTES:
        raise SyncError(f"a handshake message of {len(data)} bytes")
    return decode_to_coordinator(data)


def _server_options(peer_timeout_s: float) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # else a busy port is bound a second time, without a word
        ("grpc.max_receive_message_length", PIECE_NBYTES),
        ("grpc.max_connection_idle_ms", int(1000 * HANDSHAKE_S)),  # without any stream
        # Answered by gRPC's own threads: a held GIL is no death, a stopped process is.
        ("grpc.keepalive_time_ms", int(1000 * peer_timeout_s / 3)),
        ("grpc.keepalive_timeout_ms", int(1000 * peer_timeout_s / 2)),
        ("grpc.http2.ping_timeout_ms", int(1000 * peer_timeout_s / 2)),  # else a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
        # Ends who connects and opens no stream; a client of ours has one all the time.
        ("grpc.max_connection_idle_ms", int(1000 * HANDSHAKE_S)),
        ("grpc.max_concurrent_streams", 4),
    ]


def _end_with(parent: int) -> None:
    """Ends this process within a fraction of a second of its parent, whatever its loop does."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(0)


async def _run(arguments: argparse.Namespace, token: bytes) -> None:
    host, port = split_address(arguments.address)
    tls = _tls(arguments)
    server = CoordinatorServer(token=token, peer_timeout_s=arguments.peer_timeout, tls=tls)
    port = await server.start(host, port)
    if arguments.ready_fd is None:
        print(f"coordinator at {join_address(host, port)}", flush=True)
    else:
        _report(arguments.ready_fd, str(port))
    try:
        await server.run()
    finally:
        await server.stop()


def _tls(arguments: argparse.Namespace) -> TLS | None:
    files = [arguments.tls_certificate, arguments.tls_key, arguments.tls_ca]
    if files == [None] * len(files):
        return None
    tls = TLS(certificate=files[0], key=files[1], ca=files[2])
    tls_files.check(tls, serves=True)
    return tls


def _report(ready_fd: int, line: str) -> None:
    with open(ready_fd, "w") as pipe:
        print(line, file=pipe)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tpu_sync_rl.coordinator",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--address",
        required=True,
        help="host:port to listen on; port 0 is a free one, which is printed (required)",
    )
    parser.add_argument(
        "--peer_timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="silence after which a process counts as lost (default: %(default)g)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond loopback without a token (default: refuse to)",
    )
    for name, help_text in (
        ("certificate", "PEM file of the certificate that it shows; streams are encrypted then"),
        ("key", "PEM file of the private key of that certificate"),
        ("ca", "PEM file of the authorities that have to vouch for clients (default: any client)"),
    ):
        parser.add_argument(f"--tls_{name}", metavar="FILE", help=help_text)
    # For the process that starts this one: the parent to end with, and where to write the port or
    # an error.
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ready_fd", type=int, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a coordinator until it is told to end; its exit status."""
    arguments = _parser().parse_args(argv)
    # Strangers may hold connections for some seconds; there should be room for others meanwhile.
    most_fds = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_fds, most_fds))
    if arguments.parent is not None:
        watch = threading.Thread(target=_end_with, args=(arguments.parent,), daemon=True)
        watch.start()
    try:
        token = resolve_token(None)
        host, _ = split_address(arguments.address)
        if not token and not arguments.insecure and not is_loopback(host):
            raise ValueError(
                f"{host} can be reached from other machines: set TSR_TOKEN or TSR_TOKEN_FILE, "
                "here and in every program of the job, or pass --insecure"
            )
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_run(arguments, token))
    except (SyncError, ValueError) as error:
        if arguments.ready_fd is None:
            print(f"error: {error}", file=sys.stderr)
        else:
            _report(arguments.ready_fd, str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
