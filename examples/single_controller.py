"""The RL loop in one JAX client, which sees the devices of the trainer and of all samplers.

    python -m tpu_sync_rl.launch --role=controller --sampler_replicas=1

Under Pathways this is the program of the controller. There is no session: `sync_weights` brings
the params from the trainer's devices to those of each replica.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import tpu_sync_rl as tsr
from tpu_sync_rl.examples.digest import digests_on_device
from tpu_sync_rl.examples.grpo import make_train_step, optimizer
from tpu_sync_rl.examples.policy import abstract_policy, fsdp_shardings, make_mesh
from tpu_sync_rl.examples.rl_loop import (
    Emit,
    answer_prompts,
    init_training,
    place_batch,
    sampler_params,
    score_answers,
    to_sampler_dtype,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """What the controller is told.

    Attributes:
        num_replicas: sampler replicas, each on devices of its own.
        steps: training steps in all.
        seed: of the first params.
    """

    num_replicas: int
    steps: int
    seed: int


def run_controller(config: ControllerConfig, emit: Emit) -> None:
    """Trains until `config.steps`, and emits a "version" event for each version.

    Raises:
        ValueError: there are too few devices.
        RuntimeError: a replica's params differ from the trainer's; names the keys.
    """
    trainer, *samplers = split_devices(jax.devices(), config.num_replicas)
    mesh = make_mesh("fsdp", trainer)
    graphdef, params_shape = abstract_policy()
    shapes = params_shape, jax.eval_shape(optimizer.init, params_shape)
    shardings = fsdp_shardings(mesh, shapes)
    train_step = make_train_step(graphdef, shardings)
    replicas = {
        f"sampler-{i}": sampler_params(params_shape, make_mesh("tp", devices))
        for i, devices in enumerate(samplers)
    }
    params, opt_state = init_training(config.seed, shardings)
    for version in range(config.steps + 1):
        jax.block_until_ready(params)  # So that the time of the sync is its own.
        began = time.perf_counter()
        synced = {
            replica: tsr.sync_weights(params, to=like, cast=True)
            for replica, like in replicas.items()
        }
        sync_s = time.perf_counter() - began
        answered = [
            answer_prompts(graphdef, replica, held, version) for replica, held in synced.items()
        ]
        prompts, answers, logprobs = map(np.concatenate, zip(*answered, strict=True))
        batch, reward = score_answers((prompts, answers, logprobs))
        differing = [
            f"{replica}: {key}"
            for replica, held in synced.items()
            for key in _differing(to_sampler_dtype(params), held)
        ]
        emit(
            {
                "event": "version",
                "version": version,
                "reward": reward,
                "sync_s": sync_s,
                "samplers": dict.fromkeys(synced, version),
                "differing": differing,
            }
        )
        if differing:
            raise RuntimeError(f"version {version} is not bit-equal on {', '.join(differing)}")
        if version < config.steps:
            params, opt_state = train_step(params, opt_state, place_batch(batch, mesh))


def split_devices(devices: Sequence[jax.Device], num_replicas: int) -> list[list[jax.Device]]:
    """Devices of the trainer, and of each replica.

    A replica has a slice of its own, and the trainer those that are left. Where there are no
    slices, or one, the trainer has half of the devices, and the replicas share the other evenly.

    Raises:
        ValueError: somebody would have none.
    """
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    if len(slices) > num_replicas:
        *own, last = sorted(slices)[: len(slices) - num_replicas + 1]
        first = [device for index in own for device in slices[index]]
        return [first, *(slices[index] for index in sorted(slices) if index >= last)]
    half = len(devices) // 2
    each = half // num_replicas
    if len(slices) > 1 or each == 0:
        raise ValueError(
            f"{len(slices)} slices with {len(devices)} devices are too few for a trainer and "
            f"{num_replicas} sampler replicas"
        )
    starts = [half + i * each for i in range(num_replicas)]
    return [list(devices[:half]), *(list(devices[start : start + each]) for start in starts)]


def _differing(wanted: Any, held: Any) -> list[str]:
    """Keys of the leaves whose bits or places differ."""
    keys = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(wanted)
    ]
    pairs = zip(keys, digests_on_device(wanted), digests_on_device(held), strict=True)
    return [key for key, ours, theirs in pairs if int(ours) != int(theirs)]
