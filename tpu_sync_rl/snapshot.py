"""Snapshots: versions of a trainer that are copied to pinned host memory, and served from there."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from tpu_sync_rl._native import ShardLayout
from tpu_sync_rl.buffers import Aliases, layout_of
from tpu_sync_rl.local_shards import LocalShards, is_narrow
from tpu_sync_rl.manifest import Manifest
from tpu_sync_rl.moving import moving
from tpu_sync_rl.report import PINNED_HOST
from tpu_sync_rl.staging import Window, batches

_Parts = dict[int, list[jax.Array]]  # per leaf, each of one device


class Snapshot(Aliases):
    """A copy of one version in pinned host memory, and its addresses. Nothing can donate it.

    Unlike the arrays that it was made of it lives as long as this object, so that who joins late is
    served. One thread may `stage`; another one may use what is inherited meanwhile.
    """

    def __init__(self, manifest: Manifest, shards: LocalShards, *, window_nbytes: int) -> None:
        """Copies nothing yet."""
        super().__init__(manifest, shards)
        self._landed: dict[int, list[Any]] = {}  # leaf -> what keeps its shards
        self._window_nbytes = window_nbytes
        self._failed = False

    @moving()
    def stage(self, arrays: Sequence[jax.Array], on_landed: Callable[[list[int]], object]) -> None:
        """Copies `arrays`, computed ones, in the order of the manifest; blocks until all are there.

        They may be donated from then on.

        Args:
            arrays: of the version.
            on_landed: hears, a few at a time, of leaves whose addresses and strides are there.
        """
        window = Window(self._window_nbytes)
        try:
            for leaves, nbytes in batches(range(len(arrays)), self.shards):
                parts = {leaf: self._parts(leaf, arrays[leaf]) for leaf in leaves}
                copied, landed = partial(_to_pinned_host, parts), partial(self._land, on_landed)
                window.begin(nbytes, copied, landed)
            window.finish()
        except BaseException:
            self._failed = True
            raise

    @property
    def landed(self) -> list[int] | None:
        """Leaves that are in host memory by now; None where all are."""
        leaves = list(self._landed)
        return None if len(leaves) == self.shards.num_leaves else leaves

    def retake(self) -> bool:
        """Pins again whatever was let go, as far as it has landed; False where staging failed."""
        if not self._failed:
            self._pins.update(self._landed)
        return not self._failed

    def _land(self, on_landed: Callable[[list[int]], object], copies: _Parts) -> None:
        for leaf, parts in copies.items():
            self._landed[leaf] = self._hold(leaf, parts)
        on_landed(list(copies))

    def _is_in_place(self, leaf: int) -> bool:
        dtype = self.manifest.leaves[leaf].dtype
        if is_narrow(dtype):
            return False
        # XLA holds real and imaginary parts of complex elements apart where it tiles.
        is_tiled = any(device.platform != "cpu" for device in self.shards.devices[leaf])
        return not (is_tiled and dtype.startswith("complex"))

    def _held(self, leaf: int, parts: list[Any]) -> tuple[list[Any], tuple[int, ...] | None]:
        layout = layout_of(parts[0])
        if layout.tiling and self.shards.devices[leaf][0].platform != "cpu":  # see Aliases._held
            self.layouts[leaf] = self._tiles(leaf, layout.major_to_minor, layout.tiling)
        return parts, layout.major_to_minor

    def _tiles(
        self, leaf: int, order: tuple[int, ...], tiles: tuple[tuple[int, ...], ...]
    ) -> ShardLayout:
        first = self.shards.first_shard[leaf]
        shape, itemsize = self.shards.shapes[first], self.shards.itemsize.item(first)
        try:
            return ShardLayout(shape, itemsize, order, tiles)
        except ValueError as error:
            raise ValueError(
                f"leaf {self.manifest.leaves[leaf].key!r} lies in tiles {tiles}, with its "
                f"dimensions {order} from major to minor, which can't be addressed: {error}"
            ) from error


def _to_pinned_host(parts: _Parts) -> _Parts:
    # A copy also of what is in pinned host memory already, and could be donated there.
    shardings = jax.tree.map(lambda part: part.sharding.with_memory_kind(PINNED_HOST), parts)
    copies: _Parts = jax.device_put(parts, shardings, may_alias=False)
    return copies
