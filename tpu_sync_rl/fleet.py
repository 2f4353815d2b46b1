"""The fleet: all live replicas of a job, where they return a version together or not at all.

A round takes one version through two steps, so that neither a death nor a restart of the
coordinator lets one replica return what another one never will:

- Every replica prepares the version, and so promises to keep it until there is a decision, however
  long that takes. When all have, and each has returned what the fleet committed before, the fleet
  commits it; when one can't, or a newer version comes first, the fleet aborts it.
- A commit is told to every process, and only when each has stored it may calls take the version.
  A coordinator that starts anew hears of it from any process that stored it.
"""

from collections.abc import Collection
from enum import Enum, auto

from tpu_sync_rl.messages import Held, Promise
from tpu_sync_rl.replica import Replica, covers


class _Stage(Enum):
    OPEN = auto()  # some replica has not prepared it, or not returned the one before
    COMMITTED = auto()  # some process may not know that it is decided
    SETTLED = auto()
    ABORTED = auto()


class Round:
    """One version on its way through the fleet.

    Args:
        held: the version.
        names: of the fleet's replicas when it was announced.
        members: those of them that have to prepare it.
        drop: leave stragglers behind, instead of aborting or waiting for them.

    Attributes:
        why_aborted: "" unless it is aborted.
        late_callers: replicas that have not returned the version before, where it waits for
            nothing else; else empty.
    """

    def __init__(
        self,
        held: Held,
        names: Collection[str],
        members: Collection[Replica] = (),
        *,
        drop: bool = False,
    ) -> None:
        self.held = held
        self.why_aborted = ""
        self._told = ""  # of it, to replicas
        self.late_callers: list[str] = []
        self._names = sorted(names)
        self._members = set(members)
        self._drop = drop
        self._stage = _Stage.OPEN

    @property
    def is_over(self) -> bool:
        """Whether there is a decision, and all who have to know it do."""
        return self._stage in (_Stage.SETTLED, _Stage.ABORTED)

    @property
    def is_settled(self) -> bool:
        """Whether calls may take the version."""
        return self._stage is _Stage.SETTLED

    @property
    def promise(self) -> Promise | None:
        """What a replica promises that begins to receive the version now."""
        return None if self.is_settled else Promise(self.held, self._names)

    def lacking(self) -> str:
        """What it waits for."""
        version = f"the fleet's version {self.held.version}"
        if self.late_callers:
            return f"{version} waits until {', '.join(self.late_callers)} took the one before"
        behind = sorted(r.name for r in self._members if not covers(r.received, self.held))
        whom = f"prepared by {', '.join(behind)}" if behind else "known to be committed by all"
        return f"{version} is not yet {whom}"

    def commit(self) -> None:
        """Decides that all replicas return it, unless that is decided."""
        if self._stage is _Stage.OPEN:
            self.late_callers, self._stage = [], _Stage.COMMITTED

    def abort(self, why: str, replicas: Collection[Replica], *, is_told: bool = True) -> None:
        """Decides that no replica returns it, unless it is committed.

        `why` is told to the replicas, but where nothing is wrong, and `is_told` is False.
        """
        if self._stage is _Stage.OPEN:
            self.why_aborted, self._stage = why, _Stage.ABORTED
            self._told = why if is_told else ""
            self.late_callers = []
            self.spread(replicas)

    def vote(self, replicas: Collection[Replica]) -> None:
        """Commits or aborts as soon as that is clear."""
        if self._stage is not _Stage.OPEN:
            return
        self._members = {r for r in self._members if r.is_live or r.has_promised(self.held)}
        behind = {r for r in self._members if not covers(r.received, self.held)}
        stragglers = {r for r in behind if covers(r.overdue, self.held)}
        if stragglers and not self._drop:
            names = ", ".join(sorted(replica.name for replica in stragglers))
            self.abort(f"{names} did not receive it within straggler_timeout", replicas)
        elif behind == stragglers:
            newest = self.held.incarnation
            late = [r.name for r in self._members if r.is_live and r.is_awaited(newest)]
            self.late_callers = [] if self._drop else sorted(late)
            if not self.late_callers:
                self.commit()

    def tell(self, replicas: Collection[Replica], now: float, patience_s: float) -> None:
        """Tells a commit to all who wait for it; settles when they, or all but the lost, know."""
        if self._stage is not _Stage.COMMITTED:
            return
        told = [replica for replica in replicas if replica.has_promised(self.held)]
        for replica in told:
            replica.tell(self.held)
        if all(replica.knows(self.held) or replica.departed(now, patience_s) for replica in told):
            self.settle()

    def settle(self) -> None:
        """Lets calls take it, if it is committed."""
        if self._stage is _Stage.COMMITTED:
            self._stage = _Stage.SETTLED

    def spread(self, replicas: Collection[Replica]) -> None:
        """Does to every replica what was decided, those that come later too."""
        for replica in replicas:
            if self._stage is _Stage.SETTLED:
                replica.release(self.held)
            elif self._stage is _Stage.ABORTED:
                replica.withdraw(self.held, self._told)


