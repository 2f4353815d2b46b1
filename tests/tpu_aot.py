"""Asks XLA's compiler for TPUs how shards lie in memory, and writes `tpu_layouts.json` anew.

No TPU is needed: libtpu compiles without one (`pip install '.[tpu_aot]'`, Python 3.12 or later).

    python -m tests.tpu_aot             # writes the file
    python -m tests.tpu_aot --check=20  # holds 20 cases of the file against the compiler

What a compiler without a device can tell is how it lays out a shard of a given dtype, shape and
sharding, and how many bytes that takes. It proves the order of elements as well, where they are of
32 bits: a reshape and a transpose that leave every byte in its place compile to a bitcast.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).with_name("tpu_layouts.json")
# Of each generation a topology with eight devices.
TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x4",
    "v5p": "v5p:2x2x2",
    "v6e": "v6e:2x4",
    "tpu7x": "tpu7x:2x2x1",
}
STAGED_ON = ("v6e", "tpu7x")
GENERATIONS = tuple(TOPOLOGIES)

Spec = tuple[str | None, ...]
Case = tuple[str, tuple[int, ...], tuple[int, int], Spec]  # dtype, global shape, mesh x × y, spec

_FLOATS = ("float32", "bfloat16", "float8_e4m3fn", "int4")
_ALL = (
    *("float32", "int32", "uint32", "complex64", "bfloat16", "float16", "int16", "uint16"),
    *("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "float4_e2m1fn"),
)


def _cases() -> Iterator[Case]:
    # Every dtype: many rows, rows of no whole tile, one row, thin ones, vectors, a scalar.
    for dtype in _ALL:
        for shape in ((256, 512), (53, 175), (1, 300), (130, 3), (300,), ()):
            yield dtype, shape, (2, 2), (None,) * len(shape)
    # Few rows have smaller tiles, and so have short vectors.
    for dtype in _FLOATS:
        for rows in (2, 3, 4, 5, 8, 9):
            yield dtype, (rows, 256), (2, 2), (None, None)
        for n in (1, 2, 8, 128, 129, 1000, 1024, 1025, 2304, 65536):
            yield dtype, (n,), (2, 2), (None,)
    # Whole tiles of 32 bits, whose order a bitcast proves.
    for dtype in ("float32", "int32"):
        for shape in (
            *((8, 128), (64, 512), (4, 256), (2, 512), (1, 1024), (2048, 64), (128, 8), (1024,)),
            *((65536,), (3, 24, 384), (2048, 16, 128), (2048, 4, 128), (256, 2, 128)),
            *((4, 1, 256), (2, 3, 8, 128), (8, 256, 64), (2, 2, 2, 8, 128), (128, 256, 8)),
        ):
            yield dtype, shape, (2, 2), (None,) * len(shape)
    # Leaves of real models, as trainers and samplers of several sizes shard them.
    for dtype in ("bfloat16", "float32"):
        for mesh in ((1, 4), (2, 2), (2, 4), (8, 1)):
            yield dtype, (256128, 2304), mesh, ("x", "y")
            yield dtype, (2304, 9216), mesh, ("y", "x")
            yield dtype, (2048, 16, 128), mesh, (None, "y", None)
            yield dtype, (128, 2048, 768), mesh, ("x", None, "y")
            yield dtype, (26, 2304), mesh, (None, "y")
    yield from (
        ("bfloat16", (2048, 64), (2, 2), (None, None)),
        ("bfloat16", (4096, 1), (2, 2), (None, None)),
        ("int32", (128, 130), (2, 2), (None, None)),
        ("bfloat16", (4096, 28, 4096), (2, 2), ("x", None, "y")),
        ("bfloat16", (4, 1, 256), (2, 2), (None, None, None)),
        ("float32", (8, 3, 5, 7, 64), (2, 2), (None, None, None, None, None)),
        ("int8", (4096, 14336), (2, 4), ("x", "y")),
        ("int4", (4096, 14336), (2, 4), ("x", "y")),
        ("float8_e4m3fn", (128, 2048, 768), (2, 4), ("x", None, "y")),
        ("bfloat16", (5, 0, 7), (2, 2), (None, None, None)),
    )


def _compiler(generation: str) -> Any:
    """Compiles a function of one array for a generation: `compiled(function, case)`."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    found = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation])
    devices = np.array(found.devices)

    def compiled(function: Any, case: Case, kinds: tuple[str, str] = ("device", "device")) -> Any:
        dtype, shape, mesh_shape, spec = case
        mesh = Mesh(devices[: prod(mesh_shape)].reshape(mesh_shape), ("x", "y"))
        sides = [NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind) for kind in kinds]
        argument = jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype), sharding=sides[0])
        moved = (
            (lambda x: jax.device_put(function(x), sides[1])) if kinds[1] != kinds[0] else function
        )
        out = sides[1] if kinds[1] != kinds[0] else None
        return jax.jit(moved, out_shardings=out).lower(argument).compile()

    return compiled


def _layout(compiled: Any) -> dict[str, Any]:
    layout = compiled.input_formats[0][0].layout
    return {
        "order": list(layout.major_to_minor),
        "tiles": [list(tile) for tile in layout.tiling],
        "bits": layout.sub_byte_element_size_in_bits,
    }


