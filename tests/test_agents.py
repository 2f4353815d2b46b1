"""Sessions whose data path runs in agents, beside the devices, in one process."""

import importlib.util
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import Program

import tpu_sync_rl as tsr
from tpu_sync_rl import agent, agent_arrays, colocated
from tpu_sync_rl.agent_calls import AgentCalls
from tpu_sync_rl.colocated import are_remote

pytestmark = pytest.mark.end_to_end

AXES = ("fsdp", "tp")
SPECS = oracle.ODD_LEAVES
TRAINER = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), AXES)
SAMPLER = Mesh(np.array(jax.devices()[4:]).reshape(1, 4), AXES)
ROWS = NamedSharding(TRAINER, P("fsdp"))
LIKE = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(SAMPLER, P("tp")))}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def trainer() -> Iterator[tsr.TrainerSession]:
    with tsr.connect_trainer(timeout=20, agent="colocated") as session:
        yield session


def connect(trainer: tsr.TrainerSession, **options) -> tsr.SamplerSession:
    options = {"replica": "sampler-0", "timeout": 20, "agent": "colocated", **options}
    return tsr.connect_sampler(coordinator=trainer.coordinator, **options)


def params(value: float, shape: tuple[int, ...] = (8, 8)) -> dict[str, jax.Array]:
    return {"w": jax.device_put(np.full(shape, value, np.float32), ROWS)}


@pytest.mark.parametrize(
    "agents", [("colocated", "colocated"), ("colocated", "auto"), ("auto", "colocated")]
)
def test_every_byte_of_every_version_arrives(agents):
    like = oracle.like(SPECS, SAMPLER)
    with (
        tsr.connect_trainer(timeout=20, agent=agents[0]) as trainer,
        connect(trainer, like=like, agent=agents[1], verify="full") as sampler,
    ):
        for version in (0, 1, 7):
            tree = oracle.params(SPECS, TRAINER, version, column_major=["embed/table"])
            report = tsr.sync_weights(tree, to=trainer, version=version)
            update = sampler.sync_weights()
            assert update.version == version == report.version
            assert update.incarnation == trainer.incarnation == report.incarnation
            assert update.epoch == report.epoch == update.report.epoch > 0
            assert sampler.current is update and sampler.latest_version == version
            assert report.replicas == {"sampler-0": version}
            assert report.agent == agents[0].replace("auto", "process")
            assert update.report.agent == agents[1].replace("auto", "process")
            oracle.assert_equal(update.params, SPECS, version, SAMPLER)


def test_programs_of_several_processes_sync_by_agents(tmp_path: Path):
    versions, shared = [0, 1, 4], {"address_file": str(tmp_path / "address"), "agent": "colocated"}
    with (
        Program("trainer", processes=2, devices=2, mesh=[2, 2], versions=versions,
                min_replicas=1, wait="committed", **shared) as trainer,
        Program("sampler", processes=2, devices=2, mesh=[4, 1], replica="two", **shared) as two,
    ):  # fmt: skip
        reports = trainer.results()
        assert reports[0] == reports[1]
        assert [report[0] for report in reports[0]] == versions
        assert two.results() == [versions, versions]


def test_program_that_leaves_agents_open_ends_in_silence():
    with Program("agents_left_open", devices=2) as program:
        assert program.results(timeout_s=60) == [1]
        assert program.log(0) == ""


def test_agents_come_after_the_computation_of_the_params(trainer, pool):
    """They get the params as arguments of a call, and publish nothing before those are there."""
    may_end = threading.Event()

    def wait(x: np.ndarray) -> np.ndarray:
        assert may_end.wait(30)
        return x + np.float32(1)

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.lax.with_sharding_constraint(jax.pure_callback(wait, shape, x), ROWS)

    with connect(trainer, like=LIKE) as sampler:
        tsr.sync_weights(params(1), to=trainer)
        assert sampler.sync_weights().version == 1
        under_way = pool.submit(tsr.sync_weights, {"w": step(params(1)["w"])}, to=trainer)
        with pytest.raises(tsr.SyncTimeoutError):
            sampler.sync_weights(timeout=0.3)
        assert sampler.latest_version == 1 and not under_way.done()
        may_end.set()
        assert under_way.result(20).version == 2
        assert (sampler.sync_weights().params["w"] == 2).all()


