"""A rail that swallows large packets: what calls, the log and the doctor say of it."""

import contextlib
import json
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


def test_timeouts_log_and_doctor_say_what_is_wrong(namespaces):
    with (
        python(namespaces.trainer, "-c", TRAINER) as trainer,
        python(namespaces.sampler, "-c", SAMPLER) as sampler,
    ):
        assert trainer.stdout.readline() == "connected\n"
        of_sampler = sampler.stdout.readline()
        of_trainer = trainer.stdout.readline()
        doctor = ["-m", "tpu_sync_rl.doctor", f"--coordinator={COORDINATOR}", "--nics=rail0"]
        with python(namespaces.sampler, *doctor, "--json") as asked:
            found = {x["subject"]: x for x in json.loads(asked.communicate(timeout=60)[0])}
        sampler_log = sampler.communicate(timeout=30)[1]
    way = "trainer process 0, rail rail0-rail0: 2 streams get nothing, for "
    assert f"process 0 reads from {way}" in of_sampler
    assert way in of_trainer
    assert way in sampler_log
    assert way in found["replica s"]["seen"] or "lost" in found["replica s"]["seen"]
    rail = found["rail rail0-rail0 to trainer process 0"]
    assert rail["verdict"] == "broken"
    assert rail["seen"].endswith("packets above 1500 bytes vanish between 10.99.1.2 and 10.99.1.1")
    assert "set the MTU of both NICs to 1500" in rail["advice"]
    assert "sysctl -w net.ipv4.tcp_mtu_probing=1" in rail["advice"]
