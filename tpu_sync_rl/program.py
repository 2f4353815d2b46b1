"""The processes that take part in a sync together, and what they tell each other to begin with."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_MOST_NBYTES = 4096


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


def share(value: Any) -> Any:
    """What process 0 passed, in every process. Collective: each process of the program calls it.

    Args:
        value: plain JSON types, at most 4 KiB of them; ignored outside of process 0.

    Blocks until all processes have called it. In a program of one process it launches nothing.
    """
    if jax.process_count() == 1:
        return value
    text = json.dumps(value if jax.process_index() == 0 else None).encode()
    assert len(text) <= _MOST_NBYTES, len(text)
    padded = np.zeros(_MOST_NBYTES, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    shared = np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)
    return json.loads(shared.tobytes().rstrip(b"\0"))
