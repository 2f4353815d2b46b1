"""`sync_weights` inside one JAX client, by agents beside both meshes."""

from collections.abc import Iterator

import jax
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import Program

import tpu_sync_rl as tsr
from tpu_sync_rl import agent_client, sync
from tpu_sync_rl.agent_calls import AgentCalls

pytestmark = pytest.mark.end_to_end

AXES = ("fsdp", "tp")
SPECS = oracle.ODD_LEAVES
TRAINER = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), AXES)
SAMPLER = Mesh(np.array(jax.devices()[4:]).reshape(1, 4), AXES)
COLUMNS = NamedSharding(SAMPLER, P(None, "tp"))


@pytest.fixture(autouse=True)
def release() -> Iterator[None]:
    yield
    tsr.release_memory()
    assert not agent_client._routes


def params(value: float) -> dict[str, jax.Array]:
    rows = NamedSharding(TRAINER, P("fsdp"))
    return {"w": jax.device_put(np.full((8, 8), value, np.float32), rows)}


def test_every_byte_arrives_and_older_results_stay():
    like = oracle.like(SPECS, SAMPLER)
    results = {}
    for version in range(5):
        tree = oracle.params(SPECS, TRAINER, version)
        results[version] = tsr.sync_weights(tree, to=like, agent="colocated")
    tsr.release_memory()
    for version, result in results.items():
        oracle.assert_equal(result, SPECS, version, SAMPLER)


def test_target_may_be_a_sharding_or_arrays_of_another_dtype():
    synced = tsr.sync_weights(params(1), to=COLUMNS, agent="colocated")
    assert synced["w"].sharding == COLUMNS and (synced["w"] == 1).all()
    like = {"v": jax.ShapeDtypeStruct((8, 8), jax.numpy.bfloat16, sharding=COLUMNS)}
    options = {"rename": {"w": "v"}, "cast": True, "agent": "colocated"}
    synced = tsr.sync_weights(params(3), to=like, **options)
    assert synced["v"].dtype == jax.numpy.bfloat16 and (synced["v"] == 3).all()
    one = jax.numpy.zeros((8, 8))  # not committed, as results are
    assert tsr.sync_weights(params(3), to={"w": one}, agent="colocated")["w"].committed


def test_agents_are_taken_where_the_params_are_in_other_processes(monkeypatch):
    tsr.sync_weights(params(1), to=COLUMNS)
    assert not agent_client._routes
    monkeypatch.setattr(sync, "are_remote", lambda _: True)
    assert (tsr.sync_weights(params(2), to=COLUMNS)["w"] == 2).all()
    assert len(agent_client._routes) == 1


def test_few_ways_keep_their_agents():
    for length in range(1, 7):
        tree = {"w": jax.device_put(np.ones(4 * length), NamedSharding(TRAINER, P("fsdp")))}
        to = NamedSharding(SAMPLER, P("tp"))
        assert (tsr.sync_weights(tree, to=to, agent="colocated")["w"] == 1).all()
    assert len(agent_client._routes) == 4


def test_mismatch_is_a_mistake_of_the_caller():
    like = {"v": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=COLUMNS)}
    with pytest.raises(ValueError, match="params and to differ"):
        tsr.sync_weights(params(0), to=like, agent="colocated")
    with pytest.raises(ValueError, match="agent must be"):
        tsr.sync_weights(params(0), to=COLUMNS, agent="remote")
    with (
        tsr.connect_trainer() as session,
        pytest.raises(TypeError, match="agent= to both connect"),
    ):
        tsr.sync_weights(params(0), to=session, agent="colocated")


def test_deleted_leaf_is_named():
    deleted = params(0)
    jax.tree.map(lambda leaf: leaf.delete(), deleted)
    with pytest.raises(ValueError, match="leaf 'w' has been deleted"):
        tsr.sync_weights(deleted, to=COLUMNS, agent="colocated")


def test_way_that_failed_is_made_anew(monkeypatch):
    tsr.sync_weights(params(1), to=COLUMNS, agent="colocated")
    with monkeypatch.context() as patch:
        patch.setattr(AgentCalls, "status", lambda *_: None)
        with pytest.raises(tsr.SyncTimeoutError):
            tsr.sync_weights(params(2), to=COLUMNS, agent="colocated")
    assert not agent_client._routes
    assert (tsr.sync_weights(params(3), to=COLUMNS, agent="colocated")["w"] == 3).all()


def test_programs_of_several_processes_reach_each_others_devices():
    """Which one client without agents can't do."""
    with Program("agent_client", processes=2, devices=2) as program:
        assert program.results() == [[1.0, 2.0], [1.0, 2.0]]
