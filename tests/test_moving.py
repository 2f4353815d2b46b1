"""Weights move under what an application sets around its own code."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from programs import Program

import tpu_sync_rl as tsr
from tpu_sync_rl.moving import moving

TRAINER = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
SAMPLER = Mesh(np.array(jax.devices()[4:]).reshape(1, 4), ("fsdp", "tp"))
NARROW = ["int4", "uint4", "int2", "float4_e2m1fn"]
DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int8", "bool", "complex64", *NARROW]
GUARDS = ["disallow", "disallow_explicit"]


def _values(dtype: str, version: int) -> np.ndarray:
    """NaNs and infinities among them, where there are any."""
    wanted = np.dtype(jnp.dtype(dtype))
    values = (np.arange(32).reshape(8, 4) + version) % 2
    special = [np.nan, np.inf, -np.inf]
    if wanted.kind in "fc" or dtype in ("bfloat16", "float8_e4m3fn"):
        values = values.astype(np.float32)
        values[0, :3] = special
    return values.astype(wanted)


def _params(version: int = 0) -> dict[str, jax.Array]:
    rows = NamedSharding(TRAINER, P("fsdp"))
    values = {dtype: _values(dtype, version) for dtype in DTYPES}
    tree = {dtype: jax.device_put(value, rows) for dtype, value in values.items()}
    keys = jax.random.split(jax.random.key(version), 8)
    tree["local"] = jax.device_put(np.float32(np.nan), jax.devices()[0])
    return tree | {"keys": jax.device_put(keys, rows)}


def _like(params: dict[str, jax.Array]) -> dict[str, jax.ShapeDtypeStruct]:
    columns = NamedSharding(SAMPLER, P(None, "tp"))
    to = {key: NamedSharding(SAMPLER, P("tp")) if key == "keys" else columns for key in params}
    to["local"] = SingleDeviceSharding(jax.devices()[5])
    return {
        key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to[key]) for key, x in params.items()
    }


def _bytes(leaf: jax.Array) -> bytes:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.ascontiguousarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()


def _assert_equal(found: dict[str, jax.Array], params: dict[str, jax.Array]) -> None:
    like = _like(params)
    assert found.keys() == params.keys()
    for key, leaf in found.items():
        assert leaf.sharding == like[key].sharding, key
        assert _bytes(leaf) == _bytes(params[key]), key


@contextmanager
def _everywhere(guard: str) -> Iterator[None]:
    """Guards the transfers of all threads, and has JAX look for NaNs and infinities in each."""
    jax.config.update("jax_transfer_guard", guard)
    jax.config.update("jax_debug_nans", True)
    jax.config.update("jax_debug_infs", True)
    try:
        yield
    finally:
        jax.config.update("jax_debug_infs", False)
        jax.config.update("jax_debug_nans", False)
        jax.config.update("jax_transfer_guard", "allow")


@contextmanager
def _here(guard: str) -> Iterator[None]:
    with jax.transfer_guard(guard), jax.debug_nans(True), jax.debug_infs(True):
        yield


@pytest.fixture(params=GUARDS)
def guard(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=[_here, _everywhere], ids=["here", "everywhere"])
def guarded(request: pytest.FixtureRequest, guard: str) -> Callable[[], Any]:
    return lambda: request.param(guard)


@pytest.mark.parametrize("wanted", ["shardings", "arrays"])
def test_one_client_moves_every_dtype(guarded: Any, wanted: str) -> None:
    params = _params()
    like = _like(params)
    to: Any = {key: leaf.sharding for key, leaf in like.items()}
    if wanted == "arrays":
        to = {key: jax.device_put(leaf, to[key]) for key, leaf in params.items()}
    tsr.release_memory()
    with guarded():
        found = tsr.sync_weights(params, to=to)
    _assert_equal(found, params)


@pytest.mark.parametrize("agent", ["auto", "colocated"])
@pytest.mark.parametrize(
    "around", [lambda: jax.set_mesh(TRAINER), lambda: jax.set_mesh(SAMPLER), jax.disable_jit]
)
def test_one_client_moves_under_a_mesh_and_without_jit(around: Any, agent: Any) -> None:
    params = _params()
    params["by column"] = params["float32"] + 1
    like = _like(params)
    sharding = like["by column"].sharding
    columns = Format(Layout((1, 0)), sharding)
    shape, dtype = like["by column"].shape, like["by column"].dtype
    tsr.release_memory()
    with around():
        to = like | {"by column": jax.ShapeDtypeStruct(shape, dtype, sharding=columns)}
        found = tsr.sync_weights(params, to=to, agent=agent)
        mesh = jax.sharding.get_mesh()
    assert found["by column"].format.layout.major_to_minor == (1, 0)
    _assert_equal(found, params)
    with around():
        assert jax.sharding.get_mesh() == mesh


@pytest.mark.end_to_end
@pytest.mark.parametrize("staging", ["direct", "pinned_host"])
def test_sessions_move_every_dtype_and_late_joiners_get_it(guard: str, staging: Any) -> None:
    versions = [_params(version) for version in range(3)]
    like = _like(versions[0])
    options: Any = {"timeout": 20, "staging": staging}
    with _everywhere(guard), tsr.connect_trainer(**options) as trainer:
        sampling = {"coordinator": trainer.coordinator, "like": like, "verify": "full", **options}
        with tsr.connect_sampler(replica="first", **sampling) as first:
            found = []
            for version, params in enumerate(versions):
                trainer.sync_weights(params, version=version)
                found.append(first.sync_weights().params)
            # From a view that is taken again, or from the trainer's snapshot.
            with tsr.connect_sampler(replica="late", **sampling) as late:
                found.append(late.sync_weights().params)
    for params, expected in zip(found, [*versions, versions[-1]], strict=True):
        _assert_equal(params, expected)


@pytest.mark.end_to_end
def test_replica_serves_a_late_joiner(guard: str) -> None:
    params = _params()
    like = _like(params)
    with _everywhere(guard), tsr.connect_trainer(timeout=20) as trainer:
        sampling: Any = {"coordinator": trainer.coordinator, "like": like, "timeout": 20}
        with tsr.connect_sampler(replica="first", **sampling) as first:
            trainer.sync_weights(params)
            found = first.sync_weights().params
            for leaf in params.values():
                leaf.delete()
            with tsr.connect_sampler(replica="late", **sampling) as late:
                again = late.sync_weights().params
    _assert_equal(again, found)


@pytest.mark.end_to_end
def test_agents_move_every_dtype(guard: str) -> None:
    params = _params()
    like = _like(params)
    options: Any = {"timeout": 20, "agent": "colocated"}
    with (
        _everywhere(guard),
        tsr.connect_trainer(**options) as trainer,
        tsr.connect_sampler(
            coordinator=trainer.coordinator, replica="s", like=like, **options
        ) as sampler,
    ):
        trainer.sync_weights(params)
        found = sampler.sync_weights().params
    _assert_equal(found, params)


@pytest.mark.end_to_end
def test_programs_of_several_processes_connect_and_sync() -> None:
    with Program("guarded", processes=2, devices=2) as program:
        assert program.results() == [[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]]


def test_only_the_thread_that_moves_is_let_through(guard: str) -> None:
    values = np.ones(8, np.float32)
    rows = NamedSharding(TRAINER, P("fsdp"))
    minus_one = jnp.float32(-1)

    def transfer() -> None:
        jax.make_array_from_callback(values.shape, rows, lambda index: values[index])

    with _everywhere(guard), ThreadPoolExecutor(1) as other:
        with moving():
            transfer()
            with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
                other.submit(transfer).result()
            with pytest.raises(FloatingPointError):
                other.submit(jnp.log, minus_one).result()
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            transfer()
        with pytest.raises(FloatingPointError):
            jnp.log(minus_one)
