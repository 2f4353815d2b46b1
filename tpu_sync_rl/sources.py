"""Whom one announced version can be read from: its trainer, or replicas that hold it."""

from collections.abc import Collection, Set

from tpu_sync_rl.holders import Holders
from tpu_sync_rl.members import Program
from tpu_sync_rl.messages import Held, Promise
from tpu_sync_rl.readers import Readers
from tpu_sync_rl.replica import Replica, covers
from tpu_sync_rl.sampler_messages import FetchFailed, Offer
from tpu_sync_rl.trainer_messages import Pins, PinsKept
from tpu_sync_rl.transfer import Transfer


class Sources:
    """The sources of one announced version.

    A replica reads from the trainer as long as that may serve it, and from another replica if not;
    but one that was too slow for the trainer is left to the next version.

    Args:
        held: the version.
        trainer: its program.
        granted: the replicas that it keeps the version for, without being asked.
        now: seconds.
        lease_s: for how long a source keeps it for a replica, from when that begins to read.
    """

    def __init__(
        self, held: Held, trainer: Program, granted: Set[Replica], now: float, lease_s: float
    ) -> None:
        self.held = held
        self._trainer = trainer
        self._readers = Readers(held, granted, now, lease_s, trainer.process_count)
        self._holders = Holders(held, lease_s)

    def end_leases(self, replicas: Collection[Replica], now: float) -> None:
        """Notes which replicas can't get the version any more that they lack."""
        for replica in replicas:
            if covers(replica.received, self.held):
                continue
            may_get = self._readers.may_serve(replica) or self._holders.may_serve(replica, replicas)
            if self._readers.is_late(replica, now) or not may_get:
                replica.overdue = self.held

    def update(self, replicas: Collection[Replica], now: float, *, is_newest: bool) -> None:
        """Tells sources who may read; who is not reading yet may begin with the newest alone."""
        lacking = {r for r in replicas if r.is_live and not covers(r.received, self.held)}
        reading = {replica for replica in lacking if replica.is_receiving(self.held)}
        able = {replica for replica in lacking if is_newest and replica.is_ready(now)}
        pins = self._readers.update(
            lacking if is_newest else reading, able if self._trainer.complete else set(), now
        )
        if pins is not None:
            self._trainer.broadcast(pins)
        elsewhere = {replica for replica in able if self._is_left_to_holders(replica, now)}
        self._holders.update(replicas, elsewhere | reading, elsewhere, now)

    def keep(self, replica: Replica, transfer: Transfer) -> bool:
        """Whether the source of `transfer` keeps the version in place for `replica`."""
        granting = self._holders if transfer.holder else self._readers
        return granting.grants(replica)

    def begin(self, replica: Replica, promise: Promise | None, *, keep: bool, now: float) -> None:
        """Starts the transfer to a replica that is ready for it, if a source is."""
        if self._trainer.complete and self._readers.grants(replica):
            self._readers.begin(replica, now)
            replica.begin(self.held, promise, keep=keep)
        elif self._holders.grants(replica):
            holders = self._holders.begin(replica, now)
            replica.begin(self.held, promise, keep=keep, holders=holders)

    def may_serve(self, replica: Replica, replicas: Collection[Replica], now: float) -> bool:
        """Whether `replica` has a chance to get the version as things are now."""
        if self._trainer.complete and self._readers.grants(replica):
            return True
        if self._is_left_to_holders(replica, now):
            may_read = self._holders.may_serve(replica, replicas)
        else:
            may_read = self._readers.may_serve(replica)
        return replica.is_admitted and may_read

    def failed(self, replica: Replica, message: FetchFailed) -> None:
        """A transfer has failed: where the trainer let the version go, it is to be asked again."""
        if message.holder:
            self._holders.failed(replica, message)
        elif message.error == "VersionError":
            self._readers.withdraw(replica)

    def kept(self, process: int, message: PinsKept, now: float) -> None:
        """A process of the trainer has answered whether it could pin the version again."""
        self._readers.answer(process, message.ask, message.kept, now)

    def offered(self, holder: Replica, process: int, message: Offer, now: float) -> None:
        """A process of a replica has answered whether it can serve the version."""
        self._holders.answer(holder, process, message, now)

    def again(self, process: int) -> Pins:
        """What a trainer process has to hear that has connected again."""
        return self._readers.again(process)

    def end(self) -> None:
        """Replicas are not to serve the version any more: there is a newer trainer."""
        self._holders.end()

    @property
    def unread(self) -> bool:
        """Whether nobody may read the version, and its sources know that."""
        return self._readers.unread and self._holders.unread

    def _is_left_to_holders(self, replica: Replica, now: float) -> bool:
        if not self._trainer.complete:
            return True
        return not self._readers.may_serve(replica) and not self._readers.is_late(replica, now)