def test_params_may_be_donated_as_soon_as_a_call_returns(trainer):
    """An agent that pinned them later would publish what the next step makes of them."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    shape = (1024, 4096)
    like = {"w": jax.ShapeDtypeStruct(shape, np.float32, sharding=LIKE["w"].sharding)}
    with connect(trainer, like=like) as sampler:
        array = params(0, shape)["w"]
        for version in range(1, 6):
            handle = tsr.sync_weights({"w": array}, to=trainer, wait=None)
            array = jax.block_until_ready(step(array))
            assert handle.version == version and handle.result(20).version == version
            assert handle.done()
            assert (sampler.sync_weights().params["w"] == version - 1).all()


def test_no_byte_of_a_weight_passes_through_the_controller(trainer, monkeypatch):
    """The modules that run there see bytes of requests and answers alone, whatever the weights."""
    seen: list[int] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def asarray(self, array: Any) -> np.ndarray:
            seen.append(np.asarray(array).nbytes)
            assert array.dtype == np.uint8, "a leaf on the controller"
            return np.asarray(array)

    monkeypatch.setattr(colocated, "np", Watched())
    shape = (4096, 4096)
    like = {"w": jax.ShapeDtypeStruct(shape, np.float32, sharding=LIKE["w"].sharding)}
    with connect(trainer, like=like) as sampler:
        report = tsr.sync_weights(params(3, shape), to=trainer)
        assert (sampler.sync_weights().params["w"] == 3).all()
        passed = [
            session._front.agents.controller_nbytes  # type: ignore[attr-defined]
            for session in (trainer, sampler)
        ]
    assert 0 < sum(passed) < report.nbytes / 100 and sum(seen) < report.nbytes / 100


def addresses(update: tsr.Update) -> set[int]:
    return {x.data.unsafe_buffer_pointer() for x in update.params["w"].addressable_shards}


def test_arrays_stay_valid_while_held_and_memory_is_used_again(trainer):
    with connect(trainer, like=LIKE) as sampler:
        tsr.sync_weights(params(1), to=trainer)
        held = sampler.sync_weights()
        used = set()
        for version in range(2, 8):
            tsr.sync_weights(params(version), to=trainer)
            update = sampler.sync_weights()
            assert (update.params["w"] == version).all()
            used |= addresses(update)
        assert len(used) == 2 * len(addresses(held)) and not used & addresses(held)
    assert (held.params["w"] == 1).all()


def beside_others(devices: agent_arrays.Devices) -> agent_arrays.Devices:
    """As if half of the devices were accelerators, with the other half beside them."""
    every = jax.devices()
    return tuple(every[(device.id + 4) % 8] for device in devices)


def test_memory_is_used_again_as_soon_as_devices_have_copies(trainer, monkeypatch):
    """Nothing waits for the end of arrays, of which a runtime may keep some that nobody sees."""
    monkeypatch.setattr(agent_arrays, "cpu_devices", beside_others)
    with connect(trainer, like=LIKE, max_generations=2) as sampler:
        updates = []
        for version in range(1, 8):
            tsr.sync_weights(params(version), to=trainer)
            updates.append(sampler.sync_weights())
            assert updates[-1].params["w"].sharding == LIKE["w"].sharding
    for update in updates:
        assert (update.params["w"] == update.version).all()


def test_copies_beside_devices_serve_who_joins_late(trainer, monkeypatch):
    monkeypatch.setattr(agent_arrays, "cpu_devices", beside_others)
    tree = params(1)
    tsr.sync_weights(tree, to=trainer)
    tree["w"].delete()
    with connect(trainer, like=LIKE, agent="process") as sampler:
        assert (sampler.sync_weights().params["w"] == 1).all()


def test_copies_beside_devices_have_to_fit_host_memory(monkeypatch):
    """Two that samplers may read, and the next one."""
    monkeypatch.setattr(agent_arrays, "cpu_devices", beside_others)
    nbytes = 2 * 8 * 8 * 4  # each row is on two devices
    for max_host_nbytes, fits in ((3 * nbytes, True), (3 * nbytes - 1, False)):
        with tsr.connect_trainer(
            timeout=20, agent="colocated", max_host_nbytes=max_host_nbytes
        ) as trainer:
            if fits:
                tsr.sync_weights(params(0), to=trainer)
                continue
            with pytest.raises(ValueError, match=r"max_host_nbytes=1535 .* 1 bytes are missing"):
                tsr.sync_weights(params(0), to=trainer)


def test_jitted_function_compiles_once_for_all_updates(trainer):
    double = jax.jit(lambda x: x * 2)
    with connect(trainer, like=LIKE) as sampler:
        for version in (1, 2, 3):
            tsr.sync_weights(params(version), to=trainer)
            assert (double(sampler.sync_weights().params["w"]) == 2 * version).all()
    assert double._cache_size() == 1


def test_iteration_ends_with_the_job(pool):
    with tsr.connect_trainer(timeout=20, min_replicas=1, agent="colocated") as trainer:
        sampler = connect(trainer, like=LIKE)
        taken = pool.submit(lambda: [update.version for update in sampler])
        for _ in range(3):
            tsr.sync_weights(params(0), to=trainer, wait="committed")
    assert taken.result(20) == [1, 2, 3]
    with pytest.raises(tsr.JobEndedError):
        sampler.sync_weights()
    sampler.close()
    sampler.close()
    with pytest.raises(tsr.SyncError, match="closed"):
        sampler.sync_weights()
    with pytest.raises(tsr.SyncError, match="closed"):
        trainer.sync_weights(params(0))


def test_trainer_that_fails_leaves_the_job_to_the_next(pool):
    with tsr.connect_trainer(timeout=20) as host:
        joined = {"coordinator": host.coordinator, "host_coordinator": False, "agent": "colocated"}
        with connect(host, like=LIKE) as sampler:
            with (
                pytest.raises(ZeroDivisionError),
                tsr.connect_trainer(timeout=20, **joined) as first,
            ):
                tsr.sync_weights(params(1), to=first)
                former = sampler.sync_weights()
                assert former.version == 1
                raise ZeroDivisionError
            with tsr.connect_trainer(timeout=20, **joined) as second:
                tsr.sync_weights(params(2), to=second, version=0)
                update = sampler.sync_weights()
                assert (update.incarnation, update.version) == (second.incarnation, 0)
                assert update.epoch > former.epoch


def test_waits_end_at_their_deadline_and_the_next_call_goes_on(trainer):
    with connect(trainer, like=LIKE) as sampler:
        began = time.monotonic()
        with pytest.raises(tsr.SyncTimeoutError, match="sampler-0"):
            sampler.sync_weights(timeout=0.2)
        assert time.monotonic() - began < 10
        assert sampler.sync_weights(wait=False) is None
        tsr.sync_weights(params(1), to=trainer)
        assert sampler.sync_weights().version == 1


def test_interrupted_call_is_taken_up_by_the_next(trainer, monkeypatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with connect(trainer, like=LIKE) as sampler:
        with monkeypatch.context() as patch:
            patch.setattr(AgentCalls, "status", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sampler.sync_weights()
        tsr.sync_weights(params(1), to=trainer)
        assert (sampler.sync_weights().params["w"] == 1).all()


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        ({"w": np.zeros(4)}, TypeError, "leaf 'w' is a ndarray"),
        ({"w": jax.ShapeDtypeStruct((8,), np.float32, sharding=ROWS)}, TypeError, "leaf 'w'"),
        ({"w": jnp.zeros(4), "v": jnp.zeros(2)}, tsr.ManifestError, "'v'"),
    ],
)
def test_leaves_that_can_not_be_published_are_named(trainer, tree, error, message):
    tsr.sync_weights({"w": jnp.zeros(4)}, to=trainer)
    with pytest.raises(error, match=message):
        tsr.sync_weights(tree, to=trainer)


def test_errors_of_agents_are_those_of_sessions(trainer):
    tree = params(0)
    tree["w"].delete()
    with pytest.raises(ValueError, match="'w' has been deleted"):
        tsr.sync_weights(tree, to=trainer)
    tsr.sync_weights(params(0), to=trainer, version=4)
    with pytest.raises(tsr.VersionError, match="4"):
        tsr.sync_weights(params(0), to=trainer, version=4)
    with pytest.raises(ValueError, match="version"):
        tsr.sync_weights(params(0), to=trainer, version=-1)
    with pytest.raises(ValueError, match="wait must be"):
        tsr.sync_weights(params(0), to=trainer, wait="later")
    with pytest.raises(tsr.AuthError):
        connect(trainer, like=LIKE, token="another")


def test_answers_may_be_long(trainer):
    """What a refusal says of 2,000 keys does not fit a page."""
    like = {f"layer/{i}/kernel": LIKE["w"] for i in range(2000)}
    with connect(trainer, like=like) as sampler:
        report = tsr.sync_weights(params(0), to=trainer)
        assert "layer/1999/kernel" in report.refused["sampler-0"]
        with pytest.raises(tsr.ManifestError, match="layer/1999/kernel"):
            sampler.sync_weights()


def test_two_hosts_of_one_controller_serve_what_each_holds(monkeypatch):
    """As under Pathways, where JAX calls all devices its own: agents find out who holds what."""
    hosts = [jax.devices()[:2], jax.devices()[2:4]]
    made: list[list[Any]] = []

    class Request:
        """What the agent of one host sees of a request."""

        def __init__(self, array: jax.Array, host: list[jax.Device]) -> None:
            self.shape, self.sharding = array.shape, array.sharding
            self.addressable_shards = [x for x in array.addressable_shards if x.device in host]

    def on_each_host(kind: type) -> Any:
        class Wrapped:
            def __init__(self, *arguments: Any, **options: Any) -> None:
                self._each = [kind(*arguments, **options) for _ in hosts]
                made.append(self._each)

            def __getattr__(self, method: str) -> Any:
                def call(request: jax.Array, *arrays: jax.Array) -> jax.Array:
                    shards = []
                    for one, host in zip(self._each, hosts, strict=True):
                        seen = Request(request, host)
                        if seen.addressable_shards:
                            answer = getattr(one, method)(seen, *arrays)
                            shards += [x for x in answer.addressable_shards if x.device in host]
                    return jax.make_array_from_single_device_arrays(
                        answer.shape, answer.sharding, [x.data for x in shards]
                    )

                return call

        return Wrapped

    with monkeypatch.context() as patch:
        patch.setattr(colocated, "colocated_python_class", on_each_host)
        with (
            tsr.connect_trainer(timeout=20, agent="colocated") as trainer,
            connect(trainer, like=oracle.like(SPECS, SAMPLER), agent="process") as sampler,
        ):
            for version in (0, 1):
                tree = oracle.params(SPECS, TRAINER, version)
                report = tsr.sync_weights(tree, to=trainer, version=version)
                oracle.assert_equal(sampler.sync_weights().params, SPECS, version, SAMPLER)
            first, second = made[0]
            programs = [one._session._program for one in (first, second)]
    assert [(program.index, program.count) for program in programs] == [(0, 2), (1, 2)]
    assert 0 < report.local.nbytes < report.nbytes


def device(**changes: Any) -> Any:
    client = SimpleNamespace(runtime_type=changes.pop("runtime_type", "pjrt_ifrt"))
    return SimpleNamespace(**{"process_index": 0, "client": client, **changes})


def test_agents_are_taken_where_devices_belong_to_other_processes():
    assert not are_remote(jax.devices())
    assert not are_remote([device()])
    assert are_remote([device(), device(process_index=1)])
    assert are_remote([device(runtime_type="proxy/pathways")])


def test_options_that_agents_can_not_have_are_refused(monkeypatch):
    from prometheus_client import CollectorRegistry

    with pytest.raises(ValueError, match="agent must be 'auto' or 'process' or 'colocated'"):
        tsr.connect_trainer(agent="remote")
    with tsr.connect_trainer() as trainer, pytest.raises(ValueError, match="max_device_nbytes="):
        connect(trainer, like=LIKE, max_device_nbytes=1 << 30)
    with pytest.raises(ValueError, match="metrics= is not kept by agents"):
        tsr.connect_trainer(agent="colocated", metrics=CollectorRegistry())
    monkeypatch.setattr(colocated, "are_remote", lambda _: True)
    with pytest.raises(ValueError, match=r"agents on other hosts can't dial 127\.0\.0\.1"):
        tsr.connect_trainer()


def test_outcomes_of_handles_may_be_asked_for_late(trainer, monkeypatch):
    tree = params(0)
    handles = [tsr.sync_weights(tree, to=trainer, wait=None) for _ in range(12)]
    assert [handle.result().version for handle in handles] == [*range(1, 13)]
    monkeypatch.setattr(agent, "_NUM_KEPT_CALLS", 2)
    handles = [tsr.sync_weights(tree, to=trainer, wait=None) for _ in range(3)]
    with pytest.raises(tsr.SyncError, match="known no more: 2 calls came after it"):
        handles[0].result()


def test_nics_that_a_host_lacks_are_named(trainer):
    with pytest.raises(ValueError, match="'nope0' is no NIC"):
        connect(trainer, like=LIKE, nics=["nope0"])


def test_trees_without_leaves_sync(trainer):
    with connect(trainer, like={}) as sampler:
        assert tsr.sync_weights({}, to=trainer).version == 1
        assert sampler.sync_weights().params == {}


def test_like_that_is_not_committed_is_refused(trainer):
    with pytest.raises(ValueError, match="'w' of like= is not committed"):
        connect(trainer, like={"w": jnp.zeros(4)})


def test_sharding_without_devices_in_order_is_refused():
    with pytest.raises(ValueError, match=r"leaf 'w' has sharding None, expected a NamedSharding"):
        agent_arrays.beside("w", None)


def test_leaves_are_matched_by_key_whatever_their_order(trainer):
    ones, twos = params(1)["w"], params(2)["w"]
    with connect(trainer, like={"a": LIKE["w"], "b": LIKE["w"]}) as sampler:
        for tree in ({"a": ones, "b": twos}, OrderedDict(b=twos, a=ones)):
            tsr.sync_weights(tree, to=trainer)
            update = sampler.sync_weights()
            assert (update.params["a"] == 1).all() and (update.params["b"] == 2).all()


def test_params_that_moved_to_other_devices_are_refused(trainer):
    tsr.sync_weights(params(0), to=trainer)
    moved = NamedSharding(Mesh(np.array(jax.devices()[4:]).reshape(2, 2), AXES), P("fsdp"))
    with pytest.raises(tsr.ManifestError, match="other devices"):
        tsr.sync_weights(jax.device_put(params(0), moved), to=trainer)


def test_missing_cloudpickle_is_an_error_that_says_what_to_install(trainer, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(tsr.SyncError, match=r"pip install 'tpu_sync_rl\[agents\]'"):
        tsr.sync_weights(params(0), to=trainer)


def test_missing_sidecar_is_an_error_that_says_what_to_run(trainer, monkeypatch):
    class Alone:
        def __init__(self, *_: Any, **options: Any) -> None: ...

        def meet(self, *_: Any) -> None:
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no remote Python here")

    monkeypatch.setattr(colocated, "colocated_python_class", lambda _: Alone)
    with pytest.raises(tsr.SyncError, match=r"UNIMPLEMENTED.*colocated-Python sidecar"):
        tsr.sync_weights(params(0), to=trainer)


def test_sidecar_with_other_versions_is_refused(trainer, monkeypatch):
    class Other(agent.TrainerAgent):
        def meet(self, request: jax.Array) -> jax.Array:
            return self._first_page(request, lambda: {"python": "3.10.1", "jax": "0.9"})

    monkeypatch.setattr("tpu_sync_rl.agent_trainer.TrainerAgent", Other)
    with pytest.raises(tsr.SyncError, match=r"python 3\.10\.1, here .* jax 0\.9, here"):
        tsr.sync_weights(params(0), to=trainer)
