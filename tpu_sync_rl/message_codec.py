"""Messages of the control plane as bytes: who may send which, and how."""

import msgspec

from tpu_sync_rl.greeting import Challenge, Credentials, Greeting, Proof
from tpu_sync_rl.messages import (
    Abandon,
    Admit,
    Announced,
    CloseJob,
    Fetch,
    FetchFailed,
    FleetCommit,
    FleetCommitStored,
    GiveUp,
    JobClosed,
    JobEnded,
    JobStatus,
    JoinSampler,
    JoinTrainer,
    Latest,
    Leave,
    Live,
    Message,
    Pins,
    PinsKept,
    Prepared,
    Publish,
    PublishOutcome,
    RefusalTaken,
    Refuse,
    Refused,
    ReplicaRefused,
    SamplerJoined,
    SamplerOutcome,
    Take,
    Took,
    TrainerJoined,
    TrainerUp,
)

SESSION_METHOD = "/tpu_sync_rl.Coordinator/Session"
MAX_MESSAGE_NBYTES = 512 << 20

ToCoordinator = (
    Greeting
    | Credentials
    | JoinTrainer
    | Publish
    | GiveUp
    | PinsKept
    | CloseJob
    | JoinSampler
    | Admit
    | Refuse
    | RefusalTaken
    | Prepared
    | FetchFailed
    | Take
    | Took
    | FleetCommitStored
    | Leave
)
FromCoordinator = (
    Challenge
    | Proof
    | Refused
    | JobStatus
    | TrainerJoined
    | Announced
    | Pins
    | Live
    | PublishOutcome
    | JobClosed
    | SamplerJoined
    | TrainerUp
    | Latest
    | Fetch
    | Abandon
    | FleetCommit
    | SamplerOutcome
    | ReplicaRefused
    | JobEnded
)


_encoder = msgspec.msgpack.Encoder()
_to_coordinator = msgspec.msgpack.Decoder(ToCoordinator)
_from_coordinator = msgspec.msgpack.Decoder(FromCoordinator)


def encode(message: Message) -> bytes:
    """Bytes of a message."""
    return _encoder.encode(message)


def decode_to_coordinator(data: bytes) -> ToCoordinator:
    """What a client sent. Raises msgspec.DecodeError for anything else."""
    return _to_coordinator.decode(data)


def decode_from_coordinator(data: bytes) -> FromCoordinator:
    """What the coordinator sent. Raises msgspec.DecodeError for anything else."""
    return _from_coordinator.decode(data)
