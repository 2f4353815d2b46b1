"""`bench local`: one JAX client, from the mesh of four devices to that of four others.

Each round measures memcpy into reused memory with as many threads (the fastest of three ways),
`jax.device_put` across the same meshes, and `tpu_sync_rl.sync_weights`, one after the other.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import tpu_sync_rl as tsr
from tpu_sync_rl.bench import figures, models
from tpu_sync_rl.bench.cases import NUM_WARMUPS
from tpu_sync_rl.bench.figures import Figure, Row
from tpu_sync_rl.bench.memcpy_limit import MemcpyLimit
from tpu_sync_rl.generations import NUM_THREADS

MOVES = {
    "same sharding": ((1, 4), (1, 4)),
    "1x4 to 2x2": ((1, 4), (2, 2)),
    "axis 0 to 1": ((4, 1), (1, 4)),
}
NUM_DEVICES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    models.add_arguments(parser)
    figures.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table and writes the JSON.

    Raises:
        RuntimeError: bytes of a result are wrong.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    leaves = models.along_axes(models.model(args.model, args.nbytes))
    nbytes = models.model_nbytes(leaves)
    rows = []
    with MemcpyLimit(nbytes, NUM_THREADS) as limit:
        for name, (trainer, sampler) in MOVES.items():
            rows += _rows(args, limit, name, _Move(leaves, trainer, sampler))
    figures.print_table(
        f"{args.model}: {len(leaves):,} bf16 leaves, {nbytes / 1e9:.3f} GB, in one process; "
        f"every byte of {args.rounds} versions a row verified; memcpy: {limit.way}",
        rows,
    )
    figures.write_json(args, rows, nbytes=nbytes, memcpy=limit.way)


class _Move:
    """Params on one mesh, and the ways to get them to another."""

    def __init__(
        self, leaves: models.Model, trainer: tuple[int, int], sampler: tuple[int, int]
    ) -> None:
        devices = np.array(jax.devices())
        half = NUM_DEVICES // 2
        self._like = models.structs(leaves, Mesh(devices[:half].reshape(trainer), models.AXES))
        target = models.structs(leaves, Mesh(devices[half:].reshape(sampler), models.AXES))
        self._to = {key: leaf.sharding for key, leaf in target.items()}
        self._nbytes = models.model_nbytes(leaves)
        self._params: dict[str, jax.Array] | None = None

    def make(self, version: int) -> None:
        self._params = models.make_params(self._like, version, self._params)

    def sync(self, version: int) -> float:
        return self._timed(lambda: tsr.sync_weights(self._params, to=self._to), version)

    def device_put(self, version: int) -> float:
        return self._timed(lambda: jax.device_put(self._params, self._to), version)

    def _timed(self, move: Callable[[], Any], version: int) -> float:
        """GB/s of `move`, whose result is checked and dropped."""
        began = time.monotonic()
        moved = jax.block_until_ready(move())
        seconds = time.monotonic() - began
        models.refuse_wrong(models.wrong_leaves(moved, version), f"version {version}")
        return self._nbytes / seconds / 1e9


def _rows(args: argparse.Namespace, limit: MemcpyLimit, name: str, move: _Move) -> list[Row]:
    ours, copies, puts = [], [], []
    for version in range(1, NUM_WARMUPS + args.rounds + 1):
        move.make(version)
        copies.append(limit.gbytes_per_s())
        puts.append(move.device_put(version))
        ours.append(move.sync(version))
    synced, memcpy, put = (
        Figure(label, samples[NUM_WARMUPS:])
        for label, samples in ((name, ours), ("memcpy", copies), ("jax.device_put", puts))
    )
    return [Row(synced, memcpy), Row(synced, put)]
