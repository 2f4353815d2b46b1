"""Shards in tiles, from memory to memory and over a stream, against a model of XLA's tiling."""

import contextlib
import ctypes
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import tile_model
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.layout import Layout

from tpu_sync_rl import _native, snapshot
from tpu_sync_rl.buffers import Aliases
from tpu_sync_rl.local_shards import LocalShards
from tpu_sync_rl.shard_table import shard_table
from tpu_sync_rl.snapshot import Snapshot
from tpu_sync_rl.transport import Exporter, Fetcher, shard_directory

WAIT_S = 20.0
COMMON_TILES = {
    4: [((8, 128),), ((128,),), ((1024,),), ((2, 128),)],
    2: [((8, 128), (2, 1)), ((16, 128), (2, 1)), ((8, 128),), ((1024,), (128,), (2, 1))],
    1: [((8, 128), (4, 1)), ((32, 128), (4, 1)), ((1024,), (512,), (4, 1))],
    8: [((8, 128),)],
}
FLOAT_KINDS = {"float32": 3, "bfloat16": 2}  # of csrc/cast.h


@dataclass
class Side:
    """Boxes of equal extents in one layout; their memory holds `array`, or nothing yet."""

    boxes: list[tuple[slice, ...]]
    extents: tuple[int, ...]
    dtype: np.dtype
    order: tuple[int, ...]
    tiles: tuple[tuple[int, ...], ...]
    memory: list[np.ndarray] = field(default_factory=list)

    def fill(self, array: np.ndarray, padding: int) -> None:
        self.memory = [
            tile_model.to_memory(array[box], self.order, self.tiles, padding) for box in self.boxes
        ]

    def arrays(self) -> list[np.ndarray]:
        return [
            tile_model.from_memory(memory, self.extents, self.dtype, self.order, self.tiles)
            for memory in self.memory
        ]

    @property
    def layout(self) -> _native.ShardLayout:
        return _native.ShardLayout(self.extents, self.dtype.itemsize, self.order, self.tiles)

    @property
    def addresses(self) -> np.ndarray:
        return np.array([memory.ctypes.data for memory in self.memory], np.uint64)

    @property
    def ranges(self) -> np.ndarray:
        starts = [(part.start, part.stop) for box in self.boxes for part in box]
        return np.array(starts, np.int64).reshape(-1)

    def box_layout(self, shape: Sequence[int]) -> _native.BoxLayout:
        count = len(self.boxes)
        offsets = np.arange(count + 1, dtype=np.uint32)
        return _native.BoxLayout(
            np.array(shape, np.int64), self.ranges, offsets, np.zeros(count, np.uint32)
        )

    def padding(self) -> list[np.ndarray]:
        held = tile_model.elements(self.extents, self.order, self.tiles)
        return [memory.reshape(len(held), -1)[held < 0] for memory in self.memory]


def grid(start: Sequence[int], extents: Sequence[int], parts: Sequence[int]):
    """Boxes of `extents`, `parts` in each dimension, the first at `start`."""
    return [
        tuple(slice(s + i * e, s + (i + 1) * e) for s, e, i in zip(start, extents, at, strict=True))
        for at in product(*map(range, parts))
    ]


