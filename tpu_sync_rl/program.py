"""The processes that take part in a sync together, and what they tell each other to begin with."""

import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from math import inf
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tpu_sync_rl.deadline import seconds_left
from tpu_sync_rl.errors import PeerLostError, SyncTimeoutError
from tpu_sync_rl.moving import moving
from tpu_sync_rl.threads import start_thread

_MOST_NBYTES = 4096
_MOMENT_S = 0.5  # so that what process 0 failed in at its deadline is heard
_given_up = threading.Event()  # a `share` whose collective goes on without a reader


@dataclass(frozen=True, slots=True)
class Program:
    """The processes of a trainer or of a replica, and which of them this one is.

    Attributes:
        index: of this process.
        count: of all.
        processes: per device the index of the process whose memory its shards are in. None: as JAX
            says. Where one controller drives agents on several hosts, JAX does not know.
        agent: where the data path runs: "process", in the program itself, or "colocated".
    """

    index: int
    count: int
    processes: Mapping[jax.Device, int] | None = None
    agent: str = "process"

    @classmethod
    def here(cls) -> "Program":
        """This JAX program and process."""
        return cls(jax.process_index(), jax.process_count())

    @property
    def has_one_controller(self) -> bool:
        """Whether one Python process makes all arrays, so that each has one global value."""
        return self.processes is not None

    def holder(self, device: jax.Device) -> int:
        """The process that the shards of `device` are in."""
        return device.process_index if self.processes is None else self.processes[device]


def share(value: Any, deadline: float) -> Any:
    """What process 0 passed, in every process. Collective: each process of the program calls it.

    Blocks until all processes have called it. In a program of one process it launches nothing.

    Args:
        value: plain JSON types, at most 4 KiB of them; ignored outside of process 0.
        deadline: `time.monotonic()` at which it gives up.

    Raises:
        SyncTimeoutError: some process has not called it by then. The collective goes on, so this
            program can launch no other: later calls raise this at once.
        PeerLostError: JAX lost some process.
        SyncError: the system has no thread left.
    """
    if jax.process_count() == 1:
        return value
    alone = SyncTimeoutError(
        f"process {jax.process_index()} of {jax.process_count()}: some other process of this "
        "program did not connect in time, or is gone; start the program again"
    )
    if _given_up.is_set():
        raise alone
    told: Future[Any] = Future()

    def broadcast() -> None:
        try:
            told.set_result(_broadcast(value))
        except BaseException as error:
            told.set_exception(error)

    # JAX's collectives know no deadline, and Ctrl-C does not end them.
    start_thread("tsr-share", broadcast, exit_waits_s=inf)
    try:
        return told.result(_MOMENT_S + seconds_left(deadline))
    except FutureTimeoutError:
        _given_up.set()
        raise alone from None
    except jax.errors.JaxRuntimeError as error:
        raise PeerLostError(
            f"process {jax.process_index()} of {jax.process_count()}: JAX lost another process of "
            f"this program, so it has to be started again: {error}"
        ) from error


def _broadcast(value: Any) -> Any:
    text = json.dumps(value if jax.process_index() == 0 else None).encode()
    assert len(text) <= _MOST_NBYTES, len(text)
    padded = np.zeros(_MOST_NBYTES, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    with moving():
        shared = np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)
    return json.loads(shared.tobytes().rstrip(b"\0"))
