"""Plans against a brute-force NumPy oracle that knows elements, not boxes."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_sync_rl.errors import PlanError
from tpu_sync_rl.manifest import BoxLayout, Leaf, Manifest, Pair, match
from tpu_sync_rl.plan import Plan, make_plan


def layout_of(shape, mesh_shape, spec, num_processes) -> BoxLayout:
    """As NamedSharding lays it out: spec[dim] are the mesh axes, major first, that divide dim."""
    devices = list(itertools.product(*map(range, mesh_shape)))
    held: dict[tuple[tuple[int, int], ...], set[int]] = {}
    for number, coordinates in enumerate(devices):
        box = []
        for extent, axes in zip(shape, spec, strict=True):
            part, parts = 0, 1
            for axis in axes:
                part = part * mesh_shape[axis] + coordinates[axis]
                parts *= mesh_shape[axis]
            box.append((extent // parts * part, extent // parts * (part + 1)))
        held.setdefault(tuple(box), set()).add(number * num_processes // len(devices))
    return layout(shape, held)


def layout(shape, held) -> BoxLayout:
    """From a dict of boxes to the processes that hold them."""
    boxes = np.array(sorted(held), np.int64).reshape(len(held), len(shape), 2)
    holders = [sorted(held[box]) for box in sorted(held)]
    offsets = np.cumsum([0, *map(len, holders)]).astype(np.uint32)
    return BoxLayout(
        tuple(shape), boxes, offsets, np.array([*itertools.chain(*holders)], np.uint32)
    )


def manifest(layouts, *, dtype="float32", itemsize=4, num_processes=8) -> Manifest:
    leaves = [Leaf(f"leaf{i:02}", dtype, itemsize, one.shape, i) for i, one in enumerate(layouts)]
    return Manifest(tuple(leaves), tuple(layouts), num_processes)


@dataclass(frozen=True)
class Case:
    source: Manifest
    sink: Manifest
    process: int
    chunk_nbytes: int


@st.composite
def sharding(draw, rank):
    mesh_shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    spec = [[] for _ in range(rank)]
    for axis in draw(st.permutations(range(len(mesh_shape)))):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            spec[dim].append(axis)
    num_processes = draw(st.integers(1, int(np.prod(mesh_shape))))
    return mesh_shape, spec, num_processes


@st.composite
def cases(draw):
    sources, sinks = [], []
    for _ in range(draw(st.integers(1, 3))):
        rank = draw(st.integers(0, 5))
        of_source, of_sink = draw(sharding(rank)), draw(sharding(rank))
        shape = []
        for dim in range(rank):
            parts = [
                int(np.prod([mesh_shape[axis] for axis in spec[dim]]))
                for mesh_shape, spec, _ in (of_source, of_sink)
            ]
            shape.append(int(np.lcm(*parts)) * draw(st.integers(0 if rank < 3 else 1, 2)))
        if np.prod(shape) > 20_000:
            shape, of_source, of_sink = [], ([1], [], 1), ([1], [], 1)
        sources.append(layout_of(shape, *of_source))
        sinks.append(layout_of(shape, *of_sink))
    return Case(
        manifest(sources),
        manifest(sinks),
        draw(st.integers(0, 3)),
        draw(st.sampled_from([1, 4, 32, 100, 1000, 1 << 20])),
    )


def plan_of(case: Case) -> Plan:
    pairs, differences = match(case.source, case.sink)
    assert not differences
    return make_plan(
        case.source, case.sink, pairs, process=case.process, chunk_nbytes=case.chunk_nbytes
    )


def slices(box):
    return tuple(slice(start, stop) for start, stop in box)


def rows_of(plan: Plan):
    """The regions as (pair, source_box, process, chunk, box, placements)."""
    columns = plan.native.regions()
    for i, pair in enumerate(columns["pair"]):
        ranges = columns["ranges"][columns["range_offsets"][i] : columns["range_offsets"][i + 1]]
        placed = slice(columns["placement_offsets"][i], columns["placement_offsets"][i + 1])
        yield (
            int(pair),
            int(columns["source_box"][i]),
            int(columns["process"][i]),
            int(columns["chunk"][i]),
            ranges.reshape(-1, 2),
            columns["placements"][placed].tolist(),
        )


@settings(max_examples=200)
@given(cases())
def test_every_wanted_element_is_read_once_from_a_holder_that_has_it(case):
    plan = plan_of(case)
    times_read = [np.zeros(leaf.shape, int) for leaf in case.sink.leaves]
    times_placed = {}
    for pair, source_box, process, _, box, placements in rows_of(plan):
        times_read[pair][slices(box)] += 1
        source, sink = case.source.layouts[pair], case.sink.layouts[pair]
        inside = np.zeros(source.shape, bool)
        inside[slices(source.boxes[source_box])] = True
        assert inside[slices(box)].all()
        assert (
            process
            in source.holders[
                source.holder_offsets[source_box] : source.holder_offsets[source_box + 1]
            ]
        )
        for number, own in enumerate(sink.boxes_of(case.process)):
            part = np.zeros(sink.shape, int)
            part[slices(box)] = 1
            part = part[slices(sink.boxes[own])]
            assert (number in placements) == bool(part.any())
            if number in placements:
                times_placed[pair, number] = times_placed.get((pair, number), 0) + part
    nbytes = 0
    for pair, sink in enumerate(case.sink.layouts):
        wanted = np.zeros(sink.shape, int)
        for number, own in enumerate(sink.boxes_of(case.process)):
            wanted[slices(sink.boxes[own])] = 1
            assert np.all(times_placed.get((pair, number), 1) == 1)
            assert ((pair, number) in times_placed) == bool(wanted.size)
        np.testing.assert_array_equal(times_read[pair], wanted)
        nbytes += 4 * int(wanted.sum())
    assert plan.nbytes == plan.wire_nbytes == nbytes


@settings(max_examples=100)
@given(cases())
def test_chunks_are_bounded_and_grouped_by_source(case):
    plan = plan_of(case)
    nbytes, num_regions, names = {}, {}, []
    for _, _, process, chunk, box, _ in rows_of(plan):
        names.append((process, chunk))
        extents = box[:, 1] - box[:, 0]
        nbytes[process, chunk] = nbytes.get((process, chunk), 0) + 4 * int(np.prod(extents))
        num_regions[process, chunk] = num_regions.get((process, chunk), 0) + 1
    assert names == sorted(names)
    assert all(n <= max(4, case.chunk_nbytes) for n in nbytes.values())
    assert all(n <= 4096 for n in num_regions.values())
    assert plan.native.num_chunks == len(nbytes)
    for process, num_chunks, source_nbytes in plan.native.sources():
        own = [n for (at, _), n in nbytes.items() if at == process]
        assert (len(own), sum(own)) == (num_chunks, source_nbytes)
        assert [c for at, c in nbytes if at == process] == list(range(num_chunks))


@settings(max_examples=50)
@given(
    num_holders=st.integers(1, 7),
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    process=st.integers(0, 9),
)
def test_holders_of_copies_share_the_bytes(num_holders, rows, process):
    held = range(num_holders)
    sources = [layout((n, 8), {((0, n), (0, 8)): set(held)}) for n in rows]
    sinks = [layout((n, 8), {((0, n), (0, 8)): {process}}) for n in rows]
    plan = plan_of(Case(manifest(sources), manifest(sinks, num_processes=10), process, 1024))
    loads = dict.fromkeys(held, 0)
    loads.update({source: nbytes for source, _, nbytes in plan.native.sources()})
    assert max(loads.values()) - min(loads.values()) <= 1024


def test_ties_between_holders_begin_at_the_sink_process():
    source = manifest([layout((4,), {((0, 4),): {0, 1, 2, 3}})])
    for process in range(4):
        sink = manifest([layout((4,), {((0, 4),): {process}})])
        assert plan_of(Case(source, sink, process, 1024)).source_processes == (process,)


def test_neighbouring_sink_boxes_of_one_source_box_are_one_region():
    source = manifest([layout_of((8, 8), (4,), [[], [0]], 4)])
    sink = manifest([layout_of((8, 8), (8,), [[0], []], 1)])
    plan = plan_of(Case(source, sink, 0, 1 << 20))
    assert [placements for *_, placements in rows_of(plan)] == [list(range(8))] * 4


def test_pieces_of_a_long_region_are_equal_and_follow_memory_order():
    whole = manifest([layout((10, 100), {((0, 10), (0, 100)): {0}})])
    plan = plan_of(Case(whole, whole, 0, 1600))  # four rows of 400 bytes
    starts = [box[0].tolist() for *_, box, _ in rows_of(plan)]
    assert starts == [[0, 4], [4, 7], [7, 10]]


def test_rows_longer_than_a_chunk_are_cut_too():
    whole = manifest([layout((2, 100), {((0, 2), (0, 100)): {0}})])
    boxes = [box.tolist() for *_, box, _ in rows_of(plan_of(Case(whole, whole, 0, 200)))]
    assert boxes == [[[0, 1], [0, 50]], [[0, 1], [50, 100]], [[1, 2], [0, 50]], [[1, 2], [50, 100]]]


def test_small_leaves_share_a_chunk():
    whole = manifest([layout((3,), {((0, 3),): {0}}) for _ in range(50)])
    assert plan_of(Case(whole, whole, 0, 1 << 20)).native.num_chunks == 1


def test_zero_size_leaf_needs_nothing():
    whole = manifest([layout((0, 4), {((0, 0), (0, 4)): {0}})])
    plan = plan_of(Case(whole, whole, 0, 1 << 20))
    assert (plan.native.num_regions, plan.source_processes) == (0, ())


def test_process_without_a_box_reads_nothing():
    whole = manifest([layout((4,), {((0, 4),): {0}})])
    assert plan_of(Case(whole, whole, 5, 1 << 20)).wire_nbytes == 0


def test_box_that_no_source_holds_is_named_with_its_key():
    half = manifest([layout((8, 4), {((0, 4), (0, 4)): {0}})])
    whole = manifest([layout((8, 4), {((0, 8), (0, 4)): {0}})])
    with pytest.raises(PlanError, match=r"leaf 'leaf00': .*lacks \[4:8, 0:4\]"):
        plan_of(Case(half, whole, 0, 1 << 20))


def test_overlapping_source_boxes_are_refused_with_their_key():
    twice = manifest([layout((8,), {((0, 5),): {0}, ((4, 8),): {0}})])
    whole = manifest([layout((8,), {((0, 8),): {0}})])
    with pytest.raises(PlanError, match=r"leaf 'leaf00' on the trainer: box 0 \[0:5\] overlaps"):
        plan_of(Case(twice, whole, 0, 1 << 20))


def test_contradicting_itemsizes_are_a_value_error():
    whole = [layout((8,), {((0, 8),): {0}})]
    source, sink = manifest(whole), manifest(whole, itemsize=2)
    with pytest.raises(ValueError, match="leaf 'leaf00': itemsizes and op"):
        make_plan(source, sink, [Pair(0, 0, 0)], process=0, chunk_nbytes=1024)


def test_cast_counts_bytes_of_the_wire():
    whole = [layout((8,), {((0, 8),): {0}})]
    source, sink = manifest(whole), manifest(whole, dtype="bfloat16", itemsize=2)
    pairs, _ = match(source, sink, cast=True)
    plan = make_plan(source, sink, pairs, process=0, chunk_nbytes=1024)
    assert plan.nbytes == plan.wire_nbytes == 16
    assert "float32 → bfloat16" in str(plan)


def test_prints_a_row_per_leaf_and_per_source():
    source = manifest([layout_of((8, 8), (4,), [[0], []], 2), layout((), {(): {0, 1}})])
    sink = manifest([layout_of((8, 8), (2,), [[], [0]], 2), layout((), {(): {0, 1}})])
    assert str(plan_of(Case(source, sink, 1, 1 << 20))).splitlines() == [
        "process 1 reads 2 leaves, 132 B in 2 chunks and 5 regions",
        "key     dtype    shape   regions  chunks  bytes  sources",
        "leaf00  float32  [8, 8]        4       2  128 B  0-1",
        "leaf01  float32  []            1       1    4 B  1",
        "from process 0: 64 B in 1 chunk",
        "from process 1: 68 B in 1 chunk",
    ]


def test_many_leaves_share_rows():
    whole = manifest([layout((3,), {((0, 3),): {0}}) for _ in range(100)])
    text = str(plan_of(Case(whole, whole, 0, 1 << 20)))
    assert "leaf* ×100" in text
    assert len(text.splitlines()) == 4


def test_prints_process_ranges_or_how_many_there_are():
    held = {((2 * i, 2 * i + 2),): {process} for i, process in enumerate([0, 1, 2, 5])}
    source, sink = manifest([layout((8,), held)]), manifest([layout((8,), {((0, 8),): {0}})])
    assert "32 B  0-2, 5" in str(plan_of(Case(source, sink, 0, 1 << 20)))
    held = {((i, i + 1),): {2 * i} for i in range(8)}
    source = manifest([layout((8,), held)], num_processes=16)
    assert "32 B  8 processes" in str(plan_of(Case(source, sink, 0, 1 << 20)))
