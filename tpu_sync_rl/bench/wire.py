"""`bench wire`: whole calls of sync_weights between separate programs over loopback TCP.

Steady state: the first two versions are not counted. Each round measures raw sockets, memcpy and
one version, one after the other, so that a noisy machine treats them alike. Both limits are native
code by the fastest way here, as a trial before the rounds finds: 1, 2 or 4 connections, persistent
or fresh. CPU seconds are those of both ends, for each GB. TSR_CPU=avx2 in the environment shows
what CPUs without AVX-512 do. With `--staging=pinned_host` copies between devices and host memory
come before and behind the wire.

Between two hosts, the same command runs on both, with the same options, and the same token in
TSR_TOKEN or TSR_TOKEN_FILE: one with `--role=trainer`, which prints the table, and one with
`--role=sampler`. `--coordinator` is an address of the trainer's host; the port after it has to be
free as well. Raw sockets then go from host to host, over the NICs that sessions take.
"""

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_sync_rl.addresses import is_loopback, split_address
from tpu_sync_rl.bench import cases, figures, models, two_hosts
from tpu_sync_rl.bench.cases import Case, Layout, Place, Settings, Sync
from tpu_sync_rl.bench.figures import Figure, Row
from tpu_sync_rl.bench.memcpy_limit import MemcpyLimit
from tpu_sync_rl.bench.processes import Pipe
from tpu_sync_rl.bench.programs import Programs, interleaved
from tpu_sync_rl.bench.raw_sockets import RawSockets
from tpu_sync_rl.bench.two_hosts import SamplerHost
from tpu_sync_rl.generations import NUM_THREADS
from tpu_sync_rl.job_token import resolve_token
from tpu_sync_rl.nics import find_nics

