"""XLA's tiled layouts as its documents define them, in NumPy, for tests of the native core.

An array is permuted from major to minor. Then each tile of k dimensions pads the last k dimensions
up to multiples of it and moves what lies within a tile behind all other dimensions; the next tile
does so with what the one before has made. A tile of more dimensions than the array has sees ones
in front. Memory is the result, row by row.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

Tiles = Sequence[Sequence[int]]


def _cut(array: np.ndarray, tile: Sequence[int], padding: int) -> np.ndarray:
    array = array.reshape((1,) * (len(tile) - array.ndim) + array.shape)
    kept = array.shape[: array.ndim - len(tile)]
    counts = [-(-n // t) for n, t in zip(array.shape[len(kept) :], tile, strict=True)]
    whole = np.full((*kept, *(n * t for n, t in zip(counts, tile, strict=True))), padding)
    whole[tuple(slice(n) for n in array.shape)] = array
    pairs = whole.reshape(*kept, *(x for pair in zip(counts, tile, strict=True) for x in pair))
    outer = list(range(len(kept))) + [len(kept) + 2 * i for i in range(len(tile))]
    return pairs.transpose(outer + [len(kept) + 2 * i + 1 for i in range(len(tile))])


def padded(extents: Sequence[int], major_to_minor: Sequence[int], tiles: Tiles) -> int:
    """How many elements have room in memory, those of the padding among them."""
    shape = [extents[dim] for dim in major_to_minor]
    for tile in tiles:
        shape = [1] * (len(tile) - len(shape)) + shape
        kept = len(shape) - len(tile)
        shape[kept:] = [-(-n // t) for n, t in zip(shape[kept:], tile, strict=True)]
        shape += tile
    return prod(shape)


def elements(extents: Sequence[int], major_to_minor: Sequence[int], tiles: Tiles) -> np.ndarray:
    """Which element, counted row by row, each place in memory holds; -1 where it is padding."""
    count = int(np.prod(extents, dtype=np.int64))
    array = np.arange(count).reshape(extents).transpose(major_to_minor)
    for tile in tiles:
        array = _cut(array, tile, -1)
    return array.reshape(-1)


def to_memory(
    array: np.ndarray, major_to_minor: Sequence[int], tiles: Tiles, padding: int = 0xA5
) -> np.ndarray:
    """The bytes of `array` in that layout; every byte of the padding is `padding`."""
    held = elements(array.shape, major_to_minor, tiles)
    memory = np.full((len(held), array.itemsize), padding, np.uint8)
    rows = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, array.itemsize)
    memory[held >= 0] = rows[held[held >= 0]]
    return memory.reshape(-1)


def from_memory(
    memory: np.ndarray,
    extents: Sequence[int],
    dtype: np.dtype,
    major_to_minor: Sequence[int],
    tiles: Tiles,
) -> np.ndarray:
    """The array that `memory`, of bytes, holds in that layout."""
    held = elements(extents, major_to_minor, tiles)
    rows = np.zeros((np.count_nonzero(held >= 0), dtype.itemsize), np.uint8)
    rows[held[held >= 0]] = memory.reshape(-1, dtype.itemsize)[held >= 0]
    return rows.reshape(-1).view(dtype).reshape(extents)
