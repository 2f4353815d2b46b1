"""The epochs of a job's incarnations: ints that say which one came before which."""

import time
from collections.abc import Callable, Collection


def unix_ms() -> int:
    """The wall clock, in milliseconds since 1970. Orders incarnations; nothing waits by it."""
    return time.time_ns() // 1_000_000


class Epochs:
    """The epoch of each incarnation that anybody here knows. It grows from each to the next.

    A coordinator that starts anew knows of no incarnation before samplers and trainers come back,
    and may have to give an epoch sooner. So it gives one above all that it knows, and at least
    what its clock says: that is above what any coordinator gave before, without asking anybody.
    Where a clock was set back, those who come back know better: the incarnation that began here
    last is then raised above all that they know.

    An incarnation that began at another coordinator keeps the epoch that it has from there. If
    somebody knows a greater one, the incarnation is outdated.

    Args:
        clock_ms: what an epoch is at least.
    """

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._epochs: dict[str, int] = {}
        self._begun = ""  # the incarnation that began here last

    def begin(self, incarnation: str) -> None:
        """An incarnation begins, and is newer than all others."""
        self._begun = incarnation
        self._epochs[incarnation] = max(self._greatest_but(incarnation) + 1, self._clock_ms())

    def learn(self, incarnation: str, epoch: int) -> None:
        """Somebody knows that `incarnation` has `epoch`, from another coordinator perhaps."""
        self._epochs[incarnation] = max(epoch, self.of(incarnation))
        if self._begun and self.is_outdated(self._begun):
            self._epochs[self._begun] = self._greatest_but(self._begun) + 1

    def of(self, incarnation: str) -> int:
        """The epoch of an incarnation; 0 of one that nobody knows."""
        return self._epochs.get(incarnation, 0)

    def is_outdated(self, incarnation: str) -> bool:
        """Whether a newer incarnation is known."""
        return self._greatest_but(incarnation) >= self.of(incarnation)

    def _greatest_but(self, incarnation: str) -> int:
        return max((e for i, e in self._epochs.items() if i != incarnation), default=0)


class KnownEpochs:
    """The epochs that one sampler process has heard of, for a coordinator that knows none."""

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}

    def learn(self, incarnation: str, epoch: int) -> None:
        """The coordinator has told the epoch of an incarnation, for the first time or again."""
        self._epochs[incarnation] = max(epoch, self._epochs.get(incarnation, 0))

    def of(self, incarnations: Collection[str]) -> dict[str, int]:
        """Those of `incarnations`, and of the newest."""
        newest = max(self._epochs, key=self._epochs.__getitem__, default="")
        told = {newest, *incarnations}
        return {name: epoch for name, epoch in self._epochs.items() if name in told}
