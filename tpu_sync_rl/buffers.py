"""PJRT buffer aliases: where the bytes of this process's shards lie, and what keeps them there."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout

from tpu_sync_rl._native import ShardLayout
from tpu_sync_rl.local_shards import LocalShards
from tpu_sync_rl.manifest import Manifest
from tpu_sync_rl.moving import moving
from tpu_sync_rl.program import Program
from tpu_sync_rl.shard_table import ShardTable, is_array, no_array, shard_table, signature
from tpu_sync_rl.tree import flatten


class Aliases:
    """Addresses and strides of every local shard of one version, and the pins that hold them.

    Pinned bytes stay as they are when the array is donated: on CPU, JAX copies instead. Shards
    whose memory can't be read in place (elements below one byte, devices that are not CPUs) are
    copied to the host. Not thread-safe: one thread at a time, any one.
    """

    def __init__(self, manifest: Manifest, shards: LocalShards) -> None:
        """Pins nothing yet."""
        self.manifest = manifest
        self.shards = shards  # those that addresses and strides are of, in their order
        self.addresses = np.zeros(shards.num_shards, np.uint64)
        self.strides = np.zeros(shards.first_stride[-1], np.int64)  # bytes, per shard and dimension
        self.layouts: dict[int, ShardLayout] = {}  # of leaves in tiles; their strides are void
        self._pins: dict[int, list[Any]] = {}  # leaf -> what keeps its shards
        self._arrays: list[weakref.ref[jax.Array]] = []

    def pin(
        self, arrays: Sequence[jax.Array], on_pinned: Callable[[int], object] = lambda _: None
    ) -> None:
        """Pins `arrays`, computed ones, in the order of the manifest; only pins refer to them.

        `on_pinned` hears, leaf after leaf, how many of the shards have their addresses and strides.

        Raises:
            ValueError: a leaf is deleted; the message has its key.
        """
        self._arrays = [weakref.ref(array) for array in arrays]
        with moving(), _collector_paused():
            for leaf, array in enumerate(arrays):
                try:
                    self._take(leaf, array)
                except RuntimeError as error:
                    if not array.is_deleted():
                        raise
                    raise ValueError(_deleted(self.manifest.leaves[leaf].key)) from error
                on_pinned(self.shards.first_shard[leaf + 1])

    @property
    def landed(self) -> list[int] | None:
        """Leaves whose bytes are there by now; None where all are."""
        return None

    def holds(self, leaf: int) -> bool:
        """Whether the shards of `leaf`, an index in the manifest, are pinned."""
        return leaf in self._pins

    def drop(self, leaves: Iterable[int]) -> None:
        """Lets go of the pins of `leaves`; nobody may read at their addresses any more."""
        for leaf in leaves:
            self._pins.pop(leaf, None)

    def drop_all(self) -> None:
        """Lets go of every pin."""
        self.drop(list(self._pins))  # one by one, so that other threads get their turn

    @moving()
    def retake(self) -> bool:
        """Pins again whatever was let go; False, with nothing changed, where an array is gone.

        Safe against other threads that donate the arrays meanwhile.
        """
        taken: list[int] = []
        for leaf, reference in enumerate(self._arrays):
            if leaf in self._pins:
                continue
            array = reference()
            try:
                if array is None or array.is_deleted():
                    raise RuntimeError
                self._take(leaf, array)
            except RuntimeError:  # what JAX raises for an array that is deleted meanwhile
                self.drop(taken)
                return False
            taken.append(leaf)
        return True

    def _take(self, leaf: int, array: jax.Array) -> None:
        self._hold(leaf, self._parts(leaf, array))

    def _parts(self, leaf: int, array: jax.Array) -> list[jax.Array]:
        """The shards of `leaf`, each an array of one device."""
        if not self.shards.devices[leaf]:
            return []
        parts = _parts(array, self.shards.devices[leaf])
        return [jax.random.key_data(part) for part in parts] if self.shards.is_key[leaf] else parts

    def _hold(self, leaf: int, parts: list[jax.Array]) -> list[Any]:
        """Pins `parts`, and notes where they lie. Returns what keeps them there."""
        if not parts:
            self._pins[leaf] = []
            return []
        shards = self.shards
        first, last = shards.first_shard[leaf], shards.first_shard[leaf + 1]
        pins: list[Any]
        if self._is_in_place(leaf):
            addresses = [part.unsafe_buffer_pointer() for part in parts]
            pins, order = self._held(leaf, parts)
        else:
            pins, order = [np.array(part, order="C") for part in parts], None
            addresses = [pin.ctypes.data for pin in pins]
        strides = byte_strides(shards.shapes[first], order, shards.itemsize.item(first))
        self.addresses[first:last] = addresses
        self.strides[shards.first_stride[leaf] : shards.first_stride[leaf + 1]] = strides * (
            last - first
        )
        self._pins[leaf] = pins
        return pins

    def _is_in_place(self, leaf: int) -> bool:
        """Whether its shards can be read where they are."""
        return self.shards.in_place[leaf]

    def _held(self, leaf: int, parts: list[Any]) -> tuple[list[Any], tuple[int, ...] | None]:
        """What keeps the buffers of `parts`, and their dimensions from major to minor, if odd."""
        if self.shards.has_buffer[leaf]:
            try:
                # A third of a capsule's cost; JAX makes them of memory in plain rows alone.
                return [memoryview(part) for part in parts], None
            except BufferError:
                pass
        # Tiles in the layout of an array on a CPU are what was asked for: they make its buffer
        # longer, but XLA's code for CPUs goes by the order of the dimensions alone.
        order = layout_of(parts[0]).major_to_minor
        # An opaque capsule: while it lives, so does the buffer, whatever the dtype or layout.
        return [part.__dlpack__() for part in parts], order


def layout_of(part: Any) -> Layout:
    """How an array lies in memory. Raises RuntimeError where it is deleted."""
    layout: Layout | None = part.format.layout
    if layout is None:
        raise RuntimeError("Array has been deleted")  # as JAX says elsewhere
    return layout


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Keeps Python's garbage collector off while many objects are made that all live on.

    It would pass over everything that JAX holds, again and again, and find nothing: half of the
    time that pinning 10,000 leaves of 4 shards took.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _parts(array: jax.Array, devices: tuple[jax.Device, ...]) -> list[jax.Array]:
    """What `devices` hold of `array`."""
    if not array.is_fully_replicated:
        data = {shard.device: shard.data for shard in array.addressable_shards}
        return [data[device] for device in devices]
    if array.sharding.num_devices == 1:
        return [array]
    # JAX takes it apart for one shard alone, where `addressable_shards` makes them all.
    return [array.addressable_data(0)]


@lru_cache
def byte_strides(
    shape: tuple[int, ...], order: tuple[int, ...] | None, itemsize: int
) -> tuple[int, ...]:
    """Byte strides of a dense array whose dimensions are `order` from major to minor (rows)."""
    strides = [0] * len(shape)
    step = itemsize
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _deleted(key: str) -> str:
    return f"leaf {key!r} has been deleted (donated?): give the params that the step returned"


class AliasResolver:
    """Aliases of a program's params, version after version.

    Remembers what the leaves look like, so that a version like the one before costs only its
    addresses. Not thread-safe.
    """

    def __init__(
        self,
        program: Program | None = None,
        make: Callable[[Manifest, LocalShards], Aliases] = Aliases,
    ) -> None:
        """`make` makes the aliases of one version, which pin nothing yet."""
        self._program = program or Program.here()
        self._make = make
        self._known: tuple[Any, ...] = ()  # treedef and signature of the leaves last seen
        self._table: ShardTable
        self._shards: LocalShards

    def resolve(self, params: Any) -> tuple[Aliases, list[jax.Array]]:
        """Aliases for `params`, and the arrays to pin by them. Waits until those are computed.

        Raises:
            TypeError: a leaf is no jax.Array; the message has its key.
            ValueError: a leaf that can't be synced, or is deleted; the message has its key.
        """
        leaves, treedef = jax.tree.flatten(params)
        known = (treedef, signature(leaves))
        if known != self._known:
            keys, leaves, _ = flatten(params)
            self._table = shard_table(keys, leaves, wanted=False, program=self._program)
            self._shards = LocalShards.of(self._table, self._program.index)
            self._known = known
        arrays = computed(self._table, leaves)
        return self._make(self._table.manifest, self._shards), arrays


def computed(table: ShardTable, leaves: Sequence[Any]) -> list[jax.Array]:
    """`leaves`, of which `table` was made, in the order of its manifest; waits for their values.

    Raises:
        TypeError: a leaf is no jax.Array; the message has its key.
        ValueError: a leaf is deleted; the message has its key.
    """
    arrays = [leaves[i] for i in table.order]
    check_alive([leaf.key for leaf in table.manifest.leaves], arrays)
    jax.block_until_ready(arrays)
    return arrays


def check_alive(keys: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raises TypeError where a leaf is no jax.Array, ValueError where it is deleted; by its key."""
    for key, leaf in zip(keys, leaves, strict=True):
        if not is_array(leaf):
            raise no_array(key, leaf)
        if leaf.is_deleted():
            raise ValueError(_deleted(key))
