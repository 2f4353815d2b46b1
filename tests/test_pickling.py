"""What users hand from one process to another pickles: all public data, and the errors."""

import copy
import pickle
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import tpu_sync_rl as tsr

DEVICE = jax.devices()[1]
CLASSES = {name: x for name in tsr.__all__ if isinstance(x := getattr(tsr, name), type)}
ERRORS = {name for name, kind in CLASSES.items() if issubclass(kind, Exception)}
DATA = {"Plan", "Report", "TLS", "Update"}
LIVING = {"SamplerSession", "SyncHandle", "TrainerSession"}


def _again(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def test_every_public_class_is_looked_at() -> None:
    assert CLASSES.keys() == ERRORS | DATA | LIVING


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_errors_keep_their_text_and_notes(name: str) -> None:
    error = CLASSES[name]("leaf 'w': it's lost")
    error.add_note("in replica s")
    error.lacking = {"s": 7}
    again = _again(error)
    assert type(again) is CLASSES[name]
    assert str(again) == str(error) and again.args == error.args
    assert vars(again) == vars(error)


def test_a_plan_is_made_again_as_it_was() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
    rows, columns = (NamedSharding(mesh, P(*spec)) for spec in [("fsdp",), (None, "tp")])
    params = {
        "b": jax.ShapeDtypeStruct((), jnp.float32, sharding=rows.update(spec=P())),
        "w": jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=rows),
    }
    plan = tsr.explain(params, {"b": SingleDeviceSharding(jax.devices()[4]), "w": columns})
    for again in (_again(plan), copy.deepcopy(plan)):
        assert str(again) == str(plan)
        assert (again.nbytes, again.wire_nbytes) == (plan.nbytes, plan.wire_nbytes)
        assert again.source.digest == plan.source.digest and again.sink.digest == plan.sink.digest
        for name, column in plan.native.regions().items():
            np.testing.assert_array_equal(again.native.regions()[name], column)


def test_a_plan_is_read_in_a_process_of_its_own() -> None:
    plan = tsr.explain({"w": jnp.ones(4)}, SingleDeviceSharding(jax.devices()[1]))
    show = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"
    shown = subprocess.run(
        [sys.executable, "-c", show], input=pickle.dumps(plan), stdout=subprocess.PIPE, check=True
    )
    assert shown.stdout.decode().rstrip() == str(plan)


@pytest.mark.end_to_end
@pytest.mark.parametrize("staging", ["direct", "pinned_host"])
@pytest.mark.parametrize("agent", ["process", "colocated"])
def test_what_both_sides_return_is_equal_again(staging: Any, agent: Any) -> None:
    like, options = {"w": jnp.ones(4)}, {"timeout": 20, "staging": staging, "agent": agent}
    with (
        tsr.connect_trainer(**options) as trainer,
        tsr.connect_sampler(
            coordinator=trainer.coordinator,
            replica="s",
            like=jax.device_put(like, DEVICE),
            **options,
        ) as sampler,
    ):
        published, update = tsr.sync_weights(like, to=trainer), sampler.sync_weights()
    again = _again(update)
    assert (again.version, again.incarnation) == (update.version, update.incarnation)
    np.testing.assert_array_equal(again.params["w"], update.params["w"])
    for report in (published, update.report):
        again = _again(report)
        assert again == report
        assert again.to_dict() == report.to_dict()
        assert str(again) == str(report)


def test_options_pickle() -> None:
    tls = tsr.TLS(ca="ca.pem", server_name="policy")
    assert _again(tls) == tls
