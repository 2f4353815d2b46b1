"""Which trees one client takes, and how it refuses the others."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

import tpu_sync_rl as tsr
from tpu_sync_rl import sync_weights
from tpu_sync_rl.options import AgentChoice

DEVICES = jax.devices()


class _GateUp:
    def __init__(self, gate: Any, up: Any) -> None:
        self.gate, self.up = gate, up


class _UpGate(_GateUp):
    """The same fields in the other order."""


jax.tree_util.register_pytree_node(
    _GateUp, lambda x: ((x.gate, x.up), None), lambda _, children: _GateUp(*children)
)
jax.tree_util.register_pytree_node(
    _UpGate, lambda x: ((x.up, x.gate), None), lambda _, children: _UpGate(*reversed(children))
)


@pytest.mark.parametrize("agent", ["auto", "colocated"])
def test_nodes_without_keys_are_matched_in_one_structure_alone(agent: AgentChoice) -> None:
    params = {"mlp": _GateUp(jnp.zeros(2), jnp.ones(2))}
    to = SingleDeviceSharding(DEVICES[1])
    for target in (to, {"mlp": to}, {"mlp": _GateUp(to, to)}, jax.device_put(params, to)):
        synced = sync_weights(params, to=target, agent=agent)["mlp"]
        assert (synced.gate.tolist(), synced.up.tolist()) == ([0, 0], [1, 1])
    for target in (_UpGate(jnp.zeros(2), jnp.ones(2)), [jnp.zeros(2), jnp.ones(2)]):
        with pytest.raises(
            TypeError, match=r"'mlp/0' is in a _GateUp, .*register_pytree_with_keys"
        ):
            sync_weights(params, to={"mlp": target}, agent=agent)
    tsr.release_memory()


def test_a_tree_without_leaves_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert sync_weights({"filtered": {}}, to={"filtered": {}}) == {"filtered": {}}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "params have no leaves" in record.getMessage()
