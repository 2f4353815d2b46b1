"""Versions that pass through pinned host memory, forced on CPU so that every line of it runs."""

import json
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tpu_sync_rl as tsr
from tpu_sync_rl import snapshot
from tpu_sync_rl.device_memory import DeviceMemory
from tpu_sync_rl.generation_layout import GenerationLayout
from tpu_sync_rl.shard_table import shard_table
from tpu_sync_rl.staged_generations import StagedGeneration

pytestmark = pytest.mark.end_to_end

AXES = ("fsdp", "tp")
SPECS = oracle.ODD_LEAVES
TRAINER = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), AXES)
SAMPLER = Mesh(np.array(jax.devices()[4:]).reshape(1, 4), AXES)
STAGED: dict[str, Any] = {"staging": "pinned_host", "timeout": 20}


def connect(trainer: tsr.TrainerSession, replica: str = "sampler-0", **options: Any) -> Any:
    options = {"like": oracle.like(SPECS, SAMPLER), **STAGED, **options}
    return tsr.connect_sampler(coordinator=trainer.coordinator, replica=replica, **options)


def publish(trainer: tsr.TrainerSession, version: int, **options: Any) -> Any:
    params = oracle.params(SPECS, TRAINER, version, column_major=["embed/table"])
    return tsr.sync_weights(params, to=trainer, version=version, **options)


@pytest.fixture
def trainer() -> Iterator[tsr.TrainerSession]:
    with tsr.connect_trainer(**STAGED) as session:
        yield session


@pytest.mark.parametrize("window_nbytes", [1, 1 << 28])
def test_every_byte_of_every_version_arrives(window_nbytes: int) -> None:
    with (
        tsr.connect_trainer(d2h_window_nbytes=window_nbytes, **STAGED) as trainer,
        connect(trainer, h2d_window_nbytes=window_nbytes) as sampler,
    ):
        taken = []
        for version in (0, 1, 7):
            report = publish(trainer, version)
            update = sampler.sync_weights()
            assert update.version == version == report.version
            taken.append(update)
        for update in taken:  # as older ones have other memory than those that came later
            oracle.assert_equal(update.params, SPECS, update.version, SAMPLER)


@pytest.mark.parametrize("sides", [("direct", "pinned_host"), ("pinned_host", "direct")])
def test_each_side_is_staged_for_itself(sides: tuple[Any, Any]) -> None:
    with (
        tsr.connect_trainer(timeout=20, staging=sides[0]) as trainer,
        connect(trainer, staging=sides[1]) as sampler,
    ):
        report, update = publish(trainer, 3), sampler.sync_weights()
        assert (report.staging, update.report.staging) == sides
        oracle.assert_equal(update.params, SPECS, 3, SAMPLER)


def test_reports_and_traces_have_both_copies(tmp_path) -> None:
    path = tmp_path / "trace.json"
    with (
        tsr.connect_trainer(trace=path, **STAGED) as trainer,
        connect(trainer, trace=tmp_path / "sampler.json") as sampler,
    ):
        report, update = publish(trainer, 1), sampler.sync_weights()
    assert report.staging == update.report.staging == "pinned_host"
    assert 0 < report.local.seconds["d2h"] < 20
    assert 0 < update.report.seconds["h2d"] == report.seconds["h2d"] < 20
    assert "staging pinned_host" in str(report)
    for file, stage in ((path, "d2h"), (tmp_path / "sampler.json", "h2d")):
        slices = {event["name"]: event for event in json.loads(file.read_text())}
        assert slices[stage]["ph"] == "X" and slices[stage]["dur"] > 0


def test_late_joiner_is_served_when_the_params_are_donated(trainer) -> None:
    params = oracle.params(SPECS, TRAINER, 5)
    handle = tsr.sync_weights(params, to=trainer, version=5, wait=None)
    for array in params.values():
        array.delete()
    assert handle.result().version == 5
    for replica in ("late", "later"):
        with connect(trainer, replica) as sampler:
            oracle.assert_equal(sampler.sync_weights().params, SPECS, 5, SAMPLER)


