"""Pytrees as keyed leaves."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.tree_util import GetAttrKey

from tpu_sync_rl.tree import flatten


def test_key_joins_the_path_of_dicts_lists_and_tuples() -> None:
    keys, leaves, _ = flatten({"b": [1, (2, 3)], "a": {"c": 4}})
    assert dict(zip(keys, leaves, strict=True)) == {"a/c": 4, "b/0": 1, "b/1/0": 2, "b/1/1": 3}


def test_a_bare_leaf_has_the_empty_key() -> None:
    assert flatten(7)[:2] == ([""], [7])


def test_nothing_has_no_leaves() -> None:
    assert flatten({"a": None, "b": {}})[:2] == ([], [])


def test_nnx_state_and_its_pure_dict_have_the_same_keys() -> None:
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert flatten(state)[0] == ["bias", "kernel"]
    assert flatten(nnx.to_pure_dict(state))[0] == ["bias", "kernel"]


def test_a_dict_keeps_its_own_key_value() -> None:
    assert flatten({"w": {"value": 1}})[0] == ["w/value"]


def test_only_the_last_attribute_called_value_is_dropped() -> None:
    @jax.tree_util.register_dataclass
    @dataclass
    class Box:
        value: Any

    assert flatten(Box(Box({"x": 1})))[0] == ["value/value/x"]
    assert flatten(Box(Box(1)))[0] == ["value"]


@pytest.mark.parametrize("tree", [{"a/b": 1, "a": {"b": 2}}, {"a/0": 1, "a": [2]}])
def test_two_leaves_with_one_key_are_refused_by_it(tree: Any) -> None:
    with pytest.raises(ValueError, match=r"two leaves have the same key: 'a/[b0]'$"):
        flatten(tree)


def test_every_repeated_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"same key: 'a/b', 'c/d'$"):
        flatten({"c/d": 1, "a/b": 1, "a": {"b": 2}, "c": {"d": 3}, "e": 4})


_NAMES = st.text("abc", min_size=1, max_size=2)
_TREES = st.recursive(
    st.integers(),
    lambda inner: st.dictionaries(_NAMES, inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=8,
)


@given(_TREES)
def test_flatten_follows_jax_order_and_unflattens(tree: Any) -> None:
    keys, leaves, treedef = flatten(tree)
    assert leaves == jax.tree.leaves(tree)
    assert len(set(keys)) == len(keys)
    assert jax.tree.unflatten(treedef, leaves) == tree


def test_leaves_are_the_arrays_themselves() -> None:
    array = jnp.zeros(3)
    assert flatten({"w": array})[1][0] is array


class _GateUp:
    def __init__(self, gate: Any, up: Any) -> None:
        self.gate, self.up = gate, up


jax.tree_util.register_pytree_node(
    _GateUp, lambda x: ((x.gate, x.up), None), lambda _, children: _GateUp(*children)
)


def test_custom_nodes_without_keys_are_refused_by_key_and_type() -> None:
    tree = {"mlp": [_GateUp(1, {"w": 2}), _GateUp(3, None)], "w": 4}
    with pytest.raises(TypeError, match=r"^leaf 'mlp/0/0' is in a _GateUp, whose .*register_data"):
        flatten(tree)
    assert flatten(tree, by_position=True)[0] == ["mlp/0/0", "mlp/0/1/w", "mlp/1/0", "w"]


def test_every_type_without_keys_is_named() -> None:
    tree = {"a": {"f": jax.tree_util.Partial(abs, 1)}, "b": _GateUp(1, 2)}
    with pytest.raises(TypeError, match=r"'a/f/0/0' is in a Partial, leaf 'b/0' is in a _GateUp"):
        flatten(tree)


def test_nodes_that_have_their_fields_as_keys_are_taken() -> None:
    @jax.tree_util.register_pytree_with_keys_class
    class Module:  # as equinox registers its own
        def tree_flatten_with_keys(self) -> Any:
            return ((GetAttrKey("gate"), 1), (GetAttrKey("up"), 2)), None

        @classmethod
        def tree_unflatten(cls, *_: Any) -> "Module":
            return cls()

    @flax.struct.dataclass
    class Struct:
        gate: int

    adam = optax.adamw(optax.linear_schedule(1, 0, 9)).init({"w": jnp.zeros(1)})
    masked = optax.masked(optax.sgd(1, momentum=0.9), {"w": True, "b": False})
    assert set(flatten(masked.init({"w": jnp.zeros(1), "b": jnp.zeros(1)}))[0]) == {
        "inner_state/0/trace/w"
    }
    assert flatten([adam, Module(), Struct(1), OrderedDict(b=2, a=None)])[0] == [
        "0/0/count", "0/0/mu/w", "0/0/nu/w", "0/2/count", "1/gate", "1/up", "2/gate", "3/b"
    ]  # fmt: skip


@flax.struct.dataclass
class _Quantised:
    qvalue: Any
    value: Any


class _Value(nnx.Module):
    def __init__(self) -> None:
        self.kernel = nnx.Param(2)


class _Layer(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(_Quantised(0, {"value": 1}))
        self.value = _Value()
        self.stack = nnx.List([nnx.Param([3, 4]), nnx.Param(5)])


def test_variables_that_hold_pytrees_have_the_same_keys_in_every_form() -> None:
    state = nnx.state(_Layer())
    for form in (_Layer(), state, nnx.to_pure_dict(state)):
        keys, leaves, _ = flatten(form)
        assert dict(zip(keys, leaves, strict=True)) == {
            "w/qvalue": 0, "w/value/value": 1, "value/kernel": 2,
            "stack/0/0": 3, "stack/0/1": 4, "stack/1": 5,
        }  # fmt: skip
