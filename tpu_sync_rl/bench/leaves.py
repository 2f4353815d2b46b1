"""`bench leaves`: one large leaf and ten thousand tiny ones, beside the list of usual ones.

All three are synced in turn, in the same processes, over loopback TCP. What Python does per leaf
while nobody can go on is shown for both sides.
"""

import argparse

from tpu_sync_rl.bench import cases, figures, models
from tpu_sync_rl.bench.cases import Case, Layout, Settings, Sync
from tpu_sync_rl.bench.figures import Figure, Row, count
from tpu_sync_rl.bench.programs import Programs, interleaved

MODELS = ("list", "one-big", "many-small")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--nbytes", type=count, help="scale the large models to about this many")
    parser.add_argument(
        "--leaves", type=count, default=10_000, help="number of tiny leaves (default: %(default)s)"
    )
    cases.add_arguments(parser)
    figures.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        RuntimeError: a program failed, or a sampler has wrong bytes.
    """
    one = Layout(fsdp=1, tp=1)
    of = {name: models.model(name, args.nbytes) for name in ("list", "one-big")}
    of["many-small"] = dict(list(models.model("many-small").items())[: args.leaves])
    settings = Settings(
        cases={name: Case(leaves=leaves, trainer=one, sampler=one) for name, leaves in of.items()},
        options=cases.options(args),
    )
    with Programs(settings) as programs:
        syncs, _ = interleaved(programs, MODELS, args.rounds)

    wires = {name: _wire(name, syncs[name]) for name in MODELS}
    tiny, num_leaves = syncs["many-small"], len(of["many-small"])
    rows = [
        Row(wires["list"]),
        Row(wires["one-big"], wires["list"]),
        Row(wires["many-small"], wires["list"]),
        _per_leaf("trainer, until pinned", [x.pin_s for x in tiny], num_leaves),
        _per_leaf("sampler, arrays", [x.stage_s("arrays") for x in tiny], num_leaves),
        _per_leaf("sampler, its call", [x.pause_s for x in tiny], num_leaves),
    ]
    figures.print_table(
        "wire phase of "
        + ", ".join(f"{x}: {len(of[x]):,} leaves, {_gb(of[x])}" for x in MODELS)
        + f"; every byte of {args.rounds} versions each verified",
        rows,
    )
    figures.write_json(args, rows)


def _wire(name: str, syncs: list[Sync]) -> Figure:
    return Figure(name, [x.nbytes / x.stage_s("wire") / 1e9 for x in syncs])


def _per_leaf(name: str, seconds: list[float], num_leaves: int) -> Row:
    return Row(Figure(name, [s / num_leaves * 1e6 for s in seconds], "µs a leaf"))


def _gb(leaves: models.Model) -> str:
    return f"{models.model_nbytes(leaves) / 1e9:.3f} GB"
