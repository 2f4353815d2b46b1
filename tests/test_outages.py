"""Programs that were away for longer than `peer_timeout`, and come back in the middle of a call."""

import contextlib
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
from programs import Program, write_file
from tcp_relay import TcpRelay

import tpu_sync_rl as tsr
from tpu_sync_rl.coordinator_process import start_coordinator

pytestmark = pytest.mark.end_to_end

SPECS = oracle.ODD_LEAVES
TRAINER = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
SAMPLER = Mesh(np.array(jax.devices()[4:8]).reshape(1, 4), ("fsdp", "tp"))
PEER_TIMEOUT_S = 1.0
OUTAGE_S = 2.5 * PEER_TIMEOUT_S  # until they are lost, and for as long as they may come back


@pytest.fixture
def address() -> Iterator[str]:
    coordinator = start_coordinator(
        "127.0.0.1", 0, token=b"", peer_timeout=PEER_TIMEOUT_S, insecure=False
    )
    yield coordinator.address
    coordinator.stop()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def connect_trainer(address: str, **options) -> tsr.TrainerSession:
    return tsr.connect_trainer(
        coordinator=address,
        host_coordinator=False,
        timeout=30,
        peer_timeout=PEER_TIMEOUT_S,
        **options,
    )


def connect_sampler(address: str) -> tsr.SamplerSession:
    like = oracle.like(SPECS, SAMPLER)
    return tsr.connect_sampler(
        coordinator=address, replica="s", like=like, timeout=30, peer_timeout=PEER_TIMEOUT_S
    )


def publish(trainer: tsr.TrainerSession, version: int, **options) -> tsr.Report:
    params = oracle.params(SPECS, TRAINER, version)
    return tsr.sync_weights(params, to=trainer, version=version, **options)


def test_sampler_that_was_cut_off_goes_on_with_its_call(
    address: str, pool: ThreadPoolExecutor
) -> None:
    with (
        connect_trainer(address, min_replicas=1) as trainer,
        TcpRelay(address) as relay,
        connect_sampler(relay.address) as sampler,
    ):
        waiting = pool.submit(sampler.sync_weights)
        relay.wait_for("Take")
        with relay.cut():
            time.sleep(OUTAGE_S)
        publish(trainer, 1)
        oracle.assert_equal(waiting.result().params, SPECS, 1, SAMPLER)


@pytest.mark.parametrize("is_announced", [False, True])
def test_trainer_that_was_cut_off_goes_on_with_its_call(
    address: str, pool: ThreadPoolExecutor, is_announced: bool
) -> None:
    with (
        TcpRelay(address) as relay,
        connect_trainer(relay.address, min_replicas=1) as trainer,
        contextlib.ExitStack() as joined,
    ):
        if is_announced:
            sampler = joined.enter_context(connect_sampler(address))
        publishing = pool.submit(publish, trainer, 1, wait="committed")
        relay.wait_for("Announced" if is_announced else "Publish")
        with relay.cut():
            time.sleep(OUTAGE_S)
        if not is_announced:
            sampler = joined.enter_context(connect_sampler(address))
        oracle.assert_equal(sampler.sync_weights().params, SPECS, 1, SAMPLER)
        assert publishing.result().replicas == {"s": 1}


def test_loop_of_a_sampler_that_was_stopped_goes_on(address: str, tmp_path: Path) -> None:
    arguments = {"address_file": str(tmp_path / "address"), "replica": "s", "mesh": [1, 4]}
    with (
        connect_trainer(address, min_replicas=1) as trainer,
        TcpRelay(address) as relay,
        Program("sampler", devices=4, **arguments) as stopped,
    ):
        write_file(tmp_path / "address", relay.address)
        publish(trainer, 1, wait="committed")
        relay.wait_for("Take", 2)
        stopped.processes[0].send_signal(signal.SIGSTOP)
        time.sleep(OUTAGE_S)
        stopped.processes[0].send_signal(signal.SIGCONT)
        publish(trainer, 2, wait="committed")
        trainer.close()
        assert stopped.results() == [[1, 2]]
