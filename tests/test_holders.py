"""Replicas that hold a version serve it to others, where the trainer can't."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import Program, wait_for_file

import tpu_sync_rl as tsr
from tpu_sync_rl import rails
from tpu_sync_rl.coordinator_process import CoordinatorProcess, start_coordinator
from tpu_sync_rl.snapshot import Snapshot
from tpu_sync_rl.transport import Exporter, Fetcher

pytestmark = pytest.mark.end_to_end

SPECS = oracle.ODD_LEAVES
TRAINER = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
SAMPLER = Mesh(np.array(jax.devices()[4:8]).reshape(1, 4), ("fsdp", "tp"))
OTHER = Mesh(np.array(jax.devices()[4:8]).reshape(2, 2), ("fsdp", "tp"))


@pytest.fixture
def trainer() -> Iterator[tsr.TrainerSession]:
    with tsr.connect_trainer(timeout=20, peer_timeout=2) as session:
        yield session


@pytest.fixture
def coordinator() -> Iterator[CoordinatorProcess]:
    process = start_coordinator("127.0.0.1", 0, token=b"", peer_timeout=2.0, insecure=False)
    yield process
    process.stop()


def connect(address: str, replica: str, mesh: Mesh = SAMPLER, **options):
    options = {"like": oracle.like(SPECS, mesh), "timeout": 20, "peer_timeout": 2, **options}
    return tsr.connect_sampler(coordinator=address, replica=replica, **options)


def delete(params) -> None:
    for leaf in jax.tree.leaves(params):
        leaf.delete()


class Gate:
    """Holds up the streams of samplers with odd chunks, until it is opened."""

    CHUNK_NBYTES = 65_432

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.is_open = threading.Event()
        dial = rails.dial

        def held_up(rail, options, **arguments):
            if options.chunk_nbytes == self.CHUNK_NBYTES:
                self.reached.set()
                assert self.is_open.wait(60)
            return dial(rail, options, **arguments)

        monkeypatch.setattr(rails, "dial", held_up)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.is_open.set()


def publish_and_delete(trainer: tsr.TrainerSession, version: int) -> None:
    params = oracle.params(SPECS, TRAINER, version)
    tsr.sync_weights(params, to=trainer, version=version)
    delete(params)


@pytest.mark.parametrize("staging", ["direct", "pinned_host"])
@pytest.mark.parametrize("taken", [True, False])
def test_late_replica_reads_what_the_trainer_no_longer_has(trainer, taken, staging):
    with connect(trainer.coordinator, "early", staging=staging) as early:
        publish_and_delete(trainer, 3)
        if taken:
            early.sync_weights()
        with connect(trainer.coordinator, "late", OTHER, verify="full") as late:
            update = late.sync_weights()
            assert (update.version, update.incarnation) == (3, trainer.incarnation)
            oracle.assert_equal(update.params, SPECS, 3, OTHER)
        publish_and_delete(trainer, 4)
        oracle.assert_equal(early.sync_weights().params, SPECS, 4, SAMPLER)


@pytest.mark.parametrize("staging", ["direct", "pinned_host"])
def test_holder_starts_no_more_threads_for_many_versions_than_for_one(
    trainer, staging, monkeypatch
):
    tsr.sync_weights(oracle.params(SPECS, TRAINER, 1), to=trainer, version=1)
    started = []
    start, init = threading.Thread.start, Exporter.__init__

    def started_python(self):
        started.append(self.name)
        start(self)

    def started_native(self, *arguments, **options):
        started.append("exporter")
        init(self, *arguments, **options)

    monkeypatch.setattr(threading.Thread, "start", started_python)
    monkeypatch.setattr(Exporter, "__init__", started_native)
    with connect(trainer.coordinator, "early", staging=staging) as early:
        for version in range(2, 7):
            publish_and_delete(trainer, version)
            early.sync_weights()
            with connect(trainer.coordinator, f"late-{version}", OTHER) as late:
                oracle.assert_equal(late.sync_weights().params, SPECS, version, OTHER)
            serving = [started.count(f"tsr-{name}") for name in ("offers", "pins", "listener")]
            assert [*serving, started.count("exporter")] == [1, 1, 1, 1]
        early.close()
    names = {thread.name for thread in threading.enumerate()}
    assert "tsr-offers" not in names


def test_sampler_has_one_fetcher_at_a_time_whomever_it_reads_from(trainer, monkeypatch):
    made, is_open = [], []
    init, close, begin_digests = Fetcher.__init__, Fetcher.close, Fetcher.begin_digests

    def noted(self, *arguments, **options):
        if options["verify"] == "full":
            assert not is_open
            made.append(self)
            is_open.append(self)
        init(self, *arguments, **options)

    def closed(self):
        close(self)
        if self in is_open:
            is_open.remove(self)

    def failing(self, version, requests):
        if len(made) == 1 and not failed:
            failed.append(version)
            raise tsr.PeerLostError("no digest comes")
        begin_digests(self, version, requests)

    failed = []
    monkeypatch.setattr(Fetcher, "__init__", noted)
    monkeypatch.setattr(Fetcher, "close", closed)
    monkeypatch.setattr(Fetcher, "begin_digests", failing)
    with connect(trainer.coordinator, "early"):
        publish_and_delete(trainer, 1)
        with connect(trainer.coordinator, "late", OTHER, verify="full") as late:
            oracle.assert_equal(late.sync_weights().params, SPECS, 1, OTHER)
            assert (failed, len(made)) == ([1], 1)  # the holder was read from twice
            publish_and_delete(trainer, 2)
            oracle.assert_equal(late.sync_weights().params, SPECS, 2, OTHER)
            assert len(made) == 2 and is_open == made[1:]


def test_holder_keeps_no_snapshot_of_what_nobody_reads(trainer, monkeypatch):
    snapshots = []
    init = Snapshot.__init__

    def noted(self, *arguments, **options):
        snapshots.append(weakref.ref(self))
        init(self, *arguments, **options)

    monkeypatch.setattr(Snapshot, "__init__", noted)
    with connect(trainer.coordinator, "early", staging="pinned_host"):
        publish_and_delete(trainer, 1)
        with connect(trainer.coordinator, "late", OTHER) as late:
            late.sync_weights()
        assert len(snapshots) == 1
        deadline = time.monotonic() + 20
        while snapshots[0]() is not None:
            assert time.monotonic() < deadline
            gc.collect()


def test_holder_serves_one_incarnation_after_another(coordinator):
    with connect(coordinator.address, "early") as early:
        for name in ("first", "second"):
            trainer = tsr.connect_trainer(
                coordinator=coordinator.address, host_coordinator=False, timeout=20, peer_timeout=2
            )
            with pytest.raises(KeyError, match=name), trainer:  # samplers wait for the next one
                publish_and_delete(trainer, 1)
                with connect(coordinator.address, f"late-{name}", OTHER) as late:
                    update = late.sync_weights()
                    assert update.incarnation == trainer.incarnation
                    oracle.assert_equal(update.params, SPECS, 1, OTHER)
                raise KeyError(name)
            assert early.sync_weights().incarnation == trainer.incarnation


def test_holder_of_two_processes_serves_from_both(trainer, tmp_path):
    with Program(
        "idle_sampler",
        processes=2,
        devices=2,
        address=trainer.coordinator,
        replica="early",
        ready_file=str(tmp_path / "ready"),
    ):
        params = oracle.params(SPECS, TRAINER, 6)
        tsr.sync_weights(params, to=trainer, version=6)
        wait_for_file(tmp_path / "ready")
        delete(params)
        with connect(trainer.coordinator, "late", OTHER) as late:
            oracle.assert_equal(late.sync_weights().params, SPECS, 6, OTHER)


def test_replica_that_donated_its_params_serves_nothing(trainer):
    with connect(trainer.coordinator, "early") as early:
        publish_and_delete(trainer, 1)
        delete(early.sync_weights().params)
        with connect(trainer.coordinator, "late") as late:
            with pytest.raises(tsr.SyncTimeoutError):
                late.sync_weights(timeout=1)
            publish_and_delete(trainer, 2)
            assert late.sync_weights().version == 2


def test_holder_is_read_under_the_trainers_names_and_only_for_the_same_bits(trainer):
    def like(key, dtype):
        return {key: jax.ShapeDtypeStruct((8,), dtype, sharding=NamedSharding(SAMPLER, P("tp")))}

    narrow = {"rename": {"w": "mine"}, "cast": True, "like": like("mine", jnp.bfloat16)}
    value = np.linspace(1, 2, 8, dtype=np.float32)
    params = {"w": jax.device_put(value, NamedSharding(TRAINER, P("tp")))}
    with connect(trainer.coordinator, "early", **narrow):
        tsr.sync_weights(params, to=trainer, version=1)
        delete(params)
        with (
            connect(trainer.coordinator, "same", **narrow) as same,
            connect(trainer.coordinator, "wide", like=like("w", jnp.float32)) as wide,
        ):
            received = same.sync_weights().params["mine"]
            assert (np.asarray(received) == value.astype(jnp.bfloat16)).all()
            with pytest.raises(tsr.SyncTimeoutError, match="'w': bfloat16 made of float32"):
                wide.sync_weights(timeout=1)


@pytest.fixture
def mortal(coordinator: CoordinatorProcess, tmp_path: Path) -> Iterator[Program]:
    """A trainer program of its own, whose incarnation is in `incarnation` once it has published."""
    with Program(
        "idle_trainer",
        devices=4,
        address=coordinator.address,
        version=8,
        address_file=str(tmp_path / "address"),
        ready_file=str(tmp_path / "incarnation"),
        host_coordinator=False,
        peer_timeout=2,
        min_replicas=2,
    ) as program:
        yield program


def test_restarted_replica_gets_a_dead_trainers_version(coordinator, mortal, tmp_path):
    with connect(coordinator.address, "a") as a:
        with connect(coordinator.address, "b") as b:
            incarnation = wait_for_file(tmp_path / "incarnation")
            assert a.sync_weights().version == b.sync_weights().version == 8
        mortal.kill(0)
        with connect(coordinator.address, "b", OTHER) as b:
            update = b.sync_weights()
            assert (update.version, update.incarnation) == (8, incarnation)
            oracle.assert_equal(update.params, SPECS, 8, OTHER)


def test_transfer_that_a_trainer_died_in_goes_on_from_a_replica(coordinator, mortal, gate):
    with (
        connect(coordinator.address, "a") as a,
        connect(coordinator.address, "b", OTHER, chunk_nbytes=gate.CHUNK_NBYTES) as b,
    ):
        received = a.sync_weights()
        assert gate.reached.wait(20)
        mortal.kill(0)
        gate.is_open.set()
        update = b.sync_weights()
        assert (update.version, update.incarnation) == (8, received.incarnation)
        oracle.assert_equal(update.params, SPECS, 8, OTHER)


def test_transfer_that_a_holder_died_in_goes_on_from_another(trainer, gate, tmp_path):
    with (
        Program(
            "idle_sampler",
            devices=4,
            address=trainer.coordinator,
            replica="a",
            ready_file=str(tmp_path / "ready"),
        ) as holder,
        connect(trainer.coordinator, "b"),
    ):
        published = threading.Thread(target=publish_and_delete, args=(trainer, 5))
        published.start()
        wait_for_file(tmp_path / "ready")
        published.join()
        late = connect(trainer.coordinator, "c", OTHER, chunk_nbytes=gate.CHUNK_NBYTES)
        with late:
            assert gate.reached.wait(20)
            holder.kill(0)
            gate.is_open.set()
            oracle.assert_equal(late.sync_weights().params, SPECS, 5, OTHER)


def test_holder_that_needs_the_memory_serves_no_longer(trainer, gate):
    with connect(trainer.coordinator, "a", max_generations=2) as holder:
        publish_and_delete(trainer, 1)
        holder.sync_weights()
        patient = {"chunk_nbytes": gate.CHUNK_NBYTES, "peer_timeout": 60}
        slow = connect(trainer.coordinator, "b", OTHER, **patient)
        with slow:
            assert gate.reached.wait(20)
            kept = []
            for version in (2, 3):
                params = oracle.params(SPECS, TRAINER, version)
                kept.append(tsr.sync_weights(params, to=trainer, version=version, wait=None))
                oracle.assert_equal(holder.sync_weights().params, SPECS, version, SAMPLER)
            gate.is_open.set()
            oracle.assert_equal(slow.sync_weights(min_version=3).params, SPECS, 3, OTHER)
