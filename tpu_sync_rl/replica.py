"""One replica as the coordinator sees it: its verdict on the manifest, its transfer, its calls."""

from collections.abc import Callable, Mapping, Sequence

from tpu_sync_rl.call_log import CallLog
from tpu_sync_rl.members import Member, Program
from tpu_sync_rl.messages import Held, Holder, Outcome, Promise, ReplicaStatus
from tpu_sync_rl.process_stats import ProcessStats
from tpu_sync_rl.restored import known_commits, restored
from tpu_sync_rl.sampler_messages import (
    Abandon,
    Fetch,
    FetchFailed,
    FleetCommit,
    Hindered,
    JobEnded,
    JoinSampler,
    Prepared,
    ReplicaRefused,
    SamplerJoined,
    Take,
    Withdrawn,
)
from tpu_sync_rl.transfer import Retries, Transfer
from tpu_sync_rl.verdict import Verdict

# Failures that another try may not cure: a call that waits is told at once.
_TELLING = ("CorruptionError", "PlanError", "ManifestError")


def covers(held: Held | None, wanted: Held) -> bool:
    """Whether `held` is `wanted` or a newer version of the same incarnation."""
    return (
        held is not None
        and held.incarnation == wanted.incarnation
        and held.version >= wanted.version
    )


def _follows(held: Held, received: Held | None) -> bool:
    """Whether `held` is newer than `received`, of the same incarnation; or nothing was received."""
    return received is None or (covers(held, received) and held != received)


