"""Shards as XLA's compilers for TPUs lay them out, in `tpu_layouts.json`, made by `tpu_aot.py`."""

import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import permutations
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tpu_aot
from test_tiles import Move, Side, copy_local, stream

from tpu_sync_rl import _native

GOLDEN = json.loads(tpu_aot.GOLDEN.read_text())
SHARDS: list[dict[str, Any]] = GOLDEN["shards"]


def name(row: dict[str, Any]) -> str:
    return f"{row['dtype']}{row['shape']} over {row['mesh']} {row['spec']}".replace("None", "-")


def shard_shape(row: dict[str, Any]) -> tuple[int, ...]:
    axes = dict(zip("xy", row["mesh"], strict=True))
    cuts = [axes.get(axis, 1) for axis in row["spec"]]
    return tuple(extent // cut for extent, cut in zip(row["shape"], cuts, strict=True))


def test_generations_and_layouts_of_note_are_covered() -> None:
    assert set(GOLDEN["generations"]) == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    tilings = {(row["dtype"], str(row["tiles"])) for row in SHARDS}
    for note in (
        *(("bfloat16", "[[8, 128], [2, 1]]"), ("bfloat16", "[[2, 128], [2, 1]]")),
        *(("bfloat16", "[[1024], [128], [2, 1]]"), ("bfloat16", "[[256]]")),
        *(("int8", "[[32, 128], [4, 1]]"), ("float8_e4m3fn", "[[32, 128], [4, 1]]")),
        *(("int4", "[[64, 128], [8, 1]]"), ("float32", "[[4, 128]]"), ("float32", "[[1, 128]]")),
    ):
        assert note in tilings
    assert len(SHARDS) >= 200
    assert any(row["order"] != sorted(row["order"]) for row in SHARDS)


@pytest.mark.parametrize("row", SHARDS, ids=name)
def test_a_shard_takes_the_bytes_that_xla_gives_it(row: dict[str, Any]) -> None:
    """Elements below one byte are as many, and lie as those of one byte would, packed."""
    bits = row["bits"] or 8 * jnp.dtype(row["dtype"]).itemsize
    layout = _native.ShardLayout(
        shard_shape(row), max(1, bits // 8), tuple(row["order"]), row["tiles"]
    )
    assert layout.nbytes * min(bits, 8) // 8 == row["nbytes"]


PROVED = [row for row in SHARDS if row["bitcast"] is not None]


@pytest.mark.parametrize("row", PROVED, ids=name)
def test_elements_lie_in_the_order_that_xla_folds_to_a_bitcast(row: dict[str, Any]) -> None:
    assert row["bitcast"], "the compiler moves bytes where the view should move none"
    shape, order = tuple(row["shape"]), tuple(row["order"])
    view, axes = tpu_aot.view_of_memory(shape, order, row["tiles"][0])
    array = np.arange(prod(shape), dtype=np.uint32).reshape(shape)
    memory = np.ascontiguousarray(array.reshape(view).transpose(axes))
    whole = [tuple(slice(0, extent) for extent in shape)]
    source = Side(whole, shape, array.dtype, order, tuple(map(tuple, row["tiles"])), [memory])
    rows = np.zeros(shape, np.uint32)
    sink = Side(whole, shape, array.dtype, tuple(range(len(shape))), (), [rows])
    copy_local(Move(shape, source, sink, 1 << 20))
    assert (rows == array).all()


def layouts_of(dtype: str, rank: int) -> list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    found = {
        (tuple(row["order"]), tuple(map(tuple, row["tiles"])))
        for row in SHARDS
        if row["dtype"] == dtype and len(row["shape"]) == rank
    }
    return sorted(found)


@pytest.mark.parametrize("run", [copy_local, stream])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *(("bfloat16", (2500,)), ("bfloat16", (70, 300)), ("bfloat16", (5, 40, 200))),
        *(("float32", (2500,)), ("float32", (70, 300)), ("float32", (5, 40, 200))),
        *(("int8", (70, 300)), ("float8_e4m3fn", (2500,)), ("float8_e4m3fn", (70, 300))),
    ],
)
def test_shardings_whose_layouts_differ_exchange_tiles(run, dtype: str, shape) -> None:
    """Trainer and sampler of other sizes get other orders of dimensions and other tiles."""
    pairs = list(permutations(layouts_of(dtype, len(shape)), 2))
    assert pairs
    box = [tuple(slice(0, extent) for extent in shape)]
    for source, sink in pairs:
        sides = [Side(box, shape, jnp.dtype(dtype), *layout) for layout in (source, sink)]
        Move(shape, *sides, 5000).check(run)


def test_the_sharding_alone_turns_the_dimensions_of_a_leaf() -> None:
    for shape in ([256128, 2304], [128, 2048, 768]):
        rows = [r for r in SHARDS if r["shape"] == shape and r["dtype"] == "bfloat16"]
        assert len({tuple(row["order"]) for row in rows}) > 1


@pytest.mark.parametrize("row", SHARDS, ids=name)
def test_copies_to_pinned_host_memory_keep_the_layout_of_the_device(row: dict[str, Any]) -> None:
    """So the layout of a staged shard tells where its elements are; complex ones are split."""
    assert row["staged"] == (row["dtype"] != "complex64")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed ([tpu_aot])")
def test_the_compiler_still_says_so() -> None:
    command = [sys.executable, "-m", "tests.tpu_aot", "--check=12"]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout
