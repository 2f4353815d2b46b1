"""Programs that die, stop or are interrupted, and those that go on without them."""

import signal
import time
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
from tpu_sync_rl.addresses import split_address
from tpu_sync_rl.coordinator_process import CoordinatorProcess, start_coordinator

pytestmark = pytest.mark.end_to_end

SPECS = oracle.ODD_LEAVES
TRAINER = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
SAMPLER = Mesh(np.array(jax.devices()[4:8]).reshape(1, 4), ("fsdp", "tp"))


@pytest.fixture
def trainer() -> Iterator[tsr.TrainerSession]:
    with tsr.connect_trainer(timeout=30, peer_timeout=2, min_replicas=1) as session:
        yield session


def connect(address: str, **options):
    options = {"like": oracle.like(SPECS, SAMPLER), "timeout": 30, **options}
    return tsr.connect_sampler(coordinator=address, **options)


def test_sampler_keeps_params_when_trainer_dies_and_takes_its_successor(tmp_path: Path) -> None:
    files = {"address_file": str(tmp_path / "address"), "ready_file": str(tmp_path / "ready")}
    with Program("idle_trainer", devices=4, address=None, version=8, **files) as first:
        address = wait_for_file(tmp_path / "address")
        with connect(address, replica="s") as sampler:
            update = sampler.sync_weights()
            wait_for_file(tmp_path / "ready")
            first.kill(0)
            with pytest.raises(tsr.SyncTimeoutError):
                sampler.sync_weights(timeout=1.5)
            assert sampler.current is update
            oracle.assert_equal(update.params, SPECS, 8, SAMPLER)
            (tmp_path / "ready").unlink()
            with Program("idle_trainer", devices=4, address=address, version=3, **files):
                later = sampler.sync_weights()
                assert later.version == 3 and later.incarnation != update.incarnation
                assert later.epoch > update.epoch
                oracle.assert_equal(later.params, SPECS, 3, SAMPLER)
        oracle.assert_equal(update.params, SPECS, 8, SAMPLER)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_trainer_goes_on_without_a_sampler_that_died(
    trainer: tsr.TrainerSession, tmp_path: Path, how: signal.Signals
) -> None:
    with Program(
        "idle_sampler",
        devices=4,
        address=trainer.coordinator,
        replica="mortal",
        ready_file=str(tmp_path / "ready"),
    ) as mortal:
        params = oracle.params(SPECS, TRAINER, 1)
        assert tsr.sync_weights(params, to=trainer, version=1).replicas == {"mortal": 1}
        wait_for_file(tmp_path / "ready")
        with connect(trainer.coordinator, replica="other") as other:
            assert other.sync_weights().version == 1
            mortal.processes[0].send_signal(how)
            params = oracle.params(SPECS, TRAINER, 2)
            report = tsr.sync_weights(params, to=trainer, version=2)
            assert report.replicas["other"] == 2
            assert "mortal" in report.lost or "mortal" not in report.replicas
            oracle.assert_equal(other.sync_weights().params, SPECS, 2, SAMPLER)


def test_ctrl_c_ends_a_waiting_call_within_a_second(
    trainer: tsr.TrainerSession, tmp_path: Path
) -> None:
    with Program(
        "waiting_sampler",
        devices=4,
        address=trainer.coordinator,
        ready_file=str(tmp_path / "ready"),
    ) as waiting:
        wait_for_file(tmp_path / "ready")
        sent = time.monotonic()
        waiting.processes[0].send_signal(signal.SIGINT)
        (interrupted,) = waiting.results()
        assert interrupted - sent < 1.0


def test_job_ends_though_its_coordinator_died_meanwhile() -> None:
    def start(port: int) -> CoordinatorProcess:
        return start_coordinator("127.0.0.1", port, token=b"", peer_timeout=2.0, insecure=False)

    first = start(0)
    with (
        tsr.connect_trainer(
            coordinator=first.address, host_coordinator=False, timeout=30
        ) as trainer,
        connect(first.address, replica="s") as sampler,
        ThreadPoolExecutor(1) as pool,
    ):
        tsr.sync_weights(oracle.params(SPECS, TRAINER, 1), to=trainer, version=1)
        assert sampler.sync_weights().version == 1
        first.stop()
        closing = pool.submit(trainer.close)
        second = start(split_address(first.address)[1])
        try:
            closing.result(20)
            with pytest.raises(tsr.JobEndedError):
                sampler.sync_weights()
        finally:
            second.stop()
