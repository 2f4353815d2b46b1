"""One life of the trainer as the coordinator sees it: its processes, calls and versions."""

from collections.abc import Collection

import msgspec

from tpu_sync_rl import authentication
from tpu_sync_rl.epochs import Epochs
from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.fleet import Fleet, Round
from tpu_sync_rl.inheritance import Inheritance
from tpu_sync_rl.members import Member, Program
from tpu_sync_rl.messages import Held, Outcome, TrainerUp
from tpu_sync_rl.publish_call import PublishCall
from tpu_sync_rl.publish_log import PublishLog
from tpu_sync_rl.replica import Replica, covers
from tpu_sync_rl.sampler_messages import FetchFailed, Offer
from tpu_sync_rl.sources import Sources
from tpu_sync_rl.trainer_messages import (
    Announced,
    CloseJob,
    JoinTrainer,
    LeafDigests,
    Live,
    Pins,
    PinsKept,
    Publish,
    TrainerJoined,
)
from tpu_sync_rl.transfer import Transfer


class Incarnation(Program):
    """One life of a trainer program.

    One that knew another coordinator begins where it was with that one: it announces nothing
    before the replicas are back that it knew, or have had `patience_s` to come.

    Attributes:
        digest: of its manifest; "" before that is known.
        newest: the last version announced.
    """

    def __init__(
        self, first: JoinTrainer, epochs: Epochs, fleet: Fleet, patience_s: float, now: float
    ) -> None:
        super().__init__(first.incarnation, first.process_count)
        self.digest = ""
        self.newest: Held | None = None
        self._epochs = epochs
        self._fleet = fleet
        self._decides_together = first.commit == "fleet"
        self._drop = first.on_straggler == "drop"
        self._round: Round | None = None  # of the last version announced
        self._lease_s = first.straggler_timeout_s
        self._live: list[str] = []  # as its processes know
        self._inheritance = Inheritance(first, patience_s, now)
        self._sources: dict[int, Sources] = {}  # of each version that is read, and of the newest
        self._manifest = b""
        self._joins: dict[int, JoinTrainer] = {}  # the last of each process
        self._calls = PublishLog(first.incarnation)
        self._close_by: dict[int, float] = {}  # per process that wants the job to end
        self._patience_s = patience_s

    # --- membership

    def join(self, member: Member, message: JoinTrainer, now: float) -> None:
        """Takes a process in and tells it what it may have missed."""
        process = member.process_index
        for other, join in self._joins.items():
            for option in ("commit", "on_straggler", "verify"):
                ours, theirs = getattr(message, option), getattr(join, option)
                if ours != theirs:
                    text = f"process {other} has {option} {theirs!r}, process {process} {ours!r}"
                    raise SyncError(f"the trainer's processes disagree: {text}")
        self.connect(member, now)
        self._joins[process] = msgspec.structs.replace(message, manifest=None)  # one is enough
        member.send(TrainerJoined(self.epoch))
        if not self.digest and message.manifest is not None:
            self.digest, self._manifest = message.digest, message.manifest
        if self._inheritance.is_settled:
            member.send(Live(self._live))
        for outcome in self._calls.restore(message.outcomes):
            self.broadcast(outcome)
        for call in self._calls.since(message.call):
            if call.held is not None:
                member.send(Announced(call.number, call.held.version))
            if call.outcome is not None:
                member.send(call.outcome)
        newest = -1 if self.newest is None else self.newest.version
        for version in {*message.pinned, *self._sources}:
            if version in self._sources:
                member.send(self._sources[version].again(process))
            elif version <= newest:
                member.send(Pins(version, [], 0))
            elif self.newest is None:
                self._inheritance.versions.add(version)

    @property
    def epoch(self) -> int:
        """Which of the job's incarnations it is."""
        return self._epochs.of(self.name)

    @property
    def is_known(self) -> bool:
        """Whether there is a manifest, and every process has said where it serves."""
        return bool(self.digest) and len(self._joins) == self.process_count

    def up(self, sink: int) -> TrainerUp | None:
        """What the sampler process `sink` has to know of it; None before its manifest is known."""
        if not self.is_known:
            return None
        joins = [self._joins[process] for process in range(self.process_count)]
        sources = [join.addresses for join in joins]
        tickets = [authentication.ticket(join.ticket_secret, sink) for join in joins]
        return TrainerUp(self.name, self.epoch, self.digest, self._manifest, sources, tickets)

    def announced(self) -> str:
        """How far its versions are, for the text of a timeout."""
        if not self._inheritance.is_settled:
            return self._has_to_wait_for()
        if self.newest is None:
            return "the trainer has not announced a version yet"
        return f"version {self.newest.version} is the newest announced"

    # --- calls

    def publish(self, member: Member, message: Publish, now: float) -> None:
        """A process has entered a call."""
        call = self._calls.entered(message, now)
        if call.outcome is not None:
            member.send(call.outcome)
        elif call.held is not None and not message.error:
            member.send(Announced(call.number, call.held.version))
        else:
            call.enter(member.process_index, message, now)

    def give_up(self, call: int, now: float) -> None:
        """The deadline of a call has passed in some process."""
        self._calls.give_up(call, now)

    def told_digests(self, process: int, message: LeafDigests) -> None:
        """A process has said what tells its leaves apart from those of another."""
        self._calls.told_digests(process, message)

    def announce(self, replicas: Collection[Replica], now: float) -> None:
        """Announces versions, or ends their calls, in the order of the calls."""
        if not self._inheritance.is_settled:
            self._settle(replicas, now)
        missed = self.missed(now, self._patience_s)
        for call in self._calls.undecided:
            outcome: Outcome | None = None
            if missed:
                outcome = Outcome("PeerLostError", f"the trainer's {missed}", call.held)
            elif call.held is None:
                outcome = self._try_to_announce(call, replicas, now)
            if outcome is not None:
                self._decide(call, outcome, replicas, now)
            elif call.held is None:
                break  # the next one has to wait for it

    def _settle(self, replicas: Collection[Replica], now: float) -> None:
        """Goes on where it was with another coordinator, once everybody is back."""
        joins = self._joins.values()
        self._inheritance.settle(joins, self.process_count, replicas, now)
        newest = max((join.newest for join in joins), default=-1)
        if self._inheritance.is_settled and newest >= 0 and self.digest:
            pinned = all(newest in join.pinned for join in joins)
            live = {replica for replica in replicas if replica.is_live}
            self._begin(Held(self.name, newest), live, live if pinned else set(), now)

    def conclude(self, replicas: Collection[Replica], now: float) -> None:
        """Ends calls whose version is announced: all have it, nobody can, or time is over."""
        for call in self._calls.undecided:
            if call.held is None:
                continue
            failure = call.failure
            if failure is not None:
                if call.round is not None:
                    call.round.abort(f"the trainer's {failure.text}", replicas)
                self._decide(call, failure, replicas, now)
            elif call.round is not None and call.round.why_aborted:
                text = f"version {call.held.version} is withdrawn: {call.round.why_aborted}"
                self._decide(call, Outcome("SyncTimeoutError", text, None), replicas, now)
            elif call.observe(drop=self._drop):
                self._decide(call, Outcome("", "", call.held, self.epoch), replicas, now)
            elif call.expired(now):
                text = f"version {call.held.version} stays announced, but {call.lacking()}"
                self._decide(call, Outcome("SyncTimeoutError", text, call.held), replicas, now)

    def end_calls(self, outcome: Outcome, replicas: Collection[Replica], now: float) -> None:
        """Ends every open call alike: the job is over, or a process is gone that they need."""
        for call in self._calls.undecided:
            self._decide(call, outcome, replicas, now)

    def _decide(
        self, call: PublishCall, outcome: Outcome, replicas: Collection[Replica], now: float
    ) -> None:
        self.broadcast(call.decide(outcome, replicas, now))

    def _try_to_announce(
        self, call: PublishCall, replicas: Collection[Replica], now: float
    ) -> Outcome | None:
        """Announces the version of a call if it is time; returns why that will never be."""
        first = call.first
        late = set(range(self.process_count)) - call.publishes.keys()
        if late or not self.complete:
            if not call.expired(now):
                return None
            text = self.absent() or f"process {min(late)} of {self.process_count} has not called"
            text = f"version {first.version} was not announced: the trainer's {text}"
            return Outcome("SyncTimeoutError", text, None)
        wait = self._has_to_wait_for()
        if wait:
            if not call.expired(now):
                return None
            text = f"version {first.version} was not announced and may be published again: {wait}"
            return Outcome("SyncTimeoutError", text, None)
        newest = None if self.newest is None else self.newest.version
        flaw = call.flaw(newest, self.digest)
        if flaw is not None:
            return flaw
        if not self.digest:
            self.digest, self._manifest = first.digest, call.manifest or b""
        is_met = sum(replica.is_admitted for replica in replicas) >= first.min_replicas
        unmet = None if is_met else call.unmet(replicas, now, self._lease_s)
        if call.copies.differ:
            call.copies.ask(call.number, self.members)
            # As any other end, not before the samplers are there that the call waits for.
            is_due = call.copies.is_answered and (is_met or unmet is not None)
            if is_due or call.expired(now):
                return call.different_copies(call.manifest or self._manifest)
            return None
        if is_met:
            self._announce(call, {replica for replica in replicas if replica.is_live}, now)
        elif unmet is None and call.expired(now):
            unmet = Outcome("SyncTimeoutError", call.shortage(replicas), None)
        return unmet

    def _has_to_wait_for(self) -> str:
        """What keeps every version from being announced now."""
        if not self._inheritance.is_settled:
            names = ", ".join(sorted(self._inheritance.gone)) or "the trainer's processes"
            return f"the coordinator was restarted and waits for {names}"
        if self._round is not None and not self._round.is_over and not self._round.late_callers:
            return self._round.lacking()
        return ""

    def _announce(self, call: PublishCall, live: set[Replica], now: float) -> None:
        held = Held(self.name, call.first.version)
        self._begin(held, live, live, now)
        call.held, call.waiting, call.round = held, set(live), self._round
        call.lost = self._inheritance.lost()
        self.broadcast(Announced(call.number, held.version))
        # Newer ones are about to be published again, in the order of their calls.
        self._let_go({older for older in self._inheritance.versions if older < held.version})

    def _begin(self, held: Held, live: set[Replica], readers: set[Replica], now: float) -> None:
        """Makes `held` the newest; the trainer keeps it for `readers` without being asked."""
        self.newest = held
        if self._decides_together:
            self._round = self._fleet.begin(held, live, now, drop=self._drop)
        self._sources[held.version] = Sources(held, self, readers, now, self._lease_s)
        self._inheritance.versions.discard(held.version)

    # --- pins and transfers

    def end_leases(self, replicas: Collection[Replica], now: float) -> None:
        """Notes which replicas can't get a version any more that they lack."""
        for sources in self._sources.values():
            sources.end_leases(replicas, now)

    def serve(self, replicas: Collection[Replica], now: float) -> None:
        """Brings pins and transfers up to date."""
        newest = self._wanted
        for version, sources in list(self._sources.items()):
            is_newest = sources.held == newest
            sources.update(replicas, now, is_newest=is_newest)
            if sources.unread and not is_newest:
                del self._sources[version]
        for replica in replicas:
            if replica.transfer is not None and not self._keep(replica, replica.transfer):
                replica.abandon()
            if newest is not None and replica.is_ready(now):
                promise = None if self._round is None else self._round.promise
                self._sources[newest.version].begin(
                    replica, promise, keep=self._decides_together, now=now
                )
        again = {call.first.version for call in self._calls.undecided}
        self._let_go(self._inheritance.outlived(again, now))
        live = sorted(replica.name for replica in replicas if replica.is_live)
        if live != self._live and self._inheritance.is_settled:
            self._live = live
            self.broadcast(Live(live))

    def kept(self, process: int, message: PinsKept, now: float) -> None:
        """A process has answered whether it could pin a version again."""
        if message.version in self._sources:
            self._sources[message.version].kept(process, message, now)

    def offered(self, holder: Replica, process: int, message: Offer, now: float) -> None:
        """A process of a replica has answered whether it can serve a version."""
        sources = self._sources_of(message.held)
        if sources is not None:
            sources.offered(holder, process, message, now)

    def failed(self, replica: Replica, message: FetchFailed) -> None:
        """A transfer has failed: where a source let the version go, it is to be asked again."""
        sources = self._sources_of(message.held)
        if sources is not None:
            sources.failed(replica, message)

    @property
    def _wanted(self) -> Held | None:
        """The newest version, unless the fleet has aborted it."""
        aborted = self._round is not None and self._round.why_aborted
        return None if aborted else self.newest

    def _sources_of(self, held: Held) -> Sources | None:
        sources = self._sources.get(held.version)
        return sources if sources is not None and sources.held == held else None

    def _keep(self, replica: Replica, transfer: Transfer) -> bool:
        sources = self._sources_of(transfer.held)
        return sources is not None and sources.keep(replica, transfer)

    def _let_go(self, inherited: set[int]) -> None:
        for version in sorted(inherited):
            self.broadcast(Pins(version, [], 0))
        self._inheritance.versions -= inherited

    # --- the end

    def fence(self, text: str, now: float) -> None:
        """Ends every stream, and what replicas serve in its place: there is a newer trainer."""
        super().fence(text, now)
        for sources in self._sources.values():
            sources.end()

    def close(self, process: int, message: CloseJob, now: float) -> None:
        """A process wants the job to end."""
        self._close_by[process] = now + message.timeout_s

    def is_over(self, replicas: Collection[Replica], now: float) -> bool:
        """Whether all processes want the job to end, and samplers have what they can get."""
        # A process that has not joined yet would find nobody.
        ended = self._close_by.keys() | self.left | self.lost_at.keys()
        if not self.members or len(ended) < self.process_count:
            return False
        if now >= max(self._close_by[process] for process in self.members):
            return True
        return not any(self._may_commit(replica, replicas, now) for replica in replicas)

    def _may_commit(self, replica: Replica, replicas: Collection[Replica], now: float) -> bool:
        """Whether `replica` lacks the newest version and can still get to commit it."""
        newest = self._wanted
        if newest is None or not replica.is_live or covers(replica.calls.taken, newest):
            return False
        if covers(replica.received, newest) or replica.is_receiving(newest):
            return True
        return self._sources[newest.version].may_serve(replica, replicas, now)
