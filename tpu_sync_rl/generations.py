"""Host memory that holds one version of a sampler's params, and the jax.Arrays over it.

Memory is pre-faulted once and used again, but only when no array lives over it: each use has a root
object of its own, which the views under the arrays keep alive, and whose end gives the memory back.
"""

import gc
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tpu_sync_rl._native import HostMemory
from tpu_sync_rl.generation_layout import GenerationLayout, held_elsewhere
from tpu_sync_rl.maker_process import only_here
from tpu_sync_rl.moving import moving

# How often a wait for dead arrays looks for cycles. Even without one, JAX lets go of memory only at
# its next call or at a collection, however small, where an array ended beside a running thread.
_COLLECT_S = 0.2
_SMALL_NBYTES = 4 << 20  # blocks up to here serve results of any smaller size
NUM_THREADS = min(8, len(os.sched_getaffinity(0)))


def _allocated(layout: GenerationLayout, nodes: Sequence[int] = ()) -> HostMemory:
    """Memory for one version, on these NUMA nodes. Blocks until every page is there."""
    return HostMemory(max(1, layout.nbytes), NUM_THREADS, nodes)


class _Root(np.ndarray):
    """The memory of one generation. Made right over the buffer, it stays the base of its views."""


def notice_dead_arrays() -> None:
    """Has JAX let go of memory whose arrays have ended, as its next call would. Takes no time."""
    gc.collect(0)


class Generation:
    """One use of a block of memory: bytes are put in, then arrays are handed out.

    When the generation and all arrays over it are gone, the memory is free. One thread at a time.
    """

    def __init__(
        self, layout: GenerationLayout, memory: HostMemory, on_free: Callable[[HostMemory], object]
    ) -> None:
        """Takes `memory`, of at least `layout.nbytes`; `on_free` gets it back, on any thread."""
        # shape=[num_shards], dtype=uint64: where the bytes of each go, dense and row-major
        self.sink_addresses = layout.offsets + np.uint64(memory.address)
        self._layout = layout
        self._root = _Root((memory.nbytes,), np.uint8, buffer=memoryview(memory))
        # In a fork `on_free` might find a lock taken, by a thread that is not there.
        self._end = weakref.finalize(self._root, only_here(on_free), memory)
        self._end.atexit = False
        self._arrays: list[jax.Array | None] = [None] * len(layout.leaves)
        self._num_prepared = 0  # leaves that prepare_arrays() need not look at again

    @moving()
    def prepare_arrays(self, until: Callable[[], bool] = lambda: False) -> None:
        """Makes the arrays that alias the memory, so that handing out is quick.

        Their bytes may land before, meanwhile or later. Leaves that JAX copies are left out. Ends
        early where `until()`; what is made already is not made again.
        """
        for index in range(self._num_prepared, len(self._arrays)):
            if index not in self._layout.copied:
                if until():
                    return
                self._arrays[index] = self._made(index, must_alias=True)
            self._num_prepared = index + 1

    @moving()
    def arrays(self) -> list[Any]:
        """Hands out the jax.Arrays, in the manifest's order. Call once, when all bytes are there.

        Zero-copy on CPU. From then on they alone keep the memory, and nothing may write to it.
        """
        made = [
            self._made(index, must_alias=False) if array is None else array
            for index, array in enumerate(self._arrays)
        ]
        self._arrays = []
        del self._root
        return made

    def use(self) -> Callable[[], bool]:
        """Tells, whenever asked, whether the memory is still in use. Does not keep it."""
        end = self._end
        return lambda: end.alive

    def release(self) -> None:
        """Gives the memory back at once. Arrays over it may live on, but must not be read."""
        freed = self._end.detach()
        if freed is not None:
            _, on_free, memories, _ = freed
            on_free(*memories)

    def _made(self, index: int, *, must_alias: bool) -> jax.Array | None:
        leaf = self._layout.leaves[index]

        def part(where: Any) -> Any:
            shard = leaf.first_shard + leaf.shard_at[tuple([x.start or 0 for x in where])]
            view: np.ndarray = np.ndarray(
                self._layout.shards.shapes[shard],
                leaf.stored,
                buffer=self._root,
                offset=self._layout.offsets.item(shard),
            )
            if leaf.key_impl is None:
                return view
            return jax.random.wrap_key_data(jax.device_put(view), impl=leaf.key_impl)

        array: jax.Array
        if not leaf.devices:  # of a replicated leaf JAX would ask for a part all the same
            array = held_elsewhere(leaf)
        elif leaf.device is None:
            # Its views are aliased as by device_put(may_alias=True), at a fifth of the cost.
            array = jax.make_array_from_callback(leaf.shape, leaf.sharding, part, dtype=leaf.dtype)
        else:
            with jax.default_device(leaf.device):
                array = jax.device_put(part((slice(None),) * len(leaf.shape)), may_alias=True)
        if must_alias and index not in self._layout.aliased:
            if not self._is_alias(index, array):
                self._layout.copied.add(index)
                return None
            self._layout.aliased.add(index)
        return array

    def _is_alias(self, index: int, array: jax.Array) -> bool:
        first, last = self._layout.shards.first_shard[index : index + 2]
        addresses = set(self.sink_addresses[first:last].tolist())
        shards = array.addressable_shards
        return all(shard.data.unsafe_buffer_pointer() in addresses for shard in shards)