@dataclass
class Move:
    shape: tuple[int, ...]
    source: Side
    sink: Side
    chunk_nbytes: int

    def plan(self) -> _native.Plan:
        layouts = [self.source.box_layout(self.shape), self.sink.box_layout(self.shape)]
        pair = [0, 0, 0, 1, self.source.dtype.itemsize, self.sink.dtype.itemsize, self._op()]
        return _native.make_plan(layouts, np.array([pair], np.uint32), 0, self.chunk_nbytes)

    def _op(self) -> int:
        if self.source.dtype == self.sink.dtype:
            return 0
        return FLOAT_KINDS[self.source.dtype.name] << 4 | FLOAT_KINDS[self.sink.dtype.name]

    def shards(self) -> SimpleNamespace:
        count = len(self.source.boxes)
        return SimpleNamespace(
            leaf=np.zeros(count, np.uint32),
            box=np.arange(count, dtype=np.uint32),
            itemsize=np.full(count, self.source.dtype.itemsize, np.uint32),
            kind=np.full(count, FLOAT_KINDS.get(self.source.dtype.name, 0), np.uint8),
            rank=np.full(count, len(self.shape), np.uint32),
            ranges=self.source.ranges,
            num_leaves=1,
        )

    def strides(self) -> np.ndarray:
        strides = [-1] * len(self.shape)  # in tiles they are not looked at
        step = self.source.dtype.itemsize
        for dim in reversed(() if self.source.tiles else self.source.order):
            strides[dim] = step
            step *= self.source.extents[dim]
        return np.array(strides * len(self.source.boxes), np.int64)

    def source_layout(self) -> _native.ShardLayout | None:
        return self.source.layout if self.source.tiles else None

    def sink_layouts(self) -> dict[int, _native.ShardLayout]:
        is_dense = not self.sink.tiles and self.sink.order == tuple(range(len(self.shape)))
        return {} if is_dense else {0: self.sink.layout}

    def check(self, run) -> None:
        array = random_array(self.shape, self.source.dtype)
        self.source.fill(array, padding=0x5A)
        self.sink.fill(np.zeros(self.shape, self.sink.dtype), padding=0xA5)
        run(self)
        expected = array.astype(self.sink.dtype)
        for box, found in zip(self.sink.boxes, self.sink.arrays(), strict=True):
            assert found.tobytes() == np.ascontiguousarray(expected[box]).tobytes()
        for padding in self.sink.padding():
            assert (padding == 0xA5).all()


def random_array(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    rng = np.random.default_rng(3)
    if dtype.name in FLOAT_KINDS:
        return rng.standard_normal(shape).astype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return rng.integers(0, 256, nbytes, np.uint8).view(dtype).reshape(shape)


def copy_local(move: Move) -> None:
    copy = _native.LocalCopy(
        move.plan(),
        shard_directory(move.shards()),
        move.source.addresses,
        move.strides(),
        move.sink.addresses,
        2,
        move.sink_layouts(),
    )
    copy.set_pinned(len(move.source.boxes), move.source_layout())
    copy.finish()


def source_memory(move: Move) -> SimpleNamespace:
    """Where the source lies, in the words of `buffers.Aliases`."""
    layout = move.source_layout()
    return SimpleNamespace(
        addresses=move.source.addresses,
        strides=move.strides(),
        layouts={} if layout is None else {0: layout},
    )


@contextlib.contextmanager
def streaming(move: Move, memory: SimpleNamespace | Aliases) -> Iterator[Fetcher]:
    """A fetcher with a stream to an exporter that has published `memory` as version 1."""
    exporter = Exporter(move.shards(), peer_timeout_s=WAIT_S, num_workers=1)
    fetcher = Fetcher(move.plan(), peer_timeout_s=WAIT_S, num_workers=1)
    with contextlib.closing(exporter), contextlib.closing(fetcher):
        exporter.publish(1, memory.addresses, memory.strides, layouts=memory.layouts)
        ours, theirs = (end.detach() for end in socket.socketpair())
        exporter.add_connection(ours, 7, "rail")
        fetcher.add_stream(0, theirs, "rail")
        yield fetcher


def stream(move: Move, memory: Aliases | None = None) -> None:
    with streaming(move, memory or source_memory(move)) as fetcher:
        fetcher.begin(1, move.sink.addresses, move.sink_layouts())
        assert fetcher.wait(WAIT_S)
        fetcher.end()


EXTENTS = st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 33, 130, 257]))
TILE_EXTENTS = st.sampled_from([1, 2, 3, 4, 5, 8, 16, 128])


MAX_ELEMENTS = 1 << 17  # of a shard, with its padding: nested tiles pad a few to any number


