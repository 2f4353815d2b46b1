"""Which arrays a version becomes on a sampler, and where their shards lie in its memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Sharding

from tpu_sync_rl.local_shards import LocalShards
from tpu_sync_rl.shard_table import ShardTable
from tpu_sync_rl.tree import is_prng_key

_ALIGNMENT = 64  # bytes; JAX copies what is aligned less

Starts = tuple[int, ...]  # per dimension: shards of a leaf are of one shape, so these name a box


@dataclass(frozen=True, slots=True)
class _ArrayToMake:
    """What an array is, and which shard has which box."""

    shape: tuple[int, ...]
    dtype: Any
    stored: np.dtype[Any]  # of the elements in memory: uint32 for PRNG keys
    key_impl: Any  # what jax.random.wrap_key_data takes; None for other dtypes
    sharding: Sharding | Format
    devices: frozenset[jax.Device]  # of this process
    device: Any  # of an array that is not committed to it; else None
    first_shard: int
    shard_at: Mapping[Starts, int]  # without a key's words -> shard, counted from first_shard


@dataclass(frozen=True, slots=True, eq=False)
class GenerationLayout:
    """Where the shards of a version lie in its memory, and which arrays are made over them."""

    shards: LocalShards
    offsets: np.ndarray  # shape=[num_shards], dtype=uint64: bytes into the memory, aligned
    nbytes: int
    leaves: tuple[_ArrayToMake, ...]  # in the manifest's order
    copied: set[int]  # leaves of which JAX makes copies: when their bytes are there, not before
    aliased: set[int]  # leaves that were seen not to be; dtype, layout and alignment decide

    @classmethod
    def of(
        cls, table: ShardTable, leaves: Sequence[Any], *, process: int, commit: bool = False
    ) -> "GenerationLayout":
        """Lays out memory for arrays like `leaves`, of which `table` was made; keeps none of them.

        Arrays are committed to their devices where those of `leaves` are, or `commit` is set.
        """
        shards = LocalShards.of(table, process)
        sizes = [
            itemsize * prod(shape)
            for itemsize, shape in zip(shards.itemsize.tolist(), shards.shapes, strict=True)
        ]
        aligned = [-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in sizes]
        ends = np.cumsum([0, *aligned], dtype=np.uint64)
        shard_at: dict[tuple[int, int], Mapping[Starts, int]] = {}  # by layout and rank of the leaf
        made = []
        for leaf, position, first_shard in zip(
            table.manifest.leaves, table.order, shards.first_shard, strict=False
        ):
            rank = len(leaf.shape)
            if (leaf.layout, rank) not in shard_at:
                layout = table.manifest.layouts[leaf.layout]
                starts = layout.boxes[layout.boxes_of(process), :rank, 0].tolist()
                shard_at[leaf.layout, rank] = {tuple(x): i for i, x in enumerate(starts)}
            at = shard_at[leaf.layout, rank]
            made.append(_array_to_make(leaves[position], commit, first_shard, at))
        copied = {
            index
            for index, leaf in enumerate(made)
            if leaf.key_impl is not None or not shards.in_place[index]
        }
        return cls(shards, ends[:-1], int(ends[-1]), tuple(made), copied, set())


def _array_to_make(
    like: Any, commit: bool, first_shard: int, shard_at: Mapping[Starts, int]
) -> _ArrayToMake:
    is_key = is_prng_key(like)
    committed = commit or getattr(like, "committed", True)
    return _ArrayToMake(
        shape=tuple(like.shape),
        dtype=like.dtype,
        stored=np.dtype(np.uint32 if is_key else like.dtype),
        key_impl=key_impl(like.dtype) if is_key else None,
        devices=frozenset(like.sharding.addressable_devices),
        sharding=placement(like),
        device=None if committed else next(iter(like.sharding.device_set)),
        first_shard=first_shard,
        shard_at=shard_at,
    )


def placement(like: Any) -> Sharding | Format:
    """Where an array like this is to be: with its sharding, and its layout if that is odd."""
    sharding: Sharding = like.sharding
    layout = None if is_prng_key(like) else like.format.layout
    is_plain = layout is None or layout.major_to_minor == tuple(range(len(like.shape)))
    return sharding if is_plain else Format(layout, sharding)


def held_elsewhere(like: Any) -> jax.Array:
    """The array that `like` describes, in a process that has none of its shards."""
    placed = like.sharding
    sharding: Any = placed.sharding if isinstance(placed, Format) else placed
    return jax.make_array_from_single_device_arrays(like.shape, sharding, [], dtype=like.dtype)


@lru_cache
def key_impl(dtype: Any) -> Any:
    """What `jax.random.wrap_key_data` takes to make PRNG keys of `dtype`."""
    found: list[Any] = []
    jax.eval_shape(
        lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype)
    )
    return found[0]
