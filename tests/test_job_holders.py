"""Where the trainer can't serve a version, the coordinator has replicas that hold it do so."""

import pytest
from job_world import LEASE_S, World, admit, close, prepare, publish

from tpu_sync_rl import authentication
from tpu_sync_rl.messages import Held, Leave, Outcome
from tpu_sync_rl.sampler_messages import (
    Abandon,
    Fetch,
    FleetCommitStored,
    SamplerJoined,
    SamplerOutcome,
    Serve,
)
from tpu_sync_rl.trainer_messages import JobClosed, PinsKept, PublishOutcome

VERSION = Held("A", 1)


@pytest.fixture
def world():
    return World()


def held_by(world, *names, num_processes=1):
    """A trainer whose version 1 these replicas have, and which no longer has it itself."""
    [trainer] = world.trainer()
    holders = [world.replica(name, num_processes) for name in names]
    publish([trainer], 0, 1)
    for holder in holders:
        admit(holder)
        prepare(holder, 1)
    return trainer, *holders


def late(world, trainer, num_processes=1):
    """A replica that joins when the trainer's arrays are gone."""
    replica = world.replica("late", num_processes)
    admit(replica)
    trainer.say(PinsKept(1, 1, False))
    return replica


def serves(process):
    return process.new(Serve)


def sink_of(process):
    return process.last(SamplerJoined).sink


def test_late_replica_is_told_where_a_holder_serves_and_how_to_prove_itself(world):
    trainer, holder = held_by(world, "holder", num_processes=2)
    reader = late(world, trainer, 2)
    sinks = sorted(sink_of(process) for process in reader)
    assert [process.last(Serve) for process in holder] == [Serve(VERSION, sinks, 1)] * 2
    holder[0].offer(1)
    assert not reader[0].all(Fetch)
    holder[1].offer(1)
    for process in reader:
        fetch = process.last(Fetch)
        assert fetch.held == VERSION
        assert (fetch.holder.replica, fetch.holder.manifest) == ("holder", b"theirs")
        assert [source[0].port for source in fetch.holder.sources] == [2000, 2001]
        assert fetch.holder.tickets == [
            authentication.ticket(secret, sink_of(process)) for secret in (b"holder 0", b"holder 1")
        ]
    prepare(reader, 1)
    reader[0].take(0)
    assert reader[0].last(SamplerOutcome).outcome == Outcome("", "", VERSION, epoch=1)
    assert holder[0].last(Serve) == Serve(VERSION, [], 0)


def test_trainer_that_still_has_the_version_serves_it(world):
    trainer, holder = held_by(world, "holder")
    [reader] = world.replica("late")
    reader.admit()
    trainer.say(PinsKept(1, 1, True))
    assert reader.last(Fetch).holder is None and not holder[0].all(Serve)


@pytest.mark.parametrize("leaves", [True, False])
def test_holder_serves_for_a_trainer_that_is_gone(world, leaves):
    trainer, holder = held_by(world, "holder")
    trainer.say(Leave()) if leaves else trainer.lose()
    [reader] = world.replica("late")
    reader.admit()
    holder[0].offer(1)
    assert reader.last(Fetch).holder.replica == "holder"


def test_transfer_that_a_dead_trainer_broke_off_goes_on_from_a_holder(world):
    [trainer] = world.trainer()
    [one], [two] = world.replica("one"), world.replica("two")
    publish([trainer], 0, 1)
    admit([one, two])
    one.prepare(1)
    trainer.lose()
    assert not two.all(Abandon)  # its data may still come
    two.fail(1)
    world.pass_time(1)
    one.offer(1)
    assert two.last(Fetch).holder.replica == "one"


def test_holder_that_has_let_the_version_go_is_not_asked_again(world):
    trainer, one, two = held_by(world, "one", "two")
    [reader] = late(world, trainer)
    one[0].offer(1, kept=False)
    two[0].offer(1)
    assert reader.last(Fetch).holder.replica == "two"
    reader.fail(1, "VersionError", "gone", "two")
    serves(one[0]), serves(two[0])
    world.pass_time(1)
    assert not serves(one[0]) and not any(serve.sinks for serve in serves(two[0]))
    publish([trainer], 1, 2)
    assert reader.fetched() == [1, 2]


