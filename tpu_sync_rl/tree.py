"""Pytrees as keyed leaves: leaves are matched by key, never by order."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey, keystr, tree_flatten_with_path


def key_of(path: tuple[Any, ...]) -> str:
    """Key of a leaf: its path joined by "/", less the `.value` that nnx puts behind a variable.

    A dict that owns a key "value" keeps it: only a trailing attribute is dropped.
    """
    if path and path[-1] == GetAttrKey("value"):
        path = path[:-1]
    return keystr(path, simple=True, separator="/")


def flatten(tree: Any) -> tuple[list[str], list[Any], jax.tree_util.PyTreeDef]:
    """Keys and leaves of `tree` in its own order, and its treedef. Copies nothing.

    Raises:
        ValueError: two leaves have one key, as `{"a/b": x, "a": {"b": y}}` does.
    """
    entries, treedef = tree_flatten_with_path(tree)
    keys = [key_of(path) for path, _ in entries]
    repeated = sorted(key for key, count in Counter(keys).items() if count > 1)
    if repeated:
        raise ValueError(f"two leaves have the same key: {', '.join(map(repr, repeated))}")
    return keys, [leaf for _, leaf in entries], treedef


def is_prng_key(leaf: Any) -> bool:
    """Whether a leaf is of typed PRNG keys, whose memory has their data."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