class Fleet:
    """The rounds of a job: the newest, and those that a former coordinator left.

    Args:
        patience_s: for how long a lost process, or a replica that knew a former coordinator, is
            waited for.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._rounds: dict[Held, Round] = {}
        self._broken: set[Held] = set()  # promises to a former coordinator that came to nothing
        self._back_by: float | None = None  # who knew a former coordinator is back, or lost

    def expect(self, now: float) -> None:
        """Somebody comes who knew a former coordinator: others are going to."""
        if self._back_by is None:
            self._back_by = now + self._patience_s

    def begin(self, held: Held, replicas: Collection[Replica], now: float, *, drop: bool) -> Round:
        """Starts the round of `held`, or goes on with the one that a former coordinator began.

        One that waits for nothing but late callers makes way for it.
        """
        found = self._rounds.get(held)
        for round_ in self._rounds.values():
            if round_.late_callers and round_ is not found:
                round_.abort(f"version {held.version} came first", replicas, is_told=False)
        self._broken |= {round_.held for round_ in self._rounds.values() if round_.why_aborted}
        self._rounds = {h: r for h, r in self._rounds.items() if not r.is_over or r is found}
        if found is None:
            members = [replica for replica in replicas if replica.is_live]
            names = {replica.name for replica in members}
            for replica in members:
                if replica.promised is not None and replica.promised.held == held:
                    names |= set(replica.promised.fleet)  # as a former coordinator began it
            found = Round(held, names, members, drop=drop)
            self._rounds[held] = found
            self._go_on(found, replicas, now)
        return found

    def on_time(self, replicas: Collection[Replica], now: float) -> None:
        """Decides what can be decided at `now`, and lets calls take what all know."""
        for replica in replicas:
            if replica.promised is not None and replica.promised.held not in self._rounds:
                self._adopt(replica, replica.promised, replicas, now)
        for round_ in self._rounds.values():
            self._go_on(round_, replicas, now)

    def abort(self, why: str, replicas: Collection[Replica]) -> None:
        """Aborts rounds that are not decided: their trainer is gone."""
        for round_ in self._rounds.values():
            round_.abort(why, replicas)

    def end(self, replicas: Collection[Replica]) -> None:
        """The job is over: what is committed is handed out, what is not decided is aborted."""
        for round_ in self._rounds.values():
            round_.abort("the job was closed first", replicas)
            round_.settle()
            round_.spread(replicas)

    def _go_on(self, round_: Round, replicas: Collection[Replica], now: float) -> None:
        if not round_.is_over and self._is_known(round_.held, replicas):
            round_.commit()
        round_.vote(replicas)
        if self._are_back(round_.promise, replicas, now):
            round_.tell(replicas, now, self._patience_s)
        round_.spread(replicas)

    def _adopt(
        self, replica: Replica, promise: Promise, replicas: Collection[Replica], now: float
    ) -> None:
        """Decides on a promise to a former coordinator.

        It is a commit if anybody stored that, and an abort when all who could have are back, or
        have had the time: who comes later has to follow.
        """
        if self._is_known(promise.held, replicas):
            self._rounds[promise.held] = Round(promise.held, promise.fleet)
        elif promise.held in self._broken or self._are_back(promise, replicas, now):
            self._broken.add(promise.held)
            replica.withdraw(
                promise.held, "the coordinator was restarted before the fleet had decided"
            )

    def _is_known(self, held: Held, replicas: Collection[Replica]) -> bool:
        if held in self._broken:
            return False
        return any(held in replica.known_commits for replica in replicas)

    def _are_back(self, promise: Promise | None, replicas: Collection[Replica], now: float) -> bool:
        """Whether all replicas that share a promise are here, or have had the time to be."""
        if promise is None or self._back_by is None or now >= self._back_by:
            return True
        return set(promise.fleet) <= {replica.name for replica in replicas if replica.is_restored}
