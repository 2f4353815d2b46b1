"""A small job as an explicit model: the real `Job`, and processes that do what sessions do.

A `Model` is one state; `steps` names everything that can happen next, and `do` makes it happen.
Messages to a process wait in its inbox and are lost with its stream, so each of them may come late
or never. What is answered in one way only, and told of in no later message, is heard at once: that
keeps the number of states small.
"""

import pickle
import random
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from types import MethodType
from typing import Any

from job_world import LEASE_S, PATIENCE_S, STATS
from msgspec import Struct

from tpu_sync_rl.job import Job
from tpu_sync_rl.members import Member
from tpu_sync_rl.messages import Address, Held, Message, Promise, Refused, TrainerUp
from tpu_sync_rl.options import Commit, OnStraggler
from tpu_sync_rl.publications import Publications
from tpu_sync_rl.replica import Replica
from tpu_sync_rl.sampler_messages import (
    Abandon,
    Admit,
    Fetch,
    FetchFailed,
    FleetCommit,
    FleetCommitStored,
    JoinSampler,
    Latest,
    LeaveCall,
    Offer,
    Prepared,
    SamplerJoined,
    SamplerOutcome,
    Serve,
    Take,
    Took,
    Withdrawn,
)
from tpu_sync_rl.trainer_messages import (
    Announced,
    EpochRaised,
    JoinTrainer,
    Live,
    Pins,
    PinsKept,
    Publish,
    PublishOutcome,
    TrainerJoined,
)

CALL_S = 20.0  # of samplers
MAY_HAPPEN = (
    *("crash", "lose", "die", "repeat", "echo"),
    *("succeed", "replace", "patience", "lease", "orphan", "fade", "fail", "leave"),
)
PAIR = {"a": 1, "b": 1}  # replicas, and how many processes each has
Step = tuple[str, int]


def age(held: Held) -> tuple[str, int]:
    """What grows from each version to the next, in a job of incarnations A and B."""
    return held.incarnation, held.version


class Process:
    """What both roles share."""

    role = ""

    def __init__(self, model: "Model", name: str, index: int, num_processes: int) -> None:
        self.model = model
        self.name = name
        self.index = index
        self.num_processes = num_processes
        self.inbox: list[Message] = []
        self.connected = False
        self.dead = False
        self.faded = False  # its arrays are gone, but for what is pinned
        self.away_since = 0.0
        self.in_call = False
        self.next_call = 0
        self.said: Any = None  # last, on the present stream
        self.heard: Any = None  # last, from the inbox

    def receive(self, message: Message) -> None:
        """The stream brings a message."""
        if not self.hear_at_once(message):
            self.inbox.append(message)

    def say(self, message: Any) -> None:
        if self.connected:
            self.said = message
            self.model.job.on_message(self.member, message, self.model.now)

    def repeat(self) -> None:
        """What was said last comes a second time."""
        self.model.job.on_message(self.member, self.said, self.model.now)

    def echo(self) -> None:
        """What was heard last comes a second time."""
        self.inbox.insert(0, self.heard)
        self.hear()

    def connect(self) -> None:
        self.member = Member(self.role, self.name, self.index, self.receive)
        self.connected = True
        self.model.joining = self
        self.join()
        self.said = self.heard = None

    def disconnect(self) -> None:
        self.inbox.clear()
        self.connected = False
        self.away_since = self.model.now

    def fade(self) -> None:
        """The application has donated its arrays."""
        self.faded = True

    def join(self) -> None:
        raise NotImplementedError

    def hear_at_once(self, message: Message) -> bool:
        raise NotImplementedError

    def answer(self, message: Message) -> None:
        raise NotImplementedError

    def hear(self) -> None:
        raise NotImplementedError


