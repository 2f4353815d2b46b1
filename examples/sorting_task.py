"""The task that the policy learns: write the digits of a prompt in ascending order."""

import numpy as np
import numpy.typing as npt

NUM_DIGITS = 10
LENGTH = 8
START = NUM_DIGITS
VOCABULARY = NUM_DIGITS + 1

Digits = npt.NDArray[np.int32]


def sample_prompts(rng: np.random.Generator, num_prompts: int) -> Digits:
    """Draws prompts of random digits, `[num_prompts, LENGTH]`."""
    return rng.integers(0, NUM_DIGITS, (num_prompts, LENGTH), dtype=np.int32)


def rewards(prompts: Digits, answers: Digits) -> npt.NDArray[np.float32]:
    """Scores every position of `answers`: 1 for the right digit, else 0.

    Arguments and result are `[..., LENGTH]`. A policy that knows nothing gets 0.1 on average.
    """
    return np.asarray(np.sort(prompts, axis=-1) == answers, np.float32)