CASE = "wire"
CPU = "CPU of raw sockets"
CPU_UNIT = "s per GB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    models.add_arguments(parser)
    parser.add_argument("--trainer_mesh", default="1x1", metavar="FSDPxTP")
    parser.add_argument("--sampler_mesh", default="1x1", metavar="FSDPxTP")
    parser.add_argument("--trainer_processes", type=int, default=1)
    parser.add_argument("--sampler_processes", type=int, default=1, help="of each replica")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--role", choices=["trainer", "sampler"], help="be this one of two hosts")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of two hosts: where it is")
    parser.add_argument("--nics", nargs="*", metavar="NIC", help="of two hosts: what carries data")
    cases.add_arguments(parser)
    figures.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        ValueError: the options don't fit one another.
        RuntimeError: a program failed, or a sampler has wrong bytes.
        SyncError: the other host did not come, or has another token.
    """
    case = Case(
        leaves=models.model(args.model, args.nbytes),
        trainer=Layout.parse(args.trainer_mesh, args.trainer_processes),
        sampler=Layout.parse(args.sampler_mesh, args.sampler_processes),
    )
    settings = _settings(args, case)
    if args.role == "sampler":
        two_hosts.serve(settings)
        return
    with contextlib.ExitStack() as exits:
        pipes: Mapping[str, Pipe] = {}
        hosts = ["127.0.0.1"]
        if args.role == "trainer":
            pipes = exits.enter_context(SamplerHost(settings)).pipes
            hosts = _hosts(args)
        raw = exits.enter_context(
            RawSockets(case.nbytes, args.congestion, hosts=hosts, there=pipes.get("sockets"))
        )
        copier = exits.enter_context(MemcpyLimit(case.nbytes, NUM_THREADS))
        programs = exits.enter_context(Programs(settings, pipes.get("sampler")))
        limits = {
            "raw sockets": raw.gbytes_per_s,
            CPU: lambda: raw.cpu_s_per_gbyte,  # of the sample before
            "memcpy": copier.gbytes_per_s,
        }
        syncs, samples = interleaved(programs, [CASE], args.rounds, limits)
    moved = syncs[CASE]
    sockets, memcpy = (Figure(name, samples[name]) for name in ("raw sockets", "memcpy"))
    rows = [
        Row(Figure("whole call", [x.nbytes / x.call_s / 1e9 for x in moved]), sockets),
        Row(Figure("wire phase", [x.nbytes / x.stage_s("wire") / 1e9 for x in moved]), sockets),
        *_cpu_rows(args, moved, samples[CPU]),
        *_verify_rows(args, moved, memcpy),
        *_stage_rows(args, moved),
        Row(sockets),
        Row(memcpy),
        Row(Figure("pause of a sampler", [x.pause_s * 1e3 for x in moved], "ms")),
    ]
    figures.print_table(
        f"{args.model}: {len(case.leaves):,} bf16 leaves, {case.nbytes / 1e9:.3f} GB; "
        f"{case.trainer} in {args.trainer_processes} to {args.replicas} × {case.sampler} in "
        f"{args.sampler_processes} processes; every byte of {args.rounds} versions verified; "
        f"raw sockets: {raw.way}; memcpy: {copier.way}",
        rows,
    )
    figures.write_json(
        args,
        rows,
        nbytes=case.nbytes,
        limits={"raw sockets": str(raw.way), "memcpy": copier.way},
        trainer_reports=[[sample.report for sample in x.trainers] for x in moved],
        sampler_reports=[[sample.report for sample in x.samplers] for x in moved],
    )


def _cpu_rows(
    args: argparse.Namespace, moved: Sequence[Sync], of_sockets: Sequence[float]
) -> list[Row]:
    """CPU seconds for each GB beside those of raw sockets, where both ends are here."""
    if args.role is not None:
        return []
    ours = Figure("CPU of both ends", [x.cpu_s / x.nbytes * 1e9 for x in moved], CPU_UNIT)
    return [Row(ours, Figure(CPU, of_sockets, CPU_UNIT))]


def _verify_rows(args: argparse.Namespace, moved: Sequence[Sync], memcpy: Figure) -> list[Row]:
    """How fast the memory of both ends was compared, where it was."""
    if args.verify != "full":
        return []
    speeds = [x.nbytes / x.stage_s("verify") / 1e9 for x in moved]
    return [Row(Figure("verify phase", speeds), memcpy)]


def _stage_rows(args: argparse.Namespace, moved: Sequence[Sync]) -> list[Row]:
    """How long each stage was under way, and the whole over the slowest of them, where staged."""
    if args.staging != "pinned_host":
        return []
    stages = [x.copies_s for x in moved]
    slowest = Figure("slowest stage", [max(x.values()) for x in stages], "s")
    return [
        Row(Figure("whole call, in seconds", [x.call_s for x in moved], "s"), slowest),
        *(Row(Figure(f"  {name}", [x[name] for x in stages], "s")) for name in stages[0]),
    ]


def _settings(args: argparse.Namespace, case: Case) -> Settings:
    of_all: dict[str, Any] = {"cases": {CASE: case}, "options": cases.options(args)}
    if args.role is None:
        return Settings(num_replicas=args.replicas, **of_all)
    if not args.coordinator:
        raise ValueError("--role needs --coordinator=HOST:PORT, at the trainer's host")
    split_address(args.coordinator, "--coordinator", dialled=True)
    if {args.trainer_processes, args.sampler_processes, args.replicas} != {1}:
        raise ValueError("--role is for one trainer process and one sampler process")
    place = Place(coordinator=args.coordinator, nics=args.nics and tuple(args.nics))
    token = resolve_token(None) or None
    return Settings(trainer=place, sampler=place, token=token, **of_all)


def _hosts(args: argparse.Namespace) -> list[str]:
    """Addresses of the NICs that this host serves on."""
    host, _ = split_address(args.coordinator)
    if is_loopback(host):
        return [host]
    first: dict[str, str] = {}  # a NIC may have two
    for nic in find_nics(args.nics):
        first.setdefault(nic.name, nic.host)
    return [*first.values()]
