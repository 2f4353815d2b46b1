"""Digests of what a process of a trainer holds copies of, so that the copies can be compared.

They are of the memory that samplers read. No process sees the bytes of another one.
"""

import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from tpu_sync_rl import _native
from tpu_sync_rl.buffers import Aliases
from tpu_sync_rl.errors import SyncTimeoutError
from tpu_sync_rl.generations import NUM_THREADS
from tpu_sync_rl.local_shards import LocalShards
from tpu_sync_rl.manifest import BoxLayout, Manifest
from tpu_sync_rl.shared_boxes import SharedBoxes
from tpu_sync_rl.transport import shard_directory
from tpu_sync_rl.verification import pieces, ranges_of, volume

# What is read at a stretch, so that a deadline or an interrupt is noticed within a second.
_STRETCH_NBYTES = 1 << 30

# Per group of shared boxes, for each of its leaves 8 bytes: the digest of all that the group has.
LeafDigests = Mapping[int, bytes]


def combined(digests: LeafDigests) -> dict[int, bytes]:
    """Of each group one digest for all its leaves, as short as it is for any number of them."""
    return {group: sha256(of_leaves).digest()[:16] for group, of_leaves in digests.items()}


class _Piece(NamedTuple):
    """A part of a box: start and stop of each dimension, one after another."""

    box: int
    ranges: list[int]
    nbytes: int


class CopyDigests:
    """What one process of a program shares with others, version after version. For one thread."""

    def __init__(self, manifest: Manifest, shards: LocalShards, process: int) -> None:
        """Finds out what is shared; in a program of one process that is nothing, at no cost."""
        shared = SharedBoxes(manifest)
        self._groups = {group: shared.leaves(group) for group in shared.of_process(process)}
        self._requests: list[_native.DigestRequest] = []
        self._slots: list[int] = []  # per request, of the digests of all groups one after another
        self._stretches = [0]  # where one ends and the next one begins
        self._directory = shard_directory(shards) if self._groups else None
        slot, stretch_nbytes = 0, 0
        cut: dict[tuple[int, int, int], list[_Piece]] = {}  # leaves of one layout are cut alike
        for group, leaves in self._groups.items():
            for index in leaves:
                leaf = manifest.leaves[index]
                layout = manifest.layouts[leaf.layout]
                alike = (group, leaf.layout, leaf.itemsize)
                if alike not in cut:
                    cut[alike] = _cut(layout, shared.boxes(group, index), leaf.itemsize)
                for box, ranges, nbytes in cut[alike]:
                    self._requests.append(
                        _native.DigestRequest(index, box, 0, layout.shape, ranges)
                    )
                    self._slots.append(slot)
                    stretch_nbytes += nbytes
                    if stretch_nbytes >= _STRETCH_NBYTES:
                        self._stretches.append(len(self._requests))
                        stretch_nbytes = 0
                slot += 1
        self._stretches.append(len(self._requests))
        self._num_slots = slot

    @property
    def is_empty(self) -> bool:
        """Whether nothing is shared."""
        return not self._groups

    def of(self, aliases: Aliases, deadline: float) -> LeafDigests:
        """Reads all that is shared, once, where `aliases` pin it; without the GIL.

        Raises:
            SyncTimeoutError: `deadline` passed first.
        """
        if self._directory is None:
            return {}
        digests = np.zeros(self._num_slots, np.uint64)
        for first, last in zip(self._stretches, self._stretches[1:], strict=False):
            if time.monotonic() >= deadline:
                raise SyncTimeoutError("the copies on the trainer's processes were being compared")
            found = _native.shard_digests(
                self._directory,
                self._requests[first:last],
                aliases.addresses,
                aliases.strides,
                aliases.layouts,
                NUM_THREADS,
            )
            np.add.at(digests, self._slots[first:last], found)  # modulo 2**64, as digests add up
        told: dict[int, bytes] = {}
        slot = 0
        for group, leaves in self._groups.items():
            told[group] = digests[slot : slot + len(leaves)].astype("<u8").tobytes()
            slot += len(leaves)
        return told


def _cut(layout: BoxLayout, boxes: Sequence[int], itemsize: int) -> list[_Piece]:
    """Small pieces of what is in `boxes`, so that several threads share them out."""
    return [
        _Piece(box, [x for dim in piece for x in dim], volume(piece) * itemsize)
        for box in boxes
        for piece in pieces(ranges_of(*layout.boxes[box].T), itemsize)
        if volume(piece) > 0
    ]
