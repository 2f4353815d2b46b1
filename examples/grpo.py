"""Group relative policy optimisation, GRPO (Shao et al. 2024, arXiv:2402.03300).

Each prompt is answered several times by one policy; how much better than its group a digit is
says how much more likely it should become. Rewards are dense here, so every position is compared
with the same position of the group's other answers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from flax import nnx

from tpu_sync_rl.examples.sorting_task import LENGTH, Digits

GROUP = 16
CLIP = 0.2
LEARNING_RATE = 2e-3
UPDATES_PER_BATCH = 4

optimizer: optax.GradientTransformation = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE, b2=0.99)
)


class Batch(NamedTuple):
    """Answers to learn from, all `[batch, LENGTH]`; logprobs are those of the sampling policy."""

    prompts: Digits
    answers: Digits
    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]


def group_advantages(rewards: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """How far each reward lies above the mean of its group, in units of the group's spread.

    `rewards` is `[batch, LENGTH]` with the `GROUP` answers of a prompt in adjacent rows.
    """
    groups = rewards.reshape(-1, GROUP, LENGTH)
    spread = groups.std(axis=1, keepdims=True) + 0.1
    advantages = (groups - groups.mean(axis=1, keepdims=True)) / spread
    return np.reshape(advantages, rewards.shape)


def make_train_step(graphdef: Any, shardings: Any) -> Callable[[Any, Any, Batch], tuple[Any, Any]]:
    """Compiles `params, opt_state = train_step(params, opt_state, batch)`, which donates both.

    Args:
        graphdef: of the policy.
        shardings: of `(params, opt_state)`, kept by the step.
    """

    def loss(params: Any, batch: Batch) -> jax.Array:
        scores = jax.nn.log_softmax(nnx.merge(graphdef, params)(batch.prompts, batch.answers))
        logprobs = jnp.take_along_axis(scores, batch.answers[..., None], axis=-1)[..., 0]
        ratio = jnp.exp(logprobs - batch.logprobs)
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        return -jnp.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()

    def train_step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any]:
        def update(_: jax.Array, state: Any) -> Any:
            params, opt_state = state
            updates, opt_state = optimizer.update(jax.grad(loss)(params, batch), opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        state = params, opt_state
        params, opt_state = jax.lax.fori_loop(0, UPDATES_PER_BATCH, update, state)
        return params, opt_state

    return jax.jit(train_step, donate_argnums=(0, 1), out_shardings=shardings)
