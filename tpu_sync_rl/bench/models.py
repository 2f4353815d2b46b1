"""Params to measure with: shapes, specs over (fsdp, tp), and contents that anyone can recompute.

Every element is a hash of its leaf, its position in the leaf and the version, so a sampler checks
every byte on its own mesh without hearing anything from the trainer.
"""

import argparse
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpu_sync_rl.bench.figures import count

DTYPE = "bfloat16"
AXES = ("fsdp", "tp")

Model = Mapping[str, tuple[tuple[int, ...], P]]  # key -> global shape and spec


def model(name: str, nbytes: int | None = None, dtype: str = DTYPE) -> Model:
    """The model `name` of `MODELS`, scaled to about `nbytes` of `dtype` (None: as published).

    Dimensions stay multiples of 16, so that meshes of up to 16 devices divide them.
    """
    full = MODELS[name]()
    if nbytes is None:
        return full
    ratio = nbytes / model_nbytes(full, dtype)
    if name == "many-small":
        return dict(list(full.items())[: max(1, round(len(full) * ratio))])
    return {key: (_scaled(shape, ratio), spec) for key, (shape, spec) in full.items()}


def along_axes(leaves: Model) -> Model:
    """`leaves` with the rows of every matrix over fsdp, and its columns over tp."""
    return {
        key: (shape, P("fsdp", "tp") if len(shape) > 1 else spec)
        for key, (shape, spec) in leaves.items()
    }


def model_nbytes(leaves: Model, dtype: str = DTYPE) -> int:
    """Bytes of one copy of the params."""
    return sum(prod(shape) for shape, _ in leaves.values()) * jnp.dtype(dtype).itemsize


def structs(leaves: Model, mesh: Mesh, dtype: str = DTYPE) -> dict[str, jax.ShapeDtypeStruct]:
    """The params as `like` of a sampler on `mesh`, whose axes are fsdp and tp."""
    return {
        key: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
        for key, (shape, spec) in leaves.items()
    }


def structs_on_one_device(leaves: Model) -> dict[str, jax.ShapeDtypeStruct]:
    """The same on the only device of this process, of which JAX is told to use the CPU."""
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.make_mesh((1, 1), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return structs(leaves, mesh)


def make_params(
    like: Mapping[str, jax.ShapeDtypeStruct],
    version: int,
    old: Mapping[str, jax.Array] | None = None,
) -> dict[str, jax.Array]:
    """The params of `version`, as a training step makes them: in the memory of `old`, donated."""
    params = {}
    for key, leaf in like.items():
        memory = old[key] if old else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        params[key] = _refill(leaf.sharding)(memory, _salt(key, version))
    jax.block_until_ready(params)
    return params


def wrong_leaves(params: Mapping[str, jax.Array], version: int, made_as: str = DTYPE) -> list[str]:
    """Keys of leaves of which a shard in this process differs from `version` in any bit.

    `made_as` is the dtype that the trainer has them in: others are what JAX's cast makes of it.
    """
    verdicts = []
    for key, leaf in params.items():
        salt = _salt(key, version)
        for shard in leaf.addressable_shards:
            starts = tuple(np.uint32(part.start or 0) for part in shard.index)
            verdicts.append((key, _matches(leaf.shape, made_as)(shard.data, starts, salt)))
    return sorted({key for key, verdict in verdicts if not verdict})


def refuse_wrong(keys: Iterable[str], what: str) -> None:
    """Raises RuntimeError, which says `what`, if there are any wrong leaves."""
    wrong = sorted(set(keys))
    if wrong:
        raise RuntimeError(f"{what} is wrong in {', '.join(wrong)}")


def _salt(key: str, version: int) -> np.uint32:
    return np.uint32(zlib.crc32(f"{key} {version}".encode()))


def _contents(
    local: tuple[int, ...],
    shape: tuple[int, ...],
    starts: tuple[jax.Array, ...],
    salt: jax.Array,
    dtype: str,
) -> jax.Array:
    """The box of extents `local` that begins at `starts` in a leaf of `shape`."""
    position = jnp.full(local, salt, jnp.uint32)
    for dim, start in enumerate(starts):
        stride = prod(shape[dim + 1 :])
        position += (jax.lax.broadcasted_iota(jnp.uint32, local, dim) + start) * np.uint32(
            stride & 0xFFFFFFFF
        )
    position = (position ^ (position >> 16)) * np.uint32(0x7FEB352D)
    position = (position ^ (position >> 15)) * np.uint32(0x846CA68B)
    if jnp.dtype(dtype).itemsize == 2:
        return jax.lax.bitcast_convert_type((position >> 16).astype(jnp.uint16), jnp.dtype(dtype))
    # No NaN, infinity or denormal: casts may give their bits as they like.
    finite = (position & np.uint32(0xBFFFFFFF)) | np.uint32(0x00800000)
    return jax.lax.bitcast_convert_type(finite, jnp.dtype(dtype))


@cache
def _refill(sharding: NamedSharding) -> Callable[[jax.Array, np.uint32], jax.Array]:
    def refill(old: jax.Array, salt: jax.Array) -> jax.Array:
        starts = (jnp.uint32(0),) * old.ndim
        return _contents(old.shape, old.shape, starts, salt, old.dtype.name)

    return jax.jit(refill, donate_argnums=0, keep_unused=True, out_shardings=sharding)


@cache
def _matches(
    shape: tuple[int, ...], made_as: str
) -> Callable[[jax.Array, tuple[np.uint32, ...], np.uint32], jax.Array]:
    def matches(shard: jax.Array, starts: tuple[jax.Array, ...], salt: jax.Array) -> jax.Array:
        expected = _contents(shard.shape, shape, starts, salt, made_as).astype(shard.dtype)
        return jnp.all(_bits(shard) == _bits(expected))

    return jax.jit(matches)


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.dtype(f"uint{8 * values.dtype.itemsize}"))


