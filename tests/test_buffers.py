"""Aliases: addresses and strides of shards, and pins that outlive donation."""

import ctypes
import gc
import threading
import weakref
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from strategies import Shardings, shardings

from tpu_sync_rl.buffers import Aliases, AliasResolver, computed
from tpu_sync_rl.local_shards import LocalShards
from tpu_sync_rl.shard_table import ShardTable, shard_table

MESH = jax.make_mesh((2, 4), ("a", "b"))
STEP = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)


def _params() -> dict[str, jax.Array]:
    """Computed arrays: what came from NumPy is never donated in place."""
    made = jax.jit(lambda: jnp.arange(4096.0).reshape(64, 64), out_shardings=_sharding("a", "b"))
    return {"v": made() + 1, "w": made()}


def _sharding(*spec: Any, memory_kind: str | None = None) -> NamedSharding:
    return NamedSharding(MESH, P(*spec), memory_kind=memory_kind)


def _resolved(params: Any) -> Aliases:
    aliases, arrays = AliasResolver().resolve(params)
    aliases.pin(arrays)
    return aliases


def _pinned(table: ShardTable, shards: LocalShards, leaves: list[jax.Array]) -> Aliases:
    aliases = Aliases(table.manifest, shards)
    aliases.pin(computed(table, leaves))
    return aliases


def _memory(aliases: Aliases, leaf: int, dtype: Any) -> list[np.ndarray]:
    """Copies of what lies at the addresses of a leaf's shards, read by their strides."""
    shards = aliases.shards
    found = []
    for shard in range(*shards.first_shard[leaf : leaf + 2]):
        shape = shards.shapes[shard]
        begin = shards.first_stride[leaf] + (shard - shards.first_shard[leaf]) * len(shape)
        strides = tuple(aliases.strides[begin : begin + len(shape)].tolist())
        itemsize = int(shards.itemsize[shard])
        span = itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        nbytes = 0 if 0 in shape else span
        buffer = (ctypes.c_char * nbytes).from_address(int(aliases.addresses[shard]))
        found.append(np.ndarray(shape, dtype, buffer=buffer, strides=strides).copy())
    return found


def _pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@given(
    shardings(1),
    st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64", "int4"]),
    st.randoms(use_true_random=False),
)
def test_addresses_and_strides_lead_to_every_local_box(
    sharded: Shardings, dtype: str, random: Any
) -> None:
    shape, (sharding,) = sharded
    stored = np.dtype(jnp.dtype(dtype))
    values = np.arange(np.prod(shape)).reshape(shape).astype(np.int8).astype(stored)
    order = random.sample(range(len(shape)), len(shape))
    plain = dtype == "int4" or 0 in shape or order == sorted(order)
    target = sharding if plain else Format(Layout(tuple(order)), sharding)
    array = jax.device_put(values, target)
    aliases = _resolved({"w": array})
    shards = aliases.shards
    boxes = shards.ranges.reshape(shards.num_shards, len(shape), 2)
    wanted = {tuple(map(tuple, box.tolist())) for box in aliases.manifest.layouts[0].boxes}
    assert {tuple(map(tuple, box.tolist())) for box in boxes} == wanted
    for box, memory in zip(boxes, _memory(aliases, 0, stored), strict=True):
        expected = values[tuple(slice(*part) for part in box)]
        assert memory.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_shards_are_in_the_order_of_keys_and_boxes() -> None:
    params = {"b": jnp.zeros(8, jnp.bfloat16), "a": _params()["w"], "c": jnp.zeros((), jnp.int32)}
    shards = _resolved(params).shards
    assert shards.leaf.tolist() == [0] * 8 + [1, 2]
    assert shards.box.tolist() == [*range(8), 0, 0]
    assert shards.itemsize.tolist() == [4] * 8 + [2, 4]
    assert shards.kind.tolist() == [3] * 8 + [2, 0]
    assert shards.rank.tolist() == [2] * 8 + [1, 0]
    assert len(shards.ranges) == 8 * 4 + 2
    assert (shards.num_shards, shards.num_leaves) == (10, 3)


def test_of_equal_shards_one_is_taken() -> None:
    array = jax.device_put(jnp.arange(8.0), _sharding("a"))
    aliases = _resolved({"w": array})
    first = [array.addressable_shards[i].data.unsafe_buffer_pointer() for i in (0, 4)]
    assert aliases.addresses.tolist() == first


def test_another_process_holds_no_shard_of_ours() -> None:
    table = shard_table(["w"], [_params()["w"]], wanted=False)
    shards = LocalShards.of(table, 1)
    assert (shards.num_shards, shards.num_leaves, len(shards.ranges)) == (0, 1, 0)
    aliases = _pinned(table, shards, [_params()["w"]])
    assert aliases.holds(0)
    assert len(aliases.addresses) == 0


