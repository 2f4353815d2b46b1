"""Random orders of what the processes of a job say, against what has to hold in all of them."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from job_world import LEASE_S, STATS, Sampler, Trainer, World

from tpu_sync_rl.messages import Held, TrainerUp
from tpu_sync_rl.sampler_messages import (
    Abandon,
    Fetch,
    FetchFailed,
    Prepared,
    SamplerJoined,
    SamplerOutcome,
)
from tpu_sync_rl.trainer_messages import (
    Announced,
    GiveUp,
    Pins,
    PinsKept,
    PublishOutcome,
    TrainerJoined,
)


class TrainerModel(Trainer):
    """A trainer process that hears with a delay, and checks what it hears."""

    def __init__(self, world, name, index, num_processes):
        self.read = 0
        self.pinned = {}  # version -> sinks, None while it is not announced
        self.outcomes = {}
        self.announced = set()
        self.asks = []
        self.said = {}  # call -> how it was published
        self.lost = False
        super().__init__(world, name, index, num_processes)

    def listen(self):
        while self.read < len(self.heard):
            message = self.heard[self.read]
            self.read += 1
            match message:
                case TrainerJoined():
                    self.epoch = message.epoch
                case Announced():
                    self.announced.add(message.version)
                case PublishOutcome():
                    known = self.outcomes.setdefault(message.call, message)
                    assert known == message, "one outcome per call"
                case Pins():
                    self.pinned[message.version] = message.sinks
                    if message.ask:
                        self.asks.append((message.version, message.ask))

    def publish(self, call, version, **changes):
        self.said[call] = (version, changes)
        super().publish(call, version, **changes)

    def lose(self):
        del self.heard[self.read :]
        self.lost = True
        super().lose()

    def rejoin(self):
        self.open()
        self.lost = False
        open_calls = sorted(self.said.keys() - self.outcomes.keys())
        self.join(
            epoch=self.epoch,
            call=min(open_calls, default=len(self.said)),
            pinned=[version for version, sinks in self.pinned.items() if sinks != []],
            outcomes=list(self.outcomes.values())[-4:],
        )
        for call in open_calls:
            version, changes = self.said[call]
            super().publish(call, version, **changes)


class SamplerModel(Sampler):
    """A sampler process as a session is: it hears with a delay and has one call at a time."""

    def __init__(self, world, name, index, num_processes, life):
        self.read = 0
        self.next_call = 0
        self.taken = 0
        self.in_call = False
        self.prepared = None
        self.fetching = None
        self.assigned = None  # what it is receiving as its present stream told it to
        self.current = None
        self.outcomes = {}
        self.lost = False
        super().__init__(world, name, index, num_processes, life)

    def listen(self, most=10**9):
        while self.read < len(self.heard) and most:
            message = self.heard[self.read]
            self.read += 1
            most -= 1
            match message:
                case SamplerJoined():
                    self.sink = message.sink
                case TrainerUp():
                    self.admit()
                case Fetch():
                    if self.prepared == message.held:
                        self.say(Prepared(message.held, STATS))
                        continue
                    self.prepared = None
                    self.fetching = self.assigned = message.held
                case Abandon():
                    if self.fetching == message.held:
                        self.fetching = self.assigned = None
                case SamplerOutcome():
                    known = self.outcomes.setdefault(message.call, message)
                    assert known == message, "one outcome per call"
                    self.taken = max(self.taken, message.taken)

    def complete(self):
        """Has received every byte of what it is fetching."""
        self.prepared, self.fetching, self.assigned = self.fetching, None, None
        if not self.lost:
            self.say(Prepared(self.prepared, STATS))

    def enter(self, **arguments):
        self.in_call, self.arguments = True, arguments
        self.take(self.next_call, **arguments)

    def finish(self):
        """Returns from the call if its outcome is here."""
        decision = self.outcomes.get(self.next_call)
        if not self.in_call or decision is None:
            return
        held = decision.outcome.held
        if held is not None:
            assert self.prepared == held, "what is decided is held by every process"
            assert self.current is None or held.version > self.current.version
            self.current, self.prepared = held, None
        self.in_call = False
        self.next_call += 1
        self.took(self.next_call - 1)

    def lose(self):
        del self.heard[self.read :]
        self.lost, self.assigned = True, None
        super().lose()

    def rejoin(self):
        self.open()
        self.lost = False
        self.join(
            sink=self.sink,
            prepared=[] if self.prepared is None else [self.prepared],
            committed=self.current,
            call=self.next_call,
            outcomes=[o for call, o in self.outcomes.items() if call >= self.taken],
        )
        if self.in_call:
            self.take(self.next_call, **self.arguments)


class JobMachine(RuleBasedStateMachine):
    """A trainer of two processes, replicas of two and one, in any order of events."""

    @initialize()
    def begin(self):
        self.world = World()
        self.trainer = [TrainerModel(self.world, "A", p, 2) for p in range(2)]
        self.replicas = {
            name: [SamplerModel(self.world, name, p, n, "life") for p in range(n)]
            for name, n in (("one", 2), ("two", 1))
        }
        self.samplers = [p for program in self.replicas.values() for p in program]
        self.published = [-1, -1]
        self.num_faults = 0
        for process in self.trainer + self.samplers:
            process.join()

    sampler = st.integers(0, 2)

    # --- what processes do by themselves

    @rule(process=st.integers(0, 1), wait=st.sampled_from(["received", "committed", None]))
    def publish(self, process, wait):
        """A trainer process enters its next call; the one that is behind goes first."""
        if self.published[0] != self.published[1]:
            process = self.published.index(min(self.published))
        else:
            self.wait = wait
        trainer = self.trainer[process]
        if trainer.lost:
            trainer.rejoin()
        self.published[process] += 1
        call = self.published[process]
        trainer.publish(call, call + 1, wait=self.wait, timeout_s=300)
        trainer.listen()

    @rule(sampler=sampler, num_steps=st.integers(1, 6))
    def go_on(self, sampler, num_steps):
        process = self.samplers[sampler]
        for _ in range(num_steps):
            if process.lost:
                process.rejoin()
            elif process.read < len(process.heard):
                process.listen(1)
            elif process.fetching is not None:
                process.complete()
            elif process.in_call:
                process.finish()
            else:
                process.enter(timeout_s=100)

    @rule(sampler=sampler)
    def hear_everything(self, sampler):
        self.samplers[sampler].listen()

    @rule(
        sampler=sampler,
        wait=st.booleans(),
        min_version=st.sampled_from([None, 2, 4]),
        timeout_s=st.sampled_from([0.0, 1.0, 100.0]),
    )
    def enter_call(self, sampler, wait, min_version, timeout_s):
        process = self.samplers[sampler]
        if not process.lost and not process.in_call:
            process.enter(wait=wait, min_version=min_version, timeout_s=timeout_s)

    @rule(process=st.integers(0, 1), kept=st.booleans())
    def answer(self, process, kept):
        for trainer in (self.trainer[process], self.trainer[1 - process]):
            trainer.listen()
            if not trainer.lost and trainer.asks:
                version, ask = trainer.asks.pop(0)
                trainer.say(PinsKept(version, ask, kept))
                return

    @rule(seconds=st.sampled_from([0.1, 0.5, 5.0, LEASE_S]))
    def pass_time(self, seconds):
        self.world.pass_time(seconds)

    # --- what goes wrong

    @rule(sampler=sampler, error=st.sampled_from(["PeerLostError", "CorruptionError"]))
    def fail(self, sampler, error):
        process = self.samplers[sampler]
        if process.fetching is None:
            return
        held, process.fetching, process.assigned = process.fetching, None, None
        if not process.lost:
            process.say(FetchFailed(held, error, "broke"))

    @rule(process=st.integers(0, 1))
    def give_up(self, process):
        if not self.trainer[process].lost and self.published[process] >= 0:
            self.trainer[process].say(GiveUp(self.published[process]))

    @precondition(lambda self: self.num_faults < 4)
    @rule(index=st.integers(0, 4))
    def lose(self, index):
        process = (self.trainer + self.samplers)[index]
        if not process.lost:
            self.num_faults += 1
            process.lose()

    @rule()
    def come_back(self):
        for process in self.trainer + self.samplers:
            if process.lost:
                process.rejoin()

    @precondition(lambda self: self.num_faults < 4)
    @rule()
    def restart(self):
        """The coordinator dies, and another takes its place."""
        self.num_faults += 2
        for process in self.trainer + self.samplers:
            if not process.lost:
                process.lose()
        self.world.restart()

    # --- what has to hold

    @invariant()
    def outcomes_are_the_same_in_all_processes(self):
        for program in (self.trainer, *self.replicas.values()):
            kind = PublishOutcome if program is self.trainer else SamplerOutcome
            decided = {}
            for process in program:
                for message in process.all(kind):
                    assert decided.setdefault(message.call, message) == message

    @invariant()
    def versions_that_are_fetched_only_grow(self):
        for process in self.samplers:
            versions = process.fetched()
            assert versions == sorted(versions)

    @invariant()
    def version_withdrawn_by_a_fetch_is_never_decided(self):
        for process in self.samplers:
            newest = None
            for message in process.heard:
                if isinstance(message, Fetch):
                    newest = message.held
                elif isinstance(message, SamplerOutcome) and message.outcome.held is not None:
                    assert message.outcome.held == newest

    @invariant()
    def pins_cover_whoever_is_receiving(self):
        for process in self.samplers:
            if process.assigned is None or process.read < len(process.heard):
                continue
            for trainer in self.trainer:
                if not trainer.lost:
                    pins = [m for m in trainer.all(Pins) if m.version == process.assigned.version]
                    assert process.sink in pins[-1].sinks

    @invariant()
    def only_announced_versions_are_fetched(self):
        announced = {m.version for trainer in self.trainer for m in trainer.all(Announced)}
        for process in self.samplers:
            assert set(process.fetched()) <= announced

    def teardown(self):
        """Whatever happened: when all are back and one more version comes, everybody gets it."""
        if not hasattr(self, "world"):
            return
        self.come_back()
        for process in self.trainer + self.samplers:
            process.listen()
        call = max(self.published) + 1
        last = Held("A", call + 100)
        for trainer, published in zip(self.trainer, self.published, strict=True):
            for late in range(published + 1, call):
                trainer.publish(late, late + 1, wait=self.wait)
            trainer.publish(call, last.version, wait="committed", timeout_s=1000)
        for _ in range(50):
            for process in self.samplers:
                process.listen()
                if process.fetching is not None:
                    process.complete()
                process.finish()
                if not process.in_call and process.current != last:
                    process.enter(timeout_s=100)
                process.listen()
                process.finish()
            for trainer in self.trainer:
                trainer.listen()
                while trainer.asks:
                    trainer.say(PinsKept(*trainer.asks.pop(0), True))
            self.world.pass_time(0.5)
        for process in self.samplers:
            assert process.current == last
        for trainer in self.trainer:
            trainer.listen()
            assert trainer.outcomes[call].outcome.error == ""
            assert trainer.pinned[last.version] == []


JobMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestInterleavings = JobMachine.TestCase
