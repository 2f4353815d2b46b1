"""The RL loop in one JAX client: who gets which devices, and what it proves."""

from dataclasses import dataclass

import jax.numpy as jnp
import pytest

from tpu_sync_rl.examples import single_controller
from tpu_sync_rl.examples.digest import digests_on_device
from tpu_sync_rl.examples.single_controller import ControllerConfig, run_controller, split_devices


@dataclass(frozen=True)
class Device:
    number: int
    slice_index: int = 0


def numbers(parts):
    return [[device.number for device in part] for part in parts]


def test_each_replica_has_a_slice_and_the_trainer_the_others():
    devices = [Device(n, slice_index=n // 2) for n in range(8)]
    assert numbers(split_devices(devices, 2)) == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert numbers(split_devices(devices, 3)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_without_slices_the_trainer_has_half_of_the_devices():
    devices = [Device(n) for n in range(8)]
    assert numbers(split_devices(devices, 1)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert numbers(split_devices(devices, 3)) == [[0, 1, 2, 3], [4], [5], [6]]


@pytest.mark.parametrize("num_slices, num_replicas", [(1, 5), (2, 2), (2, 3)])
def test_too_few_devices_are_refused(num_slices, num_replicas):
    devices = [Device(n, slice_index=n % num_slices) for n in range(8)]
    with pytest.raises(ValueError, match=f"too few for a trainer and {num_replicas} sampler"):
        split_devices(devices, num_replicas)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_digests_on_the_device_see_changed_and_moved_elements(dtype):
    leaf = jnp.arange(64, dtype=dtype).reshape(8, 8)
    trees = [leaf, leaf.at[3, 4].add(1), leaf.T, leaf.at[0, 0].set(leaf[0, 1]).at[0, 1].set(0)]
    assert len({int(digests_on_device([tree])[0]) for tree in trees}) == len(trees)
    assert int(digests_on_device([leaf])[0]) == int(digests_on_device([leaf + 0])[0])


def test_wrong_params_end_the_loop(monkeypatch):
    sync = single_controller.tsr.sync_weights

    def sync_wrongly(params, **options):
        synced = sync(params, **options)
        synced["head"]["kernel"] = synced["head"]["kernel"] + 1
        return synced

    monkeypatch.setattr(single_controller.tsr, "sync_weights", sync_wrongly)
    events = []
    with pytest.raises(RuntimeError, match=r"version 0 is not bit-equal on sampler-0: head/kernel"):
        run_controller(ControllerConfig(num_replicas=1, steps=1, seed=0), events.append)
    assert len(events) == 1
