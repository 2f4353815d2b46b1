"""Processes that are connected to the coordinator, and the programs that they make up."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tpu_sync_rl.messages import ConnectedProcess, Message, Refused


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One process, for the life of one proved stream.

    `send` queues a message for it and returns at once; `Refused` is the last one. `software` has
    versions by package.
    """

    role: str
    name: str
    process_index: int
    send: Callable[[Message], None]
    software: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> ConnectedProcess:
        """What others are told about it."""
        return ConnectedProcess(self.role, self.name, self.process_index, self.software)


class Program:
    """The processes of one trainer incarnation or one sampler replica.

    Attributes:
        members: connected processes.
        lost_at: when the stream of a process broke that is not back yet.
        left: processes that said goodbye.
    """

    def __init__(self, name: str, process_count: int) -> None:
        self.name = name
        self.process_count = process_count
        self.members: dict[int, Member] = {}
        self.lost_at: dict[int, float] = {}
        self.left: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether every process is connected."""
        return len(self.members) == self.process_count

    def connect(self, member: Member, now: float) -> None:
        """Takes a process in. Where it is the first one back, the others get time to follow."""
        process = member.process_index
        if not self.members:
            self.lost_at = dict.fromkeys(self.lost_at, now)
        self.members[process] = member
        self.lost_at.pop(process, None)
        self.left.discard(process)

    def has(self, member: Member) -> bool:
        """Whether `member` is the present stream of its process."""
        return self.members.get(member.process_index) is member

    def disconnect(self, process: int, now: float, *, left: bool) -> None:
        """Takes a process out that was lost, or has left."""
        del self.members[process]
        if left:
            self.left.add(process)
        else:
            self.lost_at[process] = now

    def broadcast(self, message: Message) -> None:
        """Sends `message` to every connected process."""
        for member in self.members.values():
            member.send(message)

    def fence(self, text: str, now: float) -> None:
        """Ends every stream: another program has taken the place of this one."""
        self.broadcast(Refused("VersionError", text))
        for process in list(self.members):
            self.disconnect(process, now, left=False)

    def departed(self, now: float, patience_s: float) -> str:
        """Names processes that have left, or been lost for `patience_s`; "" if there are none."""
        late = {p for p, since in self.lost_at.items() if now - since >= patience_s}
        return self._names(late | self.left)

    def missed(self, now: float, patience_s: float) -> str:
        """Names processes that have departed, for those that are here; "" if nobody is here.

        A program that was lost as a whole, and comes back, so hears nothing of its own loss.
        """
        return self.departed(now, patience_s) if self.members else ""

    def absent(self) -> str:
        """Names processes that are not connected; "" if all are."""
        return self._names(set(range(self.process_count)) - self.members.keys())

    def _names(self, processes: set[int]) -> str:
        return ", ".join(
            f"process {p} of {self.process_count} {self._absence(p)}" for p in sorted(processes)
        )

    def _absence(self, process: int) -> str:
        if process in self.left:
            return "has left"
        return "is lost" if process in self.lost_at else "has not joined"
