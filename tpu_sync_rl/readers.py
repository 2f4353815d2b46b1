"""Who may still read one announced version: what a source has to keep, and for how long."""

from collections.abc import Set

from tpu_sync_rl.messages import Held
from tpu_sync_rl.replica import Replica
from tpu_sync_rl.trainer_messages import Pins


class Readers:
    """The replicas that an announced version is pinned for.

    Those that are there when it is announced are granted it. For one that comes later the trainer
    is asked first, since it may have dropped leaves that all others have.

    Attributes:
        granted: replicas whose every read finds the version in place.
    """

    def __init__(
        self, held: Held, granted: Set[Replica], now: float, lease_s: float, process_count: int
    ) -> None:
        self.held = held
        self.granted = set(granted)
        self._lease_s = lease_s
        self._lease_ends = dict.fromkeys(granted, now + lease_s)
        self._begun: set[Replica] = set()
        self._dropped: set[Replica] = set()  # their lease has ended
        self._available = True  # for those who come later
        self._process_count = process_count  # of the trainer
        self._ask = 0
        self._asked: set[Replica] = set()
        self._unanswered: set[int] = set()
        self._sent: list[int] | None = None

    def update(self, wanting: Set[Replica], able: Set[Replica], now: float) -> Pins | None:
        """Brings the pins up to date; returns what the trainer has to hear, if anything.

        Args:
            wanting: live replicas that lack the version, and may want it still.
            able: those of them that would begin to receive it at once, were it granted.
            now: seconds.
        """
        self._dropped |= {replica for replica, end in self._lease_ends.items() if now >= end}
        self.granted &= wanting - self._dropped
        self._asked &= wanting
        self._begun &= self.granted
        newcomers = able - self.granted - self._dropped
        ask = 0
        if newcomers and self._available and not self._asked:
            self._ask += 1
            self._asked = set(newcomers)
            self._unanswered = set(range(self._process_count))
            ask = self._ask
        sinks = self._sinks()
        if ask == 0 and sinks == self._sent:
            return None
        self._sent = sinks
        return Pins(self.held.version, sinks, ask)

    def again(self, process: int) -> Pins:
        """What a trainer process has to hear that has connected again."""
        asking = bool(self._asked) and process in self._unanswered
        return Pins(self.held.version, self._sinks(), self._ask if asking else 0)

    def answer(self, process: int, ask: int, kept: bool, now: float) -> None:
        """Takes a trainer process's answer to `Pins.ask`."""
        if ask != self._ask or process not in self._unanswered:
            return
        self._unanswered.discard(process)
        if not kept:
            self._available = False
            self._unanswered.clear()
            self._asked.clear()
        elif not self._unanswered:
            self.granted |= self._asked
            self._lease_ends |= dict.fromkeys(self._asked, now + self._lease_s)
            self._asked.clear()

    def begin(self, replica: Replica, now: float) -> None:
        """A granted replica begins to receive the version: its lease starts anew, once."""
        if replica not in self._begun:
            self._begun.add(replica)
            self._lease_ends[replica] = now + self._lease_s

    def withdraw(self, replica: Replica) -> None:
        """A source did not have the version for `replica`: the trainer is to be asked again."""
        self.granted.discard(replica)

    def grants(self, replica: Replica) -> bool:
        """Whether every read of `replica` finds the version in place."""
        return replica in self.granted

    def is_late(self, replica: Replica, now: float) -> bool:
        """Whether the lease of `replica` is over."""
        end = self._lease_ends.get(replica)
        return end is not None and now >= end

    def may_serve(self, replica: Replica) -> bool:
        """Whether `replica` has a chance to receive the version (still)."""
        if replica in self.granted or replica in self._asked:
            return True
        return self._available and replica not in self._dropped

    @property
    def unread(self) -> bool:
        """Whether nobody may read the version, and its trainer knows that."""
        return self._sent == []

    def _sinks(self) -> list[int]:
        return sorted(s for r in self.granted | self._asked for s in r.sinks.values())
