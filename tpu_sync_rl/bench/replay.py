"""`bench replay`: CPU that chunks cost beyond the work on their bytes, when a plan is replayed.

One leaf is synced in small chunks and in large ones, in turn and in the same processes. The CPU
seconds that trainer and sampler spend together differ by what the additional chunks cost: asking,
answering, checking and noting them. Both copy, check and send the same bytes.
"""

import argparse

from tpu_sync_rl.bench import cases, figures, models
from tpu_sync_rl.bench.cases import Case, Layout, Settings, Sync
from tpu_sync_rl.bench.figures import Figure, Row, count
from tpu_sync_rl.bench.programs import Programs, interleaved

PER = 10_000  # chunks that the figure is for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--nbytes", type=count, default=1 << 30, help="of the leaf, about (default: %(default)s)"
    )
    cases.add_arguments(parser)
    parser.set_defaults(chunk_nbytes=64 << 10)
    parser.add_argument(
        "--large_chunk_nbytes",
        type=count,
        default=1 << 20,
        help="of the chunks that it is held against (default: %(default)s)",
    )
    figures.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        ValueError: large chunks are not larger.
        RuntimeError: a program failed, or a sampler has wrong bytes.
    """
    if args.large_chunk_nbytes <= args.chunk_nbytes:
        raise ValueError("--large_chunk_nbytes has to be more than --chunk_nbytes")
    leaves = models.model("one-big", args.nbytes)
    small, large = (
        _case(leaves, nbytes) for nbytes in (args.chunk_nbytes, args.large_chunk_nbytes)
    )
    num_small, num_large = (
        -(-case.nbytes // case.options["chunk_nbytes"]) for case in (small, large)
    )
    settings = Settings(cases={"small": small, "large": large}, options=cases.options(args))
    with Programs(settings) as programs:
        syncs, _ = interleaved(programs, ["large", "small"], args.rounds)
    of_large = _cpu(f"{num_large:,} chunks", syncs["large"])
    of_small = _cpu(f"{num_small:,} chunks", syncs["small"])
    more_ms = [a - b for a, b in zip(of_small.samples, of_large.samples, strict=True)]
    each_ms = [ms / (num_small - num_large) * PER for ms in more_ms]
    rows = [
        Row(of_large),
        Row(of_small, of_large),
        Row(Figure(f"for each {PER:,} more", each_ms, "ms")),
    ]
    figures.print_table(
        f"CPU of both sides for {small.nbytes / 1e9:.3f} GB; every byte of {args.rounds} versions "
        "each verified",
        rows,
        beside="beside",
    )
    figures.write_json(args, rows, nbytes=small.nbytes)


def _case(leaves: models.Model, chunk_nbytes: int) -> Case:
    one = Layout(fsdp=1, tp=1)
    options = {"chunk_nbytes": chunk_nbytes}
    return Case(leaves=leaves, trainer=one, sampler=one, options=options)


def _cpu(name: str, syncs: list[Sync]) -> Figure:
    return Figure(name, [sync.cpu_s * 1e3 for sync in syncs], "ms")
