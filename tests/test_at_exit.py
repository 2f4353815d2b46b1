"""The end of programs that leave their sessions open."""

import os
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


# Threads come back from native code while the interpreter is being taken down.
NATIVE_PROGRAM = """
import sys, threading, time
import numpy as np
from test_transport import Fetcher, make_plan

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

late = Late()
fetcher = Fetcher(make_plan(), peer_timeout_s=20.0)
memory = np.zeros(1 << 23, np.uint8)
fetcher.begin(1, np.full(2, memory.ctypes.data, np.uint64))
threading.Thread(target=lambda: fetcher.wait(0.5), daemon=True).start()
time.sleep(0.1)
print("exits")
sys.exit(3)
"""

JAX_PROGRAM = """
import sys
import jax, jax.numpy as jnp
import tpu_sync_rl as tsr

@jax.jit
def step(x, n):
    return jax.lax.fori_loop(0, n, lambda _, x: x @ x, x)

x = jnp.ones((300, 300))
step(x, 1)
trainer = tsr.connect_trainer(timeout=30)
try:
    tsr.sync_weights({"x": step(x, 1000)}, to=trainer, timeout=0)
except tsr.SyncTimeoutError as error:
    print("exits" if "being computed" in str(error) else error)
sys.exit(3)
"""


@pytest.mark.parametrize("program", [NATIVE_PROGRAM, JAX_PROGRAM], ids=["native", "jax"])
def test_thread_that_waits_in_native_code_changes_nothing_of_an_exit(program):
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (3, "exits\n"), ended.stderr
    assert ended.stderr == ""


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
