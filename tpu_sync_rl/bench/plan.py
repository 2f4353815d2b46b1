"""`bench plan`: a plan for a trillion params over 1,024 trainer shards, from shapes alone.

46,080 leaves on 256 trainer hosts, for one of 32 sampler hosts; layouts that go together, and
unkind ones. Each layout is planned in a process of its own, whose peak memory is measured; the
planner runs on one thread. Nothing is allocated for params, and no device is used.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from tpu_sync_rl.bench import figures
from tpu_sync_rl.bench.figures import Figure, Row, count
from tpu_sync_rl.bench.processes import Processes, answer, peak_mib
from tpu_sync_rl.manifest import BoxLayout, Leaf, Manifest, match
from tpu_sync_rl.plan import make_plan

NUM_LEAVES = 46_080  # 60 layers of 256 experts with three matrices each
SHAPES = ((7168, 3072), (7168, 3072), (3072, 7168))
NUM_TRAINER_HOSTS, NUM_SAMPLER_HOSTS = 256, 32
AT_MOST_S, AT_MOST_MIB = 1.5, 1024.0


@dataclass(frozen=True, slots=True)
class Grid:
    """How each leaf is cut, in rows and columns of its first shape; the other is transposed.

    Attributes:
        rows: parts along dimension 0.
        columns: parts along dimension 1.
        copies: of each box, on hosts far apart.
        by_columns: neighbours in a column share a host, instead of those in a row.
        whole: leaf n is on host n modulo their number, uncut.
    """

    rows: int = 1
    columns: int = 1
    copies: int = 1
    by_columns: bool = False
    whole: bool = False


LAYOUTS = {
    "rows and columns stay": (Grid(64, 16), Grid(16, 16)),
    "axis change": (Grid(64, 16), Grid(8, 32, by_columns=True)),
    "parts that do not fit": (Grid(64, 16), Grid(7, 32, by_columns=True)),
    "four copies of each": (Grid(16, 16, copies=4), Grid(8, 32)),
    "whole experts": (Grid(64, 16), Grid(whole=True)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--leaves", type=count, default=NUM_LEAVES, help="number of leaves (default: %(default)s)"
    )
    parser.add_argument(
        "--process",
        type=int,
        choices=range(NUM_SAMPLER_HOSTS),
        default=5,
        metavar="INDEX",
        help="the sampler host that is planned (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk_nbytes", type=count, default=1 << 20, help="of a chunk (default: %(default)s)"
    )
    figures.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        RuntimeError: a layout could not be planned.
    """
    rows = []
    for name in LAYOUTS:
        measured = _measure(args, name)
        at_most = Figure("at most", [AT_MOST_S] * args.rounds, "s")
        label = f"{name}: {measured.num_regions / 1e6:.2f} M regions"
        rows += [
            Row(Figure(label, measured.plan_s, "s"), at_most),
            Row(Figure("  its tables", measured.tables_s, "s")),
            Row(
                Figure("  peak memory", [measured.peak_mib], "MiB"),
                Figure("at most", [AT_MOST_MIB], "MiB"),
            ),
        ]
    num_params = sum(np.prod(SHAPES[i % 3]) for i in range(args.leaves))
    figures.print_table(
        f"{args.leaves:,} leaves, {num_params / 1e12:.3f} T params, 1,024 shards on "
        f"{NUM_TRAINER_HOSTS} hosts; one of {NUM_SAMPLER_HOSTS} sampler hosts",
        rows,
    )
    figures.write_json(args, rows)


@dataclass(frozen=True, slots=True)
class _Measured:
    num_regions: int
    plan_s: Sequence[float]
    tables_s: Sequence[float]
    peak_mib: float


def _measure(args: argparse.Namespace, name: str) -> _Measured:
    with Processes() as processes:
        measured: _Measured = answer(processes.start(_plan, args, name), f"planning {name!r}")
        return measured


def _plan(pipe: Connection, args: argparse.Namespace, name: str) -> None:
    trainer, sampler = LAYOUTS[name]
    source = manifest(args.leaves, trainer, NUM_TRAINER_HOSTS)
    sink = manifest(args.leaves, sampler, NUM_SAMPLER_HOSTS)
    pairs, differences = match(source, sink)
    assert not differences
    plan_s, tables_s, num_regions = [], [], 0
    for _ in range(args.rounds):
        began = time.monotonic()
        plan = make_plan(
            source, sink, pairs, process=args.process, chunk_nbytes=args.chunk_nbytes
        ).native
        planned = time.monotonic()
        for index in range(len(plan.sources())):
            plan.encode_table(index)
        plan_s.append(planned - began)
        tables_s.append(time.monotonic() - planned)
        num_regions = plan.num_regions
        del plan
    pipe.send(_Measured(num_regions, plan_s, tables_s, peak_mib(os.getpid())))


def manifest(num_leaves: int, grid: Grid, num_hosts: int) -> Manifest:
    """The leaves of a program of `num_hosts` processes that cuts them as `grid` says."""
    shapes = dict.fromkeys(SHAPES)
    if grid.whole:
        layouts = [_whole(shape, host) for shape in shapes for host in range(num_hosts)]
    else:
        layouts = [_cut(shape, grid, num_hosts) for shape in shapes]
    leaves = []
    for index in range(num_leaves):
        shape = SHAPES[index % len(SHAPES)]
        layout = list(shapes).index(shape)
        if grid.whole:
            layout = layout * num_hosts + index % num_hosts
        leaves.append(Leaf(f"leaf_{index:05}", "bfloat16", 2, shape, layout))
    return Manifest(tuple(leaves), tuple(layouts), num_hosts)


def _whole(shape: tuple[int, ...], host: int) -> BoxLayout:
    boxes = np.array([[(0, extent) for extent in shape]], np.int64)
    return BoxLayout(shape, boxes, np.array([0, 1], np.uint32), np.array([host], np.uint32))


def _cut(shape: tuple[int, ...], grid: Grid, num_hosts: int) -> BoxLayout:
    parts = (grid.rows, grid.columns) if shape == SHAPES[0] else (grid.columns, grid.rows)
    extents = [extent // num for extent, num in zip(shape, parts, strict=True)]
    num_boxes = grid.rows * grid.columns
    at = np.stack(np.unravel_index(np.arange(num_boxes), parts), axis=1)
    starts = at * np.array(extents)
    boxes = np.stack([starts, starts + extents], axis=2).astype(np.int64)
    # Devices go along rows, or along columns, of the first shape; hosts have equal numbers of them.
    across = grid.by_columns == (shape == SHAPES[0])
    device = at[:, 1] * parts[0] + at[:, 0] if across else np.arange(num_boxes)
    num_devices = num_boxes * grid.copies
    copies = device[:, None] + np.arange(grid.copies) * num_boxes
    holders = (copies * num_hosts // num_devices).astype(np.uint32)
    offsets = np.arange(num_boxes + 1, dtype=np.uint32) * grid.copies
    return BoxLayout(shape, boxes, offsets.astype(np.uint32), holders.ravel())
