"""Generations: bytes that are put in come out as arrays, and memory is used again in time."""

import ctypes
import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from strategies import Shardings, shardings

from tpu_sync_rl.generation_layout import GenerationLayout
from tpu_sync_rl.generations import Generation, GenerationPool, ResultPool
from tpu_sync_rl.shard_table import shard_table

MESH = jax.make_mesh((2, 4), ("a", "b"))


def _sharding(*spec: Any, memory_kind: str | None = None) -> NamedSharding:
    return NamedSharding(MESH, P(*spec), memory_kind=memory_kind)


def _struct(shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(*spec))


def _pool(*likes: Any, max_generations: int = 3) -> GenerationPool:
    """A pool for leaves "0", "1" and so on."""
    table = shard_table([str(i) for i in range(len(likes))], likes, wanted=True)
    layout = GenerationLayout.of(table, likes, process=0)
    return GenerationPool(layout, max_generations=max_generations)


def _acquired(pool: GenerationPool) -> Generation:
    generation = pool.acquire(0.0)
    assert generation is not None
    return generation


def _fill(pool: GenerationPool, generation: Generation, values: Sequence[np.ndarray]) -> None:
    """Puts every box of `values`, in storage coordinates, where the generation wants it."""
    shards = pool.layout.shards
    ranges = shards.ranges.tolist()
    for shard, address in enumerate(generation.sink_addresses.tolist()):
        rank = int(shards.rank[shard])
        box = [slice(*ranges[2 * dim : 2 * dim + 2]) for dim in range(rank)]
        del ranges[: 2 * rank]
        part = np.ascontiguousarray(values[shards.leaf[shard]][tuple(box)])
        ctypes.memmove(address, part.ctypes.data, part.nbytes)


def _versions(pool: GenerationPool, value: float) -> tuple[Any, ...]:
    """Arrays of a version whose every element is `value`."""
    generation = _acquired(pool)
    shapes = [
        leaf.shape if leaf.key_impl is None else (*leaf.shape, 2) for leaf in pool.layout.leaves
    ]
    _fill(pool, generation, [np.full(shape, value, np.float32) for shape in shapes])
    return tuple(generation.arrays())


def _number(version: tuple[Any, ...]) -> float:
    """The one value that the elements of a version of `_versions` have."""
    (value,) = set(np.asarray(version[0]).tolist())
    return float(value)


def _pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@given(
    shardings(1),
    st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64", "int4"]),
    st.booleans(),
)
def test_arrays_are_the_bytes_that_were_put_in(
    sharded: Shardings, dtype: str, prepared: bool
) -> None:
    shape, (sharding,) = sharded
    stored = np.dtype(jnp.dtype(dtype))
    values = np.arange(np.prod(shape)).reshape(shape).astype(np.int8).astype(stored)
    pool = _pool(jax.ShapeDtypeStruct(shape, stored, sharding=sharding))
    generation = _acquired(pool)
    if prepared:
        generation.prepare_arrays()
    _fill(pool, generation, [values])
    (array,) = generation.arrays()
    assert array.sharding is sharding
    assert (array.shape, array.dtype, array.committed) == (shape, stored, True)
    for shard in array.addressable_shards:
        expected = np.ascontiguousarray(values[shard.index])
        assert np.asarray(shard.data).tobytes() == expected.tobytes()


def test_arrays_alias_the_memory_and_copies_of_a_box_share_it() -> None:
    pool = _pool(_struct((8, 8), "a"))
    generation = _acquired(pool)
    assert (generation.sink_addresses % 64 == 0).all()
    first, second = generation.sink_addresses.tolist()
    assert _pointers(generation.arrays()[0]) == [first] * 4 + [second] * 4


def test_what_jax_copies_is_made_of_bytes_that_have_landed() -> None:
    columns = Format(Layout((1, 0)), _sharding("a"))
    likes = [
        _struct((8,), "b", dtype=jnp.int4),
        jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=columns),
        _struct((), dtype=jnp.int32),
        _struct((0, 4)),
    ]
    values = [
        np.arange(8).astype(jnp.int4),
        np.arange(32, dtype=np.float32).reshape(4, 8),
        np.array(7, np.int32),
        np.zeros((0, 4), np.float32),
    ]
    pool = _pool(*likes)
    for _ in range(2):
        generation = _acquired(pool)
        generation.prepare_arrays()
        _fill(pool, generation, values)
        arrays = generation.arrays()
        for array, value in zip(arrays, values, strict=True):
            assert np.asarray(array).tobytes() == value.tobytes()
        assert arrays[1].format.layout.major_to_minor == (1, 0)
    assert 2 not in pool.layout.copied
    assert {0, 1} <= pool.layout.copied


