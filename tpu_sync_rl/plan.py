"""The plan: which box of which leaf one sampler process reads from which source process.

A pure function of two manifests, made by the native core: no device, socket or clock.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpu_sync_rl import _native
from tpu_sync_rl.errors import PlanError
from tpu_sync_rl.manifest import BoxLayout, Manifest, Pair
from tpu_sync_rl.report import shown_nbytes

_MAX_ROWS = 40  # of the printed table; beyond, leaves that differ in numbers alone share a row
_MAX_SOURCES = 16  # in its footer
_MAX_SPANS = 4  # of process numbers in a row
_MAX_KEY_CHARS = 48


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one sampler process reads. Immutable; `str()` is a table of its leaves and sources.

    May be pickled and copied.

    Attributes:
        native: what the fetcher and the local copy replay.
        source: manifest of the trainer.
        sink: manifest of the replica.
        pairs: leaf pairs, in the order of `native`.
        process: the sampler process whose boxes are filled.
        chunk_nbytes: most bytes of a chunk on the wire.
    """

    native: _native.Plan
    source: Manifest
    sink: Manifest
    pairs: tuple[Pair, ...]
    process: int
    chunk_nbytes: int

    def __reduce__(self) -> tuple[Any, ...]:
        # The core's part is made again: it follows from the others.
        make = partial(make_plan, process=self.process, chunk_nbytes=self.chunk_nbytes)
        return make, (self.source, self.sink, self.pairs)

    @property
    def nbytes(self) -> int:
        """Bytes of this process's boxes, copies of a box counted once."""
        return self.native.nbytes

    @property
    def wire_nbytes(self) -> int:
        """Bytes that are read from all sources."""
        return self.native.wire_nbytes

    @property
    def source_processes(self) -> tuple[int, ...]:
        """Processes that something is read from, ascending."""
        return tuple(process for process, _, _ in self.native.sources())

    def readings(self) -> set[tuple[int, int]]:
        """Each leaf of the source, and each process that something of it is read from."""
        regions = self.native.regions()
        read = np.unique(np.stack([regions["pair"], regions["process"]]), axis=1)
        return {(self.pairs[pair].source_leaf, process) for pair, process in read.T.tolist()}

    def __str__(self) -> str:
        rows = _merged(_rows(self), len(self.pairs) > _MAX_ROWS)
        lines = [
            f"process {self.process} reads {_counted(len(self.pairs), 'leaf', 'leaves')}, "
            f"{shown_nbytes(self.wire_nbytes)} in "
            f"{_counted(self.native.num_chunks, 'chunk', 'chunks')} and "
            f"{_counted(self.native.num_regions, 'region', 'regions')}"
        ]
        processes = np.array(self.source_processes, np.uint32)
        lines += _aligned([_HEADINGS, *(row.cells(processes) for row in rows[:_MAX_ROWS])])
        if len(rows) > _MAX_ROWS:
            lines.append(f"and {len(rows) - _MAX_ROWS} more rows")
        sources = self.native.sources()
        lines += [
            f"from process {process}: {shown_nbytes(nbytes)} in "
            f"{_counted(num_chunks, 'chunk', 'chunks')}"
            for process, num_chunks, nbytes in sources[:_MAX_SOURCES]
        ]
        if len(sources) > _MAX_SOURCES:
            lines.append(f"and from {len(sources) - _MAX_SOURCES} more processes")
        return "\n".join(lines)


def make_plan(
    source: Manifest,
    sink: Manifest,
    pairs: Sequence[Pair],
    *,
    process: int,
    chunk_nbytes: int,
) -> Plan:
    """Plans what `process` of the replica `sink` reads from the processes of `source`.

    Every element of its boxes is read once, from one holder of a source box that has it; holders
    of copies share the bytes evenly. Takes tens of milliseconds for a large model, without the
    GIL; may be called from any thread.

    Args:
        source: manifest of the trainer.
        sink: manifest of the replica.
        pairs: as `match` gives them where it finds no difference.
        process: index of the sampler process.
        chunk_nbytes: most bytes of a chunk on the wire.

    Raises:
        PlanError: the source does not hold a box that is wanted, or holds it twice over; the
            message has its key.
        ValueError: the manifests contradict themselves.
    """
    num_source_layouts = len(source.layouts)
    layouts = [_native_layout(layout) for layout in source.layouts]
    layouts += [_native_layout(_held_by(layout, process)) for layout in sink.layouts]
    columns = np.zeros((len(pairs), 7), np.uint32)
    for row, pair in zip(columns, pairs, strict=True):
        trainer_leaf, leaf = source.leaves[pair.source_leaf], sink.leaves[pair.sink_leaf]
        row[:] = (
            pair.source_leaf,
            pair.sink_leaf,
            trainer_leaf.layout,
            num_source_layouts + leaf.layout,
            trainer_leaf.itemsize,
            leaf.itemsize,
            pair.op,
        )
    try:
        native = _native.make_plan(layouts, columns, process, chunk_nbytes)
    except (PlanError, ValueError) as error:
        raise type(error)(_with_key(str(error), source, sink, pairs)) from None
    return Plan(native, source, sink, tuple(pairs), process, chunk_nbytes)


