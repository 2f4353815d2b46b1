"""What a program holds of every leaf: its shards as boxes, and who holds them.

Works on arrays and on ShapeDtypeStructs alike: nothing here looks at memory. Indices come from JAX
(`devices_indices_map`), never from arithmetic of our own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from tpu_sync_rl.manifest import BoxLayout, Leaf, Manifest
from tpu_sync_rl.program import Program
from tpu_sync_rl.tree import is_prng_key


@dataclass(frozen=True, slots=True)
class ShardTable:
    """The manifest of a program, and for every leaf of it the box that each device holds.

    Devices are those of all processes; boxes are indices into the leaf's `BoxLayout`.
    """

    manifest: Manifest
    device_boxes: tuple[Mapping[jax.Device, int], ...]  # per leaf, in the manifest's order
    order: tuple[int, ...]  # per leaf of the manifest its position among the leaves given
    program: Program  # whose processes hold the boxes


def shard_table(
    keys: Sequence[str],
    leaves: Sequence[Any],
    *,
    wanted: bool,
    one_client: bool = False,
    program: Program | None = None,
) -> ShardTable:
    """Describes `leaves`, jax.Arrays or ShapeDtypeStructs with a sharding.

    Args:
        keys: one per leaf, all different.
        leaves: what the program holds (`wanted=False`) or wants to hold (`wanted=True`).
        wanted: whether arrays like these are to be made, which takes a dtype that JAX can make.
        one_client: whether the table is this process's own affair: it has this process's shards
            alone, and leaves that each process holds for itself are well-defined.
        program: whose processes hold the shards; None for this JAX program.

    Raises:
        TypeError: a leaf is no array, or is weakly typed where arrays are to be made.
        ValueError: a leaf has no sharding, or one that can't be synced; the message has its key.
    """
    program = program or Program.here()
    order = sorted(range(len(keys)), key=keys.__getitem__)
    may_be_local = one_client or program.count == 1 or program.has_one_controller
    rows = [_Row.of(keys[i], leaves[i], wanted, may_be_local) for i in order]
    layouts: dict[tuple[Any, ...], int] = {}
    distinct: list[BoxLayout] = []
    # Few shardings serve many leaves: each (shape, sharding) is laid out once, and two that come
    # out alike are one layout of the manifest.
    laid_out: dict[tuple[Any, ...], tuple[int, Mapping[jax.Device, int]]] = {}
    manifest_leaves: list[Leaf] = []
    device_boxes: list[Mapping[jax.Device, int]] = []
    for row in rows:
        known = laid_out.get(row.layout_key)
        if known is None:
            layout, boxes = _lay_out(row, one_client, program)
            index = layouts.setdefault(layout.identity(), len(distinct))
            if index == len(distinct):
                distinct.append(layout)
            known = laid_out[row.layout_key] = (index, boxes)
        manifest_leaves.append(Leaf(row.key, row.dtype, row.itemsize, row.shape, known[0]))
        device_boxes.append(known[1])
    manifest = Manifest(tuple(manifest_leaves), tuple(distinct), program.count)
    return ShardTable(manifest, tuple(device_boxes), tuple(order), program)


def signature(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """A hashable value; leaves of one structure with equal signatures have equal shard tables."""
    described = (jax.Array, jax.ShapeDtypeStruct)
    return tuple(
        [
            (x.dtype, x.shape, getattr(x, "sharding", None), getattr(x, "weak_type", None))
            if isinstance(x, described)
            else type(x)
            for x in leaves
        ]
    )


def is_array(leaf: Any) -> bool:
    """Whether a leaf is a jax.Array that has values: to JAX a traced one is an array, too."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def no_array(key: str, leaf: Any, *, wanted: bool = False) -> TypeError:
    """The error for a leaf that is no array, nor (`wanted`) describes one: what to do with it."""
    if isinstance(leaf, jax.core.Tracer):
        return TypeError(f"leaf {key!r} is traced; weights can't be synced under jit or grad")
    if isinstance(leaf, jax.Ref):
        cure = "pass what it holds: ref[...]"
    elif isinstance(leaf, jax.ShapeDtypeStruct):
        cure = "it has no values: pass the array that it describes"
    elif isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        cure = "make it one: jnp.asarray(x)"
    else:
        cure = "leave it out: None in its place is no leaf"
    or_described = " or a jax.ShapeDtypeStruct with a sharding" if wanted else ""
    name = type(leaf).__name__
    return TypeError(f"leaf {key!r} is a {name}, expected a jax.Array{or_described}; {cure}")


