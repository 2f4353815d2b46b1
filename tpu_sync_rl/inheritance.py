"""What one life of a trainer has from another coordinator: versions, and replicas to wait for."""

from collections.abc import Collection

from tpu_sync_rl.replica import Replica
from tpu_sync_rl.trainer_messages import JoinTrainer


class Inheritance:
    """Nothing, where no other coordinator knew this life.

    Attributes:
        is_settled: whether all are back that were there, or have had their time to come.
        gone: replicas that are not back.
        versions: announced there and pinned since, which nobody has published again here.
    """

    def __init__(self, first: JoinTrainer, patience_s: float, now: float) -> None:
        """`first` is the first join of this life here."""
        self.is_settled = first.epoch == 0
        self.gone: set[str] = set()
        self.versions: set[int] = set()
        self._until = now if self.is_settled else now + patience_s

    def settle(
        self,
        joins: Collection[JoinTrainer],
        process_count: int,
        replicas: Collection[Replica],
        now: float,
    ) -> None:
        """Looks who is back."""
        self.gone = {name for join in joins for name in join.replicas}
        self.gone -= {replica.name for replica in replicas if replica.is_restored}
        all_are_back = not self.gone and len(joins) == process_count
        self.is_settled = all_are_back or now >= self._until

    def lost(self) -> set[str]:
        """The replicas that did not come back; once, for the call that reports them."""
        gone, self.gone = self.gone, set()
        return gone

    def outlived(self, again: set[int], now: float) -> set[int]:
        """Versions whose time is over; those of `again` are about to be published again."""
        return self.versions - again if now >= self._until else set()
