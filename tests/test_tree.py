"""Pytrees as keyed leaves."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

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
