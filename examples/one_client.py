"""One JAX client sees two meshes: move params from the trainer's to the sampler's.

    python -m tpu_sync_rl.examples.one_client

Needs four devices or more. The params change sharding, dtype and devices, and are checked after.
"""

import os

# Eight CPU devices where there is no accelerator; JAX reads this when it is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tpu_sync_rl as tsr


def main() -> None:
    """Syncs two leaves from a 1x4 mesh in f32 to a 2x2 mesh in bf16, and checks them."""
    devices = np.array(jax.devices())
    half = len(devices) // 2
    trainer = Mesh(devices[:half].reshape(1, half), ("fsdp", "tp"))
    sampler = Mesh(devices[half:].reshape(2, half // 2), ("fsdp", "tp"))

    params = {
        "kernel": jax.random.normal(jax.random.key(0), (1024, 512)),
        "bias": jnp.arange(512.0),
    }
    params = jax.device_put(params, NamedSharding(trainer, P("tp")))

    # What the sampler wants: a tree of shapes, dtypes and shardings, matched by key.
    like = {
        "kernel": jax.ShapeDtypeStruct(
            (1024, 512), jnp.bfloat16, sharding=NamedSharding(sampler, P("fsdp", "tp"))
        ),
        "bias": jax.ShapeDtypeStruct((512,), jnp.bfloat16, sharding=NamedSharding(sampler, P())),
    }
    synced = tsr.sync_weights(params, to=like, cast=True)

    for key, leaf in synced.items():
        np.testing.assert_array_equal(leaf, params[key].astype(jnp.bfloat16))
        print(f"{key}: {leaf.dtype}{list(leaf.shape)} sharded {leaf.sharding.spec}")
    print(tsr.explain(params, like, cast=True))


if __name__ == "__main__":
    main()
