"""Weights from one mesh to another inside one JAX client, past XLA: one copy, memory to memory."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import closing
from dataclasses import dataclass
from types import UnionType
from typing import Any

import jax
from jax.sharding import Sharding

from tpu_sync_rl import _native
from tpu_sync_rl.buffers import Aliases, computed
from tpu_sync_rl.errors import PlanError
from tpu_sync_rl.generation_layout import GenerationLayout
from tpu_sync_rl.generations import NUM_THREADS, ResultPool
from tpu_sync_rl.local_shards import LocalShards
from tpu_sync_rl.manifest import Pair, Rename, Sides, match, renamed
from tpu_sync_rl.plan import Plan, make_plan
from tpu_sync_rl.program import Program
from tpu_sync_rl.shard_table import ShardTable, shard_table, signature
from tpu_sync_rl.transport import shard_directory
from tpu_sync_rl.tree import check_keyed, flatten

_CHUNK_NBYTES = 1 << 20  # what a thread copies before it takes the next
_MAX_ROUTES = 32
_SIDES = Sides("params", "to", "in")

_logger = logging.getLogger("tpu_sync_rl")
_results = ResultPool()


def sync_weights(params: Any, *, to: Any, rename: Rename = None, cast: bool = False) -> Any:
    """Returns `params` as new arrays with the shardings of `to`.

    Copies every byte once, with a few native threads and without the GIL, into host memory that
    later results use again when these are dead. Blocks until all is there; any thread may call.
    Never aliases or donates `params`.

    Args:
        params: pytree of jax.Arrays.
        to: a Sharding or a prefix tree of them: the result has the structure of `params`. Or a
            tree of jax.Arrays or ShapeDtypeStructs with shardings: leaves are matched by key, and
            the result has its structure, dtypes and layouts.
        rename: mapping or callable from the keys of `params` to those of `to`.
        cast: let one float dtype become another, to nearest even.

    Returns:
        Committed arrays with exactly the shardings, dtypes and memory kinds asked for.

    Raises:
        ValueError: leaves that can't be synced, don't fit, or lie where this process can't reach
            them; names every key.
        TypeError: a leaf that is no array; a `to` that is none of the above.
    """
    leaves, treedef = jax.tree.flatten(params)
    route = _route(params, leaves, treedef, to, rename, cast)
    arrays = computed(route.source, leaves)
    aliases = Aliases(route.source.manifest, route.shards)
    generation = _results.generation(route.layout)
    copy = _native.LocalCopy(
        route.plan.native,
        route.directory,
        aliases.addresses,
        aliases.strides,
        generation.sink_addresses,
        NUM_THREADS,
    )
    # All that Python does per leaf passes while the other native threads copy.
    with closing(copy):
        aliases.pin(arrays, copy.set_pinned)
        generation.prepare_arrays()
        copy.finish()
    aliases.drop_all()
    synced: list[Any] = [None] * len(route.order)
    for position, array in zip(route.order, generation.arrays(), strict=True):
        synced[position] = array
    return jax.tree.unflatten(route.treedef, synced)


def release_memory() -> None:
    """Gives the memory of dead `sync_weights` results back to the system. Living ones stay."""
    _results.release()


def explain(source: Any, target: Any, *, rename: Rename = None, cast: bool = False) -> Plan:
    """The plan by which `sync_weights(source, to=target)` would move bytes. Moves nothing.

    Args:
        source: pytree of jax.Arrays or of ShapeDtypeStructs with shardings.
        target: as `to` of `sync_weights`.
        rename: as for `sync_weights`.
        cast: as for `sync_weights`.

    Example:
        >>> import jax, numpy as np, tpu_sync_rl as tsr
        >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        >>> mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
        >>> columns, rows = (NamedSharding(mesh, P(*spec)) for spec in [(None, "tp"), ("fsdp",)])
        >>> params = {"w": jax.ShapeDtypeStruct((256, 512), np.float32, sharding=columns)}
        >>> print(tsr.explain(params, rows))
        process 0 reads 1 leaf, 524.288 kB in 1 chunk and 2 regions
        key  dtype    shape       regions  chunks       bytes  sources
        w    float32  [256, 512]        2       1  524.288 kB  0
        from process 0: 524.288 kB in 1 chunk

    Returns:
        The plan of this process; `str()` of it is a table.

    Raises:
        ValueError, TypeError: as `sync_weights` does.
    """
    leaves, treedef = jax.tree.flatten(source)
    return _route(source, leaves, treedef, target, rename, cast).plan


@dataclass(frozen=True, slots=True, eq=False)
class _Route:
    """Everything that calls with leaves alike have in common. Holds no array."""

    plan: Plan
    source: ShardTable
    shards: LocalShards
    directory: _native.ShardDirectory
    layout: GenerationLayout
    order: tuple[int, ...]  # per leaf of the layout its position in the result
    treedef: Any  # of the result


_routes: OrderedDict[Hashable, _Route] = OrderedDict()  # guarded by _routes_lock
_routes_lock = threading.Lock()


def _route(
    params: Any, leaves: list[Any], treedef: Any, to: Any, rename: Rename, cast: bool
) -> _Route:
    """The route for leaves like these, made once and remembered."""
    key = route_key(params, leaves, treedef, to, rename, cast)
    with _routes_lock:
        route = _routes.get(key)
        if route is not None:
            _routes.move_to_end(key)
            return route
    route = _make_route(params, to, rename, cast)
    with _routes_lock:
        _routes[key] = route
        while len(_routes) > _MAX_ROUTES:
            _routes.popitem(last=False)
    return route


def route_key(
    params: Any, leaves: list[Any], treedef: Any, to: Any, rename: Rename, cast: bool
) -> Hashable:
    """Equal for calls that move leaves alike from and to the same places."""
    targets, to_treedef = jax.tree.flatten(to)
    asked = tuple(_asked(target) for target in targets)
    renaming = None
    if rename is not None:
        renaming = tuple(renamed(x, rename) for x in flatten(params, by_position=True)[0])
    return treedef, signature(leaves), to_treedef, asked, signature(targets), renaming, cast


def _asked(target: Any) -> Hashable:
    """What a leaf of `to` asks for beyond its signature: it is a sharding, or has a layout."""
    return target if isinstance(target, Sharding) else getattr(target, "format", None)


def _make_route(params: Any, to: Any, rename: Rename, cast: bool) -> _Route:
    process = jax.process_index()
    source, sink, pairs, like = matched(params, to, rename, cast)
    likes, treedef = jax.tree.flatten(like)
    plan = _reaching_plan(source, sink, pairs)
    # A leaf that is none of this process's needs nothing here. Its own ones may lack what this one
    # has, and all are to say so.
    others = {
        device.process_index
        for x in likes
        if not x.sharding.addressable_devices
        for device in x.sharding.device_set
    }
    for other in sorted(others):
        there = Program(other, jax.process_count())
        _reaching_plan(*matched(params, to, rename, cast, there)[:3])
    if not pairs:
        _logger.warning(
            "sync_weights: params have no leaves, so that nothing is moved: the tree is empty, or "
            "a filter kept nothing of it"
        )
    shards = LocalShards.of(source, process)
    layout = GenerationLayout.of(sink, likes, process=process, commit=True)
    return _Route(plan, source, shards, shard_directory(shards), layout, sink.order, treedef)


def _reaching_plan(source: ShardTable, sink: ShardTable, pairs: list[Pair]) -> Plan:
    """The plan of the process whose shards both tables have.

    Raises:
        ValueError: another process holds what it needs.
    """
    process = source.program.index
    try:
        return make_plan(
            source.manifest, sink.manifest, pairs, process=process, chunk_nbytes=_CHUNK_NBYTES
        )
    except PlanError as error:
        if jax.process_count() == 1:
            raise
        raise ValueError(
            f"{error}; other processes hold what is missing, out of reach of process {process}: "
            "use connect_trainer and connect_sampler"
        ) from error


def matched(
    params: Any, to: Any, rename: Rename, cast: bool, program: Program | None = None
) -> tuple[ShardTable, ShardTable, list[Pair], Any]:
    """Both ends, which leaf of the one becomes which of the other, and what results are like.

    Both have the shards of one process: of `program`, or of this one.

    Raises:
        ValueError, TypeError: as `sync_weights` does.
    """
    keys, leaves, treedef = flatten(params, by_position=True)
    source = shard_table(keys, leaves, wanted=False, one_client=True, program=program)
    like = _likes(params, to, rename)
    keys, leaves, like_treedef = flatten(like, by_position=True)
    sink = shard_table(keys, leaves, wanted=True, one_client=True, program=program)
    if treedef != like_treedef:  # else a position is one field, also where the nodes have no keys
        check_keyed(params)
        check_keyed(like)
    pairs, differences = match(
        source.manifest, sink.manifest, rename=rename, cast=cast, sides=_SIDES
    )
    if differences:
        raise ValueError("params and to differ:\n" + "\n".join(differences))
    return source, sink, pairs, like


def _likes(params: Any, to: Any, rename: Rename) -> Any:
    """The tree of arrays or ShapeDtypeStructs that `to` means."""
    if to is None:  # to JAX a tree without leaves
        raise _wrong_target("", to)
    keys, targets, _ = flatten(to, by_position=True)
    expected: type[Any] | UnionType = jax.Array | jax.ShapeDtypeStruct
    if any(isinstance(target, Sharding) for target in targets):
        expected = Sharding
    for key, target in zip(keys, targets, strict=True):
        if not isinstance(target, expected):
            raise _wrong_target(key, target)
    if expected is not Sharding:
        return to
    if rename is not None:
        raise ValueError("rename= needs a tree of arrays as to=: shardings alone have no keys")
    keys, leaves, treedef = flatten(params, by_position=True)
    try:
        shardings = jax.tree.leaves(jax.tree.broadcast(to, params))
    except ValueError as error:
        raise _misfit(keys, leaves, flatten(to, by_position=True)[0]) from error
    return jax.tree.unflatten(
        treedef,
        [
            _like(key, leaf, sharding)
            for key, leaf, sharding in zip(keys, leaves, shardings, strict=True)
        ],
    )


def _misfit(keys: list[str], leaves: list[Any], branches: list[str]) -> ValueError:
    """Why shardings at the keys `branches` are no prefix of params with `leaves` at `keys`."""

    def covers(branch: str, key: str) -> bool:
        return key == branch or key.startswith(f"{branch}/")

    differences = [
        f"{branch!r}: to has a Sharding, params has no such leaf or branch"
        for branch in branches
        if not any(covers(branch, key) for key in keys)
    ]
    differences += [
        f"{key!r}: params has {leaf.dtype}{list(leaf.shape)}, to has no Sharding for it"
        for key, leaf in zip(keys, leaves, strict=True)
        if not any(covers(branch, key) for branch in branches)
    ]
    other = "the keys are equal, but the branches are containers of other types"
    return ValueError("params and to differ:\n" + ("\n".join(differences) or other))


def _wrong_target(key: str, target: Any) -> TypeError:
    return TypeError(
        f"to{f' at {key!r}' if key else ''} is a {type(target).__name__}, expected a "
        "TrainerSession, a Sharding, a tree of Shardings alone, or a tree of jax.Arrays and "
        f"ShapeDtypeStructs alone{_hint(target)}"
    )


def _hint(target: Any) -> str:
    """How to make a sharding of what is almost one, for the text of an error."""
    is_part = isinstance(target, jax.sharding.Mesh | jax.sharding.PartitionSpec)
    return "; make it one: NamedSharding(mesh, P(...))" if is_part else ""


def _like(key: str, leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    try:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    except ValueError as error:
        raise ValueError(f"leaf {key!r} of shape {leaf.shape}: {error}") from error