def test_pinned_bytes_stay_when_the_arrays_are_donated() -> None:
    params = _params()
    expected = np.asarray(params["w"]).copy()
    aliases = _resolved(params)
    before = b"".join(memory.tobytes() for memory in _memory(aliases, 1, np.float32))
    for _ in range(3):
        params = STEP(params)
    jax.block_until_ready(params)
    assert b"".join(memory.tobytes() for memory in _memory(aliases, 1, np.float32)) == before
    assert sum(memory.sum() for memory in _memory(aliases, 1, np.float32)) == expected.sum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"])
@pytest.mark.parametrize(
    "target",
    [
        SingleDeviceSharding(jax.devices()[2]),
        _sharding(),
        _sharding("b"),
        _sharding("b", memory_kind="pinned_host"),
        Format(Layout((1, 0)), _sharding("b")),
    ],
    ids=["one device", "replicated", "sharded", "pinned host", "columns"],
)
def test_every_leaf_is_pinned_where_it_lies(dtype: str, target: Any) -> None:
    values = np.arange(32).reshape(8, 4).astype(jnp.dtype(dtype))
    array = jax.jit(lambda: jnp.asarray(values), out_shardings=target)()
    aliases = _resolved({"w": array})
    assert set(aliases.addresses.tolist()) <= set(_pointers(array))
    before = [memory.tobytes() for memory in _memory(aliases, 0, values.dtype)]
    stepped = jax.jit(lambda x: jnp.zeros_like(x), donate_argnums=0, out_shardings=target)(array)
    jax.block_until_ready(stepped)
    assert [memory.tobytes() for memory in _memory(aliases, 0, values.dtype)] == before
    assert b"".join(before) == b"".join(
        np.ascontiguousarray(part).tobytes() for part in np.split(values, len(before))
    )


def test_keys_and_columns_stay_when_they_are_donated() -> None:
    columns = Format(Layout((1, 0)), _sharding(None, "b"))
    params = {
        "columns": jax.device_put(np.arange(32.0).reshape(4, 8), columns),
        "key": jax.device_put(jax.random.split(jax.random.key(1), 4), _sharding("b")),
    }
    words = np.asarray(jax.random.key_data(params["key"])).copy()
    aliases = _resolved(params)
    donating = jax.jit(
        lambda tree: (tree["columns"] * 0, jax.random.clone(tree["key"])), donate_argnums=0
    )
    jax.block_until_ready(donating(params))
    parts = _memory(aliases, 0, np.float32)
    assert np.concatenate(parts, axis=1).tolist() == np.arange(32.0).reshape(4, 8).tolist()
    assert np.concatenate(_memory(aliases, 1, np.uint32)).tolist() == words.tolist()


def test_a_dropped_leaf_is_donated_in_place_and_the_others_stay() -> None:
    params = _params()
    pointers = {key: _pointers(array) for key, array in params.items()}
    aliases = _resolved(params)
    aliases.drop([0])
    assert (aliases.holds(0), aliases.holds(1)) == (False, True)
    stepped = STEP(params)
    assert _pointers(stepped["v"]) == pointers["v"]
    assert _pointers(stepped["w"]) != pointers["w"]
    aliases.drop_all()
    assert not aliases.holds(1)


def test_aliases_keep_no_array_alive() -> None:
    params = _params()
    gone = weakref.ref(params["w"])
    aliases = _resolved(params)
    del params
    gc.collect()
    assert gone() is None
    assert aliases.holds(1)


def test_leaves_of_living_arrays_are_pinned_again() -> None:
    params = _params()
    aliases = _resolved(params)
    addresses = aliases.addresses.copy()
    aliases.drop([0])
    assert aliases.retake()
    assert aliases.holds(0)
    assert (aliases.addresses == addresses).all()
    jax.block_until_ready(STEP(params))
    assert all((memory != 0).any() for memory in _memory(aliases, 0, np.float32))


@pytest.mark.parametrize("end", ["donated", "forgotten"])
def test_leaves_of_arrays_that_are_gone_are_not(end: str) -> None:
    params = _params()
    aliases = _resolved(params)
    aliases.drop([1])
    if end == "donated":
        STEP(params)
    else:
        del params
        gc.collect()
    assert not aliases.retake()
    assert aliases.holds(0) and not aliases.holds(1), "others may still read what was pinned"


def test_pinning_again_beside_a_donating_thread_keeps_all_bytes_or_says_no() -> None:
    for _ in range(30):
        params = _params()
        aliases = _resolved(params)
        aliases.drop_all()
        ready = threading.Barrier(2)

        def donate(params: Any = params, ready: threading.Barrier = ready) -> None:
            ready.wait()
            jax.block_until_ready(STEP(params))

        thread = threading.Thread(target=donate)
        thread.start()
        ready.wait()
        kept = aliases.retake()
        thread.join()
        if kept:
            memory = np.concatenate([part.ravel() for part in _memory(aliases, 1, np.float32)])
            assert sorted(memory) == list(range(4096))


