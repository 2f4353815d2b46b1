"""The copies that processes of a trainer hold of the same boxes, compared in one publish call.

Each process says one digest for each group of boxes that it shares (see `shared_boxes`). Only where
those differ are the leaves told apart: one process of each kind is asked for a digest per leaf.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from tpu_sync_rl.members import Member
from tpu_sync_rl.trainer_messages import LeafDigests, LeafDigestsWanted, Publish

# Of what differs so much is looked into; the rest is alike.
_MOST_GROUPS = 4
_MOST_KINDS = 4
_MOST_LEAVES = 5

_DIGEST_NBYTES = 8


class CopyComparison:
    """What the processes of a trainer said of their copies in one call."""

    def __init__(self) -> None:
        self._digests: dict[int, dict[int, bytes]] = {}  # per group and process
        self._differing: set[int] = set()  # groups
        self._asked: dict[tuple[int, int], bytes | None] = {}  # group, process -> its answer

    def enter(self, process: int, publish: Publish) -> None:
        """A process has entered the call, maybe once more."""
        for group, digest in publish.copies.items():
            known = self._digests.setdefault(group, {})
            known[process] = digest
            if digest != next(iter(known.values())):
                self._differing.add(group)
        self._asked = {at: answer for at, answer in self._asked.items() if at[1] != process}

    @property
    def differ(self) -> bool:
        """Whether some processes hold different copies."""
        return bool(self._differing)

    def ask(self, call: int, members: Mapping[int, Member]) -> None:
        """Asks for what tells the leaves apart, once; `members` are the connected processes."""
        for group in self._looked_into():
            for process, *_ in self._kinds(group)[:_MOST_KINDS]:
                if (group, process) not in self._asked and process in members:
                    self._asked[group, process] = None
                    members[process].send(LeafDigestsWanted(call, group))

    def answer(self, process: int, message: LeafDigests) -> None:
        """A process has answered."""
        if (message.group, process) in self._asked:
            self._asked[message.group, process] = message.digests

    @property
    def is_answered(self) -> bool:
        """Whether all who were asked have answered."""
        return None not in self._asked.values()

    def described(self, manifest: bytes) -> str:
        """Which leaves differ, as far as that is told, and between which processes."""
        lines = [line for group in self._looked_into() for line in self._lines(group, manifest)]
        if len(lines) > _MOST_LEAVES:
            lines[_MOST_LEAVES:] = [f"and {len(lines) - _MOST_LEAVES} more leaves"]
        return "; ".join(lines)

    def _looked_into(self) -> list[int]:
        return sorted(self._differing)[:_MOST_GROUPS]

    def _kinds(self, group: int) -> list[list[int]]:
        """The processes of a group, those together that said the same."""
        return _together(self._digests[group].items())

    def _lines(self, group: int, manifest: bytes) -> list[str]:
        every = self._kinds(group)
        kinds = {kind[0]: kind for kind in every}
        num_others = sum(map(len, every[_MOST_KINDS:]))
        told = {p: answer for (of, p), answer in self._asked.items() if of == group and answer}
        keys = _keys(manifest, group) if len(told) > 1 else []
        lines = []
        for index, key in enumerate(keys):
            at = index * _DIGEST_NBYTES
            found = _together((p, told[p][at : at + _DIGEST_NBYTES]) for p in sorted(told))
            if len(found) > 1:
                sides = [sorted(q for p in alike for q in kinds[p]) for alike in found]
                lines.append(f"leaf {key!r}: {_against(sides, num_others)}")
        if lines:
            return lines
        return [f"leaves not told in time: {_against(every[:_MOST_KINDS], num_others)}"]


def _together(said: Iterable[tuple[int, bytes]]) -> list[list[int]]:
    """The processes by what they said, each list and all of them by the lowest process."""
    by_digest: dict[bytes, list[int]] = defaultdict(list)
    for process, digest in sorted(said):
        by_digest[digest].append(process)
    return list(by_digest.values())


def _keys(manifest: bytes, group: int) -> list[str]:
    """The keys of the leaves of a group; none where the manifest has no such group."""
    # Not before it is needed: the coordinator starts without NumPy.
    from tpu_sync_rl.manifest import Manifest
    from tpu_sync_rl.shared_boxes import SharedBoxes

    try:
        decoded = Manifest.decode(manifest)
    except ValueError:
        return []
    shared = SharedBoxes(decoded)
    if not 0 <= group < len(shared.groups):
        return []
    return [decoded.leaves[leaf].key for leaf in shared.leaves(group)]


def _against(sides: list[list[int]], num_others: int) -> str:
    others = f" ({num_others} more processes differ, too)" if num_others else ""
    return " against ".join(map(_named, sides)) + others


def _named(processes: list[int]) -> str:
    """Ascending numbers as ranges: "process 0", "processes 0-2, 5"."""
    spans: list[list[int]] = []
    for process in processes:
        if spans and spans[-1][1] == process - 1:
            spans[-1][1] = process
        else:
            spans.append([process, process])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(texts)}"
