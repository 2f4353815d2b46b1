"""How versions that are prepared become the params of a sampler process's application."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.generations import Generation, GenerationPool
from tpu_sync_rl.messages import Held
from tpu_sync_rl.prepared_versions import Received
from tpu_sync_rl.process_stats import ProcessStats
from tpu_sync_rl.report import DIRECT, PINNED_HOST, Report
from tpu_sync_rl.staged_generations import StagedGeneration, StagedPool
from tpu_sync_rl.trace import Trace
from tpu_sync_rl.update import Update


class Updates:
    """The updates of one session, each in the place of the one before. For one thread at a time.

    Attributes:
        current: the last one; None before the first.
        committed: the version that it is.
    """

    def __init__(
        self,
        treedef: Any,
        order: Sequence[int],
        *,
        replica: str,
        agent: str,
        pool: GenerationPool,
        trace: Trace,
    ) -> None:
        """`order` has the position in the tree of each leaf of the manifest."""
        self._treedef = treedef
        self._order = order
        self._replica = replica
        self._agent = agent
        self._pool = pool
        self._trace = trace
        self._generation: Generation | None = None  # under the params of `current`
        self.current: Update | None = None
        self.committed: Held | None = None

    def swap(self, received: Received, epoch: int, stats: ProcessStats) -> tuple[Update, list[Any]]:
        """Makes `received` the current update; also returns its leaves, in the manifest's order.

        Args:
            received: a version that this process has prepared.
            epoch: of its incarnation.
            stats: of the whole replica.

        Raises:
            SyncError: there is no room for it on the devices. After that, and an interrupt,
                `current` stays, if it is held, and another try may go well.
        """
        held = received.held
        leaves = self._copied(received) if received.leaves is None else received.leaves
        params = [None] * len(self._order)
        for position, leaf in zip(self._order, leaves, strict=True):
            params[position] = leaf
        local = self._report(held, epoch, received.stats, None)
        self._generation = received.generation
        self.current = Update(
            held.version,
            held.incarnation,
            epoch,
            jax.tree.unflatten(self._treedef, params),
            self._report(held, epoch, stats, local),
        )
        self.committed = held
        return self.current, leaves

    def release(self) -> None:
        """Gives the memory of `current` back at once: its params must not be read any more."""
        if self.current is not None and self._generation is not None:
            self.current = replace(self.current, params=None)
            self._generation.release()
            self._generation = None

    def _copied(self, received: Received) -> list[Any]:
        """The arrays of a version that its devices have room for only where the former one was."""
        assert isinstance(self._pool, StagedPool)
        former = None if self.current is None else weakref.ref(self.current)
        self.current = None
        try:
            self._pool.device_memory.check_swap()
            leaves = received.generation.arrays()
        except BaseException as error:
            self.current = None if former is None else former()
            if isinstance(error, jax.errors.JaxRuntimeError):
                text = f"version {received.held.version} was not copied to the devices: {error}"
                raise SyncError(text) from error
            raise
        assert isinstance(received.generation, StagedGeneration)
        received.stats.seconds["h2d"] = received.generation.trace(
            self._trace, received.held.version
        )
        return leaves

    def _report(self, held: Held, epoch: int, stats: ProcessStats, local: Report | None) -> Report:
        return Report(
            version=held.version,
            incarnation=held.incarnation,
            epoch=epoch,
            nbytes=stats.nbytes,
            wire_nbytes=stats.wire_nbytes,
            seconds=stats.seconds,
            rails=stats.rails,
            replicas={self._replica: held.version},
            staging=PINNED_HOST if isinstance(self._pool, StagedPool) else DIRECT,
            agent=self._agent,
            local=local,
        )
