"""The replicas that hold one announced version, as sources of it where its trainer is none."""

from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field

from tpu_sync_rl import authentication
from tpu_sync_rl.messages import Held, Holder
from tpu_sync_rl.readers import Readers
from tpu_sync_rl.replica import Replica
from tpu_sync_rl.sampler_messages import FetchFailed, Offer, Serve


@dataclass(slots=True)
class _Source:
    """A replica that is asked to serve the version, or does."""

    readers: Readers
    offers: dict[int, Offer] = field(default_factory=dict)  # of each process, the last


class Holders:
    """Lets replicas that lack a version read it from those that have it.

    Each reader has one holder at a time: the one that failed it least often, and of those the one
    with the fewest readers. A holder is asked first, as a trainer is for those who come late; it
    serves until its readers have the version, have left, or their leases have ended.
    """

    def __init__(self, held: Held, lease_s: float) -> None:
        self.held = held
        self._lease_s = lease_s
        self._sources: dict[Replica, _Source] = {}
        self._holder_of: dict[Replica, Replica] = {}  # per reader
        self._num_failures: Counter[tuple[Replica, Replica]] = Counter()  # of reader and holder
        self._useless: set[tuple[Replica, Replica]] = set()  # the same: not to be tried again
        self._without: set[Replica] = set()  # they no longer have every leaf of it

    def update(
        self, replicas: Collection[Replica], wanting: Set[Replica], able: Set[Replica], now: float
    ) -> None:
        """Finds holders for readers, and tells holders of their readers.

        Args:
            replicas: those of the job.
            wanting: those that the trainer can't serve, or that read from a holder already.
            able: those of them that would begin to receive the version at once.
            now: seconds.
        """
        for holder in [holder for holder in self._sources if not holder.is_live]:
            self._end(holder)
        for reader in self._holder_of.keys() - wanting:
            del self._holder_of[reader]
        for reader in sorted(able - self._holder_of.keys(), key=lambda replica: replica.name):
            found = self._find(reader, replicas)
            if found is not None:
                self._holder_of[reader] = found
                if found not in self._sources:
                    readers = Readers(self.held, set(), now, self._lease_s, found.process_count)
                    self._sources[found] = _Source(readers)
        for holder, source in list(self._sources.items()):
            self._tell(holder, source, able, now)

    def grants(self, reader: Replica) -> bool:
        """Whether `reader` may read the version from its holder."""
        holder = self._holder_of.get(reader)
        return holder is not None and self._sources[holder].readers.grants(reader)

    def begin(self, reader: Replica, now: float) -> Mapping[int, Holder]:
        """What each process of `reader`, which is granted the version, has to know to read it."""
        holder = self._holder_of[reader]
        source = self._sources[holder]
        source.readers.begin(reader, now)
        offers = [source.offers[process] for process in range(holder.process_count)]
        return {
            process: Holder(
                holder.name,
                offers[0].manifest,
                [offer.addresses for offer in offers],
                [authentication.ticket(offer.ticket_secret, sink) for offer in offers],
            )
            for process, sink in reader.sinks.items()
        }

    def may_serve(self, reader: Replica, replicas: Collection[Replica]) -> bool:
        """Whether `reader` has a chance to receive the version from another replica."""
        return reader in self._holder_of or self._find(reader, replicas) is not None

    def answer(self, holder: Replica, process: int, offer: Offer, now: float) -> None:
        """A process of `holder` has answered `Serve.ask`."""
        source = self._sources.get(holder)
        if source is None:
            return
        source.offers[process] = offer
        source.readers.answer(process, offer.ask, offer.kept, now)
        if not offer.kept:
            self._without.add(holder)
            self._end(holder)

    def failed(self, reader: Replica, message: FetchFailed) -> None:
        """A transfer from a holder has failed: the next one may be from another."""
        holder = self._holder_of.pop(reader, None)
        if holder is None:
            return
        self._num_failures[reader, holder] += 1
        if message.error == "VersionError":  # it has let the version go, or has it otherwise
            self._useless.add((reader, holder))

    def end(self) -> None:
        """Nobody is to read the version any more."""
        for holder in list(self._sources):
            self._end(holder)

    @property
    def unread(self) -> bool:
        """Whether nobody reads the version, and its holders know that."""
        return all(source.readers.unread for source in self._sources.values())

    def _tell(self, holder: Replica, source: _Source, able: Set[Replica], now: float) -> None:
        readers = {reader for reader, of in self._holder_of.items() if of is holder}
        pins = source.readers.update(readers, readers & able, now)
        if pins is not None:
            holder.broadcast(Serve(self.held, pins.sinks, pins.ask))
        for reader in readers:
            if not source.readers.may_serve(reader):  # its lease is over
                self._useless.add((reader, holder))
                del self._holder_of[reader]

    def _end(self, holder: Replica) -> None:
        del self._sources[holder]
        self._holder_of = {r: of for r, of in self._holder_of.items() if of is not holder}
        holder.broadcast(Serve(self.held, [], 0))

    def _find(self, reader: Replica, replicas: Collection[Replica]) -> Replica | None:
        num_readers = Counter(self._holder_of.values())
        found = [
            replica
            for replica in replicas
            if replica is not reader
            and replica.is_live
            and replica.received == self.held
            and replica not in self._without
            and (reader, replica) not in self._useless
        ]

        def preference(holder: Replica) -> tuple[int, int, str]:
            return self._num_failures[reader, holder], num_readers[holder], holder.name

        return min(found, key=preference, default=None)
