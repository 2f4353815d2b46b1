"""The trainer of the smallest job with separate programs; sampler.py is its other half.

    python -m tpu_sync_rl.examples.trainer &
    python -m tpu_sync_rl.examples.sampler

It fits a straight line to points, and publishes the params after each step.
"""

import argparse

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tpu_sync_rl as tsr

STEPS = 20


@jax.jit
def train_step(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """One step of gradient descent on the squared error of `slope * x + offset`."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((params["slope"] * x + params["offset"] - y) ** 2)

    slope, offset = params["slope"], params["offset"]
    grad = jax.grad(loss)(params)
    return {"slope": slope - 0.5 * grad["slope"], "offset": offset - 0.5 * grad["offset"]}


def main(coordinator: str) -> None:
    """Trains with one sampler that follows, and ends the job when the sampler has the last step."""
    x = jnp.linspace(-1.0, 1.0, 100)
    y = 3.0 * x + 2.0
    # In a program of several processes, every leaf needs a sharding over all of its devices.
    mesh = Mesh(jax.devices(), ("fsdp",))
    params = jax.device_put(
        {"slope": jnp.zeros(()), "offset": jnp.zeros(())}, NamedSharding(mesh, P())
    )
    print(f"waiting for a sampler at {coordinator}", flush=True)
    with tsr.connect_trainer(coordinator=coordinator, min_replicas=1) as session:
        for step in range(STEPS):
            params = train_step(params, x, y)
            report = tsr.sync_weights(params, to=session, version=step)
            print(f"step {step}: {report.wire_nbytes} bytes to {list(report.replicas)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The trainer of the smallest job.")
    parser.add_argument("coordinator", nargs="?", default="127.0.0.1:8476", help="host:port")
    main(**vars(parser.parse_args()))
