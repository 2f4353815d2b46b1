"""The RL loop that `python -m tpu_sync_rl.launch` runs: one trainer, and samplers that follow it.

In each round the trainer publishes its params as a version, every sampler takes it and answers
prompts with it, and the trainer learns from the answers. A round also proves that each sampler
ran exactly the trainer's params: both sides compute digests of the arrays that they hold.
"""

import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tpu_sync_rl as tsr
from tpu_sync_rl.examples.checkpoints import Checkpoints, TrainingState
from tpu_sync_rl.examples.digest import digest_params
from tpu_sync_rl.examples.grpo import GROUP, Batch, group_advantages, make_train_step, optimizer
from tpu_sync_rl.examples.policy import (
    abstract_policy,
    fsdp_shardings,
    init_params,
    make_mesh,
    sample_answers,
    tensor_parallel_shardings,
)
from tpu_sync_rl.examples.rollouts import Rollouts, RolloutServer, submit_rollouts
from tpu_sync_rl.examples.sorting_task import LENGTH, rewards, sample_prompts
from tpu_sync_rl.job_token import resolve_token

PROMPTS_PER_REPLICA = 16
SAMPLER_DTYPE = jnp.bfloat16

# Takes what happened, as plain JSON types: {"event": "version", "version": 3, "reward": 0.2, …}.
Emit = Callable[[dict[str, Any]], None]
# Prompts, answers and the log-probabilities of these: `[batch, LENGTH]`.
Answers = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """What a trainer process is told.

    Attributes:
        connect: arguments of `connect_trainer`.
        rollouts: "host:port" where process 0 takes rollouts; port 0 finds a free one.
        num_replicas: sampler replicas that take every version.
        steps: training steps in all, with those before the checkpoint.
        seed: of the first params.
        checkpoint_dir: folder of the checkpoints; None for none.
        checkpoint_every: training steps from one checkpoint to the next.
        resume: go on from the last checkpoint.
        timeout_s: longest wait for the rollouts of one version.
    """

    connect: Mapping[str, Any]
    rollouts: str
    num_replicas: int
    steps: int
    seed: int
    checkpoint_dir: str | None
    checkpoint_every: int
    resume: bool
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    """What a sampler process is told.

    Attributes:
        connect: arguments of `connect_sampler`, the name of the replica among them.
        rollouts: "host:port" where the trainer takes rollouts.
        from_checkpoint: folder of checkpoints whose last params are used until the trainer is up.
        timeout_s: longest wait for the trainer to take rollouts.
    """

    connect: Mapping[str, Any]
    rollouts: str
    from_checkpoint: str | None
    timeout_s: float


def run_trainer(config: TrainerConfig, emit: Emit) -> None:
    """Trains until `config.steps`; every process of the trainer program calls it.

    Version v is the params after v steps. Process 0 emits a "start" event as soon as samplers can
    connect, a "resume" event if it goes on from a checkpoint, and a "version" event for each
    version, once all samplers have answered with it.

    Raises:
        FileNotFoundError: there is no checkpoint to resume from.
        FileExistsError: there are checkpoints, and it shall not resume.
        RuntimeError: a sampler's params differ from the trainer's; names the keys.
        TimeoutError: rollouts did not come.
    """
    token = resolve_token(None)
    with ExitStack() as stack:
        server = None
        if jax.process_index() == 0:
            server = stack.enter_context(RolloutServer(config.rollouts, token))
        session = stack.enter_context(
            tsr.connect_trainer(**{"min_replicas": config.num_replicas, **config.connect})
        )
        if server is not None:
            emit({"event": "start", "coordinator": session.coordinator, "rollouts": server.address})

        mesh = make_mesh("fsdp")
        graphdef, params_shape = abstract_policy()
        shapes = params_shape, jax.eval_shape(optimizer.init, params_shape)
        shardings = fsdp_shardings(mesh, shapes)
        train_step = make_train_step(graphdef, shardings)
        checkpoints = Checkpoints(config.checkpoint_dir) if config.checkpoint_dir else None
        state = _first_state(config, checkpoints, shapes, shardings)
        if server is not None and state.rewards:
            emit({"event": "resume", "version": state.version, "rewards": state.rewards})

        while True:
            batch, reward = _publish(state, session, server, config, emit)
            if state.version >= config.steps:
                return
            params, opt_state = train_step(state.params, state.opt_state, place_batch(batch, mesh))
            state = TrainingState(state.version + 1, params, opt_state, [*state.rewards, reward])
            if checkpoints is not None and state.version % config.checkpoint_every == 0:
                checkpoints.save(state)


def run_sampler(config: SamplerConfig, emit: Emit) -> None:
    """Answers prompts with every version that it gets, until the trainer has ended the job.

    Every process of the replica calls it; process 0 submits the rollouts. With `from_checkpoint`
    it answers once before it connects, and emits a "checkpoint" event.
    """
    token = resolve_token(None)
    replica = config.connect["replica"]
    graphdef, params_shape = abstract_policy()
    like = sampler_params(params_shape, make_mesh("tp"))
    answer = partial(answer_prompts, graphdef, replica)

    if config.from_checkpoint is not None:
        version, params = Checkpoints(config.from_checkpoint).load_params(like)
        prompts, answers, _ = answer(params, version)
        reward = float(rewards(prompts, answers).mean())
        if jax.process_index() == 0:
            emit({"event": "checkpoint", "version": version, "reward": reward})

    with tsr.connect_sampler(like=like, cast=True, **config.connect) as session:
        for update in session:
            prompts, answers, logprobs = answer(update.params, update.version)
            digests = digest_params(update.params)
            if jax.process_index() == 0:
                rollouts = Rollouts(
                    replica=replica,
                    incarnation=update.incarnation,
                    version=update.version,
                    digests=digests,
                    prompts=prompts.tobytes(),
                    answers=answers.tobytes(),
                    logprobs=logprobs.tobytes(),
                )
                submit_rollouts(config.rollouts, token, rollouts, config.timeout_s)


