"""Leaves that can't be synced are refused by key, wherever they are given, with what to do."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import tpu_sync_rl as tsr

DEVICE = SingleDeviceSharding(jax.devices()[1])
SPEC = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=DEVICE)
NO_ARRAYS = [
    (np.ones(4), "a ndarray, expected a jax.Array; make it one: jnp.asarray(x)"),
    (np.float32(1), "a float32, expected a jax.Array; make it one: jnp.asarray(x)"),
    (1.5, "a float, expected a jax.Array; make it one: jnp.asarray(x)"),
    (True, "a bool, expected a jax.Array; make it one: jnp.asarray(x)"),
    ("gelu", "a str, expected a jax.Array; leave it out: None in its place is no leaf"),
    (SPEC, "a ShapeDtypeStruct, expected a jax.Array; it has no values: pass the array that"),
    (lambda: jax.new_ref(jnp.ones(4)), "a Ref, expected a jax.Array; pass what it holds: ref[...]"),
]


def _one_client(params: Any) -> None:
    tsr.sync_weights(params, to=DEVICE)


def _one_client_by_agents(params: Any) -> None:
    tsr.sync_weights(params, to=DEVICE, agent="colocated")


def _session(params: Any) -> None:
    with tsr.connect_trainer(timeout=20) as trainer:
        tsr.sync_weights(params, to=trainer)


def _session_by_agents(params: Any) -> None:
    with tsr.connect_trainer(timeout=20, agent="colocated") as trainer:
        tsr.sync_weights(params, to=trainer)


@pytest.mark.parametrize("give", [_one_client, _one_client_by_agents, _session, _session_by_agents])
@pytest.mark.parametrize(
    ("leaf", "text"), NO_ARRAYS, ids=[text.split(",")[0] for _, text in NO_ARRAYS]
)
def test_params_that_are_no_arrays(give: Callable[[Any], None], leaf: Any, text: str) -> None:
    params = {"a": jnp.ones(4), "w": leaf() if callable(leaf) else leaf}
    with pytest.raises(TypeError, match=re.escape(f"leaf 'w' is {text}")):
        give(params)


@pytest.mark.parametrize("give", [_one_client, _one_client_by_agents, _session, _session_by_agents])
def test_params_that_are_donated_or_traced(give: Callable[[Any], None]) -> None:
    donated = jnp.ones(4) + 1
    donated.delete()
    with pytest.raises(ValueError, match="leaf 'w' has been deleted"):
        give({"w": donated})
    with pytest.raises(TypeError, match="leaf 'w' is traced"):
        jax.jit(lambda x: give({"w": x}))(jnp.ones(4))


def _like(like: Any, agent: Any) -> None:
    with tsr.connect_trainer(timeout=20) as trainer:
        tsr.connect_sampler(
            coordinator=trainer.coordinator, replica="s", like=like, timeout=20, agent=agent
        )


@pytest.mark.parametrize("agent", ["auto", "colocated"])
def test_like_that_is_no_array(agent: Any) -> None:
    like = {"a": jnp.ones(4), "w": np.ones(4)}
    text = "'w' is a ndarray, expected a jax.Array or a jax.ShapeDtypeStruct with a sharding; make"
    with pytest.raises(TypeError, match=re.escape(text)):
        _like(like, agent)


@pytest.mark.parametrize("agent", ["auto", "colocated"])
@pytest.mark.parametrize(
    "give",
    [
        _like,
        lambda like, agent: tsr.sync_weights(
            {"a": jnp.ones(4), "w": jnp.ones(4)}, to=like, agent=agent
        ),
    ],
    ids=["session", "one_client"],
)
def test_likes_on_an_abstract_mesh(give: Callable[[Any, Any], None], agent: Any) -> None:
    abstract = NamedSharding(AbstractMesh((2,), ("x",)), P("x"))
    like = {"a": SPEC, "w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=abstract)}
    text = r"leaf 'w' has the sharding .* whose mesh is abstract, .*NamedSharding\(mesh, x.shard"
    with pytest.raises(ValueError, match=text):
        give(like, agent)


def test_sharding_on_an_abstract_mesh() -> None:
    to = NamedSharding(AbstractMesh((2,), ("x",)), P("x"))
    with pytest.raises(ValueError, match=r"leaf 'w' has the sharding .* whose mesh is abstract"):
        tsr.sync_weights({"w": jnp.ones(4)}, to=to)
