"""`bench wire`: whole calls of sync_weights between separate programs over loopback TCP.

Steady state: the first two versions are not counted. Each round measures raw sockets, memcpy and
one version, one after the other, so that a noisy machine treats them alike.
"""

import argparse

from tpu_sync_rl.bench import cases, figures, models
from tpu_sync_rl.bench.cases import Case, Layout, Settings
from tpu_sync_rl.bench.figures import Figure, Row
from tpu_sync_rl.bench.programs import Programs, interleaved
from tpu_sync_rl.bench.raw_limits import RawLimits

CASE = "wire"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--model", choices=sorted(models.MODELS), default="list")
    parser.add_argument("--nbytes", type=int, help="scale the model to about this many bytes")
    parser.add_argument("--trainer_mesh", default="1x1", metavar="FSDPxTP")
    parser.add_argument("--sampler_mesh", default="1x1", metavar="FSDPxTP")
    parser.add_argument("--trainer_processes", type=int, default=1)
    parser.add_argument("--sampler_processes", type=int, default=1, help="of each replica")
    parser.add_argument("--replicas", type=int, default=1)
    cases.add_arguments(parser)
    figures.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        ValueError: the options don't fit one another.
        RuntimeError: a program failed, or a sampler has wrong bytes.
    """
    case = Case(
        leaves=models.model(args.model, args.nbytes),
        trainer=Layout.parse(args.trainer_mesh, args.trainer_processes),
        sampler=Layout.parse(args.sampler_mesh, args.sampler_processes),
    )
    settings = Settings(cases={CASE: case}, num_replicas=args.replicas, options=cases.options(args))
    with RawLimits(case.nbytes, args.congestion) as raw, Programs(settings) as programs:
        limits = {"raw sockets": raw.sockets_gbytes_per_s, "memcpy": raw.memcpy_gbytes_per_s}
        syncs, samples = interleaved(programs, [CASE], args.rounds, limits)
    moved = syncs[CASE]
    sockets, memcpy = (Figure(name, values) for name, values in samples.items())
    rows = [
        Row(Figure("whole call", [x.nbytes / x.call_s / 1e9 for x in moved]), sockets),
        Row(Figure("wire phase", [x.nbytes / x.stage_s("wire") / 1e9 for x in moved]), sockets),
        Row(sockets),
        Row(memcpy),
        Row(Figure("pause of a sampler", [x.pause_s * 1e3 for x in moved], "ms")),
    ]
    figures.print_table(
        f"{args.model}: {len(case.leaves):,} bf16 leaves, {case.nbytes / 1e9:.3f} GB; "
        f"{case.trainer} in {args.trainer_processes} to {args.replicas} × {case.sampler} in "
        f"{args.sampler_processes} processes; every byte of {args.rounds} versions verified",
        rows,
    )
    figures.write_json(
        args,
        rows,
        nbytes=case.nbytes,
        trainer_reports=[[sample.report for sample in x.trainers] for x in moved],
        sampler_reports=[[sample.report for sample in x.samplers] for x in moved],
    )
