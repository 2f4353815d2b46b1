"""What the processes of a replica and the coordinator say to each other; see `messages`."""

from msgspec import field

from tpu_sync_rl.messages import Address, Epoch, Held, Holder, Message, Outcome, Promise
from tpu_sync_rl.process_stats import ProcessStats

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
    epochs: dict[str, Epoch] = field(default_factory=dict)  # by incarnation, of all these versions


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


class Hindered(Message, frozen=True):
    """What holds up the transfer of `held` to this process, in words that follow its name.

    An empty text: nothing does any more.
    """

    held: Held
    text: str


class Offer(Message, frozen=True):
    """Answer to `Serve` with `ask`: whether every leaf of the version can be read, and where."""

    held: Held
    ask: int
    kept: bool
    manifest: bytes = b""
    addresses: list[Address] = field(default_factory=list)
    ticket_secret: bytes = b""  # as in `JoinTrainer`


class Take(Message, frozen=True):
    """The process has entered its call number `call`. Process 0's arguments count."""

    call: int
    min_version: int | None
    wait: bool
    timeout_s: float


class LeaveCall(Message, frozen=True):
    """The process does not wait for call `call` any more; it may enter it again."""

    call: int


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


class Withdrawn(Message, frozen=True):
    """The fleet has given `held` up: no replica returns it. For the log."""

    held: Held
    text: str  # why, and who was in the way


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
