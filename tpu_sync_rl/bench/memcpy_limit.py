"""What a process copies from memory to memory."""

import itertools
from multiprocessing.connection import Connection

from tpu_sync_rl import _native
from tpu_sync_rl.bench import _limits
from tpu_sync_rl.bench.limit import Limit, stamp, touched
from tpu_sync_rl.bench.processes import answer, words

# In the order of CopyBy in csrc/limits/limits.h.
WAYS = ("one memcpy a thread", "memcpy of what the cache holds", "stores past the cache")


class MemcpyLimit(Limit[str]):
    """A process of its own that copies.

    Args:
        nbytes: bytes of a sample, over all threads.
        num_threads: how many copy.
    """

    def __init__(self, nbytes: int, num_threads: int) -> None:
        self.nbytes = nbytes
        self._numbers = itertools.count(1)
        super().__init__()
        try:
            self._copier = self.start(_copy, nbytes, num_threads)
            answer(self._copier, "touching memory")
            self.choose(WAYS)
        except BaseException:
            self.kill()
            raise

    def gbytes_per_s(self) -> float:
        """One sample.

        Raises:
            RuntimeError: the copy has other bytes, or the process failed.
        """
        self._copier.send((WAYS.index(self.way), next(self._numbers)))
        seconds, is_equal = answer(self._copier, "a copy")
        if not is_equal:
            raise RuntimeError(f"memcpy by {self.way}: the copy has other bytes")
        return float(self.nbytes / seconds / 1e9)

    def __enter__(self) -> "MemcpyLimit":
        return self


def _copy(pipe: Connection, nbytes: int, num_threads: int) -> None:
    source, sink = touched(nbytes), touched(nbytes)
    pipe.send(None)
    for by, number in words(pipe):
        checksum = stamp(source, number)
        seconds = _limits.copy(sink, source, num_threads, by)
        pipe.send((seconds, _native.crc32c(sink) == checksum))
