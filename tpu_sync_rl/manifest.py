"""The manifest: what the leaves of a program are and who holds which box, as data and as bytes.

Needs NumPy alone, so that programs without JAX can read one. It is immutable, and its digest names
it: equal digests mean equal plans, so that chunk tables can be replayed.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np

from tpu_sync_rl.errors import ManifestError

MAX_RANK = 32
MAX_ITEMSIZE = 16  # complex128
_MAX_ELEMENTS = 2**63 // MAX_ITEMSIZE  # so that a leaf's bytes can be counted in an int64

# dtype name -> FloatKind of csrc/cast.h: what `cast=True` can convert between.
FLOAT_KINDS = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}


@dataclass(frozen=True, slots=True, eq=False)
class BoxLayout:
    """How leaves of one global shape lie over processes.

    Box b is held by processes `holders[holder_offsets[b]:holder_offsets[b + 1]]`, ascending.
    """

    shape: tuple[int, ...]
    boxes: np.ndarray  # shape=[num_boxes, rank, 2], dtype=int64: start and stop, all different
    holder_offsets: np.ndarray  # shape=[num_boxes + 1], dtype=uint32
    holders: np.ndarray  # shape=[num_holders], dtype=uint32

    def identity(self) -> tuple[object, ...]:
        """A hashable value that equal layouts share."""
        arrays = (self.boxes, self.holder_offsets, self.holders)
        return (self.shape, *(array.tobytes() for array in arrays))

    def boxes_of(self, process: int) -> np.ndarray:
        """Indices of the boxes that `process` holds, ascending. shape=[n], dtype=int64."""
        offsets = self.holder_offsets.astype(np.int64)
        owners: np.ndarray = np.repeat(np.arange(len(self.boxes)), offsets[1:] - offsets[:-1])
        held: np.ndarray = owners[self.holders == process]
        return held


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a program. `layout` is an index into the manifest's layouts."""

    key: str
    dtype: str  # NumPy's name, or "key<impl>" for typed PRNG keys
    itemsize: int  # bytes that one element (one word of a PRNG key) takes in memory
    shape: tuple[int, ...]  # as JAX has it; a PRNG key's layout has its words as a dimension more
    layout: int

    @property
    def float_kind(self) -> int:
        """FloatKind of csrc/cast.h, 0 where the dtype can't be cast."""
        return FLOAT_KINDS.get(self.dtype, 0)


class _WireLayout(msgspec.Struct, array_like=True):
    shape: list[int]
    boxes: bytes
    holder_offsets: bytes
    holders: bytes


class _WireLeaf(msgspec.Struct, array_like=True):
    key: str
    dtype: str
    itemsize: int
    shape: list[int]
    layout: int


class _WireManifest(msgspec.Struct, array_like=True):
    format: int
    num_processes: int
    layouts: list[_WireLayout]
    leaves: list[_WireLeaf]


_FORMAT = 1


@dataclass(frozen=True, eq=False)
class Manifest:
    """Leaves of a whole program, ascending by key, over `num_processes` processes."""

    leaves: tuple[Leaf, ...]
    layouts: tuple[BoxLayout, ...]
    num_processes: int

    @cached_property
    def encoded(self) -> bytes:
        """The manifest's bytes: little endian, the same in every process of a program."""
        layouts = [
            _WireLayout(
                list(layout.shape),
                layout.boxes.astype("<i8").tobytes(),
                layout.holder_offsets.astype("<u4").tobytes(),
                layout.holders.astype("<u4").tobytes(),
            )
            for layout in self.layouts
        ]
        leaves = [
            _WireLeaf(leaf.key, leaf.dtype, leaf.itemsize, list(leaf.shape), leaf.layout)
            for leaf in self.leaves
        ]
        wire = _WireManifest(_FORMAT, self.num_processes, layouts, leaves)
        return msgspec.msgpack.encode(wire)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `encoded`, in hex."""
        return hashlib.sha256(self.encoded).hexdigest()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all leaves, each element once."""
        return sum(self.leaf_nbytes(leaf) for leaf in self.leaves)

    def leaf_nbytes(self, leaf: Leaf) -> int:
        """Bytes of one leaf, each element once."""
        return leaf.itemsize * prod(self.layouts[leaf.layout].shape)

    @classmethod
    def decode(cls, data: bytes) -> "Manifest":
        """The manifest that a peer sent as `data`.

        Raises:
            ValueError: these bytes are no manifest, or one that contradicts itself.
        """
        try:
            wire = msgspec.msgpack.decode(data, type=_WireManifest)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a manifest: {error}") from error
        if wire.format != _FORMAT:
            raise ValueError(f"manifest of format {wire.format}, expected {_FORMAT}")
        if wire.num_processes < 1:
            raise ValueError(f"manifest of {wire.num_processes} processes")
        layouts = tuple(_layout_from(layout, wire.num_processes) for layout in wire.layouts)
        leaves = tuple(
            Leaf(leaf.key, leaf.dtype, leaf.itemsize, tuple(leaf.shape), leaf.layout)
            for leaf in wire.leaves
        )
        for before, leaf in zip((None, *leaves), leaves, strict=False):
            if before is not None and before.key >= leaf.key:
                raise ValueError(f"manifest has leaf {leaf.key!r} behind {before.key!r}")
            if not 0 <= leaf.layout < len(layouts) or not 0 < leaf.itemsize <= MAX_ITEMSIZE:
                raise ValueError(f"manifest is wrong about leaf {leaf.key!r}: {leaf}")
            stored = layouts[leaf.layout].shape
            is_key = leaf.dtype.startswith("key<")
            if (stored[: len(leaf.shape)] if is_key else stored) != leaf.shape:
                raise ValueError(f"manifest has another layout than shape for leaf {leaf.key!r}")
        return cls(leaves, layouts, wire.num_processes)


