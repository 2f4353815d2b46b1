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


def test_import_loads_nothing_heavy():
    run(
        "import tpu_sync_rl\nassert not {'jax', 'numpy', 'grpc', 'rich', 'absl'} & set(sys.modules)"
    )


def test_import_of_every_public_name_starts_nothing():
    run("""
import grpc, jax, numpy
before = world()
import tpu_sync_rl as tsr
for name in tsr.__all__:
    assert getattr(tsr, name) is not None
assert world() == before, (before, world())
""")


def test_public_names_need_no_rich_flags_or_flax():
    run("""
import jax
before = set(sys.modules)
import tpu_sync_rl as tsr
for name in tsr.__all__:
    getattr(tsr, name)
new = set(sys.modules) - before
assert not {"rich", "absl.flags", "flax"} & new, sorted(new)
""")


def test_one_client_needs_no_grpc():
    run("""
import jax
import tpu_sync_rl as tsr
sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
assert tsr.sync_weights({"w": jax.numpy.ones(3)}, to=sharding)["w"].sum() == 3
assert "grpc" not in sys.modules
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


def test_dir_lists_what_is_public():
    run("""
import tpu_sync_rl as tsr
tsr.sync_weights
assert [name for name in dir(tsr) if not name.startswith("_")] == sorted(tsr.__all__)
assert "__version__" in dir(tsr)
""")
