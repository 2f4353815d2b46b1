"""One job as the coordinator sees it: who is in it, and what follows from what they say.

Pure and synchronous: messages and the time come in, messages go out through `Member.send`.
"""

import secrets
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tpu_sync_rl.epochs import Epochs
from tpu_sync_rl.errors import SyncError, VersionError
from tpu_sync_rl.fleet import Fleet
from tpu_sync_rl.incarnation import Incarnation
from tpu_sync_rl.members import Member, Program
from tpu_sync_rl.message_codec import ToCoordinator
from tpu_sync_rl.messages import Held, JobStatus, Leave, Outcome, Refused
from tpu_sync_rl.replica import Replica
from tpu_sync_rl.sampler_messages import (
    Admit,
    FetchFailed,
    FleetCommitStored,
    Hindered,
    JoinSampler,
    Latest,
    LeaveCall,
    Offer,
    Prepared,
    RefusalTaken,
    Refuse,
    Take,
    Took,
)
from tpu_sync_rl.trainer_messages import (
    CloseJob,
    EpochRaised,
    GiveUp,
    JobClosed,
    JoinTrainer,
    LeafDigests,
    PinsKept,
    Publish,
    TrainerJoined,
)

# What is kept for a program grows with its processes.
MAX_PROCESSES = 1 << 16


def _new_sink() -> int:
    return secrets.randbits(62) + 1


def _no_clock() -> int:
    return 0


def _check_process(member: Member, join: JoinTrainer | JoinSampler) -> None:
    process, num_processes = member.process_index, join.process_count
    if not 0 <= process < num_processes <= MAX_PROCESSES:
        text = f"there is no process {process} of {num_processes}"
        raise SyncError(f"{member.role} {member.name!r}: {text}")


