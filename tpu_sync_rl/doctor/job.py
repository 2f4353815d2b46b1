"""What there is to say about a job: its coordinator, its programs, and the way to the trainer."""

import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from tpu_sync_rl import rails, software
from tpu_sync_rl.addresses import is_loopback, join_address, split_address
from tpu_sync_rl.client import CoordinatorClient
from tpu_sync_rl.doctor.findings import Finding
from tpu_sync_rl.doctor.machine import MEMORY_ADVICE
from tpu_sync_rl.errors import AuthError, SyncError
from tpu_sync_rl.message_codec import FromCoordinator
from tpu_sync_rl.messages import JobStatus, Leave
from tpu_sync_rl.options import Options
from tpu_sync_rl.rails import Rail
from tpu_sync_rl.same_host import NotSharedError

_DIAL_S = 5.0
_RTT_OF_TCP_INFO = 68  # offset of tcpi_rtt in linux/tcp.h, microseconds
_HEADERS_NBYTES = 40  # of IPv4 and TCP
_OPTIONS_NBYTES = 80  # what IPv6 and the options of TCP take besides, at most


def ask(address: str, options: Options) -> tuple[list[Finding], JobStatus | None]:
    """Asks the coordinator about the job. Takes no part in it. Blocks to the options' timeout.

    Returns:
        findings: about the coordinator.
        status: its answer; None where there is none.
    """
    host, port = split_address(address, "--coordinator", dialled=True)
    address = join_address(host, port)
    began = time.monotonic()
    try:
        with socket.create_connection((host, port), options.timeout_s):
            answered_s = time.monotonic() - began
    except OSError as error:
        advice = (
            "start the trainer that hosts it, or on that host: "
            f"python -m tpu_sync_rl.coordinator --address={address}"
            if isinstance(error, ConnectionRefusedError)
            else "check the address, and what firewalls do between here and there"
        )
        seen = f"{address}: {error.strerror or error}"
        return [Finding("coordinator", "broken", seen, advice)], None
    reached = Finding("coordinator", "ok", f"{address} answers in {1e3 * answered_s:.1f} ms")
    try:
        status = _ask(address, options)
    except AuthError as error:
        advice = (
            "give every program the same token= (or TSR_TOKEN, TSR_TOKEN_FILE) and fitting tls="
        )
        return [reached, Finding("token", "broken", str(error), advice)], None
    except SyncError as error:
        advice = "see that it is a coordinator of this version, and whether it has TLS"
        return [reached, Finding("token", "broken", str(error), advice)], None
    secret = "accepted, and proved by the coordinator" if options.token else "none, and none wanted"
    return [reached, Finding("token", "ok", secret)], status


def _ask(address: str, options: Options) -> JobStatus:
    answers: list[JobStatus] = []

    def on_message(message: FromCoordinator) -> None:
        if isinstance(message, JobStatus):
            answers.append(message)
            client.finish()

    client = CoordinatorClient(
        address,
        options,
        role="doctor",
        name=socket.gethostname(),
        process_index=os.getpid(),
        join=Leave,
        on_message=on_message,
        on_refused=lambda _: None,
    )
    client.start(time.monotonic() + options.timeout_s)
    client.close()
    return answers[0]


def programs(status: JobStatus) -> Iterator[Finding]:
    """What the coordinator said about the programs of the job."""
    if status.trainer is None:
        advice = "samplers wait; a trainer shows with its first sync_weights"
        yield Finding("trainer", "note", "none that has published a version", advice)
    else:
        trainer, newest = status.trainer, status.newest
        seen = f"incarnation {trainer.incarnation}, processes: {len(trainer.sources)}"
        seen += f", newest version: {'none' if newest is None else newest.version}"
        yield Finding("trainer", "ok", seen)
    for name, state in status.replicas.items():
        yield Finding(f"replica {name}", "ok", state or "in step")
    ours = software.versions()
    places: dict[str, list[str]] = {}
    for process in status.processes:
        where = process.role
        if process.name:
            where += f" {process.name}[{process.process_index}]"
        places.setdefault(software.shown(process.software), []).append(where)
        if process.software.get("tpu_sync_rl") != ours.get("tpu_sync_rl"):
            advice = "install one version of tpu_sync_rl everywhere: others may not understand it"
            seen = f"tpu_sync_rl {process.software.get('tpu_sync_rl')}"
            yield Finding(f"software of {where}", "broken", seen, advice)
    for versions, names in places.items():
        yield Finding("software there", "ok", f"{versions}: {', '.join(names)}")


