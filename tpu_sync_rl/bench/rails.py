"""`bench rails`: several NICs at once, unequal ones, and one that is lost in the middle of a sync.

`--netns` (root) builds two network namespaces and joins them by veth pairs that are shaped like
NICs: the trainer runs in one, the sampler in the other. Each round measures the goodput of all
rails together, then one version. Nothing stays behind, also after Ctrl-C or SIGTERM.
"""

import argparse
import time
from itertools import count
from typing import Any

from tpu_sync_rl.bench import cases, figures, models
from tpu_sync_rl.bench.cases import NUM_WARMUPS, Case, Layout, Place, Settings
from tpu_sync_rl.bench.figures import Figure, Row
from tpu_sync_rl.bench.goodput import Goodput
from tpu_sync_rl.bench.netns import CONTROL, Namespaces
from tpu_sync_rl.bench.programs import Programs, interleaved

CASE = "rails"
RATES = ["2500", "2500,2500", "2500,2500,2500,2500", "2500,500"]
DONE_WITHIN_S = 3.0  # of the loss of a rail
USED_WITHIN_S = 10.0  # of its return, and the end of the sync that uses it
_GIVE_UP_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--netns", action="store_true", help="build the NICs here; needs root")
    parser.add_argument(
        "--rates",
        nargs="*",
        default=RATES,
        metavar="MBIT,MBIT",
        help="rates of the rails, a set of them per case",
    )
    parser.add_argument(
        "--lose", default="2500,2500", metavar="MBIT,MBIT", help="rails of which the first is lost"
    )
    models.add_arguments(parser)
    cases.add_arguments(parser)
    figures.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        ValueError: the options don't fit one another.
        RuntimeError: a program failed, a sampler has wrong bytes, or there are no namespaces here.
    """
    if not args.netns:
        raise ValueError("pass --netns, as root: it builds the NICs that are measured")
    rates = [_parse(text) for text in args.rates]
    lose = _parse(args.lose)
    if len(lose) < 2:
        raise ValueError(f"--lose needs two rails or more, not {args.lose!r}")
    leaves = models.model(args.model, args.nbytes)
    case = Case(leaves=leaves, trainer=Layout(fsdp=1, tp=1), sampler=Layout(fsdp=1, tp=1))
    rows = [_throughput(args, case, rates_mbit) for rates_mbit in rates]
    rows += _loss(args, case, lose)
    figures.print_table(
        f"{args.model}: {len(leaves):,} bf16 leaves, {case.nbytes / 1e9:.3f} GB over shaped NICs; "
        f"every byte of {args.rounds} versions a row verified",
        rows,
    )
    figures.write_json(args, rows, nbytes=case.nbytes)


def _parse(text: str) -> list[int]:
    rates = text.split(",")
    if not all(rate.isdecimal() and int(rate) for rate in rates):
        raise ValueError(f"rates of rails are MBIT,MBIT,… such as 2500,500, not {text!r}")
    return [int(rate) for rate in rates]


def programs_over(namespaces: Namespaces, case: Case, options: dict[str, Any]) -> Programs:
    """A trainer and a sampler, each in its namespace, with all rails between them."""
    nics = tuple(rail.name for rail in namespaces.rails)
    settings = Settings(
        cases={CASE: case},
        options=options,
        trainer=Place(
            namespace=namespaces.trainer, coordinator=f"{CONTROL.trainer_host}:0", nics=nics
        ),
        sampler=Place(namespace=namespaces.sampler, nics=nics),
    )
    return Programs(settings)


def _throughput(args: argparse.Namespace, case: Case, rates_mbit: list[int]) -> Row:
    with (
        Namespaces(rates_mbit) as namespaces,
        Goodput(namespaces, rates_mbit, args.congestion) as goodput,
        programs_over(namespaces, case, cases.options(args)) as programs,
    ):
        limits = {goodput.name: goodput.gbytes_per_s}
        syncs, samples = interleaved(programs, [CASE], args.rounds, limits)
    plural = "rails" if len(rates_mbit) > 1 else "rail"
    name = f"{len(rates_mbit)} {plural} of {', '.join(map(str, dict.fromkeys(rates_mbit)))} Mbit/s"
    limit = Figure(goodput.name, samples[goodput.name])
    return Row(Figure(name, [x.nbytes / x.call_s / 1e9 for x in syncs[CASE]]), limit)


def _loss(args: argparse.Namespace, case: Case, rates_mbit: list[int]) -> list[Row]:
    """How long a sync takes from the loss of its first rail, and until that is used again."""
    done_s: list[float] = []
    used_s: list[float] = []
    with (
        Namespaces(rates_mbit) as namespaces,
        programs_over(namespaces, case, cases.options(args)) as programs,
    ):
        lost = namespaces.rails[0]
        versions = count(1)
        half_s = min(programs.sync(CASE, next(versions)).call_s for _ in range(NUM_WARMUPS + 1)) / 2
        while len(used_s) < args.rounds:
            changed_at = 0.0

            def take_down() -> None:
                nonlocal changed_at
                time.sleep(half_s)
                namespaces.set_up(lost, False)
                changed_at = time.monotonic()

            sync = programs.sync(CASE, next(versions), meanwhile=take_down)
            was_in_time = sync.ended > changed_at
            if was_in_time:
                done_s.append(sync.ended - changed_at)
            namespaces.set_up(lost, True)
            changed_at = time.monotonic()
            while not programs.sync(CASE, next(versions)).rails.get(f"{lost.name}-{lost.name}"):
                if time.monotonic() - changed_at > _GIVE_UP_S:
                    raise RuntimeError(f"{lost.name} is up again and not used")
            if was_in_time:
                used_s.append(time.monotonic() - changed_at)
    return [
        Row(Figure("a rail is lost: done after", done_s, "s"), _at_most(DONE_WITHIN_S, done_s)),
        Row(Figure("it returns: used after", used_s, "s"), _at_most(USED_WITHIN_S, used_s)),
    ]


def _at_most(limit: float, samples: list[float]) -> Figure:
    return Figure("at most", [limit] * len(samples), "s")
