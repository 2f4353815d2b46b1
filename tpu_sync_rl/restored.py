"""What a replica has, as its processes tell a coordinator that did not know it."""

from collections.abc import Collection
from dataclasses import dataclass

from tpu_sync_rl.messages import Held, Promise
from tpu_sync_rl.sampler_messages import JoinSampler


@dataclass(slots=True)
class Restored:
    """The versions of one replica, where another coordinator knew it; see `Replica`."""

    received: Held | None
    committed: Held | None
    prepared: Held | None = None
    promised: Promise | None = None


def restored(joins: Collection[JoinSampler], handed_out: Held | None) -> Restored:
    """What all processes of a replica have, as the `joins` of each of them say.

    Args:
        joins: one of each process.
        handed_out: the outcome of a call that some process has not taken yet.
    """
    in_order = sorted(joins, key=lambda join: join.call)
    first, last = in_order[0], in_order[-1]
    found = Restored(handed_out or last.committed, first.committed)
    for held in first.prepared:
        if not all(held in join.prepared for join in joins):
            continue
        found.received = held
        promises = [join.promise for join in joins]
        if held == handed_out:
            found.prepared = None  # an older one, which can't be taken any more
        elif all(promise is not None and promise.held == held for promise in promises):
            found.promised = first.promise
        else:
            found.prepared = held  # to one process at least it came after the decision
    return found


def known_commits(join: JoinSampler) -> set[Held]:
    """The fleet's commits that a process knows of: it took a version, or was told."""
    outcomes = {outcome.outcome.held for outcome in join.outcomes}
    commits = {join.fleet_commit, join.committed, *outcomes}
    return {held for held in commits if held is not None}
