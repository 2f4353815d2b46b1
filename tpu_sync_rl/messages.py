"""What the programs of a job and its coordinator say to each other, as typed structs.

Every client process keeps one bidirectional gRPC stream to the coordinator. It opens with a mutual
handshake (see `greeting`), then one `JoinTrainer` or `JoinSampler`; after that both sides send the
structs below whenever they have something to say. A broken stream is opened again by the client,
whose join then carries what it holds, so that the coordinator needs no disk. Around such a break a
message may come twice: each side takes the second one for the first.

Versions are ints within an *incarnation* (a random hex id). A *sink* is the id that the coordinator
gives to one sampler process for one connection of its session; it names chunk tables and pins.
"""

from msgspec import Struct

from tpu_sync_rl.process_stats import ProcessStats
from tpu_sync_rl.report import UNKNOWN_LINE, Line


class Message(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of everything that crosses the control connection."""


class Address(Struct, frozen=True):
    """Where one NIC of a process listens for data connections."""

    nic: str
    host: str
    port: int
    line: Line = UNKNOWN_LINE


class Held(Struct, frozen=True):
    """One published state, and therefore a name for exactly one set of bytes."""

    incarnation: str
    version: int


class Promise(Struct, frozen=True):
    """A version that a replica keeps until the fleet's decision, whatever time passes."""

    held: Held
    fleet: list[str]  # the replicas that decide on it: those that were live when it was announced


class Holder(Struct, frozen=True):
    """A replica that serves a version as its trainer did, and where its processes do."""

    replica: str
    manifest: bytes  # with the trainer's keys, but dtypes and boxes of its own
    sources: list[list[Address]]  # per process
    tickets: list[bytes]  # of the sink that is told, to each process


class ReplicaStatus(Struct, frozen=True):
    """One replica as a trainer's call left it."""

    version: int | None  # the newest of this incarnation that it has prepared
    stats: list[ProcessStats]  # of the version above, one per process


class Outcome(Struct, frozen=True):
    """How a call ended, for all processes of its program alike.

    `error` is the name of a class of `errors` ("" for success, "Nothing" for a sampler's call that
    did not wait and found nothing), `text` its message.
    """

    error: str
    text: str
    held: Held | None


# --- whatever the role


class Refused(Message, frozen=True):
    """The coordinator's last word before it ends the stream: `error` as in `Outcome`."""

    error: str
    text: str


class Leave(Message, frozen=True):
    """A clean goodbye; the coordinator then ends the stream."""


# --- trainer to coordinator


class JoinTrainer(Message, frozen=True):
    """A trainer process opens a stream, for the first time or again."""

    incarnation: str
    epoch: int  # 0 at first; then what `TrainerJoined` gave, so that a rejoin is not a new life
    process_count: int
    addresses: list[Address]
    ticket_secret: bytes  # the listener's; tickets to it are made of this, see `authentication`
    straggler_timeout_s: float
    on_straggler: str  # "wait" or "drop"
    commit: str  # "replica" or "fleet"
    pinned: list[int]  # versions held at this moment, announced ones
    call: int  # the first call without an outcome here
    # What a restarted coordinator has to learn again.
    outcomes: list["PublishOutcome"] = []  # the last ones heard of
    replicas: list[str] = []  # those of the last `Live`
    digest: str = ""
    manifest: bytes | None = None
    newest: int = -1  # announced, by a call that is over; in a fleet, committed too


class Publish(Message, frozen=True):
    """A process has pinned `version` and is ready for it to be announced.

    Call `call` is complete when every process of the program has sent it. `manifest` comes with
    the first one only. `error`/`text` say that this process could not pin.
    """

    call: int
    version: int
    digest: str
    manifest: bytes | None
    wait: str | None
    min_replicas: int
    timeout_s: float
    seconds: dict[str, float]
    error: str
    text: str


class GiveUp(Message, frozen=True):
    """The deadline of call `call` passed in this process: decide it now."""

    call: int


class PinsKept(Message, frozen=True):
    """Answer to `Pins` with `ask`: whether every leaf of the version could be pinned (again)."""

    version: int
    ask: int
    kept: bool


class CloseJob(Message, frozen=True):
    """A clean end: drain for at most `timeout_s`, then `JobClosed`."""

    timeout_s: float


# --- coordinator to trainer


class TrainerJoined(Message, frozen=True):
    """The coordinator's answer; what it knows and the process may have missed follows."""

    epoch: int


class Announced(Message, frozen=True):
    """All processes have pinned `version` and samplers are told of it."""

    call: int
    version: int


class Pins(Message, frozen=True):
    """The sinks that may still read `version`: the complete list, empty when it can be let go.

    With `ask` other than 0 the receiver takes leaves that it dropped again where their arrays
    still live, and answers `PinsKept`.
    """

    version: int
    sinks: list[int]
    ask: int


class Live(Message, frozen=True):
    """The replicas that are live now; sent whenever that changes, for the next join."""

    replicas: list[str]


class PublishOutcome(Message, frozen=True):
    """The end of call `call`."""

    call: int
    outcome: Outcome
    seconds: dict[str, float]  # per stage, the largest of the program's processes
    replicas: dict[str, ReplicaStatus]
    lost: list[str]
    refused: dict[str, str]


class JobClosed(Message, frozen=True):
    """The job has ended cleanly, and with it this incarnation."""


# --- sampler to coordinator


class JoinSampler(Message, frozen=True):
    """A sampler process opens a stream, for the first time or again."""

    life: str  # random id of this run of the replica's program, equal in its processes
    process_count: int
    sink: int  # 0 at first; then what `SamplerJoined` gave
    prepared: list[Held]  # oldest first
    promise: Promise | None  # that came with the last `Fetch`
    committed: Held | None
    call: int  # number of the next call
    outcomes: list["SamplerOutcome"]  # decisions heard of that a restarted coordinator must keep
    fleet_commit: Held | None = None  # the last one heard of


class Admit(Message, frozen=True):
    """The manifest `digest` fits what this process wants."""

    digest: str


class Refuse(Message, frozen=True):
    """The manifest `digest` does not fit; `text` names every difference."""

    digest: str
    text: str


class RefusalTaken(Message, frozen=True):
    """The process has heard `ReplicaRefused`."""

    digest: str


class Prepared(Message, frozen=True):
    """Every byte of `held` that this process needs is verified."""

    held: Held
    stats: ProcessStats


class FetchFailed(Message, frozen=True):
    """The transfer of `held` ended without success; `error`/`text` as in `Outcome`."""

    held: Held
    error: str
    text: str
    holder: str = ""  # the replica that it was read from; "" for the trainer


class Offer(Message, frozen=True):
    """Answer to `Serve` with `ask`: whether every leaf of the version can be read, and where."""

    held: Held
    ask: int
    kept: bool
    manifest: bytes = b""
    addresses: list[Address] = []
    ticket_secret: bytes = b""  # as in `JoinTrainer`


class Take(Message, frozen=True):
    """The process has entered its call number `call`. Process 0's arguments count."""

    call: int
    min_version: int | None
    wait: bool
    timeout_s: float


class Took(Message, frozen=True):
    """The process has returned or raised the outcome of `call`."""

    call: int


class FleetCommitStored(Message, frozen=True):
    """The process has stored the `FleetCommit` of `held`: its next join speaks of it."""

    held: Held


# --- coordinator to sampler


class SamplerJoined(Message, frozen=True):
    """The coordinator's answer; what it knows and the process may have missed follows."""

    sink: int


class TrainerUp(Message, frozen=True):
    """A trainer incarnation and where its processes (list index) serve data.

    Answered each time that it comes, by `Admit` or `Refuse`.
    """

    incarnation: str
    digest: str
    manifest: bytes
    sources: list[list[Address]]
    tickets: list[bytes]  # of this sink, to each process


class Latest(Message, frozen=True):
    """The newest announced version."""

    held: Held


class Fetch(Message, frozen=True):
    """Receive `held`, in all processes of the replica.

    What else was prepared and not taken is given up, but `keep`. Answered by `Prepared` or
    `FetchFailed`; a process that holds `held` already answers at once, one that is receiving it
    from there goes on. With `promise`, no call may take it before its `FleetCommit`.
    """

    held: Held
    promise: Promise | None = None
    keep: Held | None = None
    holder: Holder | None = None  # whom to read from; None for the trainer


class Abandon(Message, frozen=True):
    """Stop receiving `held`: another process of the replica failed, or its lease ended.

    Not answered. A process that has prepared it keeps it until the next `Fetch`, which may well
    be for the same version.
    """

    held: Held


class Serve(Message, frozen=True):
    """The sinks of other replicas that may read `held` here; as `Pins` has it for a trainer.

    Holds for this connection to the coordinator. With `ask` other than 0 it is answered by `Offer`.
    """

    held: Held
    sinks: list[int]
    ask: int


class FleetCommit(Message, frozen=True):
    """All live replicas have prepared `held`, and all are going to return it or a newer one.

    For good. To be stored, and then answered by `FleetCommitStored`.
    """

    held: Held


class SamplerOutcome(Message, frozen=True):
    """The decision on call `call`, for every process of the replica."""

    call: int
    outcome: Outcome
    stats: list[ProcessStats]  # of the version taken, one per process
    taken: int  # every process has taken the outcomes of calls below this one


class ReplicaRefused(Message, frozen=True):
    """Some process of this replica refused the manifest; to be answered by `RefusalTaken`.

    Calls that wait hear why from their `SamplerOutcome`.
    """

    digest: str


class JobEnded(Message, frozen=True):
    """No version comes any more: calls from number `call` on raise `JobEndedError`."""

    call: int
    text: str


# --- coordinator to doctor


class ConnectedProcess(Struct, frozen=True):
    """A process that is connected."""

    role: str
    name: str
    process_index: int
    software: dict[str, str]


class JobStatus(Message, frozen=True):
    """All that a doctor is told, before the stream ends."""

    sink: int  # under which it may dial the trainer
    trainer: TrainerUp | None
    newest: Held | None
    replicas: dict[str, str]  # how far each is
    processes: list[ConnectedProcess]
