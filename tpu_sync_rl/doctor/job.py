"""What there is to say about a job: its coordinator, its programs, and the way to the trainer."""

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from tpu_sync_rl import rails, software, tcp
from tpu_sync_rl.addresses import is_loopback, join_address, split_address
from tpu_sync_rl.client import CoordinatorClient
from tpu_sync_rl.doctor import large_packets
from tpu_sync_rl.doctor.findings import Finding
from tpu_sync_rl.doctor.machine import MEMORY_ADVICE
from tpu_sync_rl.errors import AuthError, SyncError
from tpu_sync_rl.message_codec import FromCoordinator
from tpu_sync_rl.messages import JobStatus, Leave
from tpu_sync_rl.options import MOST_STREAMS, Options
from tpu_sync_rl.rails import Connection, Rail
from tpu_sync_rl.report import shown_nbytes
from tpu_sync_rl.same_host import NotSharedError

_DIAL_S = 5.0
_HEADERS_NBYTES = 40  # of IPv4 and TCP
_IPV6_NBYTES = 20  # what its header has more than that of IPv4
_TIMESTAMPS_NBYTES = 12  # of each segment, where TCP has them
_OPTIONS_NBYTES = 80  # what IPv6 and the options of TCP take besides, at most
_USUAL_GBYTES_PER_S = 1.25
_MIB = 1 << 20


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
    dial = partial(
        rails.dial,
        *(rail, options),
        incarnation=incarnation,
        sink=sink,
        ticket=ticket,
        timeout_s=_DIAL_S,
    )
    began = time.monotonic()
    try:
        connection = dial()
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
            round_trip_s = tcp.round_trip_s(stream)
            segment_nbytes = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        except (OSError, struct.error):  # a sandbox's own TCP may not say
            return Finding(subject, "ok", f"{seen}; round trip and segments unknown")
        passes = large_packets.pass_over(stream)
    seen += f"; round trip {1e3 * round_trip_s:.2f} ms, {segment_nbytes} bytes a segment"
    if not passes:
        return _black_hole(subject, seen, rail, dial, segment_nbytes)
    advice = segment_advice(rail, segment_nbytes) or distance_advice(rail, round_trip_s)
    return Finding(subject, "note" if advice else "ok", seen, advice)


def _black_hole(
    subject: str, seen: str, rail: Rail, dial: Callable[..., Connection], segment_nbytes: int
) -> Finding:
    """What there is to say of a rail that opens and carries nothing."""

    def dial_with(segment_nbytes: int) -> socket.socket:
        return socket.socket(fileno=dial(segment_nbytes=segment_nbytes).fd)

    headers_nbytes = _HEADERS_NBYTES + (_IPV6_NBYTES if ":" in rail.host else 0)
    vanish_nbytes = segment_nbytes + headers_nbytes + _TIMESTAMPS_NBYTES
    try:
        most = large_packets.most_nbytes(dial_with, headers_nbytes, vanish_nbytes)
    except SyncError as error:
        return Finding(subject, "broken", f"{seen}; then {error}", "see whether the trainer lives")
    between = f"between {rail.local.host} and {rail.host}"
    if most is None:
        advice = "see what firewalls on the way do to connections that have opened"
        return Finding(subject, "broken", f"{seen}; then nothing passes {between}", advice)
    seen += f"; packets above {most} bytes vanish {between}"
    advice = (
        f"set the MTU of both NICs to {most}, or let ICMP (fragmentation needed) through; or, at "
        "both ends: sysctl -w net.ipv4.tcp_mtu_probing=1"
    )
    return Finding(subject, "broken", seen, advice)


def distance_advice(rail: Rail, round_trip_s: float) -> str:
    """What to do about a way that the kernel's buffers keep slower than its NICs; "" for nothing.

    Where it is not known what the NICs are made for they are taken for 10 Gbit/s.
    """
    line_nbytes_per_s = 1e9 * (rail.line.gbytes_per_s or _USUAL_GBYTES_PER_S)
    flight_nbytes = MOST_STREAMS * tcp.most_flight_nbytes()
    if flight_nbytes >= line_nbytes_per_s * round_trip_s:
        return ""
    need_nbytes = math.ceil(line_nbytes_per_s * round_trip_s / MOST_STREAMS / _MIB) * _MIB
    return (
        f"at this round trip {MOST_STREAMS} streams carry "
        f"{shown_nbytes(flight_nbytes / round_trip_s)}/s at most: at both ends sysctl -w "
        f'net.ipv4.tcp_wmem="4096 131072 {need_nbytes}" net.ipv4.tcp_rmem="4096 131072 '
        f'{2 * need_nbytes}"'
    )


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
