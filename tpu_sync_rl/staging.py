"""How versions pass between devices and host memory: whether by copies, and how many at a time.

A device whose memory the network can't reach has its shards copied to pinned host memory (D2H), and
a version that came in copied to the devices (H2D), leaf after leaf, while other leaves are on the
wire. Public JAX API alone, which a CPU runs as well: there both are copies in host memory.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from tpu_sync_rl.local_shards import LocalShards
from tpu_sync_rl.options import StagingMode
from tpu_sync_rl.report import PINNED_HOST, shown_nbytes

_BATCH_NBYTES = 1 << 20


def takes_pinned_host(mode: StagingMode, shards: LocalShards) -> bool:
    """Whether versions of `shards` are staged: all their leaves, or none."""
    if mode == "auto":
        return any(device.platform != "cpu" for leaf in shards.devices for device in leaf)
    return mode == PINNED_HOST


def num_fitting(what: str, nbytes: int, limit: str, most_nbytes: int | None, least: int) -> int:
    """How many times `what`, of `nbytes`, fits into `most_nbytes`; a lot where that is None.

    Raises:
        ValueError: fewer than `least` times: says which limit it is, and how much is missing.
    """
    if most_nbytes is None:
        return 1 << 30
    if least * nbytes > most_nbytes:
        raise ValueError(
            f"{limit}={most_nbytes} is too little for {what}: {least} × {shown_nbytes(nbytes)}; "
            f"{least * nbytes - most_nbytes} bytes are missing"
        )
    return most_nbytes // max(1, nbytes)


def batches(leaves: Iterable[int], shards: LocalShards) -> Iterator[tuple[list[int], int]]:
    """Cuts `leaves` into runs that are copied at once, small ones together; and bytes of each.

    JAX takes half the time for a leaf among others: 10,000 small ones took 1.8 s by themselves.
    """
    batch: list[int] = []
    batch_nbytes = 0
    for leaf in leaves:
        nbytes = shards.nbytes_of(leaf)
        if batch and batch_nbytes + nbytes > _BATCH_NBYTES:
            yield batch, batch_nbytes
            batch, batch_nbytes = [], 0
        batch.append(leaf)
        batch_nbytes += nbytes
    if batch:
        yield batch, batch_nbytes


class Window:
    """Copies that are under way, at most so many bytes of them at a time; a larger one goes alone.

    For one thread.

    Attributes:
        began: when the first one began, by time.monotonic(); None before.
        busy_s: how long there was one.
    """

    def __init__(self, nbytes: int) -> None:
        self.began: float | None = None
        self.busy_s = 0.0
        self._most_nbytes = nbytes
        self._under_way: deque[tuple[int, Any, Callable[[Any], object]]] = deque()
        self._nbytes = 0
        self._busy_since = 0.0

    def begin(self, nbytes: int, start: Callable[[], Any], landed: Callable[[Any], object]) -> None:
        """Waits until there is room, and starts a copy of `nbytes`.

        Args:
            nbytes: that it takes.
            start: starts it, and returns its arrays.
            landed: gets these when it has ended; copies end in the order in which they began.
        """
        self.look()
        while self._under_way and self._nbytes + nbytes > self._most_nbytes:
            self._land()
        if not self._under_way:
            self._busy_since = time.monotonic()
            self.began = self.began or self._busy_since
        self._under_way.append((nbytes, start(), landed))
        self._nbytes += nbytes

    def look(self) -> None:
        """Notices copies that have ended. Does not wait."""
        while self._under_way and _is_ready(self._under_way[0][1]):
            self._land()

    def finish(self) -> None:
        """Waits until all have ended."""
        while self._under_way:
            self._land()

    def _land(self) -> None:
        nbytes, arrays, landed = self._under_way[0]
        jax.block_until_ready(arrays)
        self._under_way.popleft()
        self._nbytes -= nbytes
        if not self._under_way:
            self.busy_s += time.monotonic() - self._busy_since
        landed(arrays)


def _is_ready(arrays: Any) -> bool:
    # Those of PRNG keys, which are small, can't tell: they are waited for.
    return all(getattr(array, "is_ready", lambda: True)() for array in jax.tree.leaves(arrays))
