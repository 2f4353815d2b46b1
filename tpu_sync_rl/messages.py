"""What the programs of a job and its coordinator say to each other, as typed structs.

Every client process keeps one bidirectional gRPC stream to the coordinator. It opens with a mutual
handshake (see `greeting`), then one `JoinTrainer` or `JoinSampler`; after that both sides send the
structs of `trainer_messages` or `sampler_messages` whenever they have something to say. A broken
stream is opened again by the client, whose join then carries what it holds, so that the coordinator
needs no disk. Around such a break a message may come twice: each side takes the second one for the
first.

Versions are ints within an *incarnation* (a random hex id), and epochs (see `epochs`) are ints that
grow from each incarnation to the next. A *sink* is the id that the coordinator
gives to one sampler process for one connection of its session; it names chunk tables and pins.
"""

from typing import Annotated

from msgspec import Meta, Struct

from tpu_sync_rl.process_stats import ProcessStats
from tpu_sync_rl.report import UNKNOWN_LINE, Line

Epoch = Annotated[int, Meta(ge=0, lt=1 << 62)]


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
    found nothing), `text` its message; `held` what was taken, or published and stays announced.
    `epoch` is that of `held.incarnation` when the call succeeded.
    """

    error: str
    text: str
    held: Held | None
    epoch: Epoch = 0


# --- whatever the role


class Refused(Message, frozen=True):
    """The coordinator's last word before it ends the stream: `error` as in `Outcome`."""

    error: str
    text: str


class Leave(Message, frozen=True):
    """A clean goodbye; the coordinator then ends the stream."""


# --- of a trainer, to samplers and doctors


class TrainerUp(Message, frozen=True):
    """A trainer incarnation and where its processes (list index) serve data.

    Answered each time that it comes, by `Admit` or `Refuse`.
    """

    incarnation: str
    epoch: Epoch
    digest: str
    manifest: bytes
    sources: list[list[Address]]
    tickets: list[bytes]  # of this sink, to each process


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