class Job:
    """A named policy with one trainer and many samplers.

    Args:
        name: of the job.
        patience_s: for how long a lost process may come back before calls fail for it.
        new_sink: draws the id of a sampler process.
        clock_ms: what an epoch is at least; see `Epochs`.
    """

    def __init__(
        self,
        name: str,
        patience_s: float,
        new_sink: Callable[[], int] = _new_sink,
        clock_ms: Callable[[], int] = _no_clock,
    ) -> None:
        self._name = name
        self._patience_s = patience_s
        self._new_sink = new_sink
        self._epochs = Epochs(clock_ms)
        self._trainer: Incarnation | None = None
        self._fleet = Fleet(patience_s)
        self._closed = ""  # the incarnation that ended the job last
        self._goodbye = ""  # what its samplers are told
        self._introduced = ""  # the incarnation that samplers know
        self._replicas: dict[str, Replica] = {}
        self._fenced: set[tuple[str, str]] = set()  # former lives of replicas

    @property
    def name(self) -> str:
        """Of the job."""
        return self._name

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """The replicas by name, to look at: also those that are lost, or have heard of the end."""
        return MappingProxyType(self._replicas)

    # --- what happens

    def on_message(self, member: Member, message: ToCoordinator, now: float) -> None:
        """A proved stream brought a message; the first one has to be its join.

        Raises:
            SyncError: `member` has no business to send it; its stream is to be ended.
        """
        if isinstance(message, JoinTrainer):
            self._join_trainer(member, message, now)
        elif isinstance(message, JoinSampler):
            self._join_sampler(member, message, now)
        else:
            program = self._program(member)
            if program is None:
                return  # fenced, or the job has ended: what it still says is of no interest
            if isinstance(message, Leave):
                self._disconnect(program, member, now, left=True)
            elif isinstance(program, Replica):
                self._on_sampler(program, member, message, now)
            else:
                assert isinstance(program, Incarnation)
                self._on_trainer(program, member, message, now)
        self.on_time(now)

    def on_lost(self, member: Member, now: float) -> None:
        """A stream has broken, or its process has fallen silent."""
        program = self._program(member)
        if program is not None:
            self._disconnect(program, member, now, left=False)
            self.on_time(now)

    def on_time(self, now: float) -> None:
        """Does whatever is due at `now`. To be called several times a second."""
        trainer, replicas = self._trainer, self._taking_part()
        if trainer is not None:
            trainer.end_leases(replicas, now)
        self._fleet.on_time(replicas, now)
        if trainer is not None:
            before = trainer.newest
            trainer.announce(replicas, now)
            self._tell(trainer, replicas, before)
        incarnation, situation = None if trainer is None else trainer.name, self._situation()
        for replica in replicas:
            replica.decide(now, incarnation, situation)
        if trainer is None:
            return
        # Pins before outcomes: a trainer whose call is over finds its views let go.
        trainer.serve(replicas, now)
        trainer.conclude(replicas, now)
        if trainer.is_over(replicas, now):
            self._end(trainer, now)

    def status(self) -> JobStatus:
        """What there is to know of it, for somebody who takes no part."""
        trainer, sink = self._trainer, self._new_sink()
        programs = [*([] if trainer is None else [trainer]), *self._replicas.values()]
        return JobStatus(
            sink=sink,
            trainer=None if trainer is None else trainer.up(sink),
            newest=None if trainer is None else trainer.newest,
            replicas={replica.name: replica.describe() for replica in self._replicas.values()},
            processes=[m.status for program in programs for m in program.members.values()],
        )

    def _tell(self, trainer: Incarnation, replicas: list[Replica], newest: Held | None) -> None:
        """Tells samplers what is new of the trainer since `newest` was its newest version."""
        is_news = trainer.is_known and self._introduced != trainer.name
        if is_news:
            self._introduced = trainer.name
        latest = trainer.newest if trainer.newest != newest else None
        for replica in replicas:
            for process, member in replica.members.items():
                up = trainer.up(replica.sinks[process]) if is_news else None
                if up is not None:
                    member.send(up)
            if latest is not None:
                replica.broadcast(Latest(latest))

    # --- membership

    def _program(self, member: Member) -> Program | None:
        programs = {"trainer": self._trainer, "sampler": self._replicas.get(member.name)}
        program = programs[member.role]
        return program if program is not None and program.has(member) else None

    def _taking_part(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.ended is None]

    def _disconnect(self, program: Program, member: Member, now: float, *, left: bool) -> None:
        program.disconnect(member.process_index, now, left=left)
        if isinstance(program, Incarnation):
            if program.members:  # else there is nobody to tell, and who comes back goes on
                lost = Outcome("PeerLostError", f"the trainer's {program.absent()}", None)
                program.end_calls(lost, self._taking_part(), now)
        elif not program.members and not program.lost_at:
            del self._replicas[program.name]

    def _join_trainer(self, member: Member, join: JoinTrainer, now: float) -> None:
        _check_process(member, join)
        if member.role != "trainer" or member.name != join.incarnation:
            raise SyncError(f"{member.role} {member.name!r} joins as trainer {join.incarnation!r}")
        if join.incarnation == self._closed:
            member.send(TrainerJoined(self._epochs.of(join.incarnation)))
            member.send(JobClosed())
            return
        if join.epoch:
            self._learn({join.incarnation: join.epoch}, now)
        trainer = self._trainer
        if trainer is None or trainer.name != join.incarnation:
            if not self._epochs.of(join.incarnation):
                self._epochs.begin(join.incarnation)
            elif self._epochs.is_outdated(join.incarnation):
                raise VersionError(self._fencing())
            self._replace_trainer(join, now)
            trainer = self._trainer
        assert trainer is not None
        self._admit(trainer, member, join.process_count, now)
        trainer.join(member, join, now)

    def _replace_trainer(self, join: JoinTrainer, now: float) -> None:
        self._fence_trainer(now)
        self._trainer = Incarnation(join, self._epochs, self._fleet, self._patience_s, now)
        if join.epoch:
            self._fleet.expect(now)
        for replica in self._taking_part():
            replica.ask_again()

    def _fence_trainer(self, now: float) -> None:
        if self._trainer is not None:
            self._trainer.fence(self._fencing(), now)
            self._fleet.abort(
                "a newer incarnation of the trainer has taken over", self._taking_part()
            )
            self._trainer = None

    def _learn(self, epochs: Mapping[str, int], now: float) -> None:
        """Takes what a process that joins knows of incarnations, the present one or others."""
        trainer = self._trainer
        former = 0 if trainer is None else trainer.epoch
        for incarnation, epoch in epochs.items():
            self._epochs.learn(incarnation, epoch)
        if trainer is None:
            return
        if self._epochs.is_outdated(trainer.name):
            self._fence_trainer(now)
        elif trainer.epoch != former:
            trainer.broadcast(EpochRaised(trainer.epoch))

    def _fencing(self) -> str:
        return f"a newer incarnation of the trainer has taken over job {self._name!r}"

    def _join_sampler(self, member: Member, join: JoinSampler, now: float) -> None:
        _check_process(member, join)
        if member.role != "sampler":
            raise SyncError(f"trainer {member.name!r} joins as a sampler")
        replica = self._replicas.get(member.name)
        if replica is None or replica.life != join.life:
            text = f"a newer session has taken the place of replica {member.name!r}"
            again = replica is not None and join.sink != 0
            if again or (member.name, join.life) in self._fenced:
                raise VersionError(text)
            if replica is not None:
                self._fenced.add((replica.name, replica.life))
                replica.fence(text, now)
            replica = Replica(member.name, join, self._patience_s, self._epochs.of)
            self._replicas[member.name] = replica
        self._learn(join.epochs, now)
        self._admit(replica, member, join.process_count, now)
        process = member.process_index
        sink = join.sink or replica.sinks.get(process) or self._new_sink()
        if join.sink:
            self._fleet.expect(now)
        replica.join(member, join, sink, now)
        trainer = self._trainer
        if trainer is None and replica.ended is None and replica.holds_of(self._closed):
            replica.end(self._closed, self._goodbye)  # it lost its stream before it could hear
        if trainer is None or replica.ended is not None:
            return
        up = trainer.up(sink)
        if up is not None:
            member.send(up)
        if trainer.newest is not None:
            member.send(Latest(trainer.newest))

    def _admit(self, program: Program, member: Member, process_count: int, now: float) -> None:
        """Makes way for a process: its former stream is lost, whether or not that is noted."""
        if process_count != program.process_count:
            raise SyncError(
                f"{member.role} {member.name!r} has {program.process_count} processes, not "
                f"{process_count}"
            )
        former = program.members.get(member.process_index)
        if former is not None:
            former.send(Refused("VersionError", "this process has connected again"))
            self.on_lost(former, now)

    # --- messages

    def _on_trainer(
        self, trainer: Incarnation, member: Member, message: ToCoordinator, now: float
    ) -> None:
        match message:
            case Publish():
                trainer.publish(member, message, now)
            case GiveUp():
                trainer.give_up(message.call, now)
            case LeafDigests():
                trainer.told_digests(member.process_index, message)
            case PinsKept():
                trainer.kept(member.process_index, message, now)
            case CloseJob():
                trainer.close(member.process_index, message, now)
            case _:
                raise SyncError(f"a trainer does not send {type(message).__name__}")

    def _on_sampler(
        self, replica: Replica, member: Member, message: ToCoordinator, now: float
    ) -> None:
        process, trainer = member.process_index, self._trainer
        digest = "" if trainer is None else trainer.digest
        match message:
            case Admit():
                if message.digest == digest:
                    replica.verdict.admit(process)
            case Refuse():
                if message.digest == digest:
                    replica.refuse(process, digest, message.text, now)
            case RefusalTaken():
                if message.digest == digest:
                    replica.verdict.acknowledge(process)
            case Prepared():
                replica.on_prepared(process, message)
            case Hindered():
                replica.on_hindered(process, message)
            case FetchFailed():
                if replica.on_failed(message, now) and trainer is not None:
                    trainer.failed(replica, message)
            case Offer():
                if trainer is not None:
                    trainer.offered(replica, process, message, now)
            case Take():
                decision = replica.calls.take(process, message, now)
                if decision is not None:
                    member.send(decision)
            case LeaveCall():
                replica.calls.leave(process, message.call)
            case Took():
                replica.calls.took(process, message.call)
            case FleetCommitStored():
                replica.store(process, message.held)
            case _:
                raise SyncError(f"a sampler does not send {type(message).__name__}")

    # --- the end, and words

    def _end(self, trainer: Incarnation, now: float) -> None:
        newest = trainer.newest
        self._goodbye = f"the trainer has closed job {self._name!r}" + (
            "" if newest is None else f" after version {newest.version}"
        )
        closed = Outcome("SyncError", "the job was closed first", None)
        trainer.end_calls(closed, self._taking_part(), now)
        self._fleet.end(self._taking_part())
        for replica in self._taking_part():
            replica.end(trainer.name, self._goodbye)
        trainer.broadcast(JobClosed())
        self._closed, self._trainer = trainer.name, None

    def _situation(self) -> str:
        trainer = self._trainer
        if trainer is None:
            return f"no trainer has joined job {self._name!r}"
        absent = trainer.absent()
        return trainer.announced() + (f"; the trainer's {absent}" if absent else "")
