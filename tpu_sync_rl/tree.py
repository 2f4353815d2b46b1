"""Pytrees as keyed leaves: leaves are matched by key, never by order."""

from collections.abc import Iterable
from typing import Any

import jax
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
    if len(set(keys)) != len(keys):
        raise ValueError(f"two leaves have the same key: {_repeated(keys)}")
    return keys, [leaf for _, leaf in entries], treedef


def _repeated(keys: Iterable[str]) -> str:
    seen: set[str] = set()
    repeated = sorted({key for key in keys if key in seen or seen.add(key)})  # type: ignore[func-returns-value]
    return ", ".join(repr(key) for key in repeated)
