"""Weights from one mesh to another of a client whose devices belong to other processes, by agents.

A trainer and a sampler of a job of their own, both by agents, for each way that weights take; they
stay for the next call.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import jax

from tpu_sync_rl.addresses import join_address
from tpu_sync_rl.colocated import are_remote
from tpu_sync_rl.connect import connect_sampler, connect_trainer
from tpu_sync_rl.manifest import Rename
from tpu_sync_rl.nics import find_nics, loopback
from tpu_sync_rl.one_client import matched, route_key
from tpu_sync_rl.options import DEFAULT_TIMEOUT_S
from tpu_sync_rl.program import share
from tpu_sync_rl.tree import flatten

_MAX_ROUTES = 4
_UNLIMITED = 1 << 30  # generations: results are held for as long as their owner likes


class _Route:
    """The two ends of one way. One call at a time."""

    def __init__(self, params: Any, to: Any, rename: Rename, cast: bool) -> None:
        """Makes the agents; raises as `sync_weights` does."""
        # Both ends have their leaves by key, so that nodes without keys pass in one structure, as
        # `matched` allows.
        self._keys, leaves, _ = flatten(params, by_position=True)
        like = matched(params, to, rename, cast)[-1]
        self._keys_of_result, likes, self._treedef = flatten(like, by_position=True)
        devices = {device for leaf in leaves for device in leaf.sharding.device_set}
        host = (find_nics()[0] if are_remote(devices) else loopback()).host
        token = share(secrets.token_hex(16), time.monotonic() + DEFAULT_TIMEOUT_S)
        self._lock = threading.Lock()
        self._trainer = connect_trainer(
            coordinator=join_address(host, 0),
            job="one client",
            min_replicas=1,
            token=token,
            agent="colocated",
        )
        try:
            self._sampler = connect_sampler(
                coordinator=self._trainer.coordinator,
                job="one client",
                replica="to",
                like=dict(zip(self._keys_of_result, map(_committed, likes), strict=True)),
                rename=rename,
                cast=cast,
                max_generations=_UNLIMITED,
                token=token,
                agent="colocated",
            )
        except BaseException:
            self._trainer.close()
            raise

    def sync(self, params: Any) -> Any:
        """Brings `params` to the other end."""
        with self._lock:
            leaves = jax.tree.leaves(params)
            self._trainer.sync_weights(dict(zip(self._keys, leaves, strict=True)))
            synced = self._sampler.sync_weights().params
        return jax.tree.unflatten(self._treedef, [synced[key] for key in self._keys_of_result])

    def close(self) -> None:
        """Ends the agents; results stay valid."""
        with self._lock:
            self._sampler.close()
            self._trainer.close()


_routes: OrderedDict[Hashable, _Route] = OrderedDict()  # guarded by _lock
_lock = threading.Lock()


def sync_weights(params: Any, *, to: Any, rename: Rename = None, cast: bool = False) -> Any:
    """As `one_client.sync_weights`, without a byte of a weight in this process.

    The first call for leaves and shardings like these makes agents on their hosts, which keep the
    memory of the newest result and of those that are held.

    Raises:
        SyncError: agents can't run, or one is gone.
    """
    leaves, treedef = jax.tree.flatten(params)
    key = route_key(params, leaves, treedef, to, rename, cast)
    with _lock:
        route = _routes.pop(key, None) or _Route(params, to, rename, cast)
        _routes[key] = route
        outdated = [_routes.popitem(last=False)[1] for _ in range(len(_routes) - _MAX_ROUTES)]
    for old in outdated:
        old.close()
    try:
        return route.sync(params)
    except BaseException:
        with _lock:
            if _routes.get(key) is route:
                del _routes[key]
        route.close()
        raise


def release_memory() -> None:
    """Ends the agents of all calls, and so gives back their memory, but that of living results."""
    with _lock:
        routes = list(_routes.values())
        _routes.clear()
    for route in routes:
        route.close()


def _committed(like: Any) -> Any:
    """What a result is like, which is committed to its devices whatever was given as `to`."""
    if getattr(like, "committed", True):
        return like
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=like.sharding)
