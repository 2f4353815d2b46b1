"""Snapshots: versions of a trainer that are copied to pinned host memory, and served from there."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from tpu_sync_rl._native import ShardLayout
from tpu_sync_rl.buffers import Aliases, LocalShards, is_narrow, layout_of
from tpu_sync_rl.manifest import Manifest
from tpu_sync_rl.report import PINNED_HOST
from tpu_sync_rl.staging import Window


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

    def stage(self, arrays: Sequence[jax.Array], on_landed: Callable[[list[int]], object]) -> None:
        """Copies `arrays`, computed ones, in the order of the manifest; blocks until all are there.

        They may be donated from then on.

        Args:
            arrays: of the version.
            on_landed: hears, leaf after leaf, of those whose addresses and strides are there.
        """
        window = Window(self._window_nbytes)
        try:
            for leaf, array in enumerate(arrays):
                parts = self._parts(leaf, array)
                nbytes = sum(part.nbytes for part in parts)
                landed = partial(self._land, leaf, on_landed)
                window.begin(nbytes, partial(_to_pinned_host, parts), landed)
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

    def _land(
        self, leaf: int, on_landed: Callable[[list[int]], object], parts: list[jax.Array]
    ) -> None:
        self._hold(leaf, parts)
        self._landed[leaf] = self._pins[leaf]
        on_landed([leaf])

    def _is_in_place(self, leaf: int) -> bool:
        return not is_narrow(self.manifest.leaves[leaf].dtype)

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


def _to_pinned_host(parts: list[jax.Array]) -> Any:
    # A copy also of what is in pinned host memory already, and could be donated there.
    shardings = [part.sharding.with_memory_kind(PINNED_HOST) for part in parts]
    return jax.device_put(parts, shardings, may_alias=False)
