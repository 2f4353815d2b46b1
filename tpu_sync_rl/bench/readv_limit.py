"""What the kernel copies from one process into another: `process_vm_readv`, on huge pages."""

import ctypes
import mmap
import os
import threading
import time
from multiprocessing.connection import Connection

from tpu_sync_rl.bench.processes import Processes, answer, words

NUM_THREADS = 2
_READ_NBYTES = 64 << 20  # that one call asks for
# From linux/prctl.h: lets a sibling read memory where Yama allows that to parents only.
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class ReadvLimit(Processes):
    """A process that owns memory, and one that reads all of it, a sample at a time.

    Args:
        nbytes: bytes of a sample, over all threads.

    Raises:
        RuntimeError: processes may not read each other's memory here.
    """

    def __init__(self, nbytes: int) -> None:
        share = max(mmap.PAGESIZE, nbytes // NUM_THREADS // mmap.PAGESIZE * mmap.PAGESIZE)
        self.nbytes = share * NUM_THREADS
        super().__init__()
        try:
            there = answer(self.start(_owner, self.nbytes), "touching memory")
            self._reader = self.start(_reader, share, *there)
            answer(self._reader, "touching memory")
        except BaseException:
            self.kill()
            raise

    def gbytes_per_s(self) -> float:
        """One sample."""
        self._reader.send(None)
        seconds: float = answer(self._reader, "process_vm_readv")
        return self.nbytes / seconds / 1e9

    def __enter__(self) -> "ReadvLimit":
        return self


class _Span(ctypes.Structure):
    """An iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def _owner(pipe: Connection, nbytes: int) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)  # fails without Yama: all may then
    memory = _touched(nbytes)
    pipe.send((os.getpid(), _address(memory)))
    for _ in words(pipe):
        pass


def _reader(pipe: Connection, share: int, pid: int, address: int) -> None:
    # Calls through ctypes let go of the GIL, so the threads read at once.
    readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    readv.restype = ctypes.c_ssize_t
    memory = _touched(share * NUM_THREADS)
    here = _address(memory)
    failures: list[str] = []

    def read(thread: int) -> None:
        done, end = thread * share, (thread + 1) * share
        while done < end:
            nbytes = min(_READ_NBYTES, end - done)
            local, remote = _Span(here + done, nbytes), _Span(address + done, nbytes)
            got = readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
            if got <= 0:
                failures.append(os.strerror(ctypes.get_errno()))
                return
            done += got

    pipe.send(None)
    for _ in words(pipe):
        began = time.monotonic()
        threads = [threading.Thread(target=read, args=(thread,)) for thread in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        if failures:
            raise RuntimeError(f"process_vm_readv: {failures[0]}")
        pipe.send(seconds)


def _touched(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, nbytes, mmap.PAGESIZE):
        memory[start] = 1
    return memory


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
