"""What the kernel copies from one process into another: `process_vm_readv`, on huge pages."""

import itertools
import os
from multiprocessing.connection import Connection

from tpu_sync_rl import _native
from tpu_sync_rl.bench import _limits
from tpu_sync_rl.bench.limit import Limit, stamp, touched
from tpu_sync_rl.bench.processes import answer, words

THREADS = (1, 2)


class ReadvLimit(Limit[int]):
    """A process that owns memory, and one that reads all of it.

    Args:
        nbytes: bytes of a sample, over all threads.

    Attributes:
        way: how many threads read.

    Raises:
        RuntimeError: processes may not read each other's memory here.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._numbers = itertools.count(1)
        super().__init__()
        try:
            self._owner = self.start(_own, nbytes)
            there = answer(self._owner, "touching memory")
            self._reader = self.start(_read, nbytes, *there)
            answer(self._reader, "touching memory")
            self.choose(THREADS)
        except BaseException:
            self.kill()
            raise

    def gbytes_per_s(self) -> float:
        """One sample.

        Raises:
            RuntimeError: the reader has other bytes, or a process failed.
        """
        self._owner.send(next(self._numbers))
        owned = answer(self._owner, "writing memory")
        self._reader.send(self.way)
        seconds, read = answer(self._reader, "process_vm_readv")
        if read != owned:
            raise RuntimeError("process_vm_readv: the reader has other bytes than the owner")
        return float(self.nbytes / seconds / 1e9)

    def __enter__(self) -> "ReadvLimit":
        return self


def _own(pipe: Connection, nbytes: int) -> None:
    _limits.let_others_read()
    memory = touched(nbytes)
    pipe.send((os.getpid(), memory.address))
    for number in words(pipe):
        pipe.send(stamp(memory, number))


def _read(pipe: Connection, nbytes: int, pid: int, address: int) -> None:
    memory = touched(nbytes)
    pipe.send(None)
    for num_threads in words(pipe):
        seconds = _limits.read_process(pid, address, memory, num_threads)
        pipe.send((seconds, _native.crc32c(memory)))