def test_stages_overlap_leaf_by_leaf(monkeypatch) -> None:
    """The trainer copies its last leaf when the sampler has begun to copy those before it on."""
    num_leaves = 3
    others_went_on = threading.Event()
    gone_on = []
    d2h, h2d = snapshot._to_pinned_host, StagedGeneration._copied

    def copy_late(parts: Any) -> Any:
        if num_leaves - 1 in parts:
            assert others_went_on.wait(20)
        return d2h(parts)

    def noted(generation: StagedGeneration, leaves: Any) -> Any:
        gone_on.extend(leaves)
        if len(gone_on) == num_leaves - 1:
            others_went_on.set()
        return h2d(generation, leaves)

    monkeypatch.setattr(snapshot, "_to_pinned_host", copy_late)
    monkeypatch.setattr(StagedGeneration, "_copied", noted)
    # Too large for two to share a batch, or a chunk.
    spec = oracle.LeafSpec((1024, 256), "float32", P("tp"), P("fsdp"))
    specs = {str(i): spec for i in range(num_leaves)}
    with (
        tsr.connect_trainer(d2h_window_nbytes=1, **STAGED) as trainer,
        connect(trainer, like=oracle.like(specs, SAMPLER)) as sampler,
    ):
        params = oracle.params(specs, TRAINER, 1)
        assert tsr.sync_weights(params, to=trainer, version=1).version == 1
        oracle.assert_equal(sampler.sync_weights().params, specs, 1, SAMPLER)
    assert sorted(gone_on) == list(range(num_leaves))


def test_of_snapshots_the_newest_alone_is_kept_and_goes_with_the_session(monkeypatch) -> None:
    snapshots: list[list[weakref.ref[Any]]] = []
    d2h = snapshot._to_pinned_host

    def noted(parts: Any) -> Any:
        copies = d2h(parts)
        snapshots[-1] += [weakref.ref(copy) for copy in jax.tree.leaves(copies)]
        return copies

    monkeypatch.setattr(snapshot, "_to_pinned_host", noted)
    with tsr.connect_trainer(**STAGED) as trainer, connect(trainer) as sampler:
        for version in (1, 2, 3):
            snapshots.append([])
            publish(trainer, version)
            sampler.sync_weights()
        alive = [[copy() is not None for copy in copies] for copies in snapshots]
        assert [any(copies) for copies in alive] == [False, False, True]
    assert not any(copy() for copies in snapshots for copy in copies)


def test_copy_that_fails_leaves_the_session_usable(trainer, monkeypatch) -> None:
    with connect(trainer) as sampler:
        publish(trainer, 1)
        with monkeypatch.context() as broken:
            broken.setattr(snapshot, "_to_pinned_host", lambda parts: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                publish(trainer, 2)
        assert publish(trainer, 3).replicas == {"sampler-0": 3}
        oracle.assert_equal(sampler.sync_weights().params, SPECS, 3, SAMPLER)


@pytest.mark.parametrize("staging", ["direct", "pinned_host"])
def test_nothing_compiles_again(staging: Any) -> None:
    sharding = NamedSharding(SAMPLER, P(None, "tp"))
    like = {
        "w": jax.device_put(jnp.zeros((8, 8)), sharding),
        "b": jnp.zeros(8),
        "h": jax.device_put(
            jnp.zeros(8), sharding.with_memory_kind("pinned_host").update(spec=P())
        ),
    }
    num_traces = 0

    @jax.jit
    def apply(params: Any) -> Any:
        nonlocal num_traces
        num_traces += 1
        return params["w"] @ params["b"]

    jitted = {key: like[key] for key in ("w", "b")}
    apply(jitted)
    with (
        tsr.connect_trainer(timeout=20, staging=staging) as trainer,
        connect(trainer, like=like, staging=staging) as sampler,
    ):
        for version in (1, 2):
            params = jax.tree.map(lambda x, value=version: x + value, like)
            tsr.sync_weights(params, to=trainer, version=version)
            new = sampler.sync_weights().params
            apply({key: new[key] for key in jitted})
            for key, array in like.items():
                assert new[key].sharding == array.sharding, key
                assert new[key].committed == array.committed, key
                assert new[key].format == array.format, key
    assert num_traces == 1
    assert apply._cache_size() == 1


class Mapped:
    """What a client that maps memory for DMA would be asked for."""

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}

    def dma_map(self, address: int, nbytes: int) -> None:
        self.mapped[address] = nbytes

    def dma_unmap(self, address: int) -> None:
        del self.mapped[address]


def test_memory_is_mapped_for_dma_while_it_lives(trainer) -> None:
    client = Mapped()
    with connect(trainer) as sampler:
        sampler._pool._clients = {client}
        publish(trainer, 1)
        sampler.sync_weights()
        assert sampler._pool.layout.nbytes in client.mapped.values()
    assert not client.mapped


def weights(version: int) -> dict[str, jax.Array]:
    """Two leaves of 4 KiB, on one device."""
    return {key: jnp.full((1024,), version, jnp.float32) for key in ("a", "b")}


