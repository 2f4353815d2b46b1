"""Hypothesis strategies for meshes and shardings over the eight CPU devices."""

from math import lcm, prod
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Shardings = tuple[tuple[int, ...], list[NamedSharding]]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """A mesh of some of the devices, in any order, with axes of any kind."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=3).filter(_fits))
    devices = np.array(draw(st.permutations(jax.devices()))[: prod(sizes)])
    kind = draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]))
    names = tuple("abc"[: len(sizes)])
    return Mesh(devices.reshape(sizes), names, axis_types=(kind,) * len(sizes))


def _fits(sizes: list[int]) -> bool:
    return prod(sizes) <= len(jax.devices())


@st.composite
def specs(draw: st.DrawFn, mesh: Mesh, rank: int) -> P:
    """A spec of at most `rank` parts; a dimension may have several axes, in any order."""
    parts: list[list[str]] = [[] for _ in range(rank)]
    for name in draw(st.permutations(mesh.axis_names)):
        if rank and draw(st.booleans()):
            parts[draw(st.integers(0, rank - 1))].append(name)
    spec: list[Any] = [tuple(part) or None for part in parts]
    while spec and spec[-1] is None and draw(st.booleans()):
        spec.pop()
    return P(*spec)


@st.composite
def shardings(draw: st.DrawFn, number: int, *, max_rank: int = 4) -> Shardings:
    """A shape, and `number` shardings that divide it, each over a mesh of its own."""
    rank = draw(st.integers(0, max_rank))
    found = []
    for _ in range(number):
        mesh = draw(meshes())
        found.append(NamedSharding(mesh, draw(specs(mesh, rank))))
    cuts = [lcm(*(_cuts(sharding, dim) for sharding in found)) for dim in range(rank)]
    times = draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank))
    return tuple(cut * n for cut, n in zip(cuts, times, strict=True)), found


def _cuts(sharding: NamedSharding, dim: int) -> int:
    """Into how many parts `sharding` cuts the dimension `dim`."""
    spec = tuple(sharding.spec)
    axes = spec[dim] if dim < len(spec) else None
    if axes is None:
        return 1
    return prod(sharding.mesh.shape[name] for name in (axes if isinstance(axes, tuple) else [axes]))
