"""Holds the arrays of a version against its source: digests of what lies in memory at both ends.

Nothing here knows how bytes were moved. What a source is asked for follows from the two manifests,
what lies here from the arrays themselves. So a mistake on the way between the two memories shows,
be it in the plan, in a copy, in the memory of a generation or in how arrays were made.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_sync_rl import _native
from tpu_sync_rl.buffers import byte_strides
from tpu_sync_rl.generations import NUM_THREADS
from tpu_sync_rl.local_shards import is_readable_in_place
from tpu_sync_rl.manifest import BoxLayout
from tpu_sync_rl.moving import moving
from tpu_sync_rl.plan import Plan
from tpu_sync_rl.tree import is_prng_key

# What one request is for, at most: sources of a box share it out, and serve others in between.
_PIECE_NBYTES = 4 << 20
_SHOWN = 5

Ranges = tuple[tuple[int, int], ...]  # of a box: start and stop per dimension


class Box(NamedTuple):
    """A box of a leaf of the sampler, in global coordinates."""

    leaf: int
    ranges: Ranges


class Verification:
    """What one sampler process verifies of every version of a trainer incarnation.

    Attributes:
        requests: to each source process: the digests that it is asked for.
    """

    def __init__(self, plan: Plan) -> None:
        """Finds out who has what. Of `plan` it takes the manifests, and who is read from.

        A process is asked only about leaves that the plan reads from it: it does not keep the
        others for this sink.
        """
        self._sink = plan.sink
        self.requests: dict[int, list[_native.DigestRequest]] = defaultdict(list)
        self._asked_for: dict[int, list[Box]] = defaultdict(list)  # what each request is a part of
        self._expected: list[Box] = []
        load: dict[int, int] = dict.fromkeys(plan.source_processes, 0)
        readings = plan.readings()
        common: dict[tuple[int, int], list[tuple[Ranges, list[tuple[int, Ranges]]]]] = {}
        for pair in plan.pairs:
            given, leaf = plan.source.leaves[pair.source_leaf], plan.sink.leaves[pair.sink_leaf]
            layout = plan.source.layouts[given.layout]
            layouts = (given.layout, leaf.layout)
            if layouts not in common:
                common[layouts] = _in_common(layout, plan.sink.layouts[leaf.layout], plan.process)
            for ranges, parts in common[layouts]:
                box = Box(pair.sink_leaf, ranges)
                self._expected.append(box)
                for source_box, part in parts:
                    holders = [
                        process
                        for process in _holders(layout, source_box)
                        if (pair.source_leaf, process) in readings
                    ]
                    if not holders:
                        continue  # the plan should have read it: what is here will differ
                    for piece in pieces(part, max(given.itemsize, leaf.itemsize)):
                        process = min(holders, key=load.__getitem__)
                        load[process] += volume(piece) * given.itemsize
                        flat = [x for dim in piece for x in dim]
                        self.requests[process].append(
                            _native.DigestRequest(
                                pair.source_leaf, source_box, pair.op, layout.shape, flat
                            )
                        )
                        self._asked_for[process].append(box)

    @moving()
    def digests_of(self, leaves: Sequence[jax.Array]) -> list[tuple[Box, int]]:
        """The digest of every shard that lies here, of `leaves` in the manifest's order.

        Copies on several devices count each. Reads the arrays' own memory, without the GIL.
        """
        boxes: list[Box] = []
        parts: list[_Part] = []
        for index, array in enumerate(leaves):
            shape = self._sink.layouts[self._sink.leaves[index].layout].shape
            shards = array.addressable_shards
            is_key = is_prng_key(array)
            datas = [jax.random.key_data(x.data) if is_key else x.data for x in shards]
            order = _order(datas)
            for shard, data in zip(shards, datas, strict=True):
                every = shard.index + (slice(None),) * (len(shape) - len(shard.index))
                ranges = tuple(
                    x.indices(extent)[:2] for x, extent in zip(every, shape, strict=True)
                )
                boxes.append(Box(index, ranges))
                parts.append(_Part.of(data, order, shape, ranges))
        digests = _native.digests(
            np.array([part.address for part in parts], np.uint64),
            np.array([part.itemsize for part in parts], np.uint32),
            np.array([len(part.shape) for part in parts], np.uint32),
            np.array([x for part in parts for x in part.shape], np.int64),
            np.array([x for part in parts for dim in part.ranges for x in dim], np.int64),
            np.array([x for part in parts for x in part.strides], np.int64),
            NUM_THREADS,
        )
        return list(zip(boxes, digests.tolist(), strict=True))

    def differences(
        self, found: Sequence[tuple[Box, int]], answers: Mapping[int, Sequence[int]]
    ) -> str:
        """The boxes that differ, for people; "" where all are what the sources have.

        Args:
            found: from `digests_of`.
            answers: per source process, of its `requests` in their order.
        """
        expected = dict.fromkeys(self._expected, 0)
        for process, boxes in self._asked_for.items():
            for box, digest in zip(boxes, answers[process], strict=True):
                expected[box] = (expected[box] + digest) % 2**64
        wrong = {box: None for box, digest in found if expected.get(box) != digest}
        wrong |= dict.fromkeys(expected.keys() - {box for box, _ in found})
        lines = [
            f"leaf {self._sink.leaves[box.leaf].key!r}, box "
            f"[{', '.join(f'{start}:{stop}' for start, stop in box.ranges)}]"
            for box in wrong
        ]
        if len(lines) > _SHOWN:
            lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} more boxes"]
        return "; ".join(lines)


class _Part(NamedTuple):
    """Elements of a box, where they lie."""

    address: int
    itemsize: int
    shape: tuple[int, ...]  # of the leaf
    ranges: Ranges
    strides: tuple[int, ...]  # in bytes
    pin: Any  # keeps the memory

    @classmethod
    def of(
        cls, data: Any, order: tuple[int, ...] | None, shape: tuple[int, ...], ranges: Ranges
    ) -> "_Part":
        """What one device holds; copied to the host where `order` is None."""
        itemsize = data.dtype.itemsize
        if order is None:
            host = np.array(data, order="C")
            return cls(host.ctypes.data, itemsize, shape, ranges, host.strides, host)
        strides = byte_strides(data.shape, order, itemsize)
        return cls(data.unsafe_buffer_pointer(), itemsize, shape, ranges, strides, data)


def _order(datas: Sequence[Any]) -> tuple[int, ...] | None:
    """Dimensions of all of an array's parts from major to minor; None: can't be read in place."""
    devices = tuple(device for data in datas for device in data.devices())
    if not datas or not is_readable_in_place(datas[0].dtype.name, devices):
        return None
    order: tuple[int, ...] = datas[0].format.layout.major_to_minor
    return order


def _in_common(
    source: BoxLayout, sink: BoxLayout, process: int
) -> list[tuple[Ranges, list[tuple[int, Ranges]]]]:
    """Each box of `process` at the sink, and what each source box has of it."""
    found = []
    for box in sink.boxes[sink.boxes_of(process)]:
        starts = np.maximum(source.boxes[..., 0], box[:, 0])
        stops = np.minimum(source.boxes[..., 1], box[:, 1])
        overlapping = np.flatnonzero((starts < stops).all(axis=1)).tolist()
        parts = [(i, ranges_of(starts[i], stops[i])) for i in overlapping]
        found.append((ranges_of(box[:, 0], box[:, 1]), parts))
    return found


def ranges_of(starts: np.ndarray, stops: np.ndarray) -> Ranges:
    """A box from its starts and stops, each of them per dimension."""
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def _holders(layout: BoxLayout, box: int) -> list[int]:
    first, last = layout.holder_offsets[box : box + 2].tolist()
    holders: list[int] = layout.holders[first:last].tolist()
    return holders


def volume(ranges: Ranges) -> int:
    """Elements of a box."""
    return prod(stop - start for start, stop in ranges)


def pieces(ranges: Ranges, itemsize: int) -> Iterator[Ranges]:
    """`ranges`, halved along the first dimension that can be until each piece is small."""
    if volume(ranges) * itemsize <= _PIECE_NBYTES:
        yield ranges
        return
    dim = next(i for i, (start, stop) in enumerate(ranges) if stop - start > 1)
    start, stop = ranges[dim]
    middle = (start + stop) // 2
    for half in ((start, middle), (middle, stop)):
        yield from pieces((*ranges[:dim], half, *ranges[dim + 1 :]), itemsize)