class Trainer(Process):
    """A trainer process, which publishes one version after the other with `wait="received"`."""

    role = "trainer"

    def __init__(self, model: "Model", name: str, index: int, num_processes: int) -> None:
        super().__init__(model, name, index, num_processes)
        self.epoch = 0
        self.live: list[str] = []
        self.publications = Publications()
        self.outcomes: dict[int, PublishOutcome] = {}
        self.pinned: set[int] = set()

    def join(self) -> None:
        known = self.publications.newest >= 0
        self.say(
            JoinTrainer(
                incarnation=self.name,
                epoch=self.epoch,
                process_count=self.num_processes,
                addresses=[Address("lo", "127.0.0.1", 1000 + self.index)],
                ticket_secret=b"",
                straggler_timeout_s=LEASE_S,
                on_straggler=self.model.on_straggler,
                commit=self.model.commit,
                pinned=sorted(self.pinned),
                call=self.next_call - self.in_call,
                outcomes=list(self.outcomes.values())[-2:],
                replicas=self.live,
                digest="d" if known else "",
                manifest=b"m" if known else None,
                newest=self.publications.newest_done,
            )
        )

    def publish(self) -> None:
        version = self.publications.next_version(None)
        publish = Publish(
            self.next_call, version, "d", b"m", "received", 0, self.model.publish_s, {}, "", ""
        )
        self.in_call = True
        self.next_call += 1
        self.pinned.add(version)
        self.publications.add(publish)
        self.say(publish)

    def hear_at_once(self, message: Message) -> bool:
        match message:
            case Announced():
                self.publications.announced(message)
                for sampler in self.model.samplers:
                    if not sampler.connected:
                        sampler.give_up((self.name, message.version))
            case Live():
                self.live = message.replicas
            case EpochRaised():
                self.epoch = message.epoch
            case TrainerJoined():
                self.epoch = message.epoch
                self.model.prompt.append((self, message))
            case Pins():
                if not message.sinks:
                    self.pinned.discard(message.version)
                elif message.ask:
                    if not self.faded:
                        self.pinned.add(message.version)
                    self.model.prompt.append((self, message))
            case _:
                return False
        return True

    def answer(self, message: Message) -> None:
        match message:
            case TrainerJoined():
                for publish in self.publications.undecided():
                    self.say(publish)
            case Pins():
                self.say(PinsKept(message.version, message.ask, message.version in self.pinned))

    def hear(self) -> None:
        self.heard = self.inbox.pop(0)
        match self.heard:
            case PublishOutcome() as outcome:
                known = self.outcomes.setdefault(outcome.call, outcome)
                assert known == outcome, "a call has one outcome"
                withdrawn = self.publications.over(outcome)
                self.pinned -= {withdrawn}
                self.in_call = self.in_call and outcome.call != self.next_call - 1
            case message:
                raise AssertionError(message)


