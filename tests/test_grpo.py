"""The policy learns to sort; advantages compare answers within their group."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tpu_sync_rl.examples.grpo import GROUP, Batch, group_advantages, make_train_step, optimizer
from tpu_sync_rl.examples.policy import (
    abstract_policy,
    fsdp_shardings,
    init_params,
    sample_answers,
)
from tpu_sync_rl.examples.sorting_task import LENGTH, NUM_DIGITS, rewards, sample_prompts


def test_reward_counts_right_positions():
    prompts = np.array([[3, 1, 2, 0, 4, 5, 6, 7]], np.int32)
    answers = np.array([[0, 1, 2, 3, 4, 5, 7, 6]], np.int32)
    assert rewards(prompts, answers).tolist() == [[1, 1, 1, 1, 1, 1, 0, 0]]


def test_advantages_are_relative_to_the_group_and_position():
    score = np.zeros((2 * GROUP, LENGTH), np.float32)
    score[0, 3] = 1  # one of the first group is right where the others are wrong
    score[GROUP:, 5] = 1  # all of the second group are right
    advantages = group_advantages(score)
    assert advantages[0, 3] > 1
    assert (advantages[1:GROUP, 3] < 0).all()
    assert not advantages[GROUP:].any()
    np.testing.assert_allclose(advantages.reshape(2, GROUP, LENGTH).mean(axis=1), 0, atol=1e-6)


@pytest.mark.slow
def test_policy_learns_and_keeps_its_shardings():
    graphdef, shape = abstract_policy()
    shapes = shape, jax.eval_shape(optimizer.init, shape)
    shardings = fsdp_shardings(Mesh(jax.devices()[:2], ("fsdp",)), shapes)
    train_step = make_train_step(graphdef, shardings)
    params = jax.device_put(init_params(0), shardings[0])
    opt_state = jax.device_put(optimizer.init(params), shardings[1])
    rng = np.random.default_rng(0)
    means = []
    for step in range(5):
        prompts = np.repeat(sample_prompts(rng, 16), GROUP, axis=0)
        answers, logprobs = map(
            np.asarray, sample_answers(graphdef, params, prompts, np.uint32(step))
        )
        assert ((answers >= 0) & (answers < NUM_DIGITS)).all()
        assert (logprobs <= 0).all()
        score = rewards(prompts, answers)
        means.append(score.mean())
        batch = Batch(prompts, answers, logprobs, group_advantages(score))
        params, opt_state = train_step(params, opt_state, batch)
    assert means[-1] > means[0] + 0.1
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings[0]