def ways(status: JobStatus, options: Options) -> Iterator[Finding]:
    """Dials each process of the trainer on each rail, as a sampler on this host would."""
    trainer = status.trainer
    if trainer is None:
        return
    for process, (addresses, ticket) in enumerate(
        zip(trainer.sources, trainer.tickets, strict=True)
    ):
        peer = f"trainer process {process}"
        way = partial(
            _way, peer=peer, incarnation=trainer.incarnation, sink=status.sink, ticket=ticket
        )
        not_shared: list[NotSharedError] = []
        try:
            pairs = rails.pair(options, addresses, not_shared.append)
            if pairs[0].is_shared:
                memory = way(pairs[0], options)
                yield memory
                if memory.verdict != "note":
                    continue
                pairs = rails.pair(replace(options, same_host="tcp"), addresses)
        except ValueError as error:
            yield Finding(peer, "broken", str(error), "see NICs above")
            continue
        for reason in not_shared:
            yield Finding(f"rail shm to {peer}", "note", str(reason), MEMORY_ADVICE)
        for rail in pairs:
            yield way(rail, options)


def _way(
    rail: Rail, options: Options, *, peer: str, incarnation: str, sink: int, ticket: bytes
) -> Finding:
    subject = f"rail {rail.name} to {peer}"
    began = time.monotonic()
    try:
        connection = rails.dial(
            rail, options, incarnation=incarnation, sink=sink, ticket=ticket, timeout_s=_DIAL_S
        )
    except AuthError as error:
        return Finding(subject, "broken", str(error), "give the trainer the same token")
    except SyncError as error:
        if rail.is_shared:
            return Finding(subject, "note", str(error), MEMORY_ADVICE)
        advice = (
            f"let TCP through from {rail.local.host or 'here'} to {rail.host}, all ports; "
            "or leave this NIC out with nics="
        )
        return Finding(subject, "broken", str(error), advice)
    opened_s = time.monotonic() - began
    if connection.ring_fd >= 0:
        os.close(connection.ring_fd)
    with socket.socket(fileno=connection.fd) as stream:
        if rail.is_shared:
            return Finding(subject, "ok", "shared memory of one host")
        seen = f"opened and proved in {1e3 * opened_s:.1f} ms"
        try:
            info = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            (rtt_us,) = struct.unpack_from("I", info, _RTT_OF_TCP_INFO)
            segment_nbytes = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        except (OSError, struct.error):  # a sandbox's own TCP may not say
            return Finding(subject, "ok", f"{seen}; round trip and segments unknown")
    seen += f"; round trip {rtt_us / 1e3:.2f} ms, {segment_nbytes} bytes a segment"
    advice = segment_advice(rail, segment_nbytes)
    return Finding(subject, "note" if advice else "ok", seen, advice)


def segment_advice(rail: Rail, segment_nbytes: int) -> str:
    """What to do about segments that are smaller than the NIC here allows; "" where they aren't."""
    allowed_nbytes = (rail.local.line.mtu_nbytes or 0) - _HEADERS_NBYTES
    # Linux makes the segments of loopback no larger than 32768 bytes, whatever its MTU.
    if is_loopback(rail.host) or segment_nbytes >= allowed_nbytes - _OPTIONS_NBYTES:
        return ""
    return (
        f"segments carry {segment_nbytes} bytes where the MTU here allows {allowed_nbytes}: set "
        "the same MTU on the trainer's NIC and the switches between"
    )
