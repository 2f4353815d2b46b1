"""Members that say anything, in any order: it may end their stream, and does nothing else."""

import random
import types
import typing
from typing import Any

import msgspec
import pytest
from job_world import World, admit, prepare, publish

from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.job import MAX_PROCESSES
from tpu_sync_rl.members import Member
from tpu_sync_rl.message_codec import ToCoordinator, decode_to_coordinator, encode

NUM_SEQUENCES = 600
INTS = (-(2**63), -1, 0, 1, 2, 3, 5, 2**31, 2**62, 2**63 - 1)
FLOATS = (-float("inf"), float("nan"), -1.0, 0.0, 0.5, 30.0, 1e308, float("inf"))
TEXTS = ("", "A", "s", "B", "d", "received", "committed", "SyncTimeoutError", "Nothing", "\0" * 50)
ELAPSED_S = (0.0, 0.1, 11.0, 70.0)


def any_value(rng: random.Random, kind: Any) -> Any:
    """Something of a type that messages are made of."""
    if kind in (int, float, str):
        return rng.choice({int: INTS, float: FLOATS, str: TEXTS}[kind])
    if kind is bytes:
        return rng.choice((b"", b"manifest", bytes(40)))
    if kind is bool:
        return rng.random() < 0.5
    if kind is types.NoneType:
        return None
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return any_value(rng, rng.choice(arguments))
    if origin in (list, dict):
        items = [tuple(any_value(rng, x) for x in arguments) for _ in range(rng.randrange(3))]
        return dict(items) if origin is dict else [item for (item,) in items]
    fields = typing.get_type_hints(kind)
    return kind(**{name: any_value(rng, field) for name, field in fields.items()})


@pytest.mark.parametrize("first_seed", range(0, NUM_SEQUENCES, 100))
def test_any_sequence_of_messages_is_taken_or_refused(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 100):
        rng = random.Random(seed)
        world = World(commit=rng.choice(("replica", "fleet")))
        trainer = world.trainer(num_processes=rng.choice((1, 2)))
        replica = world.replica(num_processes=rng.choice((1, 2)))
        publish(trainer, 0, 1)
        admit(replica)
        if rng.random() < 0.5:
            prepare(replica, 1)
        strangers = [
            Member(role, rng.choice("ABst"), rng.choice((-1, 0, 1, 5)), lambda _: None)
            for role in ("trainer", "sampler")
        ]
        members = [*strangers, *(process.member for process in (*trainer, *replica))]
        for _ in range(rng.randrange(1, 25)):
            member = rng.choice(members)
            message = any_value(rng, rng.choice(typing.get_args(ToCoordinator)))
            try:
                message = decode_to_coordinator(encode(message))
                world.job.on_message(member, message, world.now)
            except msgspec.DecodeError:
                pass
            except SyncError:
                world.job.on_lost(member, world.now)
            world.pass_time(rng.choice(ELAPSED_S))


@pytest.mark.parametrize("count", [0, -1, MAX_PROCESSES + 1, 2**62])
def test_numbers_of_processes_are_checked_before_they_are_used(count: int) -> None:
    world = World()
    for process in (*world.trainer(), *world.replica()):
        with pytest.raises(SyncError, match=f"there is no process 0 of {count}"):
            process.join(process_count=count)
