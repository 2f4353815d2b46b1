"""Epochs order the incarnations of a job, over restarts of its coordinator and steps of clocks."""

import time
from itertools import pairwise

import pytest
from job_world import Trainer, World, admit, close, prepare, publish

from tpu_sync_rl.epochs import Epochs, unix_ms
from tpu_sync_rl.errors import VersionError
from tpu_sync_rl.messages import Held, Refused
from tpu_sync_rl.sampler_messages import SamplerJoined, SamplerOutcome
from tpu_sync_rl.trainer_messages import EpochRaised, Pins, PinsKept, PublishOutcome, TrainerJoined


@pytest.fixture
def world():
    return World()


def epoch_of(trainer):
    return trainer.last(TrainerJoined).epoch


def rejoin(sampler, **changes):
    """Opens another stream, with the sink of the first."""
    sink = sampler.last(SamplerJoined).sink
    sampler.open()
    sampler.join(sink=sink, **changes)


# --- alone


def test_each_incarnation_has_a_greater_epoch_than_the_one_before():
    epochs = Epochs(iter((5, 5, 3, 70)).__next__)
    for incarnation in "ABCD":
        epochs.begin(incarnation)
    assert [epochs.of(incarnation) for incarnation in "ABCD"] == [5, 6, 7, 70]
    assert [epochs.is_outdated(incarnation) for incarnation in "ABCD"] == [True] * 3 + [False]


def test_incarnation_that_nobody_knows_has_no_epoch():
    assert Epochs(lambda: 7).of("A") == 0


def test_coordinators_that_know_nothing_of_one_another_give_growing_epochs():
    given = []
    for incarnation in "ABC":
        epochs = Epochs(unix_ms)
        epochs.begin(incarnation)
        given.append(epochs.of(incarnation))
        time.sleep(0.002)  # no process starts as fast as that
    assert all(former < later for former, later in pairwise(given))


def test_incarnation_that_began_here_is_raised_above_all_that_come_to_be_known():
    epochs = Epochs(lambda: 10)
    epochs.begin("new")
    epochs.learn("older", 3)
    assert epochs.of("new") == 10
    epochs.learn("old", 10)
    assert epochs.of("new") == 11
    epochs.learn("old", 40)
    assert epochs.of("new") == 41


def test_incarnation_of_another_coordinator_keeps_its_epoch_and_may_be_outdated():
    epochs = Epochs(lambda: 10)
    epochs.learn("A", 3)
    assert epochs.of("A") == 3 and not epochs.is_outdated("A")
    epochs.learn("B", 4)
    assert epochs.of("A") == 3 and epochs.is_outdated("A")


# --- in a job


def test_epoch_follows_the_clock_where_nobody_knows_more(world):
    world.clock_ms = 1000
    [first] = world.trainer("A")
    world.restart()
    world.clock_ms = 2000
    [second] = world.trainer("B")
    assert (epoch_of(first), epoch_of(second)) == (1000, 2000)


def test_outcomes_of_both_sides_have_the_epoch(world):
    world.clock_ms = 1000
    [trainer], [sampler] = world.trainer(), world.replica()
    trainer.publish(0, 1)
    sampler.admit()
    sampler.prepare(1)
    sampler.take(0)
    assert trainer.last(PublishOutcome).outcome.epoch == 1000
    assert sampler.last(SamplerOutcome).outcome.epoch == 1000


@pytest.mark.parametrize("is_announced", [False, True])
def test_sampler_that_comes_back_raises_the_epoch_of_a_new_incarnation(world, is_announced):
    world.clock_ms = 1000
    world.trainer("A")
    [sampler] = world.replica()
    world.restart()
    world.clock_ms = 500  # set back
    trainer = world.trainer("B", 2)
    if is_announced:
        publish(trainer, 0, 1)
    rejoin(sampler, committed=Held("A", 7), call=1, epochs={"A": 1000})
    assert [process.last(EpochRaised).epoch for process in trainer] == [1001, 1001]
    if not is_announced:
        publish(trainer, 0, 1)
    sampler.admit()
    for process in trainer if is_announced else []:
        process.say(PinsKept(1, process.last(Pins).ask, True))
    sampler.prepare(1, "B")
    sampler.take(1)
    assert sampler.last(SamplerOutcome).outcome.epoch == 1001
    sampler.took(1)
    publish(trainer, 1, 2)
    sampler.prepare(2, "B")
    assert trainer[0].last(PublishOutcome).outcome.epoch == 1001


def test_sampler_that_comes_back_first_is_asked_first(world):
    world.trainer("A")
    [sampler] = world.replica()
    world.restart()
    rejoin(sampler, committed=Held("A", 7), call=1, epochs={"A": 1000})
    [trainer] = world.trainer("B")
    assert epoch_of(trainer) == 1001


def test_trainer_that_comes_back_is_not_raised_by_what_its_samplers_know(world):
    [trainer], [sampler] = world.trainer(), world.replica()
    world.restart()
    world.clock_ms = 5000
    trainer.open()
    trainer.join(epoch=1000)
    rejoin(sampler, committed=Held("A", 7), call=1, epochs={"A": 1000, "older": 900})
    assert epoch_of(trainer) == 1000 and not trainer.all(EpochRaised)


def test_process_that_missed_a_raise_hears_of_it(world):
    trainer = world.trainer(num_processes=2)
    world.restart()
    for process, epoch in zip(trainer, (5, 6), strict=True):
        process.open()
        process.join(epoch=epoch)
    assert trainer[0].last(EpochRaised).epoch == epoch_of(trainer[1]) == 6


def test_outdated_trainer_is_fenced_when_a_sampler_knows_its_successor(world):
    [trainer], [sampler] = world.trainer("A"), world.replica()
    world.restart()
    trainer.open()
    trainer.join(epoch=1000)
    rejoin(sampler, committed=Held("B", 1), call=1, epochs={"B": 2000})
    assert trainer.last(Refused).error == "VersionError"
    with pytest.raises(VersionError, match="newer incarnation of the trainer has taken over"):
        trainer.join(epoch=1000)
    successor = Trainer(world, "B", 0, 1)
    successor.join(epoch=2000)
    assert epoch_of(successor) == 2000


def test_prepared_version_has_the_epoch_that_its_sampler_knows(world):
    [sampler] = world.replica()
    world.restart()
    world.clock_ms = 2000
    world.trainer("B")
    rejoin(sampler, prepared=[Held("A", 7)], epochs={"A": 1000})
    sampler.take(0)
    assert sampler.last(SamplerOutcome).outcome.held == Held("A", 7)
    assert sampler.last(SamplerOutcome).outcome.epoch == 1000


def test_job_that_begins_anew_goes_on_with_its_epochs(world):
    world.clock_ms = 1000
    trainer, sampler = world.trainer("A"), world.replica()
    publish(trainer, 0, 1)
    admit(sampler)
    prepare(sampler, 1)
    close(trainer, 0.0)
    world.clock_ms = 0
    [second] = world.trainer("B")
    assert epoch_of(second) == 1001
