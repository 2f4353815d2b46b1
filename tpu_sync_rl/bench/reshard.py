"""`bench reshard`: from one mesh to another, and from float32 to bfloat16, over loopback TCP.

Each case runs beside one without resharding, in turn and in the same processes, and is compared
with it within each round. The cast is compared with the same sync in bfloat16.
"""

import argparse

from tpu_sync_rl.bench import cases, figures, models
from tpu_sync_rl.bench.cases import Case, Layout, Settings
from tpu_sync_rl.bench.figures import Figure, Row
from tpu_sync_rl.bench.programs import Programs, interleaved

MOVES = {
    "1x4 to 2x2": ("1x4", "2x2"),
    "2x2 to 1x4": ("2x2", "1x4"),
    "axis 0 to 1": ("4x1", "1x4"),
    "axis 1 to 0": ("1x4", "4x1"),
}
DTYPES = ("bfloat16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    models.add_arguments(parser)
    parser.add_argument("--moves", nargs="*", choices=list(MOVES), default=list(MOVES))
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=DTYPES)
    cases.add_arguments(parser)
    figures.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        RuntimeError: a program failed, or a sampler has wrong bytes.
    """
    nbytes = args.nbytes or models.model_nbytes(models.model(args.model))
    rows = []
    for dtype in args.dtypes:
        # As many bytes in either dtype: of float32, half as many elements.
        leaves = models.along_axes(models.model(args.model, nbytes, dtype))
        unsharded = _case(leaves, "1x1", "1x1", dtype, dtype)
        for name in args.moves:
            case = _case(leaves, *MOVES[name], dtype, dtype)
            rows.append(_speed(args, f"{name}, {dtype}", case, unsharded))
    leaves = models.model(args.model, nbytes)
    rows.append(
        _seconds(
            args,
            "float32 to bfloat16 in flight",
            _case(leaves, "1x1", "1x1", "float32", "bfloat16"),
            _case(leaves, "1x1", "1x1", "bfloat16", "bfloat16"),
        )
    )
    figures.print_table(
        f"{args.model}: {len(leaves):,} leaves, {nbytes / 1e9:.3f} GB on the wire; wire phase; "
        f"every byte of {args.rounds} versions a row verified",
        rows,
    )
    figures.write_json(args, rows, nbytes=nbytes)


def _case(leaves: models.Model, trainer: str, sampler: str, source: str, sink: str) -> Case:
    return Case(
        leaves=leaves,
        trainer=Layout.parse(trainer, 1),
        sampler=Layout.parse(sampler, 1),
        trainer_dtype=source,
        sampler_dtype=sink,
    )


def _speed(args: argparse.Namespace, name: str, case: Case, beside: Case) -> Row:
    wires, limits = _wires_s(args, case, beside)
    return Row(
        Figure(name, [case.nbytes / s / 1e9 for s in wires]),
        Figure("unsharded", [beside.nbytes / s / 1e9 for s in limits]),
    )


def _seconds(args: argparse.Namespace, name: str, case: Case, beside: Case) -> Row:
    wires, limits = _wires_s(args, case, beside)
    return Row(Figure(name, wires, "s"), Figure("bfloat16 alone", limits, "s"))


def _wires_s(args: argparse.Namespace, case: Case, beside: Case) -> tuple[list[float], list[float]]:
    settings = Settings(cases={"case": case, "beside": beside}, options=cases.options(args))
    with Programs(settings) as programs:
        syncs, _ = interleaved(programs, ["beside", "case"], args.rounds)
    wires, limits = ([x.stage_s("wire") for x in syncs[name]] for name in ("case", "beside"))
    return wires, limits