def _scaled(shape: tuple[int, ...], ratio: float) -> tuple[int, ...]:
    return tuple(max(16, round(n * ratio**0.5 / 16) * 16) for n in shape)


def _gemma2(width: int, heads: int, kv: int, hidden: int, vocabulary: int, norms: int) -> Model:
    leaves: dict[str, tuple[tuple[int, ...], P]] = {}
    for layer in range(26):
        leaves |= {
            f"layer_{layer:02}/attn/q": ((width, heads), P("fsdp", "tp")),
            f"layer_{layer:02}/attn/k": ((width, kv), P("fsdp", "tp")),
            f"layer_{layer:02}/attn/v": ((width, kv), P("fsdp", "tp")),
            f"layer_{layer:02}/attn/o": ((heads, width), P("tp", "fsdp")),
            f"layer_{layer:02}/mlp/gate": ((width, hidden), P("fsdp", "tp")),
            f"layer_{layer:02}/mlp/up": ((width, hidden), P("fsdp", "tp")),
            f"layer_{layer:02}/mlp/down": ((hidden, width), P("tp", "fsdp")),
        }
        leaves |= {f"layer_{layer:02}/norm_{i}": ((width,), P("fsdp")) for i in range(norms)}
    leaves["embed"] = ((vocabulary, width), P("tp", "fsdp"))
    leaves["final_norm"] = ((width,), P("fsdp"))
    return leaves


def _many_small() -> Model:
    # Eight sizes, evenly from 64 to 4,096: enough to be different, few enough to be compiled soon.
    sizes = [64 * (1 + 9 * (index % 8)) for index in range(10_000)]
    return {
        f"leaf_{index:05}": ((64, 64), P("fsdp", "tp")) if size == 4096 else ((size,), P("fsdp"))
        for index, size in enumerate(sizes)
    }


MODELS: Mapping[str, Callable[[], Model]] = {
    # 288 leaves, 1.07 GB: Gemma 2 2B at half its width, with four norms a layer.
    "list": lambda: _gemma2(1152, 1024, 512, 4608, 26624, norms=4),
    # 262 leaves, 5.2 GB.
    "gemma2-2b": lambda: _gemma2(2304, 2048, 1024, 9216, 256128, norms=3),
    # 10,000 leaves of 64 to 4,096 elements, 41.6 MB.
    "many-small": _many_small,
    # One leaf of 1 GiB.
    "one-big": lambda: {"leaf": ((16384, 32768), P("fsdp", "tp"))},
}


def add_arguments(parser: argparse.ArgumentParser, *, nbytes: int | None = None) -> None:
    """Which model it is about; `nbytes` is how large it is unless the command line says."""
    parser.add_argument(
        "--model", choices=sorted(MODELS), default="list", help="its leaves (default: %(default)s)"
    )
    size = "its own size" if nbytes is None else "%(default)s"
    parser.add_argument(
        "--nbytes",
        type=count,
        default=nbytes,
        help=f"scale the model to about this many bytes (default: {size})",
    )
