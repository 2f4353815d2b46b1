"""What the README shows is what runs."""

import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import free_port

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TRAINER, SAMPLER, ONE_CLIENT = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.end_to_end
def test_trainer_and_sampler_of_the_readme_work_together():
    address = f"127.0.0.1:{free_port()}"
    seen, failures = [], []

    def run(block, **names):
        try:
            exec(block.replace("127.0.0.1:8476", address), names)
        except Exception as error:
            failures.append(error)

    params = {"w": jnp.arange(8.0), "b": jnp.zeros(())}
    sampler = threading.Thread(
        target=run, args=(SAMPLER,), kwargs={"like": params, "generate": seen.append}
    )
    sampler.start()
    run(
        TRAINER,
        num_steps=3,
        params=params,
        train_step=lambda params: jax.tree.map(lambda leaf: leaf + 1, params),
    )
    sampler.join(60)
    assert not failures
    assert not sampler.is_alive()
    np.testing.assert_array_equal(seen[-1]["w"], np.arange(8.0) + 3)
    np.testing.assert_array_equal(seen[-1]["b"], 3)


def test_one_client_of_the_readme_gives_the_same_params(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # the block sets it for good
    names = {}
    exec(ONE_CLIENT, names)
    np.testing.assert_array_equal(names["synced"]["w"], np.eye(8))


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"\b(?:tpu_sync_rl|tests|csrc|examples)/[\w./]*", README)))
)
def test_path_in_the_readme_exists(path):
    assert (ROOT / path).exists()


def test_tree_in_the_readme_names_modules_that_exist():
    tree = README.partition("## Map of the tree")[2].partition("##")[0]
    package = tree.partition("tpu_sync_rl/")[2].partition("csrc/")[0]
    modules = re.findall(r"\w+\.py", package)
    assert modules
    assert [name for name in modules if not (ROOT / "tpu_sync_rl" / name).exists()] == []
