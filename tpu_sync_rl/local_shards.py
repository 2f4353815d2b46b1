"""The shards that one process holds of a program's leaves: which, of what shape, and where."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import jax
import numpy as np

from tpu_sync_rl.manifest import BoxLayout
from tpu_sync_rl.program import Program
from tpu_sync_rl.shard_table import ShardTable

# The buffer protocol knows NumPy's own dtypes alone.
_BUFFER_DTYPES = frozenset(np.dtype(code).name for code in "?bhilqBHILQefdFD")
# DLPack knows no elements below one byte, and JAX packs some of them.
_NARROW = re.compile(r"(u?int|float)[1-7](_|$)")


@dataclass(frozen=True, slots=True, eq=False)
class LocalShards:
    """The distinct shards of one process: leaves in the manifest's order, boxes ascending.

    The columns from `leaf` to `num_leaves` are what the native core has of them.
    """

    leaf: np.ndarray  # shape=[num_shards], dtype=uint32
    box: np.ndarray  # shape=[num_shards], dtype=uint32: index in the leaf's layout
    itemsize: np.ndarray  # shape=[num_shards], dtype=uint32
    kind: np.ndarray  # shape=[num_shards], dtype=uint8: FloatKind of csrc/cast.h
    rank: np.ndarray  # shape=[num_shards], dtype=uint32
    ranges: np.ndarray  # shape=[sum of 2 * rank], dtype=int64: the boxes, one behind the other
    num_leaves: int
    shapes: tuple[tuple[int, ...], ...]  # extents of each shard, in storage coordinates
    devices: tuple[tuple[jax.Device, ...], ...]  # per leaf: for each shard one that holds it
    first_shard: tuple[int, ...]  # per leaf, and at the end num_shards
    first_stride: tuple[int, ...]  # per leaf: where its strides begin in a flat array; the end
    in_place: tuple[bool, ...]  # per leaf: whether its memory can be read where it is
    is_key: tuple[bool, ...]  # per leaf: whether it is of typed PRNG keys
    has_buffer: tuple[bool, ...]  # per leaf: whether Python's buffer protocol knows its dtype

    @classmethod
    def of(cls, table: ShardTable, process: int) -> "LocalShards":
        """The shards of `table` that `process` holds; of equal ones the first device's."""
        manifest = table.manifest
        held = [_held_boxes(layout, process) for layout in manifest.layouts]
        per_leaf = [held[leaf.layout] for leaf in manifest.leaves]
        counts = [len(boxes) for boxes, _, _ in per_leaf]
        ranks = [len(manifest.layouts[leaf.layout].shape) for leaf in manifest.leaves]
        leaf = np.repeat(np.arange(len(per_leaf), dtype=np.uint32), counts)
        # Leaves of one sharding share a mapping of devices, so each is looked through once.
        devices: dict[int, tuple[jax.Device, ...]] = {}
        for (boxes, _, _), of_device in zip(per_leaf, table.device_boxes, strict=True):
            if id(of_device) not in devices:
                devices[id(of_device)] = _first_devices(of_device, boxes, process, table.program)
        return cls(
            leaf=leaf,
            box=_joined([boxes for boxes, _, _ in per_leaf], np.uint32),
            itemsize=np.array([x.itemsize for x in manifest.leaves], np.uint32)[leaf],
            kind=np.array([x.float_kind for x in manifest.leaves], np.uint8)[leaf],
            rank=np.array(ranks, np.uint32)[leaf],
            ranges=_joined([ranges for _, ranges, _ in per_leaf], np.int64),
            num_leaves=len(per_leaf),
            shapes=tuple(shape for _, _, shapes in per_leaf for shape in shapes),
            devices=tuple(devices[id(of_device)] for of_device in table.device_boxes),
            first_shard=tuple(accumulate(counts, initial=0)),
            first_stride=tuple(
                accumulate((n * rank for n, rank in zip(counts, ranks, strict=True)), initial=0)
            ),
            in_place=tuple(
                is_readable_in_place(x.dtype, devices[id(of_device)])
                for x, of_device in zip(manifest.leaves, table.device_boxes, strict=True)
            ),
            is_key=tuple(leaf.dtype.startswith("key<") for leaf in manifest.leaves),
            has_buffer=tuple(
                leaf.dtype in _BUFFER_DTYPES or leaf.dtype.startswith("key<")
                for leaf in manifest.leaves
            ),
        )

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        sizes = zip(self.itemsize.tolist(), self.shapes, strict=True)
        return sum(itemsize * prod(shape) for itemsize, shape in sizes)

    def nbytes_of(self, leaf: int) -> int:
        """Bytes of the shards of a leaf."""
        first, last = self.first_shard[leaf : leaf + 2]
        return (last - first) * self.shard_nbytes_of(leaf)

    def shard_nbytes_of(self, leaf: int) -> int:
        """Bytes of one shard of a leaf, which are all alike; 0 where there is none."""
        first, last = self.first_shard[leaf : leaf + 2]
        return int(self.itemsize[first]) * prod(self.shapes[first]) if first < last else 0


def _held_boxes(
    layout: BoxLayout, process: int
) -> tuple[np.ndarray, np.ndarray, list[tuple[int, ...]]]:
    """Indices of the boxes that `process` holds, their ranges one behind the other, extents."""
    boxes = layout.boxes_of(process)
    ranges = layout.boxes[boxes]
    return boxes, ranges.reshape(-1), [tuple(x) for x in (ranges[..., 1] - ranges[..., 0]).tolist()]


def _first_devices(
    of_device: Mapping[jax.Device, int], boxes: np.ndarray, process: int, program: Program
) -> tuple[jax.Device, ...]:
    first: dict[int, jax.Device] = {}
    for device, box in of_device.items():
        if program.holder(device) == process:
            first.setdefault(box, device)
    return tuple(first[box] for box in boxes.tolist())


def is_narrow(dtype: str) -> bool:
    """Whether elements of a dtype are below one byte: JAX may pack them, the core does not."""
    return _NARROW.match(dtype) is not None


def is_readable_in_place(dtype: str, devices: tuple[jax.Device, ...]) -> bool:
    """Whether elements of `dtype` can be read at the address of their buffers on `devices`."""
    return not is_narrow(dtype) and all(device.platform == "cpu" for device in devices)


def _joined(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(dtype)