def fitting(extents: Sequence[int], order: tuple[int, ...], tiles):
    """The layout with as many of the tiles as pad the extents to what a test can afford."""
    while tile_model.padded(extents, order, tiles) > MAX_ELEMENTS:
        tiles = tiles[:-1]
    return order, tiles


@st.composite
def layouts(draw, extents: Sequence[int], itemsize: int):
    """An order of dimensions, and tiles: none, common ones, or of any nesting."""
    order = tuple(draw(st.permutations(range(len(extents)))))
    any_tile = st.lists(TILE_EXTENTS, min_size=1, max_size=3).map(tuple)
    any_tiles = st.lists(any_tile, max_size=3).map(tuple)
    tiles = draw(st.one_of(st.just(()), st.sampled_from(COMMON_TILES[itemsize]), any_tiles))
    return fitting(extents, order, tiles)


def _is_small(extents: Sequence[int]) -> bool:
    return np.prod(extents) <= 1 << 14


@st.composite
def moves(draw, dtypes=(np.uint8, np.uint16, np.uint32, np.uint64), sink_dtype=None):
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    sink_dtype = dtype if sink_dtype is None else np.dtype(sink_dtype)
    rank = draw(st.integers(0, 4))
    extents = tuple(draw(st.lists(EXTENTS, min_size=rank, max_size=rank).filter(_is_small)))
    parts = draw(st.lists(st.integers(1, 2), min_size=rank, max_size=rank))
    shape = tuple(e * n for e, n in zip(extents, parts, strict=True))
    source = Side(
        grid((0,) * rank, extents, parts), extents, dtype, *draw(layouts(extents, dtype.itemsize))
    )
    # Any box of the leaf, in one part or two equal ones.
    sink_extents = tuple(draw(st.integers(1, n)) for n in shape)
    room = [n - e for n, e in zip(shape, sink_extents, strict=True)]
    sink_parts = [
        draw(st.integers(1, 1 + (e <= r))) for e, r in zip(sink_extents, room, strict=True)
    ]
    start = tuple(
        draw(st.integers(0, r - (n - 1) * e))
        for r, e, n in zip(room, sink_extents, sink_parts, strict=True)
    )
    alike = draw(st.booleans()) and sink_dtype == dtype
    order, tiles = (
        fitting(sink_extents, source.order, source.tiles)
        if alike
        else draw(layouts(sink_extents, sink_dtype.itemsize))
    )
    sink = Side(grid(start, sink_extents, sink_parts), sink_extents, sink_dtype, order, tiles)
    return Move(shape, source, sink, draw(st.sampled_from([300, 5000, 1 << 20])))


def move_of(
    shape: tuple[int, ...],
    dtype,
    source_tiles,
    sink_tiles,
    box: tuple[slice, ...] | None = None,
    sink_dtype=None,
) -> Move:
    """One shard to one box of it (to all of it where None), in rows cut into tiles."""
    order = tuple(range(len(shape)))
    whole = tuple(slice(0, n) for n in shape)
    box = whole if box is None else box
    extents = tuple(part.stop - part.start for part in box)
    dtype = jnp.dtype(dtype)
    sink_dtype = dtype if sink_dtype is None else jnp.dtype(sink_dtype)
    return Move(
        shape,
        Side([whole], shape, dtype, order, source_tiles),
        Side([box], extents, sink_dtype, order, sink_tiles),
        1 << 20,
    )


@given(moves())
def test_any_tiles_move_from_memory_to_memory(move: Move) -> None:
    move.check(copy_local)


@given(moves())
def test_any_tiles_move_over_a_stream(move: Move) -> None:
    move.check(stream)


@given(moves(dtypes=[np.float32], sink_dtype=jnp.bfloat16))
def test_casts_move_from_tiles_to_tiles(move: Move) -> None:
    move.check(copy_local)


