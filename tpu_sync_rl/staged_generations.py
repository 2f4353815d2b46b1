"""Versions of a sampler that go on from host memory to its devices, leaf by leaf."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax

from tpu_sync_rl._native import HostMemory
from tpu_sync_rl.device_memory import DeviceMemory
from tpu_sync_rl.generation_layout import GenerationLayout
from tpu_sync_rl.generations import Generation, GenerationPool
from tpu_sync_rl.moving import moving
from tpu_sync_rl.options import Staging
from tpu_sync_rl.staging import Window, batches, num_fitting, takes_pinned_host
from tpu_sync_rl.trace import Trace


class StagedGeneration(Generation):
    """One use of a block of memory, from which leaves go on to their devices as they are verified.

    Its memory is free when the arrays are there.
    """

    def __init__(
        self,
        layout: GenerationLayout,
        memory: Any,
        on_free: Callable[[Any], object],
        *,
        window_nbytes: int,
        device_memory: DeviceMemory,
    ) -> None:
        """As a Generation; at most `window_nbytes` of copies are under way at a time."""
        super().__init__(layout, memory, on_free)
        self._device_memory = device_memory
        self._window_nbytes = window_nbytes
        self._waits_for_swap: bool | None = None  # until it is known
        self._start_over()

    @property
    def waits_for_swap(self) -> bool:
        """Whether the devices had no room for it beside the arrays of former versions."""
        return bool(self._waits_for_swap)

    def prepare_arrays(self, until: Callable[[], bool] = lambda: False) -> None:
        """Does nothing: arrays are copies of bytes that are there."""

    def verified(self, leaves: Iterable[int]) -> None:
        """Begins H2D of leaves whose bytes are all there; waits where too much is under way."""
        if self._waits_for_swap is None:
            self._waits_for_swap = not self._device_memory.is_free_for(self)
        if not self._waits_for_swap:
            self._begin(leaves)
        self._window.look()

    def arrays(self) -> list[Any]:
        """Hands out the jax.Arrays, in the manifest's order. Call once, when all is verified.

        A call that raises gives back what it took on the devices, and may be tried again.
        """
        try:
            self._begin(range(len(self._begun)))
            self._window.finish()
        except BaseException:
            self._start_over()
            raise
        arrays: list[Any] = self._arrays
        self._device_memory.took(self, arrays)
        self._arrays = []
        del self._root
        return arrays

    def trace(self, trace: Trace, version: int) -> float:
        """Writes when H2D was; returns for how long copies were under way."""
        if self._window.began is not None:
            trace.beside(version, "h2d", self._window.began, self._window.busy_s)
        return self._window.busy_s

    def _start_over(self) -> None:
        self._window = Window(self._window_nbytes)
        self._begun = [False] * len(self._layout.leaves)
        self._arrays = [None] * len(self._layout.leaves)

    def _begin(self, leaves: Iterable[int]) -> None:
        left = [leaf for leaf in leaves if not self._begun[leaf]]
        for batch, nbytes in batches(left, self._layout.shards):
            self._window.begin(nbytes, partial(self._copied, batch), self._land)
            for leaf in batch:
                self._begun[leaf] = True

    @moving()
    def _copied(self, leaves: Sequence[int]) -> dict[int, Any]:
        """The arrays of `leaves`, on their way to the devices."""
        arrays: dict[int, Any] = {leaf: self._made(leaf, must_alias=False) for leaf in leaves}
        aliases = {
            leaf: array
            for leaf, array in arrays.items()
            if all(device.platform == "cpu" for device in array.devices())
        }
        return arrays | self._copies(aliases) if aliases else arrays

    def _copies(self, aliases: dict[int, Any]) -> dict[int, Any]:
        """What takes the place of arrays that JAX makes over the memory itself, as on a CPU."""
        made = self._layout.leaves
        parts = {}
        for leaf, array in aliases.items():
            if made[leaf].device is None:  # else it is not committed, and has to stay so
                parts[leaf] = [shard.data for shard in array.addressable_shards]
        formats = {
            leaf: [x.format if made[leaf].key_impl is None else x.sharding for x in of_leaf]
            for leaf, of_leaf in parts.items()
        }
        copies = jax.device_put(parts, formats, may_alias=False)
        return {
            leaf: jax.device_put(array, may_alias=False)
            if leaf not in copies
            else jax.make_array_from_single_device_arrays(
                array.shape, array.sharding, copies[leaf], dtype=array.dtype
            )
            for leaf, array in aliases.items()
        }

    def _land(self, copies: dict[int, Any]) -> None:
        for leaf, array in copies.items():
            self._arrays[leaf] = array


class StagedPool(GenerationPool):
    """A pool of staged generations, whose memory is mapped for DMA by clients that can do so."""

    def __init__(
        self,
        layout: GenerationLayout,
        staging: Staging,
        *,
        max_generations: int,
        nodes: Sequence[int],
    ) -> None:
        """Allocates nothing yet.

        Raises:
            ValueError: a version does not fit into the memory that `staging` allows.
        """
        super().__init__(layout, max_generations=max_generations, nodes=nodes)
        self.device_memory = DeviceMemory(layout, staging.max_device_nbytes)
        self._window_nbytes = staging.window_nbytes
        self._clients = {device.client for devices in layout.shards.devices for device in devices}

    def _generation(self, memory: HostMemory) -> Generation:
        return StagedGeneration(
            self.layout,
            memory,
            self._give_back,
            window_nbytes=self._window_nbytes,
            device_memory=self.device_memory,
        )

    def _allocated(self) -> HostMemory:
        memory = super()._allocated()
        for client in self._clients:
            # It goes on without where the client says that it can't.
            with contextlib.suppress(AttributeError, jax.errors.JaxRuntimeError):
                client.dma_map(memory.address, memory.nbytes)
        return memory

    def _release(self, memory: HostMemory) -> None:
        for client in self._clients:
            with contextlib.suppress(AttributeError, jax.errors.JaxRuntimeError):
                client.dma_unmap(memory.address)


def generation_pool(
    layout: GenerationLayout, staging: Staging, *, max_generations: int, nodes: Sequence[int]
) -> GenerationPool:
    """The pool of a sampler whose versions pass to its devices as `staging` says.

    Raises:
        ValueError: a version does not fit into the memory that `staging` allows, and what lacks.
    """
    staged = takes_pinned_host(staging.mode, layout.shards)
    # Arrays that alias a generation are held while the next one comes in.
    least = 1 if staged else 2
    limit = num_fitting(
        "versions in host memory", layout.nbytes, "max_host_nbytes", staging.max_host_nbytes, least
    )
    most = min(max_generations, limit)
    if not staged:
        return GenerationPool(layout, max_generations=most, nodes=nodes)
    return StagedPool(layout, staging, max_generations=most, nodes=nodes)
