"""Copies of a trainer's processes in a publish call, as the coordinator compares what they said."""

import pytest
from job_world import World, admit, prepare
from test_plan import layout, manifest

from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.messages import Refused
from tpu_sync_rl.sampler_messages import Fetch, Latest
from tpu_sync_rl.trainer_messages import (
    Announced,
    LeafDigests,
    LeafDigestsWanted,
    PublishOutcome,
)

WHOLE = ((0, 8),)


def shared_by(*processes: int):
    return layout((8,), {WHOLE: set(processes)})


# leaf00 and leaf01 are on all, group 0; leaf02 is on two, group 1
MANIFEST = manifest([shared_by(0, 1, 2, 3), shared_by(0, 1, 2, 3), shared_by(1, 3)]).encoded


@pytest.fixture
def world():
    return World()


def enter(trainer, copies, call=0, version=1, **changes):
    """Each process enters a call with its copies."""
    changes = {"manifest": MANIFEST, **changes}
    for process, said in zip(trainer, copies, strict=True):
        process.publish(call, version, copies=said, **changes)


def tell(process, group, *digests: bytes, call=0):
    process.say(LeafDigests(call, group, b"".join(x.ljust(8) for x in digests)))


def wanted(trainer):
    return [[m.group for m in process.all(LeafDigestsWanted)] for process in trainer]


def outcome(process):
    return process.last(PublishOutcome).outcome


def test_equal_copies_are_announced_and_nobody_is_asked(world):
    trainer = world.trainer(num_processes=4)
    enter(trainer, [{0: b"a"}, {0: b"a", 1: b"b"}, {0: b"a"}, {0: b"a", 1: b"b"}])
    assert [process.last(Announced).version for process in trainer] == [1] * 4
    assert wanted(trainer) == [[]] * 4


def test_different_copies_are_not_announced_and_leaves_and_processes_are_named(world):
    [sampler] = world.replica()
    trainer = world.trainer(num_processes=4)
    enter(trainer, [{0: b"a"}, {0: b"a", 1: b"b"}, {0: b"x"}, {0: b"a", 1: b"y"}])
    assert wanted(trainer) == [[0], [1], [0], [1]]
    tell(trainer[0], 0, b"same", b"this")
    tell(trainer[2], 0, b"same", b"that")
    tell(trainer[1], 1, b"one")
    assert not trainer[0].all(PublishOutcome)
    tell(trainer[3], 1, b"other")
    for process in trainer:
        assert outcome(process).error == "CorruptionError"
        assert outcome(process) == outcome(trainer[0])
    assert (
        "boxes: leaf 'leaf01': processes 0-1, 3 against process 2; "
        "leaf 'leaf02': process 1 against process 3. Samplers" in outcome(trainer[0]).text
    )
    assert not trainer[0].all(Announced)
    assert not sampler.all(Latest) and not sampler.all(Fetch)


def test_call_may_be_made_again_with_equal_copies(world):
    trainer = world.trainer(num_processes=2)
    enter(trainer, [{0: b"a"}, {0: b"b"}])
    tell(trainer[0], 0, b"1", b"1")
    tell(trainer[1], 0, b"1", b"2")
    assert outcome(trainer[1]).error == "CorruptionError"
    enter(trainer, [{0: b"a"}, {0: b"a"}], call=1)
    assert trainer[0].last(Announced).version == 1


def test_call_ends_at_its_deadline_where_leaves_are_not_told(world):
    trainer = world.trainer(num_processes=2)
    enter(trainer, [{0: b"a"}, {0: b"b"}], timeout_s=5.0)
    tell(trainer[0], 0, b"1", b"1")
    world.pass_time(4.9)
    assert not trainer[0].all(PublishOutcome)
    world.pass_time(0.2)
    assert outcome(trainer[0]).error == "CorruptionError"
    assert "leaves not told in time: process 0 against process 1" in outcome(trainer[0]).text


