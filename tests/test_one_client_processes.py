"""One-client sync in a program of two processes: what each of them can reach, and what not."""

import os
import socket
import subprocess
import sys

PROGRAM = """
import sys
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tpu_sync_rl.one_client import sync_weights

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
me = jax.process_index()
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("host", "chip"))
own = Mesh(np.array(jax.local_devices()), ("chip",))
values = np.arange(64.0, dtype=np.float32).reshape(8, 8)

def make(*spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

def check(result):
    for shard in result.addressable_shards:
        assert (np.asarray(shard.data) == values[shard.index]).all()

params = {"w": make("host", "chip"), "r": make()}
to = NamedSharding(mesh, P("host"))
for _ in range(2):
    result = sync_weights(params, to=to)
    assert result["w"].sharding == result["r"].sharding == to
    check(result["w"])
    check(result["r"])

with pytest.raises(ValueError, match="'w': .*use connect_trainer and connect_sampler"):
    sync_weights(params, to=NamedSharding(mesh, P("chip")))
with pytest.raises(ValueError, match="'w': .*use connect_trainer and connect_sampler"):
    sync_weights(params, to=NamedSharding(own, P()))
check(sync_weights({"r": params["r"]}, to=NamedSharding(own, P("chip")))["r"])

alone = {"count": jax.numpy.full((), me), "w": jax.device_put(values, jax.local_devices()[1])}
result = sync_weights(alone, to=NamedSharding(own, P()))
assert int(result["count"]) == me
check(result["w"])

elsewhere = Mesh(np.array(jax.devices()[:4]), ("chip",))
result = sync_weights({"r": params["r"]}, to=NamedSharding(elsewhere, P("chip")))["r"]
assert len(result.addressable_shards) == (4 if me == 0 else 0)
assert (result.shape, result.dtype) == ((8, 8), np.float32)
check(result)

# Leaves that are replicated there, too, and of every rank.
params = {"r": params["r"], "s": jax.device_put(np.float32(3), NamedSharding(mesh, P()))}
result = sync_weights(params, to=NamedSharding(elsewhere, P()))
assert len(result["s"].addressable_shards) == (4 if me == 0 else 0)
assert result["s"].shape == ()
check(result["r"])

# What lies in one process alone comes to no other: no process says that it did.
other = Mesh(np.array(jax.devices()[4:]), ("chip",))
for key, leaf in result.items():
    with pytest.raises(ValueError, match=f"'{key}': .*of process 1: use connect_trainer and"):
        sync_weights({key: leaf}, to=NamedSharding(other, P()))
"""


def test_a_process_moves_what_it_holds_and_refuses_what_others_hold() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(index)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
