"""A sampler of the smallest job with separate programs; trainer.py is its other half.

    python -m tpu_sync_rl.examples.trainer &
    python -m tpu_sync_rl.examples.sampler

It may be started before the trainer or while that runs, as often as you like under other names.
"""

import argparse

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tpu_sync_rl as tsr


@jax.jit
def answer(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """What the params say about `x`."""
    return params["slope"] * x + params["offset"]


def main(coordinator: str, replica: str) -> None:
    """Answers one question with every version that it gets, until the trainer has ended the job."""
    # The params as this program wants them: on its own devices, in its own shardings.
    sharding = NamedSharding(Mesh(jax.devices(), ("tp",)), P())
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)
    like = {"slope": scalar, "offset": scalar}
    print(f"waiting for the trainer at {coordinator}", flush=True)
    with tsr.connect_sampler(coordinator=coordinator, replica=replica, like=like) as session:
        for update in session:
            y = answer(update.params, jnp.float32(1.0))
            print(f"version {update.version}: f(1) = {y:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A sampler of the smallest job.")
    parser.add_argument("coordinator", nargs="?", default="127.0.0.1:8476", help="host:port")
    parser.add_argument("replica", nargs="?", default="sampler-0", help="unique within the job")
    main(**vars(parser.parse_args()))