class GenerationPool:
    """The generations of one sampler process: few blocks of memory, each used again and again.

    `acquire` is for one thread; arrays may die on any.

    Attributes:
        layout: of the arrays of each version.
        max_generations: most blocks that ever live.
    """

    def __init__(
        self, layout: GenerationLayout, *, max_generations: int, nodes: Sequence[int] = ()
    ) -> None:
        """Allocates nothing yet.

        Args:
            layout: of the arrays of each version.
            max_generations: most blocks that ever live.
            nodes: NUMA nodes that their memory is to be on, in turns; any where there is none.
        """
        self._nodes = nodes
        self.layout = layout
        self.max_generations = max_generations
        self._num_generations = 0
        # Filled from destructors, which may run anywhere: SimpleQueue is made for that.
        self._free: queue.SimpleQueue[HostMemory] = queue.SimpleQueue()
        self._on_free: Callable[[], object] = lambda: None
        self._prepared: Generation | None = None
        self._collected_at = 0.0
        self._closed = False

    def acquire(self, timeout_s: float) -> Generation | None:
        """A generation whose memory no array uses; None where there is none within `timeout_s`.

        Then the application still holds older params in all `max_generations` of them. Allocates,
        which blocks, the first two times, and later only while older params are held.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            return prepared
        deadline = time.monotonic() + timeout_s
        memory = self._take(0.0)
        may_grow = self._num_generations < self.max_generations
        if memory is None and self._num_generations >= min(2, self.max_generations):
            notice_dead_arrays()
            memory = self._take(0.0)
            if memory is None and may_grow:
                gc.collect()
                memory = self._take(0.0)
        if memory is None and may_grow:
            memory = self._allocated()
            self._num_generations += 1
        while memory is None and (left_s := deadline - time.monotonic()) > 0:
            memory = self._take(min(left_s, _COLLECT_S))
            self._collect()
        return None if memory is None else self._generation(memory)

    def prepare(self, until: Callable[[], bool]) -> None:
        """Makes the arrays over memory that is free, if any, for the `acquire` that comes next.

        Ends early where `until()`. For the thread that acquires.
        """
        if self._prepared is None:
            memory = self._take(0.0)
            if memory is None:
                return
            self._prepared = self._generation(memory)
        self._prepared.prepare_arrays(until)

    def when_free(self, call: Callable[[], object]) -> None:
        """Has `call` called, on any thread and perhaps in a destructor, when memory gets free."""
        self._on_free = call

    def close(self) -> None:
        """Gives memory back to the system: what is free now, the rest when its arrays are gone."""
        self._closed = True
        self._prepared = None
        while (memory := self._take(0.0)) is not None:
            self._release(memory)

    def _take(self, timeout_s: float) -> HostMemory | None:
        try:
            return self._free.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            return None

    def _collect(self) -> None:
        """Ends arrays that nobody can reach; those in cycles now and then."""
        if time.monotonic() >= self._collected_at + _COLLECT_S:
            gc.collect()
            self._collected_at = time.monotonic()
        else:
            notice_dead_arrays()

    def _give_back(self, memory: HostMemory) -> None:
        if self._closed:
            self._release(memory)
        else:
            self._free.put(memory)
            self._on_free()

    def _generation(self, memory: HostMemory) -> Generation:
        return Generation(self.layout, memory, self._give_back)

    def _allocated(self) -> HostMemory:
        return _allocated(self.layout, self._nodes)

    def _release(self, memory: HostMemory) -> None:
        """Told of a block that goes back to the system when this returns."""


class ResultPool:
    """Memory of dead results of one-client calls, kept for the next ones. Thread-safe.

    Holds at most `TSR_POOL_NBYTES` bytes, by default twice the largest block so far.
    """

    def __init__(self) -> None:
        # Results may die, and give memory back, while their thread is in here: hence an RLock, and
        # no step that a block more or less would break.
        self._lock = threading.RLock()
        self._free: list[HostMemory] = []
        self._largest_nbytes = 0
        self._max_nbytes = 0

    def generation(self, layout: GenerationLayout) -> Generation:
        """A generation for `layout`, in used memory where a block fits. Blocks while it allocates.

        Raises:
            ValueError: TSR_POOL_NBYTES is no number of bytes.
        """
        limit = os.environ.get("TSR_POOL_NBYTES")
        if limit is not None and not limit.isdecimal():
            raise ValueError(f"TSR_POOL_NBYTES is {limit!r}, expected a number of bytes")
        memory = self._take(layout.nbytes)
        if memory is None:
            notice_dead_arrays()
            memory = self._take(layout.nbytes) or _allocated(layout)
        with self._lock:
            self._largest_nbytes = max(self._largest_nbytes, memory.nbytes)
            self._max_nbytes = 2 * self._largest_nbytes if limit is None else int(limit)
        return Generation(layout, memory, self._give_back)

    def release(self) -> None:
        """Gives the memory of dead results back to the system."""
        with self._lock:
            freed, self._free = self._free, []
        del freed

    def _take(self, nbytes: int) -> HostMemory | None:
        """The smallest free block of at least `nbytes`, unless it would waste more than half."""
        most = max(2 * nbytes, _SMALL_NBYTES)
        with self._lock:
            fitting = [memory for memory in self._free if nbytes <= memory.nbytes <= most]
            if not fitting:
                return None
            best = min(fitting, key=lambda memory: memory.nbytes)
            self._free = [memory for memory in self._free if memory is not best]
            return best

    def _give_back(self, memory: HostMemory) -> None:
        with self._lock:
            self._free.append(memory)
            while self._free and sum(x.nbytes for x in self._free) > self._max_nbytes:
                del self._free[:1]
