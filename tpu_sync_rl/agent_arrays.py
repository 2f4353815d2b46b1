"""The arrays of agents: on the CPU devices beside others, and such as their calls take and return.

A call can't take or return PRNG keys, but their data.
"""

import jax
import numpy as np
from jax.experimental.colocated_python import colocated_cpu_devices
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from tpu_sync_rl.generation_layout import key_impl
from tpu_sync_rl.tree import is_prng_key

Devices = tuple[jax.Device, ...]


def beside(key: str, sharding: Sharding | None) -> Sharding:
    """Where an agent has what is sharded like this: on the CPU devices beside its devices.

    Raises:
        ValueError: it is no NamedSharding, nor one of a single device.
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        mesh = sharding.mesh
        cpus = cpu_devices(tuple(mesh.devices.flat))
        beside_mesh = Mesh(
            np.array(cpus).reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types
        )
        return NamedSharding(beside_mesh, sharding.spec)
    if isinstance(sharding, SingleDeviceSharding):
        return SingleDeviceSharding(cpu_devices(tuple(sharding.device_set))[0])
    raise ValueError(
        f"leaf {key!r} has sharding {sharding}, expected a NamedSharding for agents: "
        "jax.device_put(x, NamedSharding(mesh, P(…)))"
    )


def cpu_devices(devices: Devices) -> Devices:
    """The CPU device beside each of `devices`; of CPU devices those themselves."""
    if all(device.platform == "cpu" for device in devices):
        return devices  # of some of them, JAX 0.10 takes others in the same process
    return tuple(colocated_cpu_devices(devices))


def devices_of(sharding: Sharding) -> Devices:
    """The devices of a sharding that `beside` made, in its order."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sharding.device_set)


def to_data(leaf: jax.Array) -> jax.Array:
    """A leaf as calls of agents take and return it: of PRNG keys their data. Copies nothing."""
    return jax.random.key_data(leaf) if is_prng_key(leaf) else leaf


def from_data(array: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """The leaf of which `to_data` made `array`."""
    if is_prng_key(like) and not is_prng_key(array):
        keys: jax.Array = jax.random.wrap_key_data(array, impl=key_impl(like.dtype))
        return keys
    return array