@pytest.mark.parametrize("run", [copy_local, stream])
@pytest.mark.parametrize(
    "box", [None, (slice(16, 48), slice(128, 640)), (slice(3, 61), slice(7, 650))]
)
@pytest.mark.parametrize(
    ("itemsize", "tiles"), [(n, tiles) for n in COMMON_TILES for tiles in COMMON_TILES[n]]
)
def test_common_tiles_move_both_ways_and_as_they_are(run, box, itemsize: int, tiles) -> None:
    dtype = np.dtype(f"u{itemsize}")
    for source, sink in [(tiles, ()), ((), tiles), (tiles, tiles)]:
        move_of((64, 700), dtype, source, sink, box).check(run)


@pytest.mark.parametrize("run", [copy_local, stream])
def test_casts_leave_and_enter_tiles(run) -> None:
    tiles, narrow = ((8, 128),), ((8, 128), (2, 1))
    move_of((20, 300), "float32", tiles, narrow, sink_dtype="bfloat16").check(run)
    move_of((20, 300), "bfloat16", narrow, tiles, sink_dtype="float32").check(run)


@pytest.mark.parametrize("op", ["copy", "cast"])
def test_a_source_in_tiles_answers_with_the_digest_of_its_elements(op: str) -> None:
    shape, box = (40, 700), (slice(8, 40), slice(3, 650))
    move = move_of(shape, "float32", ((8, 128),), (), box)
    array = random_array(shape, move.source.dtype)
    move.source.fill(array, padding=0x5A)
    code, dtype = (0, array.dtype) if op == "copy" else (0x32, jnp.dtype("bfloat16"))
    part = np.ascontiguousarray(array[box].astype(dtype))
    itemsize, rank = np.array([part.itemsize], np.uint32), np.array([2], np.uint32)
    ranges = np.array([[at.start, at.stop] for at in box], np.int64)
    address, strides = np.array([part.ctypes.data], np.uint64), np.array(part.strides, np.int64)
    asked = _native.DigestRequest(0, 0, code, shape, ranges.reshape(-1).tolist())
    with streaming(move, source_memory(move)) as fetcher:
        fetcher.begin_digests(1, {0: [asked]})
        assert fetcher.wait(WAIT_S)
        found = fetcher.digests()
        fetcher.end()
    digests = _native.digests(
        address, itemsize, rank, np.array(shape, np.int64), ranges.reshape(-1), strides, 1
    )
    assert found == {0: digests.tolist()}


def staged(move: Move, monkeypatch: pytest.MonkeyPatch) -> Snapshot:
    """A snapshot whose pinned host memory is the source, as a TPU would have it: in tiles."""
    array = jnp.zeros(move.shape, move.source.dtype)
    table = shard_table(["w"], [array], wanted=False)
    tpu = SimpleNamespace(platform="tpu")
    shards = replace(LocalShards.of(table, 0), devices=((tpu,),))
    part = SimpleNamespace(
        unsafe_buffer_pointer=lambda: move.source.memory[0].ctypes.data,
        format=SimpleNamespace(layout=Layout(move.source.order, tiling=move.source.tiles)),
    )
    monkeypatch.setattr(snapshot, "_to_pinned_host", lambda parts: {0: [part]})
    copy = Snapshot(table.manifest, shards, window_nbytes=1 << 20)
    copy.stage([array], lambda _: None)
    return copy


@pytest.mark.parametrize("tiles", [((8, 128), (2, 1)), ((16, 512),)])
def test_a_snapshot_in_tiles_is_served_from_where_it_is(tiles, monkeypatch) -> None:
    move = move_of((40, 400), "bfloat16", tiles, (), (slice(8, 40), slice(3, 350)))
    move.check(lambda move: stream(move, staged(move, monkeypatch)))


def test_a_snapshot_of_complex_elements_on_a_tpu_is_not_read_where_it_lies(monkeypatch) -> None:
    array = jnp.arange(6).astype("complex64")
    table = shard_table(["w"], [array], wanted=False)
    shards = replace(LocalShards.of(table, 0), devices=((SimpleNamespace(platform="tpu"),),))
    monkeypatch.setattr(snapshot, "_to_pinned_host", lambda parts: {0: [array]})
    copy = Snapshot(table.manifest, shards, window_nbytes=1 << 20)
    copy.stage([array], lambda _: None)
    address = copy.addresses.item()
    assert address != array.unsafe_buffer_pointer()
    held = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (48,))
    assert held.tobytes() == np.asarray(array).tobytes() and not copy.layouts


