"""Params whose every byte follows from seed, incarnation, version and key; no JAX in here."""

import hashlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

Box = tuple[tuple[int, int], ...]  # start and stop per dimension
Digests = dict[str, dict[str, str]]  # key -> box -> digest of its bytes

AXES = ("fsdp", "tp")


@dataclass(frozen=True)
class Leaf:
    """Global shape, dtype, and per dimension the mesh axes on either side."""

    shape: tuple[int, ...]
    dtype: Any
    trainer: tuple[Any, ...]
    sampler: tuple[Any, ...]


# 1.4 MB in several shardings; dimensions divide by 4.
LEAVES = {
    "embed/table": Leaf((512, 256), np.float32, ("tp", "fsdp"), ("tp",)),
    "block/up": Leaf((256, 512), ml_dtypes.bfloat16, ("fsdp", "tp"), (None, ("fsdp", "tp"))),
    "block/down": Leaf((512, 256), ml_dtypes.bfloat16, ("tp", "fsdp"), ("fsdp", "tp")),
    "block/experts": Leaf((4, 64, 256), np.int32, ("fsdp", None, "tp"), (None, "tp")),
    "block/norm": Leaf((256,), np.float32, ("fsdp",), ()),
    "block/mask": Leaf((64, 512), np.uint8, (("fsdp", "tp"),), (None, "tp")),
    "step": Leaf((), np.int32, (), ()),
}


def value(seed: int, incarnation: str, version: int, key: str) -> np.ndarray:
    """The leaf `key` of one version."""
    leaf = LEAVES[key]
    rng = np.random.default_rng([seed, int(incarnation, 16), version, zlib.crc32(key.encode())])
    nbytes = int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
    return np.frombuffer(rng.bytes(nbytes), leaf.dtype).reshape(leaf.shape)


def digest(data: np.ndarray) -> str:
    """Names the bytes of an array, row-major."""
    return hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()


def encode_box(box: Box) -> str:
    """A box as text, which JSON may have for a key."""
    return ",".join(f"{start}:{stop}" for start, stop in box)


def box_of(index: Iterable[slice], shape: tuple[int, ...]) -> Box:
    """A JAX shard's index as a box."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


@lru_cache(maxsize=64)
def _values(seed: int, incarnation: str, version: int) -> dict[str, np.ndarray]:
    return {key: value(seed, incarnation, version, key) for key in LEAVES}


def differences(seed: int, incarnation: str, version: int, found: Digests) -> list[str]:
    """Keys and boxes of what a process returned that are not those of this version."""
    if found.keys() != LEAVES.keys():
        return [f"keys {sorted(found)}"]
    wrong = []
    for key, data in _values(seed, incarnation, version).items():
        if not found[key]:
            wrong.append(f"{key}: nothing")
        for text, name in found[key].items():
            ranges = [part.split(":") for part in text.split(",") if part]
            box = tuple(slice(int(start), int(stop)) for start, stop in ranges)
            if len(box) != data.ndim or digest(data[box]) != name:
                wrong.append(f"{key}[{text}]")
    return wrong
