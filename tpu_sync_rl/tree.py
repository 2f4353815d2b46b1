"""Pytrees as keyed leaves: leaves are matched by key, never by order."""

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import FlattenedIndexKey, GetAttrKey, PyTreeDef, keystr, tree_flatten_with_path

_VALUE = GetAttrKey("value")
_Path = tuple[Any, ...]
_Types = tuple[type, ...]  # of the nodes above a leaf, one for each part of its path


def flatten(tree: Any, *, by_position: bool = False) -> tuple[list[str], list[Any], PyTreeDef]:
    """Keys and leaves of `tree` in its own order, and its treedef. Copies nothing.

    A key is the path joined by "/", less the `.value` that nnx puts behind a variable: so an
    nnx.Module, its nnx.State and that one's pure dict have the same keys, also where a variable
    holds a pytree. A dict that owns a key "value" keeps it, and an attribute of that name that is
    not the last one.

    Args:
        tree: any pytree.
        by_position: let custom nodes that JAX knows without keys have positions in their place.
            Only trees of one structure may be matched by these.

    Raises:
        ValueError: two leaves have one key, as `{"a/b": x, "a": {"b": y}}` does.
        TypeError: a custom node without keys: names it, its type, and what to do.
    """
    entries, treedef = tree_flatten_with_path(tree)
    paths = [path for path, _ in entries]
    if any(_VALUE in path[:-1] for path in paths):
        paths = list(map(_without_values, paths, _types_above(treedef)))
    keys = [_key(path) for path in paths]
    if not by_position:
        check_keyed(tree)
    repeated = sorted(key for key, count in Counter(keys).items() if count > 1)
    if repeated:
        raise ValueError(f"two leaves have the same key: {', '.join(map(repr, repeated))}")
    return keys, [leaf for _, leaf in entries], treedef


def check_keyed(tree: Any) -> None:
    """Raises TypeError where a custom node has no keys: of each type of them it names one leaf."""
    entries, treedef = tree_flatten_with_path(tree)
    if not any(isinstance(part, FlattenedIndexKey) for path, _ in entries for part in path):
        return
    found: dict[type, str] = {}
    for (path, _), types in zip(entries, _types_above(treedef), strict=True):
        for part, above in zip(path, types, strict=True):
            if isinstance(part, FlattenedIndexKey):
                found.setdefault(above, _key(path))
    nodes = ", ".join(f"leaf {key!r} is in a {kind.__qualname__}" for kind, key in found.items())
    names = ", ".join(kind.__qualname__ for kind in found)
    raise TypeError(
        f"{nodes}, whose fields JAX knows by position alone, so that others could be taken for "
        f"them: register {names} by jax.tree_util.register_dataclass or register_pytree_with_keys "
        "in place of register_pytree_node, or give the fields in a dict"
    )


def is_prng_key(leaf: Any) -> bool:
    """Whether a leaf is of typed PRNG keys, whose memory has their data."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _key(path: _Path) -> str:
    return keystr(path[:-1] if path[-1:] == (_VALUE,) else path, simple=True, separator="/")


def _without_values(path: _Path, types: _Types) -> _Path:
    """`path` less the values of nnx variables that are not its last part."""
    nnx = sys.modules.get("flax.nnx")  # who has a variable has loaded it
    if nnx is None:
        return path
    last = len(path) - 1
    return tuple(
        part
        for depth, (part, above) in enumerate(zip(path, types, strict=True))
        if depth == last or part != _VALUE or not issubclass(above, nnx.Variable)
    )


def _types_above(treedef: PyTreeDef, above: _Types = ()) -> Iterator[_Types]:
    """For each leaf the types of the nodes that it is in, the outermost first."""
    node = treedef.node_data()
    if node is None:  # a leaf
        yield above
        return
    for child in treedef.children():
        yield from _types_above(child, (*above, node[0]))