def _layout_from(wire: _WireLayout, num_processes: int) -> BoxLayout:
    rank = len(wire.shape)
    extents_fit = all(0 <= extent < _MAX_ELEMENTS for extent in wire.shape)
    if rank > MAX_RANK or not extents_fit or prod(wire.shape) >= _MAX_ELEMENTS:
        raise ValueError(f"manifest has a layout of shape {wire.shape}")
    try:
        offsets = np.frombuffer(wire.holder_offsets, "<u4").astype(np.uint32)
        holders = np.frombuffer(wire.holders, "<u4").astype(np.uint32)
        boxes = np.frombuffer(wire.boxes, "<i8").astype(np.int64)
        boxes = boxes.reshape(len(offsets) - 1, rank, 2)
    except ValueError as error:
        raise ValueError(f"manifest has a broken layout: {error}") from error
    rising = len(offsets) > 0 and offsets[0] == 0 and (offsets[1:] > offsets[:-1]).all()
    if not rising or offsets[-1] != len(holders) or (holders >= num_processes).any():
        raise ValueError(f"manifest has wrong holders for a layout of shape {wire.shape}")
    starts, stops = boxes[..., 0], boxes[..., 1]
    if ((starts < 0) | (starts > stops) | (stops > np.array(wire.shape, np.int64))).any():
        raise ValueError(f"manifest has a box outside of shape {wire.shape}")
    return BoxLayout(tuple(wire.shape), boxes, offsets, holders)


Rename = Mapping[str, str] | Callable[[str], str] | None


@dataclass(frozen=True, slots=True)
class Pair:
    """A leaf of the trainer and the leaf of the sampler that takes its bytes, by index."""

    source_leaf: int
    sink_leaf: int
    op: int  # Op of csrc/cast.h: 0 copies, else FloatKinds from << 4 | to


class Sides(NamedTuple):
    """What people call the source and the sink, and how a leaf lies there: "on" or "in"."""

    source: str
    sink: str
    lies: str


TRAINER_AND_SAMPLER = Sides("the trainer", "the sampler", "on")