def init_training(seed: int, shardings: Any) -> tuple[Any, Any]:
    """New params and the optimizer's state for them, in `shardings`."""

    def init() -> tuple[Any, Any]:
        params = init_params(seed)
        return params, optimizer.init(params)

    params, opt_state = jax.jit(init, out_shardings=shardings)()
    return params, opt_state


def sampler_params(params_shape: Any, mesh: Mesh) -> Any:
    """The params as a sampler wants them, as ShapeDtypeStructs."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, SAMPLER_DTYPE, sharding=sharding),
        params_shape,
        tensor_parallel_shardings(mesh, params_shape),
    )


def answer_prompts(graphdef: Any, replica: str, params: Any, version: int) -> Answers:
    """Draws the prompts of a replica for a version, and answers each of them `GROUP` times."""
    seed = zlib.crc32(f"{replica}/{version}".encode())
    prompts = sample_prompts(np.random.default_rng(seed), PROMPTS_PER_REPLICA)
    prompts = np.repeat(prompts, GROUP, axis=0)
    answers, logprobs = sample_answers(graphdef, params, prompts, np.uint32(seed))
    return prompts, np.asarray(answers), np.asarray(logprobs)


def score_answers(answered: Answers) -> tuple[Batch, float]:
    """What a trainer learns from answers, and their mean reward."""
    prompts, answers, logprobs = answered
    score = rewards(prompts, answers)
    return Batch(prompts, answers, logprobs, group_advantages(score)), float(score.mean())


@jax.jit
def to_sampler_dtype(params: Any) -> Any:
    """The cast that sync does too, done by JAX."""
    return jax.tree.map(lambda leaf: leaf.astype(SAMPLER_DTYPE), params)


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Splits the rows of `batch` over the devices of all processes."""
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    return Batch(*(jax.device_put(array, sharding) for array in batch))


def _first_state(
    config: TrainerConfig, checkpoints: Checkpoints | None, shapes: Any, shardings: Any
) -> TrainingState:
    """The last checkpoint's state if the trainer shall resume, else a fresh one."""
    if config.resume:
        if checkpoints is None:
            raise ValueError("resume needs a checkpoint_dir")
        like = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings,
        )
        return checkpoints.load_state(*like)
    if checkpoints is not None and checkpoints.last_version is not None:
        raise FileExistsError(
            f"{config.checkpoint_dir} has checkpoints: resume from the last one (--resume), or "
            "take another folder"
        )

    return TrainingState(0, *init_training(config.seed, shardings), [])


def _publish(
    state: TrainingState,
    session: tsr.TrainerSession,
    server: RolloutServer | None,
    config: TrainerConfig,
    emit: Emit,
) -> tuple[Batch, float]:
    """Brings the params to all samplers, and proves it; returns their answers and mean reward."""
    jax.block_until_ready(state.params)  # So that the time of the sync is its own.
    began = time.perf_counter()
    report = tsr.sync_weights(state.params, to=session, version=state.version, wait="committed")
    sync_s = time.perf_counter() - began
    digests = digest_params(to_sampler_dtype(state.params))

    replies: list[Rollouts] = []
    if server is not None:
        replies = server.collect(
            report.incarnation, report.version, config.num_replicas, config.timeout_s
        )
    batch, reward = _share_batch(replies, config.num_replicas)
    differing = _differing(digests, replies)
    if server is not None:
        emit(
            {
                "event": "version",
                "version": report.version,
                "reward": reward,
                "sync_s": sync_s,
                "nbytes": report.nbytes,
                "gbytes_per_s": report.wire_nbytes / sync_s / 1e9,
                "samplers": {reply.replica: reply.version for reply in replies},
                "differing": differing,
            }
        )
    if differing:
        raise RuntimeError(f"version {report.version} is not bit-equal on {', '.join(differing)}")
    return batch, reward


def _share_batch(replies: list[Rollouts], num_replicas: int) -> tuple[Batch, float]:
    """The batch that process 0 got as `replies`, and its mean reward, in every process."""
    rows = num_replicas * PROMPTS_PER_REPLICA * GROUP
    if jax.process_index() == 0:
        parts = zip(*(reply.arrays() for reply in replies), strict=True)
        received = tuple(np.concatenate(part) for part in parts)
    else:
        digits = np.zeros((rows, LENGTH), np.int32)
        received = digits, digits, np.zeros((rows, LENGTH), np.float32)
    shared = multihost_utils.broadcast_one_to_all(received)
    prompts, answers, logprobs = (np.asarray(array) for array in shared)
    return score_answers((prompts, answers, logprobs))


def _differing(digests: dict[str, int], replies: list[Rollouts]) -> list[str]:
    """Where samplers ran other bits than the trainer has, as "replica: key"."""
    return [
        f"{reply.replica}: {key}"
        for reply in replies
        for key in sorted(digests.keys() | reply.digests.keys())
        if digests.get(key) != reply.digests.get(key)
    ]
