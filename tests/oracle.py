"""Params whose every byte follows from key and version, so that any process can check any shard."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

P = PartitionSpec


@dataclass(frozen=True)
class LeafSpec:
    """One leaf: global shape, dtype name ("key" for typed PRNG keys), spec on each side."""

    shape: tuple[int, ...]
    dtype: str
    trainer: PartitionSpec
    sampler: PartitionSpec


# Every kind of leaf that a tree may hold; dimensions divide by 4.
ODD_LEAVES = {
    "embed/table": LeafSpec((64, 32), "float32", P("tp", "fsdp"), P("tp", None)),
    "block/kernel": LeafSpec((32, 48), "bfloat16", P("fsdp", "tp"), P(None, ("fsdp", "tp"))),
    "block/bias": LeafSpec((48,), "float16", P(("fsdp", "tp")), P("tp")),
    "block/conv": LeafSpec((4, 1, 4, 2, 8), "float32", P("fsdp", None, "tp"), P(None, None, "tp")),
    "odd/complex": LeafSpec((8, 4), "complex64", P("fsdp"), P(None, "tp")),
    "odd/f8": LeafSpec((16, 16), "float8_e4m3fn", P("fsdp", "tp"), P("tp", "fsdp")),
    "odd/mask": LeafSpec((4, 12), "bool", P("fsdp"), P(None, "tp")),
    "odd/int4": LeafSpec((8, 8), "int4", P("fsdp"), P("tp")),
    "odd/scalar": LeafSpec((), "float32", P(), P()),
    "odd/count": LeafSpec((), "int32", P(), P()),
    "odd/empty": LeafSpec((0, 8), "float32", P(), P(None, "tp")),
    "odd/key": LeafSpec((4,), "key", P("fsdp"), P("tp")),
    "odd/replicated": LeafSpec((2304,), "bfloat16", P(), P("fsdp")),
}


def value(key: str, spec: LeafSpec, version: int) -> np.ndarray:
    """Bytes of a leaf in one version; of a PRNG key, its words."""
    rng = np.random.default_rng([version, zlib.crc32(key.encode())])
    if spec.dtype == "key":
        return rng.integers(0, 1 << 32, (*spec.shape, 2), np.uint32)
    dtype = jnp.dtype(spec.dtype)
    if spec.dtype == "bool":
        return rng.integers(0, 2, spec.shape).astype(bool)
    if spec.dtype == "int4":
        return rng.integers(-8, 8, spec.shape).astype(dtype)
    count = int(np.prod(spec.shape)) * dtype.itemsize
    return rng.integers(0, 256, count, np.uint8).view(dtype).reshape(spec.shape)


def make(key: str, spec: LeafSpec, version: int, sharding: NamedSharding) -> jax.Array:
    """The leaf as an array over `sharding`, made from this process's shards alone."""
    data = value(key, spec, version)
    if spec.dtype != "key":
        return jax.make_array_from_callback(spec.shape, sharding, lambda index: data[index])
    shards = [
        jax.random.wrap_key_data(jax.device_put(data[index], SingleDeviceSharding(device)))
        for device, index in sharding.addressable_devices_indices_map(spec.shape).items()
    ]
    dtype = jax.eval_shape(lambda: jax.random.key(0)).dtype
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, shards, dtype=dtype)


def params(
    specs: dict[str, LeafSpec], mesh: Mesh, version: int, column_major: Sequence[str] = ()
) -> dict[str, jax.Array]:
    """The trainer's tree in one version; `column_major` leaves are 2-D and lie column by column."""
    tree = {}
    for key, spec in specs.items():
        array = make(key, spec, version, NamedSharding(mesh, spec.trainer))
        if key in column_major:
            array = jax.device_put(array, Format(Layout((1, 0)), array.sharding))
        tree[key] = array
    return tree


def like(specs: dict[str, LeafSpec], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """What a sampler asks for, in another order of leaves than the trainer's."""
    key_dtype = jax.eval_shape(lambda: jax.random.key(0)).dtype
    return {
        key: jax.ShapeDtypeStruct(
            spec.shape,
            key_dtype if spec.dtype == "key" else jnp.dtype(spec.dtype),
            sharding=NamedSharding(mesh, spec.sampler),
        )
        for key, spec in reversed(specs.items())
    }


def assert_equal(
    tree: dict[str, jax.Array], specs: dict[str, LeafSpec], version: int, mesh: Mesh
) -> None:
    """Holds every byte, sharding and dtype of a sampler's params against the oracle."""
    assert tree.keys() == specs.keys()
    for key, spec in specs.items():
        array, expected = tree[key], value(key, spec, version)
        assert array.sharding == NamedSharding(mesh, spec.sampler), key
        assert array.shape == spec.shape and array.committed, key
        for shard in array.addressable_shards:
            data = jax.random.key_data(shard.data) if spec.dtype == "key" else shard.data
            found = np.asarray(data)
            wanted = np.ascontiguousarray(expected[shard.index])
            assert found.dtype == wanted.dtype, key
            assert found.tobytes() == wanted.tobytes(), f"{key} of version {version}"
