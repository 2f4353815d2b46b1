"""What limits have in common: ways to reach them, and memory whose bytes are checked.

Native code (csrc/limits) moves the bytes, so that Python holds nothing down. They go between blocks
of memory that were touched before and lie in huge pages, as a steady state has them. What arrived
is compared after each sample, outside of what is timed.
"""

import os
import struct
from collections.abc import Sequence
from statistics import median
from typing import Generic, TypeVar

from tpu_sync_rl import _native
from tpu_sync_rl.bench.processes import Processes

NUM_TRIALS = 3  # of each way that count; one before them does not
_STAMPED_NBYTES = 1 << 18  # each of which has the number of its sample

Way = TypeVar("Way")


class Limit(Processes, Generic[Way]):
    """Processes that do what the machine can, one sample at a time.

    Attributes:
        way: how: the fastest here of several, once `choose` has tried them.
    """

    way: Way

    def gbytes_per_s(self) -> float:
        """One sample.

        Raises:
            RuntimeError: what arrived is not what was sent, or a process failed.
        """
        raise NotImplementedError

    def choose(self, ways: Sequence[Way]) -> None:
        """Takes, of `ways`, the one with the best median. They are tried in turn."""
        turns = [[self._by(way) for way in ways] for _ in range(1 + NUM_TRIALS if ways[1:] else 1)]
        medians = [median(samples) for samples in zip(*turns[-NUM_TRIALS:], strict=True)]
        self.way = ways[medians.index(max(medians))]

    def _by(self, way: Way) -> float:
        self.way = way
        return self.gbytes_per_s()


def touched(nbytes: int) -> _native.HostMemory:
    """Memory that is there, in huge pages where the kernel has them."""
    return _native.HostMemory(nbytes, len(os.sched_getaffinity(0)))


def stamp(memory: _native.HostMemory, number: int) -> int:
    """Makes all parts of `memory` others than before, and than one another; their checksum."""
    for index, start in enumerate(range(0, memory.nbytes - 15, _STAMPED_NBYTES)):
        struct.pack_into("<QQ", memory, start, number, index)
    return _native.crc32c(memory)