def test_reader_takes_turns_with_holders_that_break(world):
    trainer, one, two = held_by(world, "one", "two")
    [reader] = late(world, trainer)
    one[0].offer(1)
    reader.fail(1, holder="one")
    world.pass_time(1)
    two[0].offer(1)
    reader.fail(1, holder="two")
    world.pass_time(2)
    one[0].offer(1, ask=2)
    sources = [fetch.holder.replica for fetch in reader.all(Fetch)]
    assert sources == ["one", "two", "one"]


def test_readers_are_spread_over_holders(world):
    trainer, one, two = held_by(world, "one", "two")
    [first] = late(world, trainer)
    [second] = world.replica("later")
    second.admit()
    one[0].offer(1)
    two[0].offer(1)
    assert [r.last(Fetch).holder.replica for r in (first, second)] == ["one", "two"]


def test_reader_goes_on_from_another_holder_when_its_own_is_lost(world):
    trainer, one, two = held_by(world, "one", "two")
    [reader] = late(world, trainer)
    one[0].offer(1)
    one[0].lose()
    assert reader.last(Abandon).held == VERSION
    world.pass_time(0)
    two[0].offer(1)
    assert reader.last(Fetch).holder.replica == "two"
    reader.fail(1, "PeerLostError", "too late to count", "one")
    assert reader.last(Fetch).holder.replica == "two" and len(reader.all(Abandon)) == 1


def test_holder_serves_no_longer_than_a_lease(world):
    trainer, one, two = held_by(world, "one", "two")
    [reader] = late(world, trainer)
    one[0].offer(1)
    world.pass_time(LEASE_S)
    assert one[0].last(Serve).sinks == [] and reader.last(Abandon).held == VERSION
    world.pass_time(0)
    two[0].offer(1)
    assert reader.last(Fetch).holder.replica == "two"


@pytest.mark.parametrize("dies", [True, False])
def test_straggler_reads_from_a_holder_only_if_no_next_version_is_to_come(world, dies):
    [trainer] = world.trainer()
    [one], [slow] = world.replica("one"), world.replica("slow")
    publish([trainer], 0, 1)
    admit([one, slow])
    one.prepare(1)
    world.pass_time(LEASE_S)
    assert slow.last(Abandon).held == VERSION
    if dies:
        trainer.lose()
    world.pass_time(1)
    assert bool(one.all(Serve)) == dies


def test_holder_serves_no_longer_than_its_trainer_is_the_newest(world):
    trainer, holder = held_by(world, "holder")
    late(world, trainer)
    holder[0].offer(1)
    world.trainer("B")
    assert holder[0].last(Serve) == Serve(VERSION, [], 0)


def test_reader_that_leaves_is_served_no_longer(world):
    trainer, holder = held_by(world, "holder")
    [reader] = late(world, trainer)
    holder[0].offer(1)
    reader.leave()
    assert holder[0].last(Serve) == Serve(VERSION, [], 0)


def test_transfer_from_a_holder_is_finished_though_there_is_a_newer_version(world):
    trainer, holder = held_by(world, "holder")
    [reader] = late(world, trainer)
    holder[0].offer(1)
    publish([trainer], 1, 2)
    prepare(holder, 2)
    assert reader.fetched() == [1] and not reader.all(Abandon)
    reader.prepare(1)
    assert reader.fetched() == [1, 2] and reader.last(Fetch).holder is None


def test_job_ends_only_when_a_holder_has_served(world):
    trainer, holder = held_by(world, "holder")
    holder[0].take(0)
    holder[0].took(0)
    [reader] = late(world, trainer)
    close([trainer])
    holder[0].offer(1)
    assert not trainer.all(JobClosed)
    reader.prepare(1)
    reader.take(0)
    reader.took(0)
    assert trainer.all(JobClosed)


def test_offers_that_nobody_asked_for_change_nothing(world):
    _, holder = held_by(world, "holder")
    holder[0].offer(1)
    holder[0].offer(7)
    [reader] = world.replica("late")
    reader.admit()
    assert not reader.all(Fetch)


def test_replica_of_a_fleet_gets_from_another_what_the_trainer_lost():
    world = World(commit="fleet")
    [trainer] = world.trainer()
    [one], [two] = world.replica("one"), world.replica("two")
    publish([trainer], 0, 1)
    admit([one, two])
    one.prepare(1)
    two.fail(1, "VersionError", "gone")
    world.pass_time(1)
    trainer.say(PinsKept(1, 1, False))
    one.offer(1)
    assert two.last(Fetch).promise.held == VERSION
    two.prepare(1)
    for process in (one, two):
        process.say(FleetCommitStored(VERSION))
    assert trainer.last(PublishOutcome).outcome.error == ""
