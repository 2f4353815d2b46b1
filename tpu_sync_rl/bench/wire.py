"""`bench wire`: whole calls of sync_weights between separate programs over loopback TCP.

Steady state: the first two versions are not counted. Each round measures raw sockets, memcpy and
one version, one after the other, so that a noisy machine treats them alike.
"""

import argparse
from pathlib import Path
from typing import Any

from tpu_sync_rl.bench import figures, models
from tpu_sync_rl.bench.figures import Figure
from tpu_sync_rl.bench.programs import Layout, Programs, Sample, Settings
from tpu_sync_rl.bench.raw_limits import RawLimits

NUM_WARMUPS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--model", choices=sorted(models.MODELS), default="list")
    parser.add_argument("--nbytes", type=int, help="scale the model to about this many bytes")
    parser.add_argument("--trainer_mesh", default="1x1", metavar="FSDPxTP")
    parser.add_argument("--sampler_mesh", default="1x1", metavar="FSDPxTP")
    parser.add_argument("--trainer_processes", type=int, default=1)
    parser.add_argument("--sampler_processes", type=int, default=1, help="of each replica")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--streams", type=int, default=2, help="TCP connections per source")
    parser.add_argument("--chunk_nbytes", type=int, default=1 << 20)
    parser.add_argument("--congestion", help="TCP congestion control; default: the system's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample here")


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        ValueError: the options don't fit one another.
        RuntimeError: a program failed, or a sampler has wrong bytes.
    """
    settings = Settings(
        leaves=models.model(args.model, args.nbytes),
        trainer=Layout.parse(args.trainer_mesh, args.trainer_processes),
        sampler=Layout.parse(args.sampler_mesh, args.sampler_processes),
        num_replicas=args.replicas,
        options={
            "same_host": "tcp",
            "streams_per_rail": args.streams,
            "chunk_nbytes": args.chunk_nbytes,
            "congestion": args.congestion,
        },
    )
    nbytes = models.model_nbytes(settings.leaves)
    sockets, copies = [], []
    syncs: list[tuple[list[Sample], list[Sample]]] = []
    with RawLimits(nbytes, args.congestion) as raw, Programs(settings) as programs:
        for version in range(1, NUM_WARMUPS + args.rounds + 1):
            sockets.append(raw.sockets_gbytes_per_s())
            copies.append(raw.memcpy_gbytes_per_s())
            syncs.append(programs.sync(version))
    del sockets[:NUM_WARMUPS], copies[:NUM_WARMUPS], syncs[:NUM_WARMUPS]

    calls = [max(s.ended for s in t) - min(s.began for s in t) for t, _ in syncs]
    wires = [max(s.report["seconds"]["wire"] for s in samplers) for _, samplers in syncs]
    moved = [trainers[0].report["wire_nbytes"] for trainers, _ in syncs]
    ours = [
        Figure("whole call", [n / s / 1e9 for n, s in zip(moved, calls, strict=True)]),
        Figure("wire phase", [n / s / 1e9 for n, s in zip(moved, wires, strict=True)]),
    ]
    limits = [Figure("raw sockets", sockets), Figure("memcpy", copies)]
    figures.print_table(_title(args, settings, nbytes), ours, limits)
    if args.json is not None:
        figures.write_json(
            args.json,
            settings={name: value for name, value in vars(args).items() if _is_plain(value)},
            nbytes=nbytes,
            figures=[figure.to_dict() for figure in [*ours, *limits]],
            calls_s=calls,
            wires_s=wires,
            trainer_reports=[[s.report for s in trainers] for trainers, _ in syncs],
            sampler_reports=[[s.report for s in samplers] for _, samplers in syncs],
        )


def _title(args: argparse.Namespace, settings: Settings, nbytes: int) -> str:
    return (
        f"{args.model}: {len(settings.leaves):,} bf16 leaves, {nbytes / 1e9:.3f} GB; "
        f"{settings.trainer} in {args.trainer_processes} to "
        f"{args.replicas} × {settings.sampler} in {args.sampler_processes} processes; "
        f"every byte of {args.rounds} versions verified"
    )


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int)