class Replica(Program):
    """One life of a sampler program.

    Args:
        name: of the replica.
        first: the first join of a process of this life.
        patience_s: for how long a lost process may come back before calls fail for it.
        epoch_of: the epoch of an incarnation.

    Attributes:
        life: its id, drawn by the program.
        sinks: per process, the id that pins and chunk tables know it by.
        transfer: what it receives now.
        prepared: what its next call may take.
        promised: what it has prepared besides, to be taken only if the fleet commits it.
        received: the newest version that it has ever prepared.
        overdue: the newest version that it can't get any more, since its lease ended first.
        known_commits: the fleet's, as processes say that knew them from another coordinator.
        ended: what it was told when the job ended; None as long as it takes part.
        verdict: on the trainer's manifest.
        calls: those of its program, and what was decided on them.
    """

    def __init__(
        self, name: str, first: JoinSampler, patience_s: float, epoch_of: Callable[[str], int]
    ) -> None:
        super().__init__(name, first.process_count)
        self.life = first.life
        self.sinks: dict[int, int] = {}
        self.transfer: Transfer | None = None
        self.prepared: Held | None = None
        self.promised: Promise | None = None
        self.received: Held | None = None
        self.overdue: Held | None = None
        self.known_commits: set[Held] = set()
        self.ended: JobEnded | None = None
        self.verdict = Verdict()
        self.calls = CallLog(first.process_count)
        self._retries = Retries()
        self._patience_s = patience_s
        self._epoch_of = epoch_of
        self._stats: dict[Held, list[ProcessStats]] = {}
        self._fleet_commit: Held | None = None  # the last one told
        self._stored: set[int] = set()  # processes that have stored it
        self._withdrawn: Held | None = None  # the last version that the fleet has withdrawn
        self._withdrawal = ""  # why, until it receives another one
        # Where another coordinator knew this life: what each process said of itself. Nothing is
        # decided until all have, since any of them may know of a decision.
        self._restoring: dict[int, JoinSampler] | None = {} if first.sink else None

    # --- membership

    def join(self, member: Member, message: JoinSampler, sink: int, now: float) -> None:
        """Takes a process in and tells it what it may have missed."""
        process = member.process_index
        self.connect(member, now)
        self.sinks[process] = sink
        member.send(SamplerJoined(sink))
        if self._fleet_commit is not None:
            member.send(FleetCommit(self._fleet_commit))
        news = self.calls.restore(process, message.call, message.outcomes)
        for other in self.members.values():
            for decision in self.calls.unheard(other.process_index):
                if other is member or decision in news:
                    other.send(decision)
        if self.verdict.is_refused:
            member.send(ReplicaRefused(self.verdict.digest))
        if self.ended is not None:
            member.send(self.ended)
        if self._restoring is not None:
            self._restoring[process] = message
            self.known_commits |= known_commits(message)
            if len(self._restoring) == self.process_count:
                found = restored(list(self._restoring.values()), self.calls.handed_out)
                self.received, self.prepared = found.received, found.prepared
                self.promised = found.promised
                self.calls.taken = self.calls.taken or found.committed
                self._restoring = None

    @property
    def is_live(self) -> bool:
        """Whether it takes part: complete, not refused, and the job has not ended for it."""
        return self.complete and not self.verdict.is_refused and self.ended is None

    @property
    def is_restored(self) -> bool:
        """Whether it is complete, and each process has said what it knew before a restart."""
        return self.complete and self._restoring is None

    def holds_of(self, incarnation: str) -> bool:
        """Whether the newest version that it has, as all its processes say, is of `incarnation`."""
        if self.received is None or self._restoring is not None:
            return False
        return self.received.incarnation == incarnation

    # --- verdict on the manifest

    def ask_again(self) -> None:
        """A new manifest: every process is to admit or refuse it."""
        self.verdict.forget()
        self._retries.forget()

    def refuse(self, process: int, digest: str, text: str, now: float) -> None:
        """The manifest does not fit what `process` wants: the whole replica is refused."""
        self.verdict.refuse(process, digest, text, now)
        self.broadcast(ReplicaRefused(digest))

    @property
    def is_admitted(self) -> bool:
        """Whether it is live, and every process has admitted the manifest."""
        return self.is_live and self.verdict.num_admitted == self.process_count

    # --- transfers

    def is_ready(self, now: float) -> bool:
        """Whether it could begin to receive a version now."""
        return (
            self.is_admitted
            and self.transfer is None
            and self.promised is None
            and self._restoring is None
            and not self.calls.holding
            and self._retries.are_due(now)
        )

    def is_receiving(self, held: Held) -> bool:
        """Whether `held` is on its way into it."""
        return self.transfer is not None and self.transfer.held == held

    def begin(
        self,
        held: Held,
        promise: Promise | None = None,
        *,
        keep: bool = False,
        holders: Mapping[int, Holder] | None = None,
    ) -> None:
        """Starts to receive `held`; what was prepared can't be taken any more, unless `keep`.

        It comes from the trainer, or from a replica, as `holders` tells each process.
        """
        if not keep:
            self.prepared = None
        self.transfer = Transfer(held, promise, holders[0].replica if holders else "")
        for process, member in self.members.items():
            holder = holders[process] if holders else None
            member.send(Fetch(held, promise, self.prepared, holder))

    def abandon(self) -> None:
        """Gives up what is being received."""
        if self.transfer is not None:
            self.broadcast(Abandon(self.transfer.held))
            self.transfer = None

    def on_prepared(self, process: int, message: Prepared) -> None:
        """A process has every byte that it needs."""
        transfer = self.transfer
        if transfer is None or transfer.held != message.held:
            return
        transfer.stats[process] = message.stats
        if len(transfer.stats) == self.process_count:
            self.received = transfer.held
            if transfer.promise is None:
                self.prepared = transfer.held
            else:
                self.promised = transfer.promise
            if transfer.released:
                self.release(transfer.held)
            kept = {held: s for held, s in self._stats.items() if held == self.prepared}
            stats = [transfer.stats[process] for process in range(self.process_count)]
            self._stats = {**kept, transfer.held: stats}
            self._retries.forget()
            self.transfer, self._withdrawal = None, ""

    def on_hindered(self, process: int, message: Hindered) -> None:
        """Something holds up what a process is to receive, or nothing does any more."""
        if self.transfer is not None and self.transfer.held == message.held:
            self.transfer.hindrances[process] = message.text

    def on_failed(self, message: FetchFailed, now: float) -> bool:
        """A process can't receive its version; whether that was news."""
        transfer = self.transfer
        if transfer is None or (transfer.held, transfer.holder) != (message.held, message.holder):
            return False
        self._retries.failed(message, now)
        self.abandon()
        if message.error in _TELLING and self.calls.asked is not None:
            self.conclude(Outcome(message.error, message.text, None))
        return True

    # --- what the fleet decides

    def has_promised(self, held: Held) -> bool:
        """Whether it keeps `held` until the fleet has decided."""
        return self.promised is not None and self.promised.held == held

    def tell(self, held: Held) -> None:
        """Tells every process that the fleet commits `held`; see `knows`."""
        if self._fleet_commit != held:
            self._fleet_commit = held
            self._stored.clear()
            self.broadcast(FleetCommit(held))

    def store(self, process: int, held: Held) -> None:
        """`process` has stored what `tell` told."""
        if held == self._fleet_commit:
            self._stored.add(process)

    def knows(self, held: Held) -> bool:
        """Whether each process has stored that the fleet commits `held`."""
        return held == self._fleet_commit and len(self._stored) == self.process_count

    def release(self, held: Held) -> None:
        """Lets calls take `held`: every process of the fleet knows that it is committed."""
        if self.has_promised(held):
            self.prepared, self.promised = held, None
            self.tell(held)
        elif self.transfer is not None and self.transfer.held == held:
            self.transfer.released = True

    def withdraw(self, held: Held, why: str) -> None:
        """Gives up `held`, which the fleet has aborted; what it had before stays.

        Its processes are told `why`, unless that is empty.
        """
        if why and self._withdrawn != held:
            self._withdrawn = held
            self._withdrawal = f"version {held.version} was withdrawn: {why}"
            self.broadcast(Withdrawn(held, why))
        if self.is_receiving(held):
            self.abandon()
        if self.has_promised(held):
            self.promised = None
        if self.received == held:
            self.received = self.prepared or self.calls.handed_out or self.calls.taken

    # --- calls

    def decide(self, now: float, newest_incarnation: str | None, situation: str) -> None:
        """Decides the next call if it can be decided now.

        Args:
            now: seconds.
            newest_incarnation: the one that `min_version` is about.
            situation: what there is to say about the trainer, should the deadline have passed.
        """
        if self._restoring is not None or self.ended is not None or not self.calls.entered:
            return
        take = self.calls.asked
        missed = self.missed(now, self._patience_s)
        if take is not None and self.may_take(take.min_version, newest_incarnation):
            self._hand_out()
        elif missed:
            self.conclude(Outcome("PeerLostError", f"replica {self.name!r}: {missed}", None))
        elif take is None:
            return
        elif self.verdict.is_refused:
            self.conclude(Outcome("ManifestError", self.verdict.text, None))
        elif not take.wait:
            self.conclude(Outcome("Nothing", "", None))
        elif self.calls.expired(now):
            self.conclude(Outcome("SyncTimeoutError", self._overtime(take, situation), None))

    def may_take(self, min_version: int | None, newest_incarnation: str | None) -> bool:
        """Whether a call with this `min_version` may take what is prepared."""
        held = self.prepared
        if held is None:
            return False
        if min_version is None:
            return True
        newest = newest_incarnation in (None, held.incarnation)
        return newest and held.version >= min_version

    def is_awaited(self, newest_incarnation: str) -> bool:
        """Whether it has yet to take what is prepared: no call under way passes that over."""
        asked = self.calls.asked
        return self.prepared is not None and (
            asked is None or self.may_take(asked.min_version, newest_incarnation)
        )

    def conclude(self, outcome: Outcome, stats: Sequence[ProcessStats] = ()) -> None:
        """Decides the next call and tells every process."""
        self.broadcast(self.calls.decide(outcome, list(stats)))

    def _hand_out(self) -> None:
        """Has the next call return what is prepared."""
        held, self.prepared = self.prepared, None
        assert held is not None
        outcome = Outcome("", "", held, self._epoch_of(held.incarnation))
        self.conclude(outcome, self._stats.get(held, []))

    def end(self, newest_incarnation: str | None, text: str) -> None:
        """Ends the job for this replica; a version that is prepared is handed out first."""
        self.abandon()
        asked = self.calls.asked
        min_version = None if asked is None else asked.min_version
        if self._restoring is None and self.may_take(min_version, newest_incarnation):
            self._hand_out()
        self.ended = JobEnded(self.calls.next_call, text)
        self.broadcast(self.ended)

    # --- words

    def status(self, incarnation: str) -> ReplicaStatus:
        """What a trainer's report says about it."""
        received = self.received
        if received is None or received.incarnation != incarnation:
            return ReplicaStatus(None, [])
        return ReplicaStatus(received.version, self._stats.get(received, []))

    def _overtime(self, take: Take, situation: str) -> str:
        """Why a call got nothing within its deadline."""
        least, details = "", {self.describe(situation): None}
        if take.min_version is not None:
            least = f" from min_version={take.min_version} on"
            details[situation] = None  # how far the trainer is, whatever is here
        return f"replica {self.name!r} got no new version in time{least}: {'; '.join(details)}"

    def describe(self, situation: str = "") -> str:
        """How far it is, for the text of a timeout."""
        absent, handed_out = self.absent(), self.calls.handed_out
        texts = [situation]
        if absent:
            texts = [absent]
        elif self.transfer is not None:
            texts = [self.transfer.describe(self.process_count)]
        elif self.promised is not None:
            version = self.promised.held.version
            texts = [f"version {version} is prepared and waits for the rest of the fleet"]
        elif handed_out is not None:
            late = self.calls.describe_late()
            texts = [f"version {handed_out.version} is handed out, and not taken by {late}"]
        elif self.prepared is not None:
            texts = [f"version {self.prepared.version} is prepared and not taken"]
        elif self.overdue is not None and _follows(self.overdue, self.received):
            lost = f"version {self.overdue.version} can't be had here any more"
            why = "it took longer than straggler_timeout, or nobody holds it; the next one can"
            texts.append(f"{lost}: {why}")
        texts += [self._withdrawal, self._retries.last_failure]
        return "; ".join(filter(None, texts))
