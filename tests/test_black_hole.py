"""A rail that swallows large packets: what calls and the log say of it."""

import contextlib
import subprocess
import sys

import pytest
from slow_link import SlowLink

from tpu_sync_rl.bench import netns
from tpu_sync_rl.bench.netns import CONTROL, Namespaces

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]
PASSES_NBYTES = 1500
COORDINATOR = f"{CONTROL.trainer_host}:8476"
TRAINER = f"""
import os, sys
import jax.numpy as jnp
import tpu_sync_rl as tsr
trainer = tsr.connect_trainer(coordinator="{COORDINATOR}", min_replicas=1, nics=["rail0"])
print("connected", flush=True)
try:
    trainer.sync_weights({{"w": jnp.ones(1_000_000)}}, timeout=6)
except tsr.SyncTimeoutError as error:
    print(error, flush=True)
sys.stdin.read()
os._exit(0)
"""
SAMPLER = f"""
import logging, os, sys
import jax.numpy as jnp
import tpu_sync_rl as tsr
logging.basicConfig(level=logging.INFO)
like = {{"w": jnp.ones(1_000_000)}}
sampler = tsr.connect_sampler(
    coordinator="{COORDINATOR}", replica="s", like=like, nics=["rail0"]
)
try:
    sampler.sync_weights(timeout=5)
except tsr.SyncTimeoutError as error:
    print(error, flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture
def namespaces(monkeypatch):
    try:
        netns.check_rights()
    except RuntimeError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TSR_TOKEN", "secret")
    with (
        Namespaces([]) as namespaces,
        SlowLink(namespaces, mtu_nbytes=9000, passes_nbytes=PASSES_NBYTES),
    ):
        yield namespaces


@contextlib.contextmanager
def python(namespace, *arguments):
    command = ["ip", "netns", "exec", namespace, sys.executable, *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as program:
        try:
            yield program
        finally:
            program.kill()


def test_timeouts_and_log_say_which_streams_get_nothing(namespaces):
    with (
        python(namespaces.trainer, "-c", TRAINER) as trainer,
        python(namespaces.sampler, "-c", SAMPLER) as sampler,
    ):
        assert trainer.stdout.readline() == "connected\n"
        of_sampler = sampler.stdout.readline()
        of_trainer = trainer.stdout.readline()
        sampler_log = sampler.communicate(timeout=30)[1]
    way = "trainer process 0, rail rail0-rail0: 2 streams get nothing, for "
    assert f"process 0 reads from {way}" in of_sampler
    assert way in of_trainer
    assert way in sampler_log
