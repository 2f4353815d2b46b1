"""What the processes of a trainer and the coordinator say to each other; see `messages`."""

from msgspec import field

from tpu_sync_rl.messages import Address, Epoch, Message, Outcome, ReplicaStatus

# --- trainer to coordinator


class JoinTrainer(Message, frozen=True):
    """A trainer process opens a stream, for the first time or again."""

    incarnation: str
    epoch: Epoch  # 0 at first; then the last one told, so that a rejoin is not a new life
    process_count: int
    addresses: list[Address]
    ticket_secret: bytes  # the listener's; tickets to it are made of this, see `authentication`
    straggler_timeout_s: float
    on_straggler: str  # "wait" or "drop"
    commit: str  # "replica" or "fleet"
    pinned: list[int]  # versions held at this moment, announced ones
    call: int  # the first call without an outcome here
    # What a restarted coordinator has to learn again.
    outcomes: list["PublishOutcome"] = field(default_factory=list)  # the last ones heard of
    replicas: list[str] = field(default_factory=list)  # those of the last `Live`
    digest: str = ""
    manifest: bytes | None = None
    newest: int = -1  # announced, by a call that is over; in a fleet, committed too
    verify: str = "wire"  # or "off" or "full"


class Publish(Message, frozen=True):
    """A process has pinned `version` and is ready for it to be announced.

    Call `call` is complete when every process of the program has sent it. `manifest` comes with
    the first one only. `error`/`text` say that this process could not pin; or, sent again, that it
    could not copy to host memory what it has pinned. `copies` has a digest of each group of boxes
    that the process shares with others (see `shared_boxes`), where they are to be compared.
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
    copies: dict[int, bytes] = field(default_factory=dict)


class LeafDigests(Message, frozen=True):
    """Answer to `LeafDigestsWanted`: of each leaf that the group has boxes of, 8 bytes."""

    call: int
    group: int
    digests: bytes


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

    epoch: Epoch


class EpochRaised(Message, frozen=True):
    """A process that has joined the job knew a greater epoch: the incarnation's is now this."""

    epoch: Epoch


class Announced(Message, frozen=True):
    """All processes have pinned `version` and samplers are told of it."""

    call: int
    version: int


class LeafDigestsWanted(Message, frozen=True):
    """The copies of a group differ in call `call`: to be answered by `LeafDigests`."""

    call: int
    group: int


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