def test_keys_are_wrapped_around_their_words() -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(5, impl="rbg"), 4), _sharding("b"))
    pool = _pool(keys)
    generation = _acquired(pool)
    generation.prepare_arrays()
    words = np.asarray(jax.random.key_data(keys))
    _fill(pool, generation, [words])
    (array,) = generation.arrays()
    assert (array.dtype, array.sharding) == (keys.dtype, keys.sharding)
    assert (np.asarray(jax.random.key_data(array)) == words).all()


@pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])
def test_arrays_have_the_memory_kind_of_like(kind: str) -> None:
    like = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=_sharding("b", memory_kind=kind))
    (array,) = _versions(_pool(like), 3.0)
    assert array.sharding.memory_kind == kind
    assert (np.asarray(array) == 3).all()


@pytest.mark.parametrize(
    "like",
    [
        jax.device_put(jnp.zeros((8, 8)), _sharding("a", "b")),
        jax.device_put(jnp.zeros((8, 8)), SingleDeviceSharding(jax.devices()[5])),
        jax.device_put(jnp.zeros((8, 8)), Format(Layout((1, 0)), _sharding("a"))),
        jnp.zeros((8, 8)),
        jax.device_put(jax.random.key(0), _sharding()),
        jax.random.key(0),
    ],
    ids=["sharded", "one device", "columns", "uncommitted", "key", "uncommitted key"],
)
def test_a_jitted_function_takes_like_and_arrays_by_one_entry(like: Any) -> None:
    (array,) = _versions(_pool(like), 1)
    assert array.committed == like.committed
    assert array.sharding == like.sharding
    function = jax.jit(lambda x: (x, 1))
    function(like)
    function(array)
    assert function._cache_size() == 1


def test_arrays_follow_an_uncommitted_like_to_its_device() -> None:
    with jax.default_device(jax.devices()[3]):
        like = jnp.zeros(4)
    (array,) = _versions(_pool(like), 2.0)
    assert not array.committed
    assert array.devices() == {jax.devices()[3]}
    assert (np.asarray(array) == 2).all()


def test_a_pool_does_not_keep_like() -> None:
    like = jax.device_put(jnp.zeros(8), _sharding("b"))
    pool, reference = _pool(like), weakref.ref(like)
    del like
    gc.collect()
    assert reference() is None
    assert (np.asarray(_versions(pool, 1.0)[0]) == 1).all()


# --- memory


def test_memory_is_used_again_when_its_arrays_are_gone() -> None:
    pool = _pool(_struct((1024,), "b"), max_generations=1)
    addresses = set()
    for version in range(5):
        (array,) = _versions(pool, version)
        assert (np.asarray(array) == version).all()
        addresses.add(min(_pointers(array)))
        del array
    assert len(addresses) == 1


def test_use_of_memory_is_told_and_does_not_keep_it() -> None:
    pool = _pool(_struct((1024,), "b"), max_generations=1)
    generation = _acquired(pool)
    in_use = generation.use()
    assert in_use()
    del generation
    assert not in_use()
    generation = _acquired(pool)
    in_use = generation.use()
    arrays = generation.arrays()
    del generation
    assert in_use()
    del arrays
    gc.collect()
    assert not in_use()


def test_a_generation_that_handed_out_its_arrays_keeps_nothing() -> None:
    pool = _pool(_struct((1024,), "b"), max_generations=1)
    generation = _acquired(pool)
    arrays = generation.arrays()
    assert pool.acquire(0.0) is None
    del arrays
    assert pool.acquire(0.0) is not None


def test_older_arrays_stay_while_they_are_held() -> None:
    pool = _pool(_struct((1024,), "b"))
    held = [_versions(pool, version) for version in range(3)]
    assert pool.acquire(0.0) is None
    assert pool.acquire(0.05) is None
    for version, (array,) in enumerate(held):
        assert (np.asarray(array) == version).all()
    del held[1], array
    newest = _versions(pool, 7)
    assert [*map(_number, held), _number(newest)] == [0, 2, 7]


@pytest.mark.parametrize(
    "derived",
    [
        lambda array: array.addressable_shards[2].data,
        lambda array: np.asarray(array.addressable_shards[2].data),
        lambda array: array.addressable_shards[2].data.__dlpack__(),
    ],
    ids=["shard", "view", "capsule"],
)
def test_whatever_looks_at_the_memory_keeps_it(derived: Any) -> None:
    pool = _pool(_struct((1024,), "b"), max_generations=1)
    look = derived(_versions(pool, 1)[0])
    assert pool.acquire(0.0) is None
    del look
    assert pool.acquire(1.0) is not None


def test_a_donated_array_gives_its_memory_back_and_nobody_writes_to_it() -> None:
    pool = _pool(_struct((1024,), "b"), max_generations=1)
    (array,) = _versions(pool, 1)
    stepped = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert (np.asarray(stepped) == 2).all()
    del array
    (again,) = _versions(pool, 5)
    assert (np.asarray(stepped) == 2).all()
    assert (np.asarray(again) == 5).all()