def is_abstract(sharding: Any) -> bool:
    """Whether a sharding has names of axes alone, and no devices."""
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)


@dataclass(frozen=True, slots=True)
class _Row:
    key: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    extra: tuple[int, ...]  # dimensions that storage has beyond the shape: a PRNG key's words
    sharding: jax.sharding.Sharding

    @property
    def layout_key(self) -> tuple[Any, ...]:
        return (self.shape, self.extra, self.sharding)

    @classmethod
    def of(cls, key: str, leaf: Any, wanted: bool, may_be_local: bool) -> "_Row":
        if not (isinstance(leaf, jax.ShapeDtypeStruct) or is_array(leaf)):
            raise no_array(key, leaf, wanted=wanted)
        sharding = leaf.sharding
        if sharding is None:
            raise ValueError(
                f"leaf {key!r} has no sharding; give its ShapeDtypeStruct one: "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(…)))"
            )
        if is_abstract(sharding):
            raise ValueError(
                f"leaf {key!r} has the sharding {sharding}, whose mesh is abstract, as those of "
                "jax.eval_shape are, and has no devices; give it a mesh of devices: "
                "NamedSharding(mesh, x.sharding.spec)"
            )
        is_local = isinstance(sharding, jax.sharding.SingleDeviceSharding)
        if is_local and not may_be_local:
            raise ValueError(
                f"leaf {key!r} is held by each process for itself ({sharding}), so it has no one "
                "global value; make it global: jax.device_put(x, NamedSharding(mesh, P()))"
            )
        extra: tuple[int, ...] = ()
        if is_prng_key(leaf):
            dtype, stored = str(leaf.dtype), jax.eval_shape(jax.random.key_data, _bare(leaf))
            itemsize, extra = stored.dtype.itemsize, stored.shape[leaf.ndim :]
        else:
            dtype, itemsize = np.dtype(leaf.dtype).name, np.dtype(leaf.dtype).itemsize
            canonical = jax.dtypes.canonicalize_dtype(leaf.dtype)
            if wanted and canonical != leaf.dtype:
                raise ValueError(
                    f"leaf {key!r} has dtype {dtype}, which JAX would make {canonical} of while "
                    "jax_enable_x64 is off"
                )
        if wanted and getattr(leaf, "weak_type", False):
            raise TypeError(
                f"leaf {key!r} is weakly typed; give it a dtype of its own: x.astype(x.dtype)"
            )
        return cls(key, dtype, itemsize, tuple(leaf.shape), tuple(extra), sharding)


def _bare(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _lay_out(
    row: _Row, one_client: bool, program: Program
) -> tuple[BoxLayout, Mapping[jax.Device, int]]:
    try:
        row.sharding.shard_shape(row.shape)
        indices = row.sharding.devices_indices_map(row.shape)
    except (ValueError, NotImplementedError, IndexError) as error:
        _refuse(row, error)
    shape = row.shape + row.extra
    devices: list[Any] = list(indices)
    if one_client:
        devices = [device for device in devices if program.holder(device) == program.index]
    every = np.zeros((len(devices), len(shape), 2), np.int64)  # shape=[devices, rank, 2]
    every[:, :, 1] = shape
    for i, device in enumerate(devices):
        for dim, part in enumerate(indices[device] or ()):
            every[i, dim] = part.indices(shape[dim])[:2]
    boxes, of_device = _distinct(every)
    processes = np.array([program.holder(device) for device in devices], np.uint32)
    held = np.unique(np.stack([of_device.astype(np.uint32), processes], axis=1), axis=0)
    counts = np.bincount(held[:, 0], minlength=len(boxes))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
    layout = BoxLayout(shape, boxes, offsets, np.ascontiguousarray(held[:, 1]))
    return layout, dict(zip(devices, of_device.tolist(), strict=True))


def _distinct(every: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct boxes of `every`, ascending, and for each row its index among them."""
    flat = every.reshape(len(every), 2 * every.shape[1])
    if flat.shape[1] == 0:
        return every[:1], np.zeros(len(every), np.int64)
    boxes, inverse = np.unique(flat, axis=0, return_inverse=True)
    return boxes.reshape(-1, *every.shape[1:]), inverse.reshape(-1)


def _refuse(row: _Row, error: Exception) -> NoReturn:
    raise ValueError(
        f"leaf {row.key!r} of shape {row.shape} can't be synced with sharding {row.sharding}: "
        f"{error}"
    ) from error