class Sampler(Process):
    """A sampler process, which takes versions in calls of its own."""

    role = "sampler"

    def __init__(self, model: "Model", name: str, index: int, num_processes: int) -> None:
        super().__init__(model, name, index, num_processes)
        self.sink = 0
        self.prepared: list[Held] = []
        self.promise: Promise | None = None
        self.fleet_commit: Held | None = None
        self.fetching: Held | None = None
        self.source = ""  # the replica that it is read from; "" for the trainer
        self.serving: set[Held] = set()
        self.current: Held | None = None
        self.epoch = 0  # of `current`
        self.epochs: dict[str, int] = {}  # of incarnations
        self.history: set[Held] = set()  # all that was current
        self.outcomes: dict[int, SamplerOutcome] = {}
        self.returned: dict[int, Held | str] = {}
        self.taken = 0  # outcomes below this one need not be told of any more
        self.given_up = ("", -1)  # newest version that others need not wait for this process with

    def join(self) -> None:
        self.serving.clear()
        self.say(
            JoinSampler(
                life="life",
                process_count=self.num_processes,
                sink=self.sink,
                prepared=self.prepared,
                promise=self.promise,
                committed=self.current,
                call=self.next_call,
                outcomes=[o for call, o in self.outcomes.items() if call >= self.taken],
                fleet_commit=self.fleet_commit,
                epochs=self.epochs,
            )
        )

    def enter(self) -> None:
        self.in_call = True
        self.say(Take(self.next_call, None, True, CALL_S))
        self.finish()

    def leave(self) -> None:
        """Is interrupted in its call, and goes on with it when it calls again."""
        self.in_call = False
        self.say(LeaveCall(self.next_call))

    def finish(self) -> None:
        """Returns from the call if its outcome is here."""
        decided = self.outcomes.get(self.next_call)
        if not self.in_call or decided is None:
            return
        held = decided.outcome.held
        if held is not None:
            assert held in self.prepared, "what is returned is held by every process"
            assert self.current is None or age(self.current) < age(held), "versions grow"
            epoch = decided.outcome.epoch
            last = (-1, -1) if self.current is None else (self.epoch, self.current.version)
            assert last < (epoch, held.version), "(epoch, version) grows"
            self.current, self.epoch = held, epoch
            self.epochs[held.incarnation] = epoch
            self.history.add(held)
            self.prepared = self.prepared[self.prepared.index(held) + 1 :]
        self.returned[self.next_call] = held or decided.outcome.error
        self.in_call = False
        self.next_call += 1
        self.say(Took(self.next_call - 1))

    def knows(self, held: Held) -> bool:
        """Whether this process holds `held` and knows that the fleet has committed it."""
        free = self.promise is None or self.promise.held != held
        return held in self.prepared and (free or held == self.fleet_commit)

    def give_up(self, newest: tuple[str, int]) -> None:
        """The others need not wait for this replica when they decide on version `newest`.

        Unless the coordinator knows that all of its processes have prepared it.
        """
        replica = self.model.job.replicas.get(self.name)
        received = None if replica is None else replica.received
        if received is None or age(received) < newest:
            self.given_up = max(self.given_up, newest)

    def fade(self) -> None:
        super().fade()
        self.serving.clear()

    def is_served(self) -> bool:
        """Whether it can read what it receives."""
        holders = self.model.replica(self.source)
        return all(self.fetching in holder.serving and not holder.dead for holder in holders)

    def fail(self) -> None:
        """Does not get what it receives."""
        assert self.fetching is not None
        error = "PeerLostError" if self.is_served() else "VersionError"
        self.say(FetchFailed(self.fetching, error, "", self.source))
        self.fetching = None

    def complete(self) -> None:
        """Has every byte of what it receives."""
        assert self.fetching is not None
        self.prepared.append(self.fetching)
        self.fetching = None
        self.say(Prepared(self.prepared[-1], STATS))

    def hear_at_once(self, message: Message) -> bool:
        match message:
            case TrainerUp() | SamplerJoined():
                self.model.prompt.append((self, message))
            case Latest() | Withdrawn():
                pass
            case _:
                return False
        return True

    def answer(self, message: Message) -> None:
        match message:
            case TrainerUp():
                self.epochs[message.incarnation] = message.epoch
                self.say(Admit(message.digest))
            case SamplerJoined():
                self.sink = message.sink
                if self.in_call:
                    self.say(Take(self.next_call, None, True, CALL_S))

    def hear(self) -> None:
        self.heard = self.inbox.pop(0)
        match self.heard:
            case Fetch() as fetch:
                self.promise = fetch.promise
                kept = (fetch.held, fetch.keep)
                self.prepared = [held for held in self.prepared if held in kept]
                if fetch.held in self.prepared:
                    self.say(Prepared(fetch.held, STATS))
                else:
                    self.fetching = fetch.held
                    self.source = "" if fetch.holder is None else fetch.holder.replica
            case Serve() as serve:
                has = {*self.prepared, *([] if self.faded else [self.current])}
                kept = serve.held in has | self.serving
                self.serving -= {serve.held}
                if kept and serve.sinks:
                    self.serving.add(serve.held)
                if serve.ask:
                    self.say(Offer(serve.held, serve.ask, kept))
            case Abandon() as abandon:
                if self.fetching == abandon.held:
                    self.fetching = None
            case FleetCommit() as commit:
                self.fleet_commit = commit.held
                self.say(FleetCommitStored(commit.held))
            case SamplerOutcome() as outcome:
                known = self.outcomes.setdefault(outcome.call, outcome)
                assert known == outcome, "a call has one outcome"
                self.taken = max(self.taken, outcome.taken)
                self.finish()
            case message:
                raise AssertionError(message)