@pytest.mark.parametrize("sampler_comes", [True, False])
def test_call_that_waits_for_replicas_ends_when_they_are_there_or_time_is_over(
    world, sampler_comes
):
    trainer = world.trainer(num_processes=2)
    enter(trainer, [{0: b"a"}, {0: b"b"}], min_replicas=1, timeout_s=5.0)
    tell(trainer[0], 0, b"1", b"1")
    tell(trainer[1], 0, b"2", b"1")
    assert not trainer[0].all(PublishOutcome)
    if sampler_comes:
        admit(world.replica())
    else:
        world.pass_time(5.1)
    assert outcome(trainer[0]).error == "CorruptionError"
    assert "leaf 'leaf00': process 0 against process 1" in outcome(trainer[0]).text


def test_other_coordinator_asks_again(world):
    trainer = world.trainer(num_processes=2)
    copies = [{0: b"a"}, {0: b"b"}]
    enter(trainer, copies)
    tell(trainer[0], 0, b"1", b"1")
    world.restart()
    for process in trainer:
        process.heard.clear()
        process.open()
        process.join(epoch=1)
    enter(trainer, copies)
    assert wanted(trainer) == [[0], [0]]
    for process, digest in zip(trainer, (b"1", b"2"), strict=True):
        tell(process, 0, digest, b"1")
    assert "leaf 'leaf00'" in outcome(trainer[1]).text


def test_few_of_many_kinds_are_asked(world):
    trainer = world.trainer(num_processes=8)
    every = manifest([shared_by(*range(8))]).encoded
    enter(trainer, [{0: b"%d" % i} for i in range(8)], manifest=every)
    assert wanted(trainer) == [[0]] * 4 + [[]] * 4
    for process in trainer[:4]:
        tell(process, 0, b"%d" % process.index)
    assert (
        "leaf 'leaf00': process 0 against process 1 against process 2 against process 3 "
        "(4 more processes differ, too)" in outcome(trainer[7]).text
    )


def test_many_leaves_are_counted(world):
    trainer = world.trainer(num_processes=2)
    every = manifest([shared_by(0, 1)] * 20).encoded
    enter(trainer, [{0: b"a"}, {0: b"b"}], manifest=every)
    tell(trainer[0], 0, *[b"a"] * 20)
    tell(trainer[1], 0, *[b"b"] * 20)
    assert "leaf 'leaf04': process 0 against process 1; and 15 more leaves." in (
        outcome(trainer[0]).text
    )


def test_later_versions_are_compared_where_the_processes_say_what_they_hold(world):
    trainer = world.trainer(num_processes=2)
    sampler = world.replica()
    enter(trainer, [{0: b"a"}, {0: b"a"}], wait=None)
    admit(sampler)
    prepare(sampler, 1)
    enter(trainer, [{}, {}], call=1, version=2, manifest=None, wait=None)
    assert trainer[0].last(Announced).version == 2
    enter(trainer, [{0: b"a"}, {0: b"b"}], call=2, version=3, manifest=None)
    tell(trainer[0], 0, b"a", b"x", call=2)
    tell(trainer[1], 0, b"b", b"x", call=2)
    assert "version 3 was not announced" in outcome(trainer[0]).text
    assert "leaf 'leaf00'" in outcome(trainer[0]).text
    assert [m.held.version for m in sampler[0].all(Latest)] == [1, 2]


@pytest.mark.parametrize("group, digests", [(7, b""), (0, b"short"), (-1, b"12345678"), (0, b"")])
def test_answers_without_sense_name_no_leaf(world, group, digests):
    trainer = world.trainer(num_processes=2)
    enter(trainer, [{group: b"a"}, {group: b"b"}], manifest=b"manifest")
    for process in trainer:
        process.say(LeafDigests(0, group, digests))
    assert "leaves not told in time: process 0 against process 1" in outcome(trainer[0]).text


def test_processes_that_verify_differently_are_refused(world):
    [first, second] = (process for process in world.trainer(num_processes=2))
    second.lose()
    second.open()
    with pytest.raises(SyncError, match="process 0 has verify 'wire', process 1 'full'"):
        second.join(verify="full")
    assert not first.all(Refused)