def test_a_snapshot_that_cannot_be_addressed_is_refused_by_key(monkeypatch) -> None:
    move = move_of((40, 400), "float32", ((8, 128),), ())
    move.source.fill(random_array(move.shape, move.source.dtype), padding=0)
    move.source.tiles = ((-(1 << 63), 128),)
    message = r"leaf 'w' lies in tiles .*128.*can't be addressed: a tile has the extent"
    with pytest.raises(ValueError, match=message):
        staged(move, monkeypatch)


def test_model_of_tiles_counts_what_it_would_make() -> None:
    for extents, tiles in [((9, 129), ((8, 128), (2, 1))), ((5,), ((3, 4), (2,))), ((), ())]:
        order = tuple(range(len(extents)))
        assert tile_model.padded(extents, order, tiles) == len(
            tile_model.elements(extents, order, tiles)
        )


def test_padding_counts_as_bytes() -> None:
    assert _native.ShardLayout((9, 129), 2, (0, 1), ((8, 128), (2, 1))).nbytes == 16 * 256 * 2
    assert _native.ShardLayout((5,), 4, (0,), ((8, 128),)).nbytes == 8 * 128 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 3), 4, (0, 0), ()), "major_to_minor is no permutation"),
        (((2, 3), 4, (0,), ()), "major_to_minor is no permutation"),
        (((2, 3), 0, (0, 1), ()), "itemsize is 0"),
        (((2, -3), 4, (0, 1), ()), "an extent is negative"),
        (((2, 3), 4, (0, 1), ((-(1 << 63), 128),)), "a tile has the extent -9223372036854775808"),
        (((2, 3), 4, (0, 1), ((8, 0),)), "a tile has the extent 0"),
        (((1 << 40, 1 << 40), 4, (0, 1), ()), "too many bytes"),
        (((2,), 4, (0,), ((1 << 62,), (1 << 62,))), "too many bytes"),
        (((1,) * 33, 4, tuple(range(33)), ()), "rank is above 32"),
        (((4,) * 20, 1, tuple(range(20)), ((2,) * 20,)), "more than 32 parts"),
    ],
)
def test_a_layout_that_cannot_be_addressed_is_refused(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.ShardLayout(*arguments)


def test_layouts_of_other_shards_are_refused_before_a_byte_moves() -> None:
    move = move_of((16, 256), np.uint32, ((8, 128),), ((8, 128),))
    move.check(copy_local)
    other = _native.ShardLayout((16, 128), 4, (0, 1), ((8, 128),))
    directory = shard_directory(move.shards())
    sides = (move.source.addresses, move.strides(), move.sink.addresses)
    with pytest.raises(ValueError, match="pair 0 has a layout of other sink boxes than its own"):
        _native.LocalCopy(move.plan(), directory, *sides, 1, {0: other})
    with pytest.raises(ValueError, match="there is no pair 1"):
        _native.LocalCopy(move.plan(), directory, *sides, 1, {1: move.sink.layout})
    copy = _native.LocalCopy(move.plan(), directory, *sides, 1)
    with pytest.raises(ValueError, match="box 0 of leaf 0 has a layout of other shards"):
        copy.set_pinned(1, other)
    exporter = Exporter(move.shards(), peer_timeout_s=WAIT_S)
    with contextlib.closing(exporter):
        with pytest.raises(ValueError, match="leaf 0 has a layout of other shards"):
            exporter.publish(1, *sides[:2], layouts={0: other})
        with pytest.raises(ValueError, match="there is no leaf 1"):
            exporter.publish(1, *sides[:2], layouts={1: other})