class Model:
    """One state of a job.

    Args:
        num_trainers: processes of the trainer.
        replicas: per replica, its number of processes.
        late: replicas that are not there at first.
        budget: how often each thing may happen that need not happen: "publish", "enter" (per
            sampler process), "crash" (of the coordinator), "lose" (of a stream), "die" (of a
            sampler process), "repeat" and "echo" (of a message to and from the coordinator),
            "succeed" (another incarnation of the trainer begins), "replace" (the same, with a
            coordinator of its own), "orphan" (the trainer dies, and none follows), "fade" (of the
            arrays of a process), "fail" (of a transfer whose source is there), "leave" (a call that
            a sampler process is in), "patience" and "lease" (that much time passes).
        commit, on_straggler: the trainer's options.
        publish_s: how long a publish call may take.
        clock_is_late: the clock of each coordinator says less than that of the one before.
    """

    def __init__(
        self,
        *,
        num_trainers: int = 1,
        replicas: dict[str, int],
        late: Collection[str] = (),
        budget: dict[str, int],
        commit: Commit = "replica",
        on_straggler: OnStraggler = "wait",
        publish_s: float = 1000.0,
        clock_is_late: bool = False,
    ) -> None:
        self.clock_ms = 1000
        self.clock_is_late = clock_is_late
        self.commit: Commit = commit
        self.on_straggler: OnStraggler = on_straggler
        self.publish_s = publish_s
        self.budget = dict(budget)
        self.now = 0.0
        self.leases_ended = False
        self.prompt: list[tuple[Process, Message]] = []  # to be answered at once
        self.job = self._new_job()
        self.trainers = [Trainer(self, "A", p, num_trainers) for p in range(num_trainers)]
        self.samplers = [
            Sampler(self, name, p, n) for name, n in replicas.items() for p in range(n)
        ]
        self.processes: list[Process] = [*self.trainers, *self.samplers]
        for process in self.processes:
            if process.name in late:
                continue
            process.connect()
            while process.inbox:
                process.hear()
        self._settle()

    def _new_job(self) -> Job:
        self.clock_ms += -100 if self.clock_is_late else 100
        return Job("policy", PATIENCE_S, self._new_sink, self._clock_ms)

    def _clock_ms(self) -> int:
        return self.clock_ms

    def _new_sink(self) -> int:
        return 100 + self.processes.index(self.joining) if hasattr(self, "processes") else 99

    # --- steps

    def steps(self) -> Iterator[Step]:
        """Everything that can happen next."""
        for number, process in enumerate(self.processes):
            if process.dead:
                continue
            if process.inbox:
                yield "hear", number
            if not process.connected:
                yield "connect", number
            elif self.budget.get("lose"):
                yield "lose", number
            for what, message in (("repeat", process.said), ("echo", process.heard)):
                if process.connected and message is not None and self.budget.get(what):
                    yield what, number
            if self.budget.get("fade") and not process.faded:
                yield "fade", number
            if isinstance(process, Sampler):
                if process.fetching is not None and process.connected:
                    if process.is_served():
                        yield "complete", number
                    if self.budget.get("fail") or not process.is_served():
                        yield "fail", number
                if not process.in_call and process.next_call < self.budget.get("enter", 0):
                    yield "enter", number
                if process.in_call and self.budget.get("leave"):
                    yield "leave", number
                if self.budget.get("die"):
                    yield "die", number
            elif not process.in_call and process.next_call < self.budget.get("publish", 0):
                yield "publish", number
        for what in ("crash", "succeed", "replace", "orphan", "patience", "lease"):
            if self.budget.get(what):
                yield what, 0

    def do(self, what: str, number: int = 0) -> None:
        """Makes something happen."""
        if what in MAY_HAPPEN and self.budget.get(what):
            self.budget[what] -= 1
        process = self.processes[number]
        if what in ("crash", "replace"):
            for process in self.processes:
                process.disconnect()
            self.job = self._new_job()
        if what in ("succeed", "replace"):
            number_of = len(self.trainers)
            self.trainers = [Trainer(self, "B", p, number_of) for p in range(number_of)]
            self.processes[:number_of] = self.trainers
        elif what == "lose":
            self.lose(process)
        elif what == "die":
            process.dead = True
            self.lose(process)
        elif what == "orphan":
            for trainer in self.trainers:
                trainer.dead = True
                self.lose(trainer)
        elif what == "patience":
            self.pass_time(PATIENCE_S)
        elif what == "lease":
            self.leases_ended = True
            self.pass_time(LEASE_S)
        elif what != "crash":
            getattr(process, what)()
        self._settle()

    def lose(self, process: Process) -> None:
        """The stream of a process breaks."""
        if process.connected:
            process.disconnect()
            if isinstance(process, Sampler):
                process.give_up(self.newest)
            self.job.on_lost(process.member, self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for sampler in self.samplers:
            if not sampler.connected and self.now - sampler.away_since >= PATIENCE_S:
                sampler.given_up = max(sampler.given_up, self.newest)
            if seconds >= LEASE_S and self.on_straggler == "drop":
                sampler.give_up(self.newest)
        self.job.on_time(self.now)

    def _settle(self) -> None:
        """What is answered at once, and what the clock brings to pass by itself."""
        while self.prompt:
            process, message = self.prompt.pop(0)
            process.answer(message)
        self.job.on_time(self.now)

    # --- what has to hold

    def check(self) -> None:
        """What no state may break."""
        for process in self.processes:
            assert not any(isinstance(message, Refused) for message in process.inbox)
        for name in {sampler.name for sampler in self.samplers}:
            returned: dict[int, Held | str] = {}
            for sampler in self.replica(name):
                for call, what in sampler.returned.items():
                    assert returned.setdefault(call, what) == what, "a call has one outcome"
        if self.commit == "fleet":
            self._check_fleet()

    def _check_fleet(self) -> None:
        """Who returned a version can be sure that every other live replica will."""
        returned = [s.current for s in self.samplers if s.current is not None]
        if not returned:
            return
        newest = max(returned, key=age)
        for sampler in self.samplers:
            if self.is_leased(sampler.name, newest):
                known = [held for held in sampler.prepared if sampler.knows(held)]
                has = max([age(held) for held in (*known, sampler.current) if held], default=None)
                assert has is not None and has >= age(newest), f"{sampler.name} lacks {newest}"
        if self.on_straggler == "wait":
            for held in set.union(*(sampler.history for sampler in self.samplers)):
                for sampler in self.samplers:
                    if held not in sampler.history and self.is_leased(sampler.name, held):
                        passed = sampler.current is not None and age(sampler.current) > age(held)
                        assert not passed, f"{sampler.name} passed over {held}"

    def replica(self, name: str) -> list[Sampler]:
        return [sampler for sampler in self.samplers if sampler.name == name]

    @property
    def newest(self) -> tuple[str, int]:
        """The newest version that was announced."""
        return max((trainer.name, trainer.publications.newest) for trainer in self.trainers)

    def is_leased(self, name: str, held: Held) -> bool:
        """Whether the others never gave up a replica when they decided on `held`."""
        return not any(p.dead or p.given_up >= age(held) for p in self.replica(name))

    def key(self) -> int:
        """What states have in common that can't be told apart."""
        replicas = [replica.__dict__ for replica in self.job.replicas.values()]
        return hash(_frozen([self.__dict__, *replicas], set()))

    # --- the end

    def run_out(self) -> None:
        """Lets everything happen that can, fairly; then one more version, which everybody gets.

        Raises:
            AssertionError: a call does not end, or somebody alive is left behind.
        """
        for sampler in self.samplers:
            if sampler.dead:
                for process in self.replica(sampler.name):
                    process.dead = True  # its launcher ends the whole program
                    self.lose(process)
        self._go_on()
        living = [sampler for sampler in self.samplers if not sampler.dead]
        if self.commit == "fleet":
            newest = max(
                (s.current for s in living if s.current is not None), key=age, default=None
            )
            for sampler in living:
                if newest is not None and self.is_leased(sampler.name, newest):
                    assert sampler.current == newest, "who is alive returns what others returned"
        self._check_converged(living)
        if any(trainer.dead for trainer in self.trainers):
            return
        for call in range(max(trainer.next_call for trainer in self.trainers) + 1):
            for trainer in self.trainers:
                if trainer.next_call == call:
                    trainer.publish()
            self._go_on()
        for trainer in self.trainers:
            assert not trainer.in_call, "a call ends"
        last = Held(*self.newest)
        for trainer in self.trainers:
            assert trainer.outcomes[trainer.next_call - 1].outcome.error == ""
            assert not trainer.pinned, "nothing is pinned for ever"
        for sampler in living:
            assert sampler.current == last, "who is alive gets the next version"

    def _check_converged(self, living: list[Sampler]) -> None:
        """What one replica has got, and its application has left alone, all get."""
        newest = Held(*self.newest)
        lacking = {s.name for s in self.samplers if s.dead or s.faded or s.current != newest}
        whole = {sampler.name for sampler in living} - lacking
        if whole and self.commit == "replica" and not self.leases_ended:
            for sampler in living:
                assert sampler.current == newest, f"{sampler.name} lacks {newest}"

    def _go_on(self) -> None:
        for _ in range(15):
            for number, process in enumerate(self.processes):
                if process.dead:
                    continue
                if not process.connected:
                    self.do("connect", number)
                while process.inbox:
                    self.do("hear", number)
                if isinstance(process, Sampler):
                    if process.fetching is not None:
                        self.do("complete" if process.is_served() else "fail", number)
                    if not process.in_call:
                        self.do("enter", number)
            self.pass_time(PATIENCE_S / 2)
            self._settle()
            self.check()


def explore(first: Model, *, run_out_every: int) -> int:
    """Visits every state that `first` leads to, nearest first; how many there are.

    Args:
        first: where it begins.
        run_out_every: from each such state, counted as they are found, the job is also run to its
            end.

    Raises:
        AssertionError: something does not hold; its notes are the steps that led there.
    """
    seen = {first.key()}
    frontier: deque[tuple[bytes, tuple[Step, ...]]] = deque([(pickle.dumps(first, -1), ())])
    while frontier:
        state, path = frontier.popleft()
        for step in list(pickle.loads(state).steps()):
            model: Model = pickle.loads(state)
            try:
                model.do(*step)
                model.check()
                key = model.key()
                if key in seen:
                    continue
                seen.add(key)
                frontier.append((pickle.dumps(model, -1), (*path, step)))
                if len(seen) % run_out_every == 0:
                    model.run_out()
            except Exception as error:
                error.add_note(f"after {[*path, step]}")
                raise
    return len(seen)


def walk(rng: random.Random) -> list[Step]:
    """Goes through a job of any size in any order, to its end; the steps that it took.

    Raises:
        AssertionError: as `explore` does.
    """
    budget = {what: rng.randrange(3) for what in MAY_HAPPEN}
    budget["replace"] = rng.randrange(2) if budget["succeed"] == 0 else 0
    budget |= {"die": rng.randrange(2), "succeed": min(budget["succeed"], 1)}
    others = budget["crash"] + budget["succeed"] + budget["replace"]
    budget["orphan"] = rng.randrange(2) if others == 0 else 0
    model = Model(
        num_trainers=rng.choice((1, 2)),
        replicas=rng.choice(
            ({"a": 1, "b": 1}, {"a": 2}, {"a": 2, "b": 1}, {"a": 1, "b": 1, "c": 1})
        ),
        late=rng.choice(((), ("b",))),
        budget=budget | {"publish": rng.choice((2, 4)), "enter": rng.choice((2, 5))},
        commit=rng.choice(("fleet", "replica")),
        on_straggler=rng.choice(("wait", "drop")),
        clock_is_late=budget["crash"] == 0 and rng.random() < 0.5,
    )
    path: list[Step] = []
    try:
        for _ in range(rng.choice((10, 30, 80))):
            steps = list(model.steps())
            usual = [step for step in steps if step[0] not in MAY_HAPPEN]
            if not steps:
                break
            path.append(rng.choice(usual if usual and rng.random() < 0.8 else steps))
            model.do(*path[-1])
            model.check()
        model.run_out()
    except Exception as error:
        error.add_note(f"after {path}")
        raise
    return path


_ATOMS = frozenset((type(None), bool, int, float, str, bytes))


def _frozen(value: Any, seen: set[int]) -> Any:
    """`value` as something that can be hashed, equal for equal states."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is list or kind is tuple:
        return tuple([_frozen(item, seen) for item in value])
    if isinstance(value, Mapping):
        return frozenset([(_frozen(k, seen), _frozen(v, seen)) for k, v in value.items()])
    if kind is set:
        return frozenset([_frozen(item, seen) for item in value])
    if isinstance(value, Struct):
        return repr(value)
    if kind is Replica or kind is Member:
        return value.name
    if kind is MethodType or isinstance(value, Enum):
        return str(value.__name__ if kind is MethodType else value.name)
    if id(value) in seen:
        return kind.__name__
    seen.add(id(value))
    names = getattr(kind, "__slots__", None) or value.__dict__
    return (kind.__name__, *[_frozen(getattr(value, name), seen) for name in names])
