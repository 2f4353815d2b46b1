"""Versions that a sampler process has ready for its application, which has not taken them yet."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tpu_sync_rl.generations import Generation
from tpu_sync_rl.messages import Held
from tpu_sync_rl.process_stats import ProcessStats


@dataclass(frozen=True, slots=True)
class Received:
    """A prepared version: every byte of it that this process needs is verified."""

    held: Held
    generation: Generation
    leaves: list[Any] | None  # jax.Arrays, in the manifest's order; None before H2D at the commit
    stats: ProcessStats


class PreparedVersions:
    """What one process holds ready; iterating gives the oldest first. Thread-safe."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may close the session whose thread is in here.
        self._lock = threading.RLock()  # guards _received
        self._received: dict[Held, Received] = {}  # oldest first

    def __iter__(self) -> Iterator[Received]:
        with self._lock:
            return iter(list(self._received.values()))

    def add(self, received: Received) -> None:
        """One more is prepared, or could not be used by the call that took it."""
        with self._lock:
            self._received[received.held] = received

    def get(self, held: Held) -> Received | None:
        """What `held` became, where it is prepared and not taken."""
        with self._lock:
            return self._received.get(held)

    def take(self, held: Held) -> Received | None:
        """Hands over `held` and gives up older ones; None where it is not prepared here."""
        with self._lock:
            if held not in self._received:
                return None
            while (older := next(iter(self._received))) != held:
                del self._received[older]
            return self._received.pop(held)

    def give_up(self, *, but: tuple[Held | None, ...] = ()) -> None:
        """Gives up the memory of all versions `but` those."""
        with self._lock:
            self._received = {held: r for held, r in self._received.items() if held in but}