def match(
    source: Manifest,
    sink: Manifest,
    *,
    rename: Rename = None,
    cast: bool = False,
    sides: Sides = TRAINER_AND_SAMPLER,
) -> tuple[list[Pair], list[str]]:
    """Pairs the leaves of `source` and `sink` by key, and lists everything that does not fit.

    Args:
        rename: from the source's keys to the sink's; keys that a mapping lacks stay as they are.
        cast: allow one float dtype to become another.
        sides: the words for both in the differences.

    Returns:
        The pairs in the order of `sink`, and the differences as lines for people, each with its
        key and both sides' values. The pairs hold for a plan only where there is no difference.

    Raises:
        TypeError: `rename` gives a key that is no str.
    """
    differences: list[str] = []
    by_key: dict[str, int] = {}
    for index, leaf in enumerate(source.leaves):
        key = renamed(leaf.key, rename)
        if key in by_key:
            first = source.leaves[by_key[key]].key
            differences.append(f"{key!r}: both {first!r} and {leaf.key!r} are renamed to it")
        by_key[key] = index
    if isinstance(rename, Mapping):
        unknown = sorted(rename.keys() - {leaf.key for leaf in source.leaves})
        differences += [f"{key!r}: renamed, but {sides.source} has no such leaf" for key in unknown]
    pairs: list[Pair] = []
    for sink_leaf, leaf in enumerate(sink.leaves):
        source_leaf = by_key.pop(leaf.key, None)
        if source_leaf is None:
            differences.append(
                f"{leaf.key!r}: {sides.sink} wants {leaf.dtype}{list(leaf.shape)}, "
                f"{sides.source} has no such leaf"
            )
            continue
        op, differing = _compare(source.leaves[source_leaf], leaf, cast, sides)
        differences += differing
        pairs.append(Pair(source_leaf, sink_leaf, op))
    for key, index in by_key.items():
        given = source.leaves[index]
        differences.append(
            f"{key!r}: {sides.source} has {given.dtype}{list(given.shape)}, "
            f"{sides.sink} has no such leaf"
        )
    return pairs, differences


def _compare(given: Leaf, wanted: Leaf, cast: bool, sides: Sides) -> tuple[int, list[str]]:
    """The op that makes `wanted` of `given`, and how they differ beyond what it can mend."""
    differences = []
    here, there = f"{sides.lies} {sides.source}", f"{sides.lies} {sides.sink}"
    if given.shape != wanted.shape:
        differences.append(
            f"{wanted.key!r}: shape {list(given.shape)} {here}, {list(wanted.shape)} {there}"
        )
    if given.dtype == wanted.dtype:
        return 0, differences
    floats = given.float_kind > 0 and wanted.float_kind > 0
    if floats and cast:
        return given.float_kind << 4 | wanted.float_kind, differences
    hint = " (cast=True would convert it)" if floats else ""
    if cast:
        hint = f" (cast=True converts only between {', '.join(FLOAT_KINDS)})"
    differences.append(f"{wanted.key!r}: dtype {given.dtype} {here}, {wanted.dtype} {there}{hint}")
    return 0, differences


def rounded(
    original: Manifest, holder: Manifest, wanted: Manifest, pairs: Sequence[Pair]
) -> list[str]:
    """Leaves that are not what `original` gives once `wanted` has made them of `holder`'s.

    A holder may have cast what it got from `original`. That is of use where exactly its dtype is
    wanted. `pairs` are those of `holder` and `wanted`; the lines are for people.
    """
    dtypes = {leaf.key: leaf.dtype for leaf in original.leaves}
    lines = []
    for pair in pairs:
        given, dtype = holder.leaves[pair.source_leaf], wanted.leaves[pair.sink_leaf].dtype
        if given.dtype not in (dtype, dtypes.get(given.key)):
            lines.append(f"{given.key!r}: {given.dtype} made of {dtypes.get(given.key)}")
    return lines


def check_unchanged(first: Manifest, manifest: Manifest) -> None:
    """Raises ManifestError where `manifest` is not the `first` of a trainer's session."""
    if manifest.digest != first.digest:
        raise ManifestError(
            "the params differ from those of the first sync_weights of this session: "
            + "; ".join(changes(first, manifest))
        )


def changes(one: Manifest, other: Manifest) -> list[str]:
    """Every leaf that two manifests of one program have differently, as lines for people."""
    lines = []
    ours, theirs = _described(one), _described(other)
    for key in sorted(ours.keys() | theirs.keys()):
        (was, layout), (found, other_layout) = ours.get(key, _ABSENT), theirs.get(key, _ABSENT)
        if was != found:
            lines.append(f"{key!r}: {was} against {found}")
        elif layout != other_layout:
            lines.append(f"{key!r}: {was} against the same over other devices")
    return lines


_ABSENT: tuple[str, object] = ("no such leaf", None)


def _described(manifest: Manifest) -> dict[str, tuple[str, object]]:
    return {
        leaf.key: (
            f"{leaf.dtype}{list(leaf.shape)}",
            manifest.layouts[leaf.layout].identity(),
        )
        for leaf in manifest.leaves
    }


def renamed(key: str, rename: Rename) -> str:
    """The key that the source's `key` has at the sink. Raises TypeError where that is no str."""
    if rename is None:
        return key
    other = rename.get(key, key) if isinstance(rename, Mapping) else rename(key)
    if not isinstance(other, str):
        raise TypeError(f"rename makes {other!r} of {key!r}, expected a str")
    return other
