"""One publish call of a trainer program: what its processes said, and whom it waits for."""

from collections.abc import Collection

import msgspec

from tpu_sync_rl.copy_comparison import CopyComparison
from tpu_sync_rl.fleet import Round
from tpu_sync_rl.messages import Held, Outcome, ReplicaStatus
from tpu_sync_rl.replica import Replica, covers
from tpu_sync_rl.trainer_messages import Publish, PublishOutcome


class PublishCall:
    """The calls number `number` of all processes of a trainer program, which are one.

    Attributes:
        publishes: what each process said.
        copies: what they hold of the same boxes, compared.
        held: the version, once it is announced.
        waiting: replicas that it waits for; set when it is announced.
        lost: names of replicas that it does not wait for any more.
        round: of the version, where the fleet returns it together.
        outcome: the end; None until it is decided.
    """

    def __init__(self, number: int, incarnation: str, timeout_s: float, now: float) -> None:
        self.number = number
        self.publishes: dict[int, Publish] = {}
        self.copies = CopyComparison()
        self.held: Held | None = None
        self.waiting: set[Replica] = set()
        self.lost: set[str] = set()
        self.round: Round | None = None
        self.outcome: PublishOutcome | None = None
        self._incarnation = incarnation
        self._began = now
        self._deadline = now + timeout_s

    @classmethod
    def decided(cls, outcome: PublishOutcome, incarnation: str) -> "PublishCall":
        """One that another coordinator has decided."""
        call = cls(outcome.call, incarnation, 0.0, 0.0)
        call.outcome = outcome
        return call

    def enter(self, process: int, publish: Publish, now: float) -> None:
        """Process `process` has entered the call, and done its part or failed to."""
        if publish.manifest is not None and publish.manifest == self.manifest:
            publish = msgspec.structs.replace(publish, manifest=self.manifest)  # one is enough
        self.publishes[process] = publish
        self.copies.enter(process, publish)
        self._began = min(self._began, now - sum(publish.seconds.values()))

    @property
    def first(self) -> Publish:
        """What the lowest process that has entered the call said."""
        return self.publishes[min(self.publishes)]

    def expired(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return now >= self._deadline

    def give_up(self, now: float) -> None:
        """Brings the deadline forward to now."""
        self._deadline = now

    @property
    def failure(self) -> Outcome | None:
        """What went wrong in the first process that could not do its part."""
        for process, publish in sorted(self.publishes.items()):
            if publish.error:
                return Outcome(publish.error, f"process {process}: {publish.text}", None)
        return None

    def flaw(self, newest: int | None, digest: str) -> Outcome | None:
        """What keeps a call that all processes have entered from being announced for good.

        Args:
            newest: the last version announced.
            digest: of the manifest that the program began with; "" at its first call.
        """
        if (failure := self.failure) is not None:
            return failure
        version, wait = self.first.version, self.first.wait
        for process, publish in sorted(self.publishes.items()):
            if publish.version != version:
                return self._disagree("VersionError", "version", version, process, publish.version)
            if publish.digest != self.first.digest:
                return self._differ(process, publish)
            if publish.wait != wait:
                return self._disagree("SyncError", "wait", wait, process, publish.wait)
        if newest is not None and version <= newest:
            text = f"version {version} does not grow: {newest} was announced before"
            return Outcome("VersionError", text, None)
        if digest and self.first.digest != digest:
            text = f"manifest {self.first.digest} is not the {digest} that this incarnation has"
            return Outcome("ManifestError", text, None)
        if not digest and self.manifest is None:
            return Outcome("SyncError", "no process sent the manifest with its first call", None)
        return None

    def _disagree(
        self, error: str, what: str, first: object, process: int, other: object
    ) -> Outcome:
        text = f"process {min(self.publishes)} has {what} {first!r}, process {process} {other!r}"
        return Outcome(error, f"the trainer's processes disagree: {text}", None)

    def _differ(self, process: int, publish: Publish) -> Outcome:
        # Not before it is needed: the coordinator starts without NumPy.
        from tpu_sync_rl.manifest import Manifest, changes

        try:
            ours, theirs = (Manifest.decode(p.manifest or b"") for p in (self.first, publish))
        except ValueError:
            return self._disagree(
                "ManifestError", "manifest", self.first.digest, process, publish.digest
            )
        text = (
            f"process {min(self.publishes)} and process {process} of the trainer differ: "
            f"{'; '.join(changes(ours, theirs))}. What each process holds for itself has no one "
            "global value; make it global: jax.device_put(x, NamedSharding(mesh, P()))"
        )
        return Outcome("ManifestError", text, None)

    def different_copies(self, manifest: bytes) -> Outcome:
        """Why it is not announced whose processes hold different copies of the same boxes."""
        text = (
            f"version {self.first.version} was not announced: the trainer's processes hold "
            f"different copies of the same boxes: {self.copies.described(manifest)}. Samplers "
            "would get a mixture that no process has; make them equal on all processes, by one "
            "seed or by jax.experimental.multihost_utils.broadcast_one_to_all, say"
        )
        return Outcome("CorruptionError", text, None)

    @property
    def manifest(self) -> bytes | None:
        """The manifest, where some process sent it."""
        sent = (publish.manifest for publish in self.publishes.values())
        return next((manifest for manifest in sent if manifest is not None), None)

    def unmet(self, replicas: Collection[Replica], now: float, lease_s: float) -> Outcome | None:
        """Why `min_replicas` can't be had any more: too many were refused, and all know."""
        refused = [r for r in replicas if r.verdict.is_refusal_known(r.members, now, lease_s)]
        undecided = any(replica.is_live and not replica.is_admitted for replica in replicas)
        if not refused or undecided:
            return None
        texts = [f"replica {replica.name!r}: {replica.verdict.text}" for replica in refused]
        return Outcome("ManifestError", "\n".join([self.shortage(replicas), *texts]), None)

    def shortage(self, replicas: Collection[Replica]) -> str:
        """Which replicas are admitted, and what the others lack."""
        admitted = [replica.name for replica in replicas if replica.is_admitted]
        others = []
        for replica in replicas:
            if not replica.is_admitted:
                verdict = "refused" if replica.verdict.is_refused else "not decided yet"
                others.append(f"{replica.name!r} ({replica.absent() or verdict})")
        have = f"{len(admitted)} admitted{': ' if admitted else ''}{', '.join(admitted)}"
        needed = self.first.min_replicas
        return (
            f"version {self.first.version} was not announced and may be published again: it waits "
            f"for {needed} {'replica' if needed == 1 else 'replicas'}, {have}"
            + (f"; others: {', '.join(others)}" if others else "")
        )

    # --- once it is announced

    def observe(self, *, drop: bool) -> bool:
        """Takes note of replicas that are lost, have left or are refused.

        Whether every other one that it waits for has what it waits for. With `drop`, those whose
        lease of the version has ended count as lost.
        """
        assert self.held is not None
        for replica in list(self.waiting):
            late = drop and covers(replica.overdue, self.held)
            if late and not covers(replica.received, self.held):
                self.lost.add(replica.name)
            elif replica.is_live:
                continue
            elif not (replica.verdict.is_refused or replica.left or replica.ended):
                self.lost.add(replica.name)
            self.waiting.discard(replica)
        return not self._waits_for_round() and all(map(self._is_met, self.waiting))

    def _waits_for_round(self) -> bool:
        """Whether the fleet's decision has to come first; applications that call late do not."""
        if self.round is None or self.round.is_settled:
            return False
        return self.first.wait == "committed" or not self.round.late_callers

    def _is_met(self, replica: Replica) -> bool:
        assert self.held is not None
        return covers(self._has(replica), self.held)

    def _has(self, replica: Replica) -> Held | None:
        """The newest version that it has in the way that this call waits for."""
        return replica.calls.taken if self.first.wait == "committed" else replica.received

    def lacking(self) -> str:
        """Each replica that it still waits for, and what that one has."""
        verb = "taken" if self.first.wait == "committed" else "prepared"
        texts = [self.round.lacking()] if self.round and self._waits_for_round() else []
        for replica in sorted(self.waiting, key=lambda replica: replica.name):
            if not self._is_met(replica):
                has, progress = self._has(replica), replica.describe()
                newest = (
                    f"only version {has.version}"
                    if has and has.incarnation == self._incarnation
                    else "no version of this incarnation"
                )
                texts.append(
                    f"replica {replica.name!r} has {verb} {newest}"
                    + (f" ({progress})" if progress else "")
                )
        return "; ".join(texts)

    def decide(self, outcome: Outcome, replicas: Collection[Replica], now: float) -> PublishOutcome:
        """Decides the call, for good; `replicas` are those of the job at this moment."""
        seconds = {"total": now - self._began}
        for publish in self.publishes.values():
            for stage, spent_s in publish.seconds.items():
                seconds[stage] = max(spent_s, seconds.get(stage, 0.0))
        statuses: dict[str, ReplicaStatus] = {
            replica.name: replica.status(self._incarnation)
            for replica in replicas
            if replica.is_live
        }
        self.outcome = PublishOutcome(
            self.number,
            outcome,
            seconds,
            statuses,
            sorted(self.lost),
            {r.name: r.verdict.text for r in replicas if r.verdict.is_refused},
        )
        self.waiting.clear()
        return self.outcome
