"""Weights between meshes of one client, against NumPy."""

import gc
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from strategies import Shardings, shardings

from tpu_sync_rl import one_client
from tpu_sync_rl.buffers import Aliases
from tpu_sync_rl.errors import PlanError
from tpu_sync_rl.one_client import explain, release_memory, sync_weights

DEVICES = jax.devices()
TRAINER = Mesh(np.array(DEVICES[:4]).reshape(1, 4), ("fsdp", "tp"))
EXPLICIT = jax.make_mesh((2, 4), ("a", "b"))
SAMPLER = Mesh(np.array(DEVICES[4:]).reshape(2, 2), ("tp", "fsdp"))

REPLICATED = NamedSharding(SAMPLER, P())

_NARROW = ["int4", "uint4", "int2", "float4_e2m1fn"]
DTYPES = [
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint16", "int32",
    "uint32", "complex64", "bool", *_NARROW,
]  # fmt: skip


def _values(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Random bits, NaNs and infinities among them."""
    rng = np.random.default_rng(seed)
    wanted = np.dtype(jnp.dtype(dtype))
    if dtype in _NARROW or dtype == "bool":
        return rng.integers(0, 2, shape).astype(np.int8).astype(wanted)
    return rng.integers(0, 256, (*shape, wanted.itemsize), np.uint8).view(wanted)[..., 0]


def _on(mesh: Mesh, value: Any, *spec: Any) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


def _bytes(value: Any) -> bytes:
    return np.ascontiguousarray(value).tobytes()


def _assert_same(result: jax.Array, expected: np.ndarray) -> None:
    """Every shard of `result`, each copy too, is bit for bit its part of `expected`."""
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    for shard in result.addressable_shards:
        assert _bytes(shard.data) == _bytes(expected[shard.index])


@st.composite
def _layouts(draw: st.DrawFn, rank: int) -> Layout | None:
    order = draw(st.permutations(range(rank)))
    return None if order == sorted(order) else Layout(tuple(order))


@settings(max_examples=150)
@given(st.data(), shardings(2), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_any_leaf_goes_from_any_mesh_to_any_other(
    data: st.DataObject, sharded: Shardings, dtype: str, seed: int
) -> None:
    shape, (source, sink) = sharded
    values = _values(shape, dtype, seed)
    # JAX lays out neither packed nor empty arrays in another order.
    layout = None if dtype in _NARROW or 0 in shape else data.draw(_layouts(len(shape)))
    array = jax.device_put(values, source if layout is None else Format(layout, source))
    result = sync_weights({"w": array}, to=sink)["w"]
    assert result.sharding == sink
    assert result.committed
    _assert_same(result, values)


@settings(max_examples=40)
@given(
    shardings(2, max_rank=2),
    st.sampled_from(
        ["float32 bfloat16", "float32 float16", "bfloat16 float32", "float16 float32",
         "bfloat16 float16"]
    ),
    st.integers(0, 2**31),
)  # fmt: skip
def test_cast_rounds_as_numpy_does(sharded: Shardings, dtypes: str, seed: int) -> None:
    shape, (source, sink) = sharded
    before, after = dtypes.split()
    values = _values(shape, before, seed)
    like = jax.ShapeDtypeStruct(shape, jnp.dtype(after), sharding=sink)
    result = sync_weights({"w": jax.device_put(values, source)}, to={"w": like}, cast=True)["w"]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(np.float32).astype(jnp.dtype(after))
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(
        np.asarray(result).astype(np.float32), expected.astype(np.float32)
    )


def test_float64_casts_to_float32() -> None:
    values = np.linspace(0, 1, 8)
    with jax.enable_x64(True):
        array = _on(TRAINER, values, "tp")
    like = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(SAMPLER, P("tp")))
    result = sync_weights({"w": array}, to={"w": like}, cast=True)["w"]
    np.testing.assert_array_equal(np.asarray(result), values.astype(np.float32))


def _odd_leaves() -> dict[str, Any]:
    key = jax.random.split(jax.random.key(7), 4)
    return {
        "rank 5": _on(TRAINER, np.arange(240.0).reshape(2, 3, 4, 5, 2), None, None, "tp"),
        "complex": _on(TRAINER, np.arange(8, dtype=np.complex64) * 1j, "tp"),
        "f8": _on(TRAINER, np.arange(8).astype(ml_dtypes.float8_e4m3fn), "tp"),
        "bool": _on(TRAINER, np.arange(8) % 3 == 0, "tp"),
        "int4": _on(TRAINER, (np.arange(16) - 8).astype(ml_dtypes.int4), "tp"),
        "0-d": _on(TRAINER, np.float32(3)),
        "zero-size": _on(TRAINER, np.zeros((0, 4), np.float32), None, "tp"),
        "key": jax.device_put(key, NamedSharding(TRAINER, P("tp"))),
        "rbg": jax.device_put(jax.random.key(1, impl="rbg"), NamedSharding(TRAINER, P())),
        "columns": jax.device_put(
            np.arange(48.0).reshape(6, 8),
            Format(Layout((1, 0)), NamedSharding(TRAINER, P(None, "tp"))),
        ),
        "pinned": jax.device_put(
            np.arange(8.0), NamedSharding(TRAINER, P("tp"), memory_kind="pinned_host")
        ),
        "default device": jnp.arange(3),
        "weak": jnp.asarray(2.5),
    }  # fmt: skip


def _plain(array: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def test_odd_leaves_arrive() -> None:
    params = _odd_leaves()
    result = sync_weights(params, to=REPLICATED)
    assert result.keys() == params.keys()
    for key, array in params.items():
        assert result[key].dtype == array.dtype, key
        # JAX itself spells the sharding of a key array in another way than it was given.
        assert result[key].sharding == jax.device_put(array, REPLICATED).sharding, key
        assert _bytes(_plain(result[key])) == _bytes(_plain(array)), key
    assert jax.random.key_impl(result["rbg"]) == "rbg"
    assert not result["weak"].weak_type


def test_an_array_as_target_gives_sharding_layout_memory_kind_and_dtype() -> None:
    pinned = NamedSharding(SAMPLER, P("tp"), memory_kind="pinned_host")
    columns = Format(Layout((1, 0)), NamedSharding(SAMPLER, P("tp")))
    values = np.arange(32.0).reshape(4, 8)
    params = {"a": _on(TRAINER, values), "b": _on(TRAINER, values), "c": _on(TRAINER, values)}
    like = {
        "a": jax.device_put(jnp.zeros((4, 8)), pinned),
        "b": jax.device_put(jnp.zeros((4, 8)), columns),
        "c": jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=columns),
    }
    for _ in range(2):
        result = sync_weights(params, to=like)
        assert result["a"].sharding.memory_kind == "pinned_host"
        assert result["b"].format == like["b"].format
        assert result["c"].format.layout.major_to_minor == (1, 0)
        for array in result.values():
            _assert_same(array, values.astype(np.float32))


def test_a_prefix_of_shardings_covers_the_leaves_below() -> None:
    params = {
        "a": {"x": _on(TRAINER, np.ones(4)), "y": _on(TRAINER, np.ones(8))},
        "b": [jnp.ones(2)],
    }
    tp, single = NamedSharding(SAMPLER, P("tp")), SingleDeviceSharding(DEVICES[6])
    result = sync_weights(params, to={"a": tp, "b": single})
    assert jax.tree.structure(result) == jax.tree.structure(params)
    assert result["a"]["x"].sharding is result["a"]["y"].sharding is tp
    assert result["b"][0].sharding == single
    assert result["b"][0].committed


def test_leaves_are_matched_by_key_not_by_order() -> None:
    params = [("w", 1.0), ("b", 2.0)]
    tree = nnx.State({key: nnx.Param(jnp.full(4, value)) for key, value in params})
    like = {
        "w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(SAMPLER, P("tp"))),
        "b": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(SAMPLER, P())),
    }
    result = sync_weights(tree, to=like)
    assert {key: float(array[0]) for key, array in result.items()} == dict(params)


def test_nnx_state_goes_in_and_comes_out() -> None:
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    result = sync_weights(state, to=NamedSharding(SAMPLER, P()))
    assert isinstance(result, nnx.State)
    other = nnx.Linear(4, 8, rngs=nnx.Rngs(1))
    nnx.update(other, result)
    assert (np.asarray(other.kernel[...]) == np.asarray(model.kernel[...])).all()


def test_rename_leads_to_the_keys_of_the_target() -> None:
    params = {"layer": {"kernel": _on(TRAINER, np.arange(8.0), "tp")}}
    like = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(SAMPLER, P("tp")))}
    for rename in ({"layer/kernel": "w"}, lambda key: key.replace("layer/kernel", "w")):
        result = sync_weights(params, to=like, rename=rename)
        _assert_same(result["w"], np.arange(8, dtype=np.float32))


def test_a_result_is_like_the_target_for_jit() -> None:
    like = {
        "w": jax.device_put(jnp.zeros((8, 8)), NamedSharding(EXPLICIT, P("a", "b"))),
        "s": jax.device_put(jnp.zeros(()), SingleDeviceSharding(DEVICES[0])),
        "k": jax.device_put(jax.random.key(0), NamedSharding(EXPLICIT, P())),
    }
    params = jax.device_put(like, NamedSharding(TRAINER, P()))
    called = jax.jit(lambda tree: tree["w"] + 1)
    called({**like, "s": like["w"]})
    for tree in (like, sync_weights(params, to=like)):
        called({**tree, "s": tree["w"]})
    assert called._cache_size() == 1
    alone = jax.jit(lambda x: x + 1)
    alone(like["s"])
    alone(sync_weights(params, to=like)["s"])
    assert alone._cache_size() == 1


def test_the_result_never_aliases_or_donates_the_source() -> None:
    params = {"w": _on(TRAINER, np.arange(1024.0), "tp") + 0}
    result = sync_weights(params, to=NamedSharding(TRAINER, P("tp")))
    sources = {shard.data.unsafe_buffer_pointer() for shard in params["w"].addressable_shards}
    sinks = {shard.data.unsafe_buffer_pointer() for shard in result["w"].addressable_shards}
    assert not sources & sinks
    assert not params["w"].is_deleted()
    donated = jax.jit(lambda x: x * 0, donate_argnums=0)(params["w"])
    donated.block_until_ready()
    _assert_same(result["w"], np.arange(1024, dtype=np.float32))
    pointers = {shard.data.unsafe_buffer_pointer() for shard in donated.addressable_shards}
    assert pointers == sources, "no pin of a finished call makes donation copy"


def test_a_result_may_be_donated() -> None:
    params = {"w": _on(TRAINER, np.arange(1024.0), "tp")}
    older = sync_weights(params, to=NamedSharding(SAMPLER, P("tp")))
    kept = older["w"] + 0
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    stepped = step(older["w"])
    newer = sync_weights(params, to=NamedSharding(SAMPLER, P("tp")))
    assert (np.asarray(stepped) == np.asarray(kept) + 1).all()
    _assert_same(newer["w"], np.arange(1024, dtype=np.float32))


def test_older_results_stay_as_they_are() -> None:
    held = []
    for version in range(6):
        params = {"w": _on(TRAINER, np.full(4096, float(version)), "tp"), "b": jnp.full(3, version)}
        held.append(sync_weights(params, to=NamedSharding(SAMPLER, P())))
    for version, result in enumerate(held):
        assert (np.asarray(result["w"]) == version).all()
        assert (np.asarray(result["b"]) == version).all()


def _address(result: Any) -> int:
    return result["w"].addressable_shards[0].data.unsafe_buffer_pointer()


def test_memory_of_dead_results_is_used_again() -> None:
    params = {"w": _on(TRAINER, np.arange(1 << 20, dtype=np.float32), "tp")}
    to = NamedSharding(SAMPLER, P("tp"))
    release_memory()
    addresses = set()
    for _ in range(5):
        addresses.add(_address(sync_weights(params, to=to)))
        gc.collect()
    assert len(addresses) == 1
    view = np.asarray(sync_weights(params, to=to)["w"].addressable_shards[0].data)
    gc.collect()
    assert _address(sync_weights(params, to=to)) not in addresses, "a view keeps memory in use"
    assert (view == np.arange(1 << 19)).all()


def test_the_pool_keeps_as_much_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"w": _on(TRAINER, np.arange(1 << 20, dtype=np.float32), "tp")}
    to = NamedSharding(SAMPLER, P("tp"))

    def pooled_nbytes() -> int:
        results = [sync_weights(params, to=to) for _ in range(4)]
        del results
        gc.collect()
        return sum(memory.nbytes for memory in one_client._results._free)

    monkeypatch.setenv("TSR_POOL_NBYTES", str(9 << 20))
    assert 4 << 20 <= pooled_nbytes() <= 9 << 20
    monkeypatch.setenv("TSR_POOL_NBYTES", "0")
    assert pooled_nbytes() == 0
    monkeypatch.delenv("TSR_POOL_NBYTES")
    assert pooled_nbytes() >= 8 << 20
    release_memory()
    assert one_client._results._free == []
    monkeypatch.setenv("TSR_POOL_NBYTES", "1 GB")
    with pytest.raises(ValueError, match="TSR_POOL_NBYTES is '1 GB', expected a number of bytes"):
        sync_weights(params, to=to)


def test_nothing_keeps_the_source_alive() -> None:
    params = {"w": _on(TRAINER, np.arange(8.0), "tp")}
    result = sync_weights(params, to=NamedSharding(SAMPLER, P()))
    source = weakref.ref(params["w"])
    del params
    gc.collect()
    assert source() is None
    assert result["w"].shape == (8,)


def test_a_leaf_that_is_donated_meanwhile_ends_the_call_and_spoils_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    to = NamedSharding(SAMPLER, P("tp"))
    values = np.arange(1 << 20, dtype=np.float32)
    params = {key: _on(TRAINER, values, "tp") + 0 for key in "abc"}
    older = sync_weights(params, to=to)
    take = Aliases._take

    def take_late(aliases: Aliases, leaf: int, array: jax.Array) -> None:
        if leaf == 1:
            params["b"].delete()
        take(aliases, leaf, array)

    with monkeypatch.context() as patched:
        patched.setattr(Aliases, "_take", take_late)
        with pytest.raises(ValueError, match=r"leaf 'b' has been deleted \(donated\?\)"):
            sync_weights(params, to=to)
    params["b"] = _on(TRAINER, values, "tp")
    newer = sync_weights(params, to=to)
    for key in "abc":
        _assert_same(older[key], values)
        _assert_same(newer[key], values)


def test_many_threads_may_sync_at_once() -> None:
    to = NamedSharding(SAMPLER, P("tp"))
    wrong = []

    def loop(value: int) -> None:
        params = {"w": _on(TRAINER, np.full(4096, float(value)), "tp")}
        for _ in range(20):
            result = sync_weights(params, to=to)
            if not (np.asarray(result["w"]) == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- refusals


def _struct(shape: tuple[int, ...] = (8,), dtype: Any = jnp.float32, spec: P | None = None) -> Any:
    sharding = NamedSharding(SAMPLER, P() if spec is None else spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _params() -> dict[str, Any]:
    return {"w": _on(TRAINER, np.arange(8.0), "tp")}


def test_a_deleted_leaf_is_refused_by_key() -> None:
    params = {**_params(), "x": jnp.zeros(3)}
    params["x"].delete()
    with pytest.raises(ValueError, match=r"leaf 'x' has been deleted \(donated\?\)"):
        sync_weights(params, to=REPLICATED)


@pytest.mark.parametrize("leaf", [np.zeros(3), 1.0])
def test_a_leaf_that_is_no_array_is_refused_by_key(leaf: Any) -> None:
    with pytest.raises(TypeError, match=f"leaf 'x' is a {type(leaf).__name__}, expected a jax.Arr"):
        sync_weights({"x": leaf}, to={"x": _struct()})
    with pytest.raises(TypeError, match=f"leaf 'x' is a {type(leaf).__name__}"):
        sync_weights({"x": leaf}, to=REPLICATED)


def test_a_leaf_without_bytes_is_refused_by_key() -> None:
    with pytest.raises(TypeError, match="leaf 'w' is a ShapeDtypeStruct, expected"):
        sync_weights({"w": _struct()}, to=REPLICATED)


def test_a_traced_leaf_is_refused_by_key() -> None:
    with pytest.raises(TypeError, match="leaf 'w' is traced"):
        jax.jit(lambda x: sync_weights({"w": x}, to=REPLICATED))(jnp.zeros(8))


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ({"w": _struct((4,))}, r"'w': shape \[8\] in params, \[4\] in to"),
        ({"w": _struct((8, 1))}, r"'w': shape \[8\] in params, \[8, 1\] in to"),
        ({"w": _struct(dtype=jnp.bfloat16)}, "'w': dtype float32 in params, bfloat16"),
        ({"w": _struct(), "x": _struct()}, r"'x': to wants float32\[8\], params has no such leaf"),
        ({"v": _struct()}, r"(?s)'v': to wants.*'w': params has float32\[8\]"),
        ({}, r"'w': params has float32\[8\], to has no such leaf"),
        ({"w": jax.ShapeDtypeStruct((8,), jnp.float32)}, "leaf 'w' has no sharding"),
        ({"w": NamedSharding(SAMPLER, P(("tp", "fsdp"), None))}, "leaf 'w' of shape .*rank"),
        ({"w": NamedSharding(EXPLICIT, P(unreduced={"a"}))}, "leaf 'w' of shape .*unreduced"),
        ({"w": REPLICATED, "x": REPLICATED}, "differ:\n'x': to has a Sharding, params has no such"),
        ({"v": REPLICATED}, r"(?s)'v': to has.*'w': params has float32\[8\], to has no Sharding"),
        ({"v": None, "w": REPLICATED}, "containers of other types"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_key(to: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sync_weights(_params(), to=to)


def test_an_indivisible_sharding_is_refused_by_key() -> None:
    params = {"w": _on(TRAINER, np.arange(6.0))}
    to = NamedSharding(SAMPLER, P(("tp", "fsdp")))
    with pytest.raises(ValueError, match=r"leaf 'w' of shape \(6,\) can't be synced with sharding"):
        sync_weights(params, to=to)
    with pytest.raises(ValueError, match=r"leaf 'w' of shape \(6,\) can't be synced with sharding"):
        sync_weights(params, to={"w": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=to)})


def test_a_cast_to_an_integer_is_refused_by_key() -> None:
    with pytest.raises(ValueError, match=r"int32 in to \(cast=True converts only"):
        sync_weights(_params(), to={"w": _struct(dtype=jnp.int32)}, cast=True)


@pytest.mark.parametrize("other", [P(), SAMPLER, "cpu", np.zeros(3)])
def test_a_target_that_is_none_is_refused(other: Any) -> None:
    found = f"is a {type(other).__name__}, expected a TrainerSession, a Sharding, a tree of Sh"
    with pytest.raises(TypeError, match=f"to {found}"):
        sync_weights(_params(), to=other)
    with pytest.raises(TypeError, match=f"to at 'w' {found}"):
        sync_weights(_params(), to={"w": other})
    with pytest.raises(TypeError, match=f"to at 'x' {found}"):
        sync_weights({**_params(), "x": jnp.zeros(3)}, to={"w": REPLICATED, "x": other})


def test_no_target_is_refused() -> None:
    with pytest.raises(TypeError, match="to is a NoneType, expected a TrainerSession, a Sharding"):
        sync_weights(_params(), to=None)


@pytest.mark.parametrize("part", [SAMPLER, P()])
def test_a_part_of_a_sharding_is_refused_with_how_to_make_one(part: Any) -> None:
    with pytest.raises(TypeError, match=r"make it one: NamedSharding\(mesh, P\(\.\.\.\)\)"):
        sync_weights(_params(), to=part)


def test_a_weakly_typed_target_is_refused_by_key() -> None:
    with pytest.raises(TypeError, match="leaf 'w' is weakly typed"):
        sync_weights({"w": jnp.zeros(())}, to={"w": jnp.asarray(1.0)})


def test_a_dtype_that_jax_would_change_is_refused_by_key() -> None:
    with jax.enable_x64(True):
        params = {"w": _on(TRAINER, np.arange(8), "tp")}
    with pytest.raises(ValueError, match="leaf 'w' has dtype int64, which JAX would make int32"):
        sync_weights(params, to=REPLICATED)


def test_two_leaves_with_one_key_are_refused() -> None:
    params = {"a/b": jnp.zeros(3), "a": {"b": jnp.zeros(3)}}
    with pytest.raises(ValueError, match="two leaves have the same key: 'a/b'"):
        sync_weights(params, to=REPLICATED)


def test_a_rename_without_keys_to_lead_to_is_refused() -> None:
    with pytest.raises(ValueError, match="rename= needs a tree of arrays as to="):
        sync_weights(_params(), to=REPLICATED, rename={"w": "v"})


def test_boxes_out_of_reach_are_refused_with_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def lacking(*args: Any, **kwargs: Any) -> Any:
        raise PlanError("leaf 'w': nobody holds it")

    monkeypatch.setattr(one_client, "make_plan", lacking)
    one_client._routes.clear()
    with pytest.raises(ValueError, match=r"leaf 'w': .*use connect_trainer and connect_s"):
        sync_weights(_params(), to=REPLICATED)
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    with pytest.raises(PlanError, match="leaf 'w': nobody holds it"):
        sync_weights(_params(), to=REPLICATED)


def test_explain_moves_nothing_and_shows_the_plan() -> None:
    source = {
        "w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(TRAINER, P("tp")))
    }
    plan = explain(source, NamedSharding(SAMPLER, P("tp")))
    assert plan.wire_nbytes == plan.nbytes == 32
    assert "w" in str(plan)
