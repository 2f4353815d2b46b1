"""Messages of the control plane as bytes: who may send which, and how.

A client sends its messages one by one. What the coordinator has to say to a client at one moment
goes together: its thread wakes once, and the data path begins or ends so much sooner.
"""

from collections.abc import Sequence

import msgspec

from tpu_sync_rl.greeting import Challenge, Credentials, Greeting, Proof
from tpu_sync_rl.messages import JobStatus, Leave, Message, Refused, TrainerUp
from tpu_sync_rl.sampler_messages import (
    Abandon,
    Admit,
    Fetch,
    FetchFailed,
    FleetCommit,
    FleetCommitStored,
    Hindered,
    JobEnded,
    JoinSampler,
    Latest,
    LeaveCall,
    Offer,
    Prepared,
    RefusalTaken,
    Refuse,
    ReplicaRefused,
    SamplerJoined,
    SamplerOutcome,
    Serve,
    Take,
    Took,
    Withdrawn,
)
from tpu_sync_rl.trainer_messages import (
    Announced,
    CloseJob,
    EpochRaised,
    GiveUp,
    JobClosed,
    JoinTrainer,
    LeafDigests,
    LeafDigestsWanted,
    Live,
    Pins,
    PinsKept,
    Publish,
    PublishOutcome,
    TrainerJoined,
)

SESSION_METHOD = "/tpu_sync_rl.Coordinator/Session"
MAX_MESSAGE_NBYTES = 512 << 20

ToCoordinator = (
    Greeting
    | Credentials
    | JoinTrainer
    | Publish
    | LeafDigests
    | GiveUp
    | PinsKept
    | CloseJob
    | JoinSampler
    | Admit
    | Refuse
    | RefusalTaken
    | Prepared
    | FetchFailed
    | Hindered
    | Offer
    | Take
    | LeaveCall
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
    | EpochRaised
    | Announced
    | LeafDigestsWanted
    | Pins
    | Live
    | PublishOutcome
    | JobClosed
    | SamplerJoined
    | TrainerUp
    | Latest
    | Fetch
    | Abandon
    | Serve
    | FleetCommit
    | Withdrawn
    | SamplerOutcome
    | ReplicaRefused
    | JobEnded
)


_encoder = msgspec.msgpack.Encoder()
_to_coordinator = msgspec.msgpack.Decoder(ToCoordinator)
_from_coordinator = msgspec.msgpack.Decoder(list[FromCoordinator])


def encode(message: Message) -> bytes:
    """Bytes of a message that a client sends."""
    return _encoder.encode(message)


def encode_together(messages: Sequence[Message]) -> bytes:
    """Bytes of messages that the coordinator sends at one moment."""
    return _encoder.encode(messages)


def decode_to_coordinator(data: bytes) -> ToCoordinator:
    """What a client sent. Raises msgspec.DecodeError for anything else."""
    return _to_coordinator.decode(data)


def decode_from_coordinator(data: bytes) -> list[FromCoordinator]:
    """What the coordinator sent at one moment. Raises msgspec.DecodeError for anything else."""
    return _from_coordinator.decode(data)
