"""Shard tables: boxes and holders as JAX has them, and what can't be synced."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from strategies import Shardings, shardings

from tpu_sync_rl.shard_table import ShardTable, shard_table, signature

MESH = jax.make_mesh((2, 4), ("a", "b"))


def _struct(shape: tuple[int, ...], spec: P | None = None, dtype: Any = jnp.float32) -> Any:
    spec = P() if spec is None else spec
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, spec))


def _table(**leaves: Any) -> ShardTable:
    return shard_table(list(leaves), list(leaves.values()), wanted=True)


@given(shardings(1))
def test_boxes_are_jax_indices(sharded: Shardings) -> None:
    shape, (sharding,) = sharded
    leaf = jax.ShapeDtypeStruct(shape, jnp.int8, sharding=sharding)
    table = shard_table(["w"], [leaf], wanted=True)
    (layout,) = table.manifest.layouts
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    assert set(table.device_boxes[0]) == set(indices)
    for device, box in table.device_boxes[0].items():
        ranges = [part.indices(n)[:2] for part, n in zip(indices[device], leaf.shape, strict=True)]
        assert layout.boxes[box].tolist() == [list(part) for part in ranges]
    flat = [box.tobytes() for box in layout.boxes]
    assert len(set(flat)) == len(flat) == len(set(table.device_boxes[0].values()))
    assert layout.boxes_of(0).tolist() == list(range(len(layout.boxes)))
    assert layout.holders.tolist() == [0] * len(layout.boxes)


def test_leaves_are_ascending_by_key_and_order_says_where_they_were() -> None:
    table = _table(b=_struct((4,)), c=_struct((4,), P("b"), jnp.bfloat16), a=_struct(()))
    assert [leaf.key for leaf in table.manifest.leaves] == ["a", "b", "c"]
    assert table.order == (2, 0, 1)
    assert [leaf.dtype for leaf in table.manifest.leaves] == ["float32", "float32", "bfloat16"]
    assert [leaf.itemsize for leaf in table.manifest.leaves] == [4, 4, 2]


def test_equal_layouts_are_kept_once() -> None:
    other = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    table = _table(
        a=_struct((4,), P("b")),
        b=_struct((4,), P("b"), jnp.int32),
        c=jax.ShapeDtypeStruct((4,), jnp.int8, sharding=NamedSharding(other, P("y"))),
        d=_struct((4,), P("a")),
    )
    assert [leaf.layout for leaf in table.manifest.leaves] == [0, 0, 0, 1]
    assert len(table.manifest.layouts) == 2


def test_a_program_and_its_like_in_another_order_have_one_digest() -> None:
    leaves = {"a": _struct((4, 8), P("a", "b")), "b": _struct((4,))}
    backwards = dict(reversed(leaves.items()))
    assert _table(**leaves).manifest.digest == _table(**backwards).manifest.digest


def test_a_prng_key_is_stored_as_its_words() -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(MESH, P("b")))
    (leaf,) = (table := _table(k=keys)).manifest.leaves
    assert (leaf.shape, leaf.itemsize, leaf.dtype) == ((8,), 4, str(keys.dtype))
    assert table.manifest.layouts[0].shape == (8, 2)
    assert table.manifest.layouts[0].boxes[1].tolist() == [[2, 4], [0, 2]]


def test_arrays_and_structs_of_them_have_one_table() -> None:
    array = jax.device_put(jnp.zeros((4, 8)), NamedSharding(MESH, P("a")))
    struct = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
    assert _table(w=array).manifest.digest == _table(w=struct).manifest.digest


@pytest.mark.parametrize("leaf", [np.zeros(3), 1.0, "text", [1]])
def test_what_is_no_array_is_refused_by_key(leaf: Any) -> None:
    with pytest.raises(TypeError, match=rf"leaf 'x' is a {type(leaf).__name__}, expected"):
        _table(w=_struct(()), x=leaf)


def test_a_traced_leaf_is_refused_by_key() -> None:
    with pytest.raises(TypeError, match="leaf 'w' is traced; weights can't be synced under jit"):
        jax.jit(lambda x: _table(w=x) and x)(jnp.zeros(3))


def test_a_struct_without_sharding_is_refused_by_key() -> None:
    with pytest.raises(ValueError, match=r"leaf 'w' has no sharding; give .*NamedSharding"):
        _table(w=jax.ShapeDtypeStruct((3,), jnp.float32))


def test_an_indivisible_sharding_is_refused_by_key() -> None:
    with pytest.raises(ValueError, match=r"leaf 'w' of shape \(6,\) can't be synced with sharding"):
        _table(w=_struct((6,), P("b")))


def test_an_unreduced_sharding_is_refused_by_key() -> None:
    with pytest.raises(ValueError, match=r"leaf 'w' of shape \(4,\) can't be synced .*unreduced"):
        _table(w=_struct((4,), P(None, unreduced={"a"})))


def test_a_weakly_typed_like_is_refused_by_key() -> None:
    weak = jnp.asarray(1.0)
    with pytest.raises(TypeError, match="leaf 'w' is weakly typed; give it a dtype of its own"):
        _table(w=weak)
    assert shard_table(["w"], [weak], wanted=False).manifest.leaves[0].dtype == "float32"


def test_a_dtype_that_jax_would_change_is_refused_by_key() -> None:
    with pytest.raises(ValueError, match="leaf 'w' has dtype int64, which JAX would make int32"):
        _table(w=_struct((4,), dtype=np.dtype("int64")))


def test_a_leaf_that_each_process_holds_for_itself_is_refused_by_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = jnp.zeros(3)
    assert isinstance(own.sharding, SingleDeviceSharding)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    fix = r"jax.device_put\(x, NamedSharding\(mesh, P\(\)\)\)"
    with pytest.raises(ValueError, match=rf"leaf 'count' is held by each process.*{fix}"):
        _table(count=own)
    table = shard_table(["count"], [own], wanted=True, one_client=True)
    assert table.manifest.layouts[0].boxes_of(0).tolist() == [0]


def test_a_table_of_one_client_has_no_box_that_it_can_not_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    table = shard_table(["w"], [_struct((8,), P("b"))], wanted=False, one_client=True)
    assert len(table.manifest.layouts[0].boxes) == 0
    assert not table.device_boxes[0]


def test_signatures_tell_apart_what_tables_depend_on() -> None:
    array = jax.device_put(jnp.zeros((4, 8)), NamedSharding(MESH, P("a")))
    same = jax.device_put(jnp.ones((4, 8)), NamedSharding(MESH, P("a")))
    assert signature([array]) == signature([same])
    assert hash(signature([array])) == hash(signature([same]))
    others = [
        array.astype(jnp.int32),
        jax.device_put(jnp.zeros((8, 4)), array.sharding),
        jax.device_put(array, NamedSharding(MESH, P("b"))),
        np.zeros((4, 8), np.float32),
        jnp.asarray(1.0),
        jnp.asarray(1.0, jnp.float32),
        None,
    ]
    assert len({signature([x]) for x in [array, *others]}) == 1 + len(others)
