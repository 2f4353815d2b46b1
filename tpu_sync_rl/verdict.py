"""What the processes of a replica think of the manifest that the trainer has now."""

from collections.abc import Collection


class Verdict:
    """Admission takes every process of the replica, refusal any one."""

    def __init__(self) -> None:
        self.digest = ""  # of the manifest that was refused last
        self._admitted: set[int] = set()
        self._refusals: dict[int, str] = {}  # every difference that the process named
        self._refused_at = 0.0
        self._acknowledged: set[int] = set()  # processes that know of the refusal

    def forget(self) -> None:
        """There is a new manifest, and nobody has said anything about it."""
        self._admitted.clear()
        self._refusals.clear()
        self._acknowledged.clear()

    def admit(self, process: int) -> None:
        """The manifest fits what `process` wants."""
        self._admitted.add(process)

    def refuse(self, process: int, digest: str, text: str, now: float) -> None:
        """The manifest does not fit what `process` wants: the replica is refused."""
        if not self._refusals:
            self.digest, self._refused_at = digest, now
        self._refusals[process] = text

    def acknowledge(self, process: int) -> None:
        """`process` knows that the replica is refused."""
        self._acknowledged.add(process)

    @property
    def is_refused(self) -> bool:
        """Whether any process refused it."""
        return bool(self._refusals)

    @property
    def num_admitted(self) -> int:
        """How many processes have admitted it."""
        return len(self._admitted)

    @property
    def text(self) -> str:
        """Every difference that the processes named; "" where none refused."""
        return "\n".join(dict.fromkeys(text for _, text in sorted(self._refusals.items())))

    def is_refusal_known(self, processes: Collection[int], now: float, lease_s: float) -> bool:
        """Whether it is refused, and `processes` know, or have had `lease_s` to say so.

        The trainer's call may then fail for it without a sampler that still waits for a word.
        """
        if not self._refusals:
            return False
        return self._acknowledged.issuperset(processes) or now >= self._refused_at + lease_s
