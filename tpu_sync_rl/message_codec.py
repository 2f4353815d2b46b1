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

# A client sends one manifest at most, beside what it says of its calls. A manifest of 46,080 leaves
# on 1,024 devices of 256 hosts, a trillion params, takes 1.5 MB; what a thousand sampler processes
# measured of eight versions takes less than 10 MB. As structs the latter takes many times as much.
MAX_MANIFEST_NBYTES = 64 << 20
MAX_REST_NBYTES = 16 << 20
MAX_TO_COORDINATOR_NBYTES = MAX_MANIFEST_NBYTES + MAX_REST_NBYTES
# The coordinator says several things at once, manifests of trainer and holder among them.
MAX_FROM_COORDINATOR_NBYTES = 512 << 20

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


class _WithManifest(msgspec.Struct):
    """Of a message its manifest alone, to be told how much the rest is before that is decoded."""

    manifest: bytes | None = None


_encoder = msgspec.msgpack.Encoder()
_to_coordinator = msgspec.msgpack.Decoder(ToCoordinator)
_with_manifest = msgspec.msgpack.Decoder(_WithManifest)
_from_coordinator = msgspec.msgpack.Decoder(list[FromCoordinator])


def encode(message: Message) -> bytes:
    """Bytes of a message that a client sends."""
    return _encoder.encode(message)


def encode_together(messages: Sequence[Message]) -> bytes:
    """Bytes of messages that the coordinator sends at one moment."""
    return _encoder.encode(messages)


def decode_to_coordinator(data: bytes | bytearray) -> ToCoordinator:
    """What a client sent.

    Raises:
        msgspec.DecodeError: it is anything else, or longer than it may be.
    """
    if len(data) > MAX_REST_NBYTES:
        manifest_nbytes = len(_with_manifest.decode(data).manifest or b"")
        for what, nbytes, most_nbytes in (
            ("a manifest", manifest_nbytes, MAX_MANIFEST_NBYTES),
            ("a message, beside its manifest,", len(data) - manifest_nbytes, MAX_REST_NBYTES),
        ):
            if nbytes > most_nbytes:
                raise msgspec.DecodeError(f"{what} of {nbytes} bytes, {most_nbytes} are the most")
    return _to_coordinator.decode(data)


def decode_from_coordinator(data: bytes | bytearray) -> list[FromCoordinator]:
    """What the coordinator sent at one moment. Raises msgspec.DecodeError for anything else."""
    return _from_coordinator.decode(data)