def test_a_version_like_the_one_before_keeps_manifest_and_directory() -> None:
    resolver = AliasResolver()
    first, second = (resolver.resolve(_params())[0] for _ in range(2))
    assert second.manifest is first.manifest
    assert second.shards is first.shards
    other = resolver.resolve({**_params(), "w": jnp.zeros(3)})[0]
    assert other.manifest.digest != first.manifest.digest
    renamed = resolver.resolve({"x": _params()["w"], "w": jnp.zeros(3)})[0]
    assert renamed.manifest.digest != other.manifest.digest


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        _resolved(_params())
        assert gc.isenabled() == enabled
        with pytest.raises(ValueError, match="deleted"):
            params = _params()
            table = shard_table(list(params), list(params.values()), wanted=False)
            params["v"].delete()
            Aliases(table.manifest, LocalShards.of(table, 0)).pin(list(params.values()))
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_params_in_flight_are_waited_for() -> None:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: y @ x, x))
    result = slow(jnp.eye(256))
    aliases = _resolved({"w": result})
    assert (_memory(aliases, 0, np.float32)[0] == np.eye(256)).all()


def test_memory_that_can_not_be_read_in_place_is_copied_to_the_host() -> None:
    array = _params()["w"]
    table = shard_table(["w"], [array], wanted=False)
    shards = LocalShards.of(table, 0)
    aliases = _pinned(table, replace(shards, in_place=(False,)), [array])
    assert not set(aliases.addresses.tolist()) & set(_pointers(array))
    in_place = _memory(_pinned(table, shards, [array]), 0, np.float32)
    for copied, original in zip(_memory(aliases, 0, np.float32), in_place, strict=True):
        assert (copied == original).all()


def test_elements_below_one_byte_are_read_as_bytes() -> None:
    values = (np.arange(16) - 8).astype(ml_dtypes.int4)
    array = jax.device_put(values, SingleDeviceSharding(jax.devices()[3]))
    aliases = _resolved({"w": array})
    assert _memory(aliases, 0, np.int8)[0].tolist() == values.view(np.int8).tolist()


def test_a_deleted_leaf_is_refused_by_key() -> None:
    params = _params()
    params["w"].delete()
    with pytest.raises(ValueError, match=r"leaf 'w' has been deleted \(donated\?\): give the para"):
        _resolved(params)


def test_a_leaf_that_is_deleted_meanwhile_is_refused_by_key() -> None:
    params = _params()
    table = shard_table(list(params), list(params.values()), wanted=False)
    params["w"].delete()
    with pytest.raises(ValueError, match="leaf 'w' has been deleted"):
        Aliases(table.manifest, LocalShards.of(table, 0)).pin(list(params.values()))


def test_each_leaf_is_told_once_its_addresses_are_there() -> None:
    params = {**_params(), "x": jnp.zeros(3)}
    table = shard_table(list(params), list(params.values()), wanted=False)
    aliases = Aliases(table.manifest, LocalShards.of(table, 0))
    told: list[tuple[int, int]] = []
    aliases.pin(
        computed(table, list(params.values())),
        lambda n: told.append((n, int(np.count_nonzero(aliases.addresses)))),
    )
    assert told == [(8, 8), (16, 16), (17, 17)]


def test_a_failed_computation_raises_as_jax_does() -> None:
    params = _params()
    with (
        mock.patch.object(Aliases, "_take", side_effect=RuntimeError("out of memory")),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        _resolved(params)


def test_a_leaf_that_is_no_array_is_refused_by_key() -> None:
    with pytest.raises(TypeError, match="leaf 'w' is a float, expected a jax"):
        _resolved({"w": 1.0})
    struct = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=_sharding())
    with pytest.raises(TypeError, match="leaf 'w' is a ShapeDtypeStruct, expected a jax"):
        _resolved({"w": struct})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_that_a_cpu_leaf_only_claims_are_left_out(dtype: str, order: tuple[int, int]) -> None:
    tiled = Format(Layout(order, tiling=((8, 128),)), SingleDeviceSharding(jax.devices()[0]))
    array = jax.jit(
        lambda: jnp.arange(16 * 300.0).reshape(16, 300).astype(dtype), out_shardings=tiled
    )()
    assert array.format.layout.tiling
    aliases = _resolved({"w": array})
    assert aliases.layouts == {}
    np.testing.assert_array_equal(_memory(aliases, 0, array.dtype), [np.asarray(array)])
