"""A job without streams or clocks: processes speak at once, and keep what they hear."""

from collections.abc import Iterable
from typing import Any, TypeVar

from tpu_sync_rl.job import Job
from tpu_sync_rl.members import Member
from tpu_sync_rl.message_codec import ToCoordinator
from tpu_sync_rl.messages import Address, Held, Leave, Message, ProcessStats
from tpu_sync_rl.report import RailReport
from tpu_sync_rl.sampler_messages import (
    Admit,
    Fetch,
    FetchFailed,
    JoinSampler,
    Offer,
    Prepared,
    Refuse,
    Take,
    Took,
)
from tpu_sync_rl.trainer_messages import CloseJob, JoinTrainer, Publish

PATIENCE_S = 10.0
LEASE_S = 60.0
STATS = ProcessStats(
    nbytes=8, wire_nbytes=4, seconds={"wire": 0.5}, rails={"lo": RailReport(nbytes=4)}
)
M = TypeVar("M", bound=Message)


class World:
    """One job and the time in it."""

    def __init__(self, *, commit: str = "replica", on_straggler: str = "wait") -> None:
        self.commit = commit
        self.on_straggler = on_straggler
        self.now = 0.0
        self.clock_ms = 0
        self._sinks = iter(range(100, 10**6))
        self.job = self.new_job()

    def new_job(self) -> Job:
        return Job("policy", PATIENCE_S, lambda: next(self._sinks), lambda: self.clock_ms)

    def restart(self) -> None:
        """Another coordinator, which knows nothing; streams are to be opened again."""
        self.job = self.new_job()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.job.on_time(self.now)

    def trainer(self, incarnation: str = "A", num_processes: int = 1) -> list["Trainer"]:
        """A trainer program, joined."""
        program = [Trainer(self, incarnation, p, num_processes) for p in range(num_processes)]
        for process in program:
            process.join()
        return program

    def replica(
        self, name: str = "s", num_processes: int = 1, life: str = "life"
    ) -> list["Sampler"]:
        """A sampler program, joined."""
        program = [Sampler(self, name, p, num_processes, life) for p in range(num_processes)]
        for process in program:
            process.join()
        return program


class Process:
    """What both roles share: a stream and what came on it."""

    role = ""

    def __init__(self, world: World, name: str, index: int, num_processes: int) -> None:
        self.world = world
        self.name = name
        self.index = index
        self.num_processes = num_processes
        self.heard: list[Any] = []
        self.open()

    def open(self) -> None:
        self.member = Member(self.role, self.name, self.index, self.heard.append)

    def say(self, message: ToCoordinator) -> None:
        self.world.job.on_message(self.member, message, self.world.now)

    def lose(self) -> None:
        """The stream breaks."""
        self.world.job.on_lost(self.member, self.world.now)

    def leave(self) -> None:
        self.say(Leave())

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if type(message) is kind]

    def last(self, kind: type[M]) -> M:
        found = self.all(kind)
        assert found, f"no {kind.__name__} in {self.heard}"
        return found[-1]

    def new(self, kind: type[M]) -> list[M]:
        """Those that came since everything was last forgotten."""
        found = self.all(kind)
        self.heard.clear()
        return found


class Trainer(Process):
    role = "trainer"
    epoch = 0
    next_call = 0

    def join(self, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "incarnation": self.name,
            "epoch": self.epoch,
            "process_count": self.num_processes,
            "addresses": [Address("lo", "127.0.0.1", 1000 + self.index)],
            "ticket_secret": b"secret of %d" % self.index,
            "straggler_timeout_s": LEASE_S,
            "on_straggler": self.world.on_straggler,
            "commit": self.world.commit,
            "pinned": [],
            "call": self.next_call,
        }
        self.say(JoinTrainer(**(fields | changes)))

    def publish(self, call: int, version: int, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "digest": "d",
            "manifest": b"manifest",
            "wait": "received",
            "min_replicas": 0,
            "timeout_s": 30.0,
            "seconds": {"pin": 0.1 * (self.index + 1)},
            "error": "",
            "text": "",
        }
        self.say(Publish(call=call, version=version, **(fields | changes)))


class Sampler(Process):
    role = "sampler"
    sink = 0

    def __init__(self, world: World, name: str, index: int, num_processes: int, life: str) -> None:
        self.life = life
        super().__init__(world, name, index, num_processes)

    def join(self, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "life": self.life,
            "process_count": self.num_processes,
            "sink": self.sink,
            "prepared": [],
            "promise": None,
            "committed": None,
            "call": 0,
            "outcomes": [],
        }
        self.say(JoinSampler(**(fields | changes)))

    def admit(self, digest: str = "d") -> None:
        self.say(Admit(digest))

    def refuse(self, text: str = "w: shape", digest: str = "d") -> None:
        self.say(Refuse(digest, text))

    def prepare(self, version: int, incarnation: str = "A") -> None:
        self.say(Prepared(Held(incarnation, version), STATS))

    def fail(
        self, version: int, error: str = "PeerLostError", text: str = "broke", holder: str = ""
    ) -> None:
        self.say(FetchFailed(Held("A", version), error, text, holder))

    def take(
        self,
        call: int,
        *,
        min_version: int | None = None,
        wait: bool = True,
        timeout_s: float = 20.0,
    ) -> None:
        self.say(Take(call, min_version, wait, timeout_s))

    def took(self, call: int) -> None:
        self.say(Took(call))

    def offer(self, version: int, ask: int = 1, *, kept: bool = True) -> None:
        address = Address("lo", "127.0.0.1", 2000 + self.index)
        secret = b"%s %d" % (self.name.encode(), self.index)
        self.say(Offer(Held("A", version), ask, kept, b"theirs", [address], secret))

    def fetched(self) -> list[int]:
        return [message.held.version for message in self.all(Fetch)]


def publish(program: Iterable[Trainer], call: int, version: int, **changes: Any) -> None:
    for process in program:
        process.publish(call, version, **changes)


def admit(program: Iterable[Sampler]) -> None:
    for process in program:
        process.admit()


def prepare(program: Iterable[Sampler], version: int, incarnation: str = "A") -> None:
    for process in program:
        process.prepare(version, incarnation)


def close(program: Iterable[Trainer], timeout_s: float = 30.0) -> None:
    for process in program:
        process.say(CloseJob(timeout_s))