def test_a_third_generation_is_made_only_while_older_arrays_are_held() -> None:
    pool = _pool(_struct((1024,), "b"))
    current = _versions(pool, 0)
    for version in range(1, 6):
        current = _versions(pool, version)
    assert pool._num_generations == 2
    held = _versions(pool, 6)
    assert pool._num_generations == 2
    newest = _versions(pool, 7)
    assert pool._num_generations == 3
    assert [*map(_number, (current, held, newest))] == [5, 6, 7]


def test_arrays_in_a_reference_cycle_are_collected_before_memory_is_added() -> None:
    pool = _pool(_struct((1024,), "b"))
    current = _versions(pool, 0)
    cycle: list[Any] = [_versions(pool, 1)]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert pool.acquire(0.0) is not None
    finally:
        gc.enable()
    assert pool._num_generations == 2
    assert _number(current) == 0


def test_a_waiting_thread_gets_the_memory_of_arrays_that_die() -> None:
    pool = _pool(_struct((1024,), "b"), max_generations=1)
    held = [_versions(pool, 1)]
    waiting = threading.Event()

    def let_go() -> None:
        waiting.wait()
        held.clear()

    thread = threading.Thread(target=let_go)
    thread.start()
    assert pool.acquire(0.0) is None
    waiting.set()
    assert pool.acquire(60.0) is not None
    thread.join()


def test_a_generation_that_is_given_up_is_free() -> None:
    pool = _pool(_struct((1024,), "b"), max_generations=1)
    generation = _acquired(pool)
    generation.prepare_arrays()
    assert pool.acquire(0.0) is None
    del generation
    assert pool.acquire(0.0) is not None


def test_arrays_are_made_over_memory_that_is_free_before_it_is_asked_for() -> None:
    pool = _pool(_struct((1024,), "b"), _struct((8, 8), "a"), max_generations=1)
    pool.prepare(lambda: False)
    assert pool._num_generations == 0, "nothing is free, and nothing is allocated"
    _versions(pool, 1)
    gc.collect()
    pool.prepare(lambda: False)
    generation = _acquired(pool)
    assert pool.acquire(0.0) is None
    prepared = list(generation._arrays)
    _fill(pool, generation, [np.full((1024,), 2, np.float32), np.full((8, 8), 3, np.float32)])
    arrays = generation.arrays()
    assert all(array is made for array, made in zip(arrays, prepared, strict=True))
    assert [set(np.asarray(array).ravel().tolist()) for array in arrays] == [{2}, {3}]


def test_making_arrays_beforehand_ends_when_there_is_more_to_do_and_goes_on_later() -> None:
    pool = _pool(*[_struct((64,), "b")] * 3, max_generations=1)
    _versions(pool, 1)
    gc.collect()
    answers = iter([False, False, True])
    pool.prepare(lambda: next(answers))
    first = pool._prepared
    assert first is not None
    assert [array is not None for array in first._arrays] == [True, True, False]
    pool.prepare(lambda: False)
    assert pool._prepared is first
    assert all(array is not None for array in first._arrays)
    assert _acquired(pool) is first


def test_memory_that_gets_free_is_told() -> None:
    pool = _pool(_struct((64,), "b"), max_generations=1)
    told: list[bool] = []
    pool.when_free(lambda: told.append(True))
    held = _versions(pool, 1)
    gc.collect()
    assert told == []
    del held
    gc.collect()
    assert told == [True]
    pool.prepare(lambda: False)
    pool.close()
    gc.collect()
    assert told == [True], "a closed pool has nobody to tell"


def test_arrays_outlive_their_pool() -> None:
    pool = _pool(_struct((1024,), "b"))
    free, (array,) = _acquired(pool), _versions(pool, 3)
    del free
    pool.close()
    assert pool._free.empty()
    assert (np.asarray(array) == 3).all()
    del array
    assert pool._free.empty(), "memory of a closed pool goes back to the system"


def test_a_result_takes_the_smallest_block_that_fits() -> None:
    results = ResultPool()
    layouts = {}
    for mebi in (1, 8, 32):
        like = _struct((mebi << 20,), dtype=jnp.int8)
        layouts[mebi] = GenerationLayout.of(
            shard_table(["w"], [like], wanted=True), [like], process=0
        )
    blocks = [results.generation(layouts[mebi]) for mebi in (8, 32, 1)]
    base = {i: int(block.sink_addresses[0]) for i, block in enumerate(blocks)}
    del blocks
    assert len(results._free) == 3
    assert int(results.generation(layouts[8]).sink_addresses[0]) == base[0]
    small = results.generation(layouts[1])
    assert int(small.sink_addresses[0]) == base[2]
    other = results.generation(layouts[1])
    assert int(other.sink_addresses[0]) not in base.values(), "8 MiB are too much for 1"
