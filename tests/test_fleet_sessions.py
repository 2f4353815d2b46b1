"""Sessions whose coordinator dies, and fleets that return a version together or not at all."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh
from programs import Program, wait_for_file

import tpu_sync_rl as tsr
from tpu_sync_rl.coordinator_process import start_coordinator

pytestmark = pytest.mark.end_to_end

SPECS = oracle.ODD_LEAVES
TRAINER = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
SAMPLER = Mesh(np.array(jax.devices()[4:8]).reshape(1, 4), ("fsdp", "tp"))


def connect(address: str, replica: str, **options) -> tsr.SamplerSession:
    options = {"like": oracle.like(SPECS, SAMPLER), "timeout": 30, **options}
    return tsr.connect_sampler(coordinator=address, replica=replica, **options)


def publish(session: tsr.TrainerSession, version: int) -> tsr.Report:
    params = oracle.params(SPECS, TRAINER, version)
    return tsr.sync_weights(params, to=session, version=version)


@pytest.fixture(params=["replica", "fleet"])
def trainer(request: pytest.FixtureRequest) -> Iterator[tsr.TrainerSession]:
    with tsr.connect_trainer(timeout=30, commit=request.param) as session:
        yield session


def kill_coordinator(trainer: tsr.TrainerSession) -> None:
    process = trainer._coordinator_process
    assert process is not None
    os.kill(process._process.pid, signal.SIGKILL)


def test_everything_goes_on_when_the_coordinator_dies(trainer: tsr.TrainerSession) -> None:
    address = trainer.coordinator
    epochs = set()
    with connect(address, "a") as a, connect(address, "b") as b:
        for version in (1, 2, 3):
            report = publish(trainer, version)
            epochs.add(report.epoch)
            assert dict(report.replicas) == {"a": version, "b": version} and not report.lost
            kill_coordinator(trainer)
            for sampler in (a, b):
                update = sampler.sync_weights()
                assert update.version == version
                epochs |= {update.epoch, update.report.epoch}
                oracle.assert_equal(update.params, SPECS, version, SAMPLER)
    assert len(epochs) == 1


def test_call_that_is_open_when_the_coordinator_dies_counts_the_replicas_from_before(
    trainer: tsr.TrainerSession,
) -> None:
    address = trainer.coordinator
    with (
        connect(address, "a", max_generations=2) as a,
        connect(address, "b") as b,
        ThreadPoolExecutor(1) as pool,
    ):
        held = []
        for version in (1, 2):
            publish(trainer, version)
            held.append(a.sync_weights())
            b.sync_weights()
        report = pool.submit(publish, trainer, 3)  # a has no memory for it
        kill_coordinator(trainer)
        with pytest.raises(tsr.SyncTimeoutError):
            a.sync_weights(timeout=2)
        assert not report.done()
        held.clear()
        assert a.sync_weights().version == 3
        assert dict(report.result(20).replicas) == {"a": 3, "b": 3}


def test_late_joiner_of_a_coordinator_that_died_gets_the_newest_version(
    trainer: tsr.TrainerSession,
) -> None:
    params = oracle.params(SPECS, TRAINER, 4)
    tsr.sync_weights(params, to=trainer, version=4)
    kill_coordinator(trainer)
    with connect(trainer.coordinator, "late") as late:
        oracle.assert_equal(late.sync_weights().params, SPECS, 4, SAMPLER)


@pytest.mark.parametrize("commit", ["replica", "fleet"])
def test_newer_incarnation_takes_over_from_one_that_hangs(tmp_path: Path, commit: str) -> None:
    alone = start_coordinator("127.0.0.1", 0, token=b"", peer_timeout=10, insecure=False)
    files = {"address_file": str(tmp_path / "address"), "ready_file": str(tmp_path / "ready")}
    options = {"address": alone.address, "host_coordinator": False, "commit": commit}
    try:
        with (
            Program("idle_trainer", devices=4, version=8, **options, **files) as first,
            connect(alone.address, "s") as sampler,
        ):
            assert sampler.sync_weights(timeout=60).version == 8
            wait_for_file(tmp_path / "ready")
            first.processes[0].send_signal(signal.SIGSTOP)
            with tsr.connect_trainer(
                coordinator=alone.address, host_coordinator=False, commit=commit
            ) as newer:
                publish(newer, 3)
                update = sampler.sync_weights(timeout=10)
                assert (update.version, update.incarnation) == (3, newer.incarnation)
                oracle.assert_equal(update.params, SPECS, 3, SAMPLER)
    finally:
        alone.stop()


def test_replica_that_calls_late_holds_up_no_publish_and_gets_what_the_others_got() -> None:
    with (
        tsr.connect_trainer(timeout=30, commit="fleet") as trainer,
        connect(trainer.coordinator, "quick") as quick,
        connect(trainer.coordinator, "late") as late,
    ):
        publish(trainer, 1)
        assert quick.sync_weights().version == 1
        for version in (2, 3):
            assert dict(publish(trainer, version).replicas) == {"quick": version, "late": version}
        assert quick.sync_weights(wait=False) is None
        oracle.assert_equal(late.sync_weights().params, SPECS, 1, SAMPLER)
        for sampler in (late, quick):
            oracle.assert_equal(sampler.sync_weights().params, SPECS, 3, SAMPLER)


@pytest.mark.parametrize("on_straggler", ["wait", "drop"])
def test_straggler_holds_up_the_fleet_or_is_left_behind(on_straggler: str) -> None:
    with (
        tsr.connect_trainer(
            timeout=30, commit="fleet", straggler_timeout=1, on_straggler=on_straggler
        ) as trainer,
        connect(trainer.coordinator, "quick") as quick,
        connect(trainer.coordinator, "slow", max_generations=2) as slow,
    ):
        publish(trainer, 1)
        held = [slow.sync_weights()]
        assert quick.sync_weights().version == 1
        publish(trainer, 2)
        held.append(slow.sync_weights())
        if on_straggler == "wait":
            with pytest.raises(tsr.SyncTimeoutError, match="version 3 is withdrawn: slow did not"):
                publish(trainer, 3)
            update = quick.sync_weights()
            assert update.version == 2  # committed, and kept while version 3 was received
            oracle.assert_equal(update.params, SPECS, 2, SAMPLER)
            assert quick.sync_weights(wait=False) is None
        else:
            assert publish(trainer, 3).lost == ("slow",)
            assert quick.sync_weights().version == 3
        held.clear()
        assert not publish(trainer, 4).lost
        for sampler in (quick, slow):
            update = sampler.sync_weights()
            assert update.version == 4
            oracle.assert_equal(update.params, SPECS, 4, SAMPLER)
