"""Where file descriptors are few, an error says how many, and nothing aborts."""

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

import tpu_sync_rl as tsr
from tpu_sync_rl.descriptors import check_descriptors

LIKE = {"w": jnp.zeros(4)}

# In a process whose gRPC has not begun, which is where it aborts.
PROGRAM = """
import os, resource, sys
import jax.numpy as jnp
import tpu_sync_rl as tsr

params = {"w": jnp.zeros(4)}
num_open = len(os.listdir("/proc/self/fd")) - 1
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 6, limits[1]))
for connect in (
    lambda: tsr.connect_trainer(timeout=20),
    lambda: tsr.connect_trainer(timeout=20, coordinator="127.0.0.1:1", host_coordinator=False),
    lambda: tsr.connect_sampler(coordinator="127.0.0.1:1", replica="s", like=params, timeout=20),
):
    try:
        connect()
    except tsr.SyncError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
with tsr.connect_trainer(timeout=20) as trainer:
    print(tsr.sync_weights(params, to=trainer).version)
"""


@contextlib.contextmanager
def few_left(num_left: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The next descriptors are above all that are open, whatever holes there are among these.
    top = max(map(int, os.listdir("/proc/self/fd"))) + 1
    filled = [os.open("/", os.O_PATH)]
    while filled[-1] < top:
        filled.append(os.open("/", os.O_PATH))
    resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + 1 + num_left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in filled:
            os.close(descriptor)


def test_as_many_as_are_needed_are_enough():
    with few_left(7):
        check_descriptors("a test", 7)
        with pytest.raises(tsr.SyncError) as raised:
            check_descriptors("a test", 8)
    assert "a test needs 8 file descriptors, and this process has 7 left" in str(raised.value)
    assert "`ulimit -n`" in str(raised.value) and isinstance(raised.value, OSError)


@pytest.mark.end_to_end
def test_connecting_with_six_left_raises_and_works_with_more():
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=90
    )
    assert ran.returncode == 0, ran.stderr
    *errors, version = ran.stdout.splitlines()
    assert len(errors) == 3 and version == "1"
    assert all("file descriptors" in text and "`ulimit -n`" in text for text in errors)


@pytest.mark.end_to_end
def test_coordinator_with_few_left_says_so():
    command = [sys.executable, "-m", "tpu_sync_rl.coordinator", "--address=127.0.0.1:0"]
    ran = subprocess.run(
        ["sh", "-c", 'ulimit -n 14; exec "$0" "$@"', *command],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: a coordinator needs 16 file descriptors")
