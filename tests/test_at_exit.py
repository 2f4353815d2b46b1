"""The end of programs that leave their sessions open."""

import subprocess
import sys

import pytest

from tpu_sync_rl.at_exit import AtExit

# Exits while a transfer is under way, and so with every thread in native code.
PROGRAM = """
import jax.numpy as jnp, tpu_sync_rl as tsr
params = {str(i): jnp.ones((32, 1 << 18)) for i in range(8)}
trainer = tsr.connect_trainer(min_replicas=1, timeout=30, staging="STAGING")
sampler = tsr.connect_sampler(
    coordinator=trainer.coordinator, replica="0", like=params, timeout=30, staging="STAGING"
)
tsr.sync_weights(params, to=trainer)
tsr.sync_weights(params, to=trainer, wait=None)
print("exits")
"""


@pytest.mark.parametrize("staging", ["direct", "pinned_host"])
def test_program_that_exits_in_a_transfer_is_not_aborted(staging):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("STAGING", staging)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (0, "exits\n"), ended.stderr
    assert "terminate" not in ended.stderr


class Closed:
    def __init__(self) -> None:
        self.times = 0

    def close(self) -> None:
        self.times += 1


def test_objects_that_are_gone_are_not_called(monkeypatch):
    registered = []
    monkeypatch.setattr("atexit.register", registered.append)
    kept, gone = Closed(), Closed()
    hooks = [AtExit(kept.close), AtExit(gone.close)]
    del gone
    for call in registered:
        call()
    assert kept.times == 1 and len(hooks) == 2