def _native_layout(layout: BoxLayout) -> _native.BoxLayout:
    shape = np.array(layout.shape, np.int64)
    return _native.BoxLayout(shape, layout.boxes, layout.holder_offsets, layout.holders)


def _held_by(layout: BoxLayout, process: int) -> BoxLayout:
    own = layout.boxes_of(process)
    offsets = np.arange(len(own) + 1, dtype=np.uint32)
    return BoxLayout(
        layout.shape, layout.boxes[own], offsets, np.full(len(own), process, np.uint32)
    )


def _with_key(message: str, source: Manifest, sink: Manifest, pairs: Sequence[Pair]) -> str:
    """The core knows pairs and layouts by index alone: puts the key of a leaf instead."""
    found = re.match(r"(pair|layout) (\d+): ", message)
    if found is None:
        return message
    index = int(found[2])
    if found[1] == "pair":
        name = repr(sink.leaves[pairs[index].sink_leaf].key)
    else:
        manifest, side = (source, "trainer") if index < len(source.layouts) else (sink, "sampler")
        index -= 0 if manifest is source else len(source.layouts)
        key = next((leaf.key for leaf in manifest.leaves if leaf.layout == index), None)
        name = f"{key!r} on the {side}"
    return f"leaf {name}: {message[found.end() :]}"


_HEADINGS = ("key", "dtype", "shape", "regions", "chunks", "bytes", "sources")


@dataclass(slots=True)
class _Row:
    key: str
    dtype: str
    shape: tuple[int, ...]
    num_regions: int
    num_chunks: int
    nbytes: int
    is_read: NDArray[np.bool_]  # shape=[num_sources], in the order of the plan's sources
    num_leaves: int = 1

    def cells(self, processes: NDArray[np.uint32]) -> tuple[str, ...]:
        key = self.key
        if len(key) > _MAX_KEY_CHARS:
            key = "…" + key[1 - _MAX_KEY_CHARS :]
        if self.num_leaves > 1:
            key += f" ×{self.num_leaves}"
        counts = (str(self.num_regions), str(self.num_chunks), shown_nbytes(self.nbytes))
        return (key, self.dtype, str(list(self.shape)), *counts, _spans(processes[self.is_read]))


def _rows(plan: Plan) -> list[_Row]:
    regions = plan.native.regions()
    of_pair, process, chunk = (regions[name] for name in ("pair", "process", "chunk"))
    num_regions = np.bincount(of_pair, minlength=len(plan.pairs))
    # A chunk counts for each leaf that it touches. A leaf's regions are neighbours within a chunk.
    begins = np.zeros(len(of_pair), bool)
    begins[:1] = True
    for column in (of_pair, process, chunk):
        begins[1:] |= column[1:] != column[:-1]
    num_chunks = np.bincount(of_pair[begins], minlength=len(plan.pairs))
    processes = np.array(plan.source_processes, np.uint32)
    is_read = np.zeros((len(plan.pairs), len(processes)), bool)
    is_read[of_pair, np.searchsorted(processes, process)] = True
    rows = []
    for index, pair in enumerate(plan.pairs):
        trainer_leaf = plan.source.leaves[pair.source_leaf]
        leaf = plan.sink.leaves[pair.sink_leaf]
        layout = _held_by(plan.sink.layouts[leaf.layout], plan.process)
        extents: NDArray[np.int64] = layout.boxes[:, :, 1] - layout.boxes[:, :, 0]
        renamed = trainer_leaf.key != leaf.key
        rows.append(
            _Row(
                f"{trainer_leaf.key} → {leaf.key}" if renamed else leaf.key,
                f"{trainer_leaf.dtype} → {leaf.dtype}" if pair.op else leaf.dtype,
                leaf.shape,
                int(num_regions[index]),
                int(num_chunks[index]),
                sum(prod(row) for row in extents.tolist()) * leaf.itemsize,
                is_read[index],
            )
        )
    return rows


def _merged(rows: Iterable[_Row], by_pattern: bool) -> list[_Row]:
    """`rows`, or one for all leaves whose keys differ in numbers alone."""
    if not by_pattern:
        return list(rows)
    merged: dict[tuple[object, ...], _Row] = {}
    for row in rows:
        row.key = re.sub(r"\d+", "*", row.key)
        group = merged.setdefault((row.key, row.dtype, row.shape), row)
        if group is not row:
            group.num_leaves += 1
            group.num_regions += row.num_regions
            group.num_chunks += row.num_chunks
            group.nbytes += row.nbytes
            group.is_read |= row.is_read
    return list(merged.values())


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    first_count, past_counts = _HEADINGS.index("regions"), _HEADINGS.index("sources")
    return [
        "  ".join(
            cell.rjust(width) if first_count <= i < past_counts else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _spans(numbers: NDArray[np.uint32]) -> str:
    """The ascending numbers as ranges, 0-2, 5 for 0, 1, 2, 5; how many where that is too long."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    if len(runs) > _MAX_SPANS:
        return f"{len(numbers)} processes"
    ends = [(int(run[0]), int(run[-1])) for run in runs if run.size]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