def view_of_memory(
    extents: Sequence[int], order: Sequence[int], tile: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Shape and axes such that `x.reshape(shape).transpose(axes)` follows the memory of `x`.

    For one tile that cuts its dimensions without a rest; the shape keeps the dimensions of `x` in
    their order, each cut one as two.
    """
    cut = dict(zip(order[len(order) - len(tile) :], tile, strict=True))
    shape: list[int] = []
    outer: dict[int, int] = {}
    inner: dict[int, int] = {}
    for dim, extent in enumerate(extents):
        outer[dim] = len(shape)
        shape.append(extent // cut.get(dim, 1))
        if dim in cut:
            inner[dim] = len(shape)
            shape.append(cut[dim])
    return shape, [outer[dim] for dim in order] + [inner[dim] for dim in order if dim in cut]


def _order_is_proved(compiled: Any, case: Case, layout: dict[str, Any]) -> bool | None:
    """Whether the view compiles to a bitcast; None where the compiler can't be asked."""
    dtype, shape, mesh_shape, spec = case
    if any(spec):
        return None
    rows, axes = _whole_tiles(dtype, shape, layout)
    if not axes:
        return None

    def follow(x: Any) -> Any:
        return x.reshape(rows).transpose(axes).reshape(-1, 8, 128)

    def stray(x: Any) -> Any:
        return x.reshape(rows).transpose([*axes[1:], axes[0]]).reshape(-1, 8, 128)

    whole = (dtype, shape, mesh_shape, (None,) * len(shape))
    text, other = (compiled(view, whole).as_text() for view in (follow, stray))
    moves = (" copy(%param", " transpose(", " fusion(")
    is_bitcast = "bitcast(%param)" in text and not any(move in text for move in moves)
    # The check can fail: another order of the same axes needs more than a bitcast.
    assert max(rows) == prod(rows) or "copy(%bitcast" in other or "fusion(" in other, other
    return is_bitcast and text.count(" copy(") == 1


def _whole_tiles(
    dtype: str, shape: Sequence[int], layout: dict[str, Any]
) -> tuple[list[int], list[int]]:
    tiles, order = layout["tiles"], layout["order"]
    if dtype not in ("float32", "int32", "uint32") or len(tiles) != 1 or not prod(shape):
        return [], []
    cut = list(zip(order[len(order) - len(tiles[0]) :], tiles[0], strict=False))
    if len(tiles[0]) > len(shape) or any(shape[dim] % tile for dim, tile in cut):
        return [], []
    if prod(shape) % 1024:
        return [], []
    return view_of_memory(shape, order, tiles[0])


def _rows(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """What the compilers say of each case, which they have to say alike for every generation."""
    compilers = {generation: _compiler(generation) for generation in GENERATIONS}
    for case in cases:
        layouts = [_described(compiled, case) for compiled in compilers.values()]
        if any(layout != layouts[0] for layout in layouts):
            raise ValueError(f"{case} differs by generation: {layouts}")
        nbytes = layouts[0]["nbytes"]
        staged = all(_staged(compilers[generation], case) == nbytes for generation in STAGED_ON)
        yield {**_named(case), **layouts[0], "staged": staged}


def _named(case: Case) -> dict[str, Any]:
    dtype, shape, mesh, spec = case
    return {"dtype": dtype, "shape": list(shape), "mesh": list(mesh), "spec": list(spec)}


def _described(compiled: Any, case: Case) -> dict[str, Any]:
    program = compiled(lambda x: x, case)
    layout = _layout(program)
    layout["nbytes"] = program.memory_analysis().argument_size_in_bytes
    layout["bitcast"] = _order_is_proved(compiled, case, layout)
    return layout


def _staged(compiled: Any, case: Case) -> int | None:
    """Bytes in pinned host memory where the ways there and back are plain copies; else None."""
    down = compiled(lambda x: x, case, ("device", "pinned_host"))
    up = compiled(lambda x: x, case, ("pinned_host", "device"))
    if _layout(down) != _layout(up):
        return None
    plain = all("copy-start(%param" in side.as_text() for side in (down, up))
    nbytes: int = down.memory_analysis().host_output_size_in_bytes
    return nbytes if plain or not nbytes else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", type=int, metavar="N", help="compare N cases, write nothing")
    count = parser.parse_args().check
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    cases = list(dict.fromkeys(_cases()))
    if count is None:
        rows = ",\n".join(map(json.dumps, _rows(cases)))
        head = json.dumps({"generations": GENERATIONS, "staged_on": STAGED_ON})[:-1]
        GOLDEN.write_text(f'{head}, "shards": [\n{rows}\n]}}\n')
        return
    kept = json.loads(GOLDEN.read_text())["shards"]
    if [_named(case) for case in cases] != [{k: row[k] for k in _named(cases[0])} for row in kept]:
        sys.exit(f"{GOLDEN.name} has other cases: write it anew")
    some = range(0, len(cases), max(1, len(cases) // count))
    for row, kept_row in zip(_rows([cases[i] for i in some]), [kept[i] for i in some], strict=True):
        if row != kept_row:
            sys.exit(f"the compiler says {row}\n{GOLDEN.name} has {kept_row}")
    print(f"{len(some)} cases are as {GOLDEN.name} has them")


if __name__ == "__main__":
    main()