def take(trainer: tsr.TrainerSession, sampler: tsr.SamplerSession, version: int) -> Any:
    tsr.sync_weights(weights(version), to=trainer, version=version)
    return sampler.sync_weights()


def test_limits_say_how_much_is_missing_before_anything_moves() -> None:
    with tsr.connect_trainer(max_host_nbytes=8000, **STAGED) as trainer:
        with pytest.raises(ValueError, match=r"max_host_nbytes=8000 .* snapshot.* 192 bytes are"):
            tsr.sync_weights(weights(1), to=trainer)
        for limit, missing in (("max_host_nbytes", 192), ("max_device_nbytes", 192)):
            with pytest.raises(ValueError, match=f"{limit}=8000 .* {missing} bytes are missing"):
                connect(trainer, like=weights(0), **{limit: 8000})
        with pytest.raises(ValueError, match=r"max_host_nbytes=8192 .* 8192 bytes are missing"):
            connect(trainer, like=weights(0), staging="direct", max_host_nbytes=8192)


def test_memory_for_one_version_is_enough_on_both_sides() -> None:
    with (
        tsr.connect_trainer(max_host_nbytes=8192, **STAGED) as trainer,
        connect(trainer, like=weights(0), max_host_nbytes=8192) as sampler,
    ):
        for version in (1, 2, 3):
            update = take(trainer, sampler, version)
            assert set(np.asarray(update.params["b"]).tolist()) == {float(version)}
        with connect(trainer, "late", like=weights(0)) as late:
            assert late.sync_weights().version == 3


def test_version_that_finds_room_comes_beside_the_current_one(trainer) -> None:
    with connect(trainer, like=weights(0), max_device_nbytes=16384) as sampler:
        first = take(trainer, sampler, 1)
        tsr.sync_weights(weights(2), to=trainer)
        (received,) = sampler._receiver.prepared
        assert received.leaves is not None
        assert sampler.sync_weights().version == 2 and first.version == 1


def test_version_without_room_takes_that_of_the_current_one_within_the_call(trainer) -> None:
    with connect(trainer, like=weights(0), max_device_nbytes=8192) as sampler:
        update = take(trainer, sampler, 1)
        tsr.sync_weights(weights(2), to=trainer)
        (received,) = sampler._receiver.prepared
        assert received.leaves is None
        with pytest.raises(tsr.SyncError, match="needs 8192 bytes more than max_device_nbytes on"):
            sampler.sync_weights()
        assert sampler.current is update
        assert set(np.asarray(update.params["a"]).tolist()) == {1.0}
        del update, received
        update = sampler.sync_weights()  # the same version, which waited
        assert update.version == 2 and update.report.local.seconds["h2d"] > 0
        assert set(np.asarray(update.params["a"]).tolist()) == {2.0}


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (jax.errors.JaxRuntimeError("no memory"), "version 2 was not copied to the devices: no"),
        (KeyboardInterrupt("now"), "now"),
    ],
)
def test_copy_that_fails_within_the_call_is_tried_again_by_the_next(
    trainer, monkeypatch, failure: BaseException, error: str
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    with connect(trainer, like=weights(0), max_device_nbytes=8192, h2d_window_nbytes=1) as sampler:
        take(trainer, sampler, 1)
        tsr.sync_weights(weights(2), to=trainer)
        with monkeypatch.context() as broken:
            broken.setattr(StagedGeneration, "_land", fail)
            with pytest.raises((tsr.SyncError, KeyboardInterrupt), match=error):
                sampler.sync_weights()
        update = sampler.sync_weights()
        assert update.version == 2
        assert set(np.asarray(update.params["a"]).tolist()) == {2.0}


def test_version_that_waits_comes_before_those_behind_it() -> None:
    like = weights(0)
    table = shard_table(["a", "b"], [like["a"], like["b"]], wanted=True)
    layout = GenerationLayout.of(table, [like["a"], like["b"]], process=0)
    memory = DeviceMemory(layout, 16384)
    first, second, third = Copier(), Copier(), Copier()
    assert memory.is_free_for(first)
    memory.took(first, older := list(weights(1).values()))
    assert memory.is_free_for(second)
    memory.took(second, newer := list(weights(2).values()))
    assert not memory.is_free_for(third)
    del newer
    assert not memory.is_free_for(Copier())  # the third one waits
    memory.check_swap()
    memory.took(third, newer := list(weights(3).values()))
    with pytest.raises(tsr.SyncError, match="8192 bytes more than max_device_nbytes"):
        memory.check_swap()
    del older, newer
    assert memory.is_free_for(Copier())


class Copier:
    """Stands for a generation: only that it lives counts."""
