"""Digests tell params apart by bits and places, and not by shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tpu_sync_rl.examples.digest import digest_params

VALUES = np.arange(48, dtype=np.float32).reshape(8, 6)


def digest(values, dtype=jnp.bfloat16):
    return digest_params({"kernel": jnp.asarray(values, dtype)})["kernel"]


@pytest.mark.parametrize(
    "spec", [PartitionSpec("x"), PartitionSpec(None, "y"), PartitionSpec("y", "x")], ids=str
)
def test_sharding_does_not_matter(spec):
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    array = jax.device_put(jnp.asarray(VALUES), NamedSharding(mesh, spec))
    assert digest_params({"kernel": array})["kernel"] == digest(VALUES, jnp.float32)


@pytest.mark.parametrize(
    "changed",
    [VALUES[::-1], VALUES[:, ::-1], np.roll(VALUES, 1), np.where(VALUES == 7, 7.5, VALUES)],
    ids=["rows swapped", "columns swapped", "moved by one", "one element"],
)
def test_moved_and_changed_elements_matter(changed):
    assert digest(changed) != digest(VALUES)


def test_zeros_of_either_sign_differ():
    assert digest(np.zeros(4)) != digest(-np.zeros(4))


def test_digest_is_the_weighted_sum_of_bits():
    mask = 2**64 - 1

    def weight(position):
        x = (position + 1) * 0x9E3779B97F4A7C15 & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    bits = VALUES.view(np.uint32).ravel().tolist()
    expected = sum((word + 1) * weight(i) for i, word in enumerate(bits)) & mask
    assert digest(VALUES, jnp.float32) == expected


def test_scalars_and_empty_leaves_have_digests():
    digests = digest_params({"scale": jnp.float32(2.0), "none": jnp.zeros((0, 3))})
    assert digests["none"] == 0
    assert digests["scale"] != 0
