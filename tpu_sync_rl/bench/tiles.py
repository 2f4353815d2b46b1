"""`bench tiles`: shards in XLA's tiles, from memory to memory, beside shards in rows.

One thread copies one shard of each common tiling into tiles, from there to other tiles, and out of
them. Each round copies rows to rows first, and ends with the bytes that it began with.
"""

import argparse
import time

import numpy as np

from tpu_sync_rl import _native
from tpu_sync_rl.bench import figures
from tpu_sync_rl.bench.cases import NUM_WARMUPS
from tpu_sync_rl.bench.figures import Figure, Row

Tiles = tuple[tuple[int, ...], ...]

TILINGS: dict[str, tuple[int, Tiles]] = {  # bytes of an element, and tiles
    "T(8,128), 4 bytes": (4, ((8, 128),)),
    "T(8,128)(2,1), 2 bytes": (2, ((8, 128), (2, 1))),
    "T(16,128)(2,1), 2 bytes": (2, ((16, 128), (2, 1))),
    "T(8,128)(4,1), 1 byte": (1, ((8, 128), (4, 1))),
    "T(32,128)(4,1), 1 byte": (1, ((32, 128), (4, 1))),
}
MOVES = ("into tiles", "from tiles to tiles", "out of tiles")
_ROW_NBYTES = 16 << 10
_CHUNK_NBYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--nbytes",
        type=figures.count,
        default=128 << 20,
        help="bytes of the shard, about (default: %(default)s)",
    )
    figures.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        RuntimeError: bytes came back wrong.
    """
    num_rows = max(1, args.nbytes // _ROW_NBYTES)
    rows = []
    for name, (itemsize, tiles) in TILINGS.items():
        shard = _Shard((num_rows, _ROW_NBYTES // itemsize), itemsize, tiles)
        rounds = [shard.round() for _ in range(NUM_WARMUPS + args.rounds)][NUM_WARMUPS:]
        limit = Figure("rows to rows", [sample["rows to rows"] for sample in rounds])
        rows += [
            Row(Figure(f"{name}: {move}", [sample[move] for sample in rounds]), limit)
            for move in MOVES
        ]
    figures.print_table(
        f"a shard of {num_rows * _ROW_NBYTES / 1e9:.3f} GB, one thread; every byte of "
        f"{args.rounds} rounds verified",
        rows,
    )
    figures.write_json(args, rows, nbytes=num_rows * _ROW_NBYTES)


class _Shard:
    """One shard in rows and in tiles, twice each."""

    def __init__(self, shape: tuple[int, int], itemsize: int, tiles: Tiles) -> None:
        box = np.array([[0, extent] for extent in shape], np.int64)
        zero, one = np.zeros(1, np.uint32), np.ones(1, np.uint32)
        whole = _native.BoxLayout(np.array(shape), box, np.array([0, 1], np.uint32), zero)
        pair = np.array([[0, 0, 0, 1, itemsize, itemsize, 0]], np.uint32)
        self._plan = _native.make_plan([whole, whole], pair, 0, _CHUNK_NBYTES)
        self._directory = _native.ShardDirectory(
            zero, zero, itemsize * one, np.zeros(1, np.uint8), 2 * one, box, 1
        )
        self._strides = np.array([shape[1] * itemsize, itemsize], np.int64)
        self._tiles = _native.ShardLayout(shape, itemsize, (0, 1), tiles)
        self._nbytes = shape[0] * _ROW_NBYTES
        self._memory = [
            _native.HostMemory(nbytes, 2)
            for nbytes in [self._nbytes] * 2 + [self._tiles.nbytes] * 2
        ]
        self._began, self._ended = (
            np.frombuffer(memoryview(memory), np.uint8)[: self._nbytes]
            for memory in self._memory[:2]
        )
        self._began[:] = np.random.default_rng(0).integers(0, 256, self._nbytes, np.uint8)

    def round(self) -> dict[str, float]:
        """GB/s of every move, by its name."""
        began, ended, tiled, again = self._memory
        moves = [(began, ended), (began, tiled), (tiled, again), (again, ended)]
        speeds = {}
        for name, (source, sink) in zip(("rows to rows", *MOVES), moves, strict=True):
            self._ended[:] = 0
            speeds[name] = self._nbytes / self._copy_s(source, sink) / 1e9
        if not np.array_equal(self._ended, self._began):
            raise RuntimeError("a shard came back from tiles with other bytes")
        return speeds

    def _copy_s(self, source: _native.HostMemory, sink: _native.HostMemory) -> float:
        in_tiles = self._memory[2:]
        began = time.monotonic()
        copy = _native.LocalCopy(
            self._plan,
            self._directory,
            np.array([source.address], np.uint64),
            self._strides,
            np.array([sink.address], np.uint64),
            1,
            {0: self._tiles} if sink in in_tiles else {},
        )
        copy.set_pinned(1, self._tiles if source in in_tiles else None)
        copy.finish()
        return time.monotonic() - began
