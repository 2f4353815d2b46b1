"""Importing the package has no effect but names."""

import subprocess
import sys

PROBE = """
import os, sys, threading

def world():
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{fd}")]
    tasks = sorted(os.listdir("/proc/self/task"))
    return dict(os.environ), threading.active_count(), tasks, sorted(
        link for link in links if link.startswith(("socket:", "anon_inode:")))
"""


def run(code):
    subprocess.run([sys.executable, "-c", PROBE + code], check=True, timeout=120)


def test_import_loads_neither_jax_nor_numpy():
    run("import tpu_sync_rl\nassert not {'jax', 'numpy', 'grpc'} & set(sys.modules)")


def test_import_of_every_public_name_starts_nothing():
    run("""
import grpc, jax, numpy
before = world()
import tpu_sync_rl as tsr
for name in tsr.__all__:
    assert getattr(tsr, name) is not None
assert world() == before, (before, world())
""")


def test_one_client_needs_no_grpc_rich_or_flags():
    run("""
import jax
before = set(sys.modules)
import tpu_sync_rl as tsr
tsr.sync_weights, tsr.explain, tsr.Report, tsr.SyncError
new = set(sys.modules) - before
assert not {"grpc", "rich", "absl.flags", "flax"} & new, sorted(new)
""")


def test_sessions_need_no_rich_or_flags():
    run("""
import grpc, jax
before = set(sys.modules)
import tpu_sync_rl as tsr
tsr.connect_trainer, tsr.connect_sampler
new = set(sys.modules) - before
assert not {"rich", "absl.flags", "flax"} & new, sorted(new)
""")


def test_unknown_name_is_an_attribute_error():
    run("""
import tpu_sync_rl
try:
    tpu_sync_rl.nothing
except AttributeError as error:
    assert "no attribute 'nothing'" in str(error)
else:
    raise AssertionError
""")
