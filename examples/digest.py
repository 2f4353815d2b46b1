"""Digests of params: equal bits at equal places give equal digests, however they are sharded."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils

Words = npt.NDArray[np.uint64]


def digest_params(params: Any) -> dict[str, int]:
    """One 64-bit digest per key of `params`, equal in all processes of the program.

    The digest of a leaf is the sum, modulo 2^64, of its elements' bits times a weight drawn from
    their global position, so moved elements count as well as changed ones. Blocks until the params
    are computed; a collective where the program has several processes.
    """
    keys = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    sums = np.array([_local_sum(leaf) for leaf in jax.tree.leaves(params)], np.uint64)
    if jax.process_count() > 1:
        # As 32-bit words: JAX would cut 64-bit ones.
        words = multihost_utils.process_allgather(sums.view(np.uint32))
        sums = np.ascontiguousarray(words).view(np.uint64).sum(axis=0, dtype=np.uint64)
    return dict(zip(keys, sums.tolist(), strict=True))


@jax.jit
def digests_on_device(params: Any) -> list[jax.Array]:
    """32-bit digests of the leaves of `params`, made where they lie; no weight comes to the host.

    As `digest_params`, of elements of two or four bytes.
    """
    return [_word(leaf) for leaf in jax.tree.leaves(params)]


def _word(leaf: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(leaf, f"u{leaf.dtype.itemsize}").astype(jnp.uint32)
    # Odd weights that differ from place to place, so that moved elements count.
    weights = (2 * jnp.arange(leaf.size, dtype=jnp.uint32) + 1) * jnp.uint32(0x9E3779B1)
    return jnp.sum((bits.reshape(-1) + 1) * (weights ^ (weights >> 15)), dtype=jnp.uint32)


def _local_sum(leaf: jax.Array) -> int:
    total = 0
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            bits = np.asarray(shard.data).reshape(-1).view(f"u{leaf.dtype.itemsize}")
            weights = _mix(_positions(leaf.shape, shard.index).reshape(-1))
            total += int(((bits.astype(np.uint64) + np.uint64(1)) * weights).sum(dtype=np.uint64))
    return total % 2**64


def _positions(shape: tuple[int, ...], index: tuple[slice, ...]) -> Words:
    """Row-major positions in an array of `shape` of the elements that `index` selects."""
    positions = np.zeros((), np.uint64)
    for dim, (extent, part) in enumerate(zip(shape, index, strict=True)):
        stride = math.prod(shape[dim + 1 :])
        steps = np.arange(*part.indices(extent), dtype=np.uint64) * np.uint64(stride)
        positions = np.add.outer(positions, steps)
    return positions


def _mix(positions: Words) -> Words:
    """Scatters `positions` over all 64-bit numbers: the output function of SplitMix64."""
    x = (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
