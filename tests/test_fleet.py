"""All live replicas return a version, or none: rounds, promises, deaths, restarts, stragglers."""

import pytest
from job_world import LEASE_S, PATIENCE_S, Sampler, Trainer, World, admit, close, prepare, publish

from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.messages import Held, Promise
from tpu_sync_rl.sampler_messages import (
    Abandon,
    Fetch,
    FleetCommit,
    FleetCommitStored,
    JobEnded,
    SamplerJoined,
    SamplerOutcome,
    Withdrawn,
)
from tpu_sync_rl.trainer_messages import Announced, PinsKept, PublishOutcome, TrainerJoined


@pytest.fixture
def world():
    return World(commit="fleet")


def store(program, version, incarnation="A"):
    for process in program:
        process.say(FleetCommitStored(Held(incarnation, version)))


def receive(program, version, incarnation="A"):
    prepare(program, version, incarnation)
    store(program, version, incarnation)


def outcome(process):
    return process.last(SamplerOutcome).outcome


def result(trainer):
    return trainer.last(PublishOutcome).outcome


def begun(world, **changes):
    """A trainer, and two replicas (of two processes and one) that receive version 1."""
    [trainer] = world.trainer()
    one, two = world.replica("one", 2), world.replica("two")
    publish([trainer], 0, 1, **changes)
    admit(one + two)
    return trainer, one, two


def come_back(process, **changes):
    """To another coordinator, as a process that knew the one before."""
    joined = process.last(SamplerJoined if process.role == "sampler" else TrainerJoined)
    process.open()
    process.heard.clear()
    if process.role == "sampler":
        process.join(sink=joined.sink, **changes)
        process.admit()
    else:
        process.join(epoch=joined.epoch, **changes)


PROMISE = Promise(Held("A", 1), ["one", "two"])


# --- a round


def test_version_is_returned_only_when_all_have_it_and_know_that(world):
    trainer, one, two = begun(world)
    for process in one + two:
        assert process.last(Fetch).promise == PROMISE
    one[0].take(0)
    two[0].take(0)
    prepare(one, 1)
    assert not one[0].all(FleetCommit)
    prepare(two, 1)
    for process in one + two:
        assert process.last(FleetCommit).held == Held("A", 1)
    store(one, 1)
    assert not one[0].all(SamplerOutcome) and not trainer.all(PublishOutcome)
    store(two, 1)
    for process in one + two:
        assert outcome(process).held == Held("A", 1)
    assert result(trainer).error == ""


def test_promise_outlasts_every_deadline(world):
    trainer, one, two = begun(world, timeout_s=5)
    prepare(one, 1)
    one[0].take(0, timeout_s=3)
    world.pass_time(5)
    assert outcome(one[0]).error == "SyncTimeoutError"
    assert "version 1 is prepared and waits for the rest of the fleet" in outcome(one[0]).text
    assert result(trainer).error == "SyncTimeoutError"
    assert "version 1 is not yet prepared by two" in result(trainer).text
    one[0].took(0)
    one[1].took(0)
    receive(two, 1)
    store(one, 1)
    one[0].take(1)
    assert outcome(one[1]).held == Held("A", 1)


def test_next_version_is_announced_when_the_round_before_is_decided(world):
    trainer, one, two = begun(world)
    publish([trainer], 1, 2, timeout_s=5)
    assert [a.version for a in trainer.all(Announced)] == [1]
    world.pass_time(5)
    assert result(trainer).error == "SyncTimeoutError"
    assert "not announced and may be published again: the fleet's" in result(trainer).text
    publish([trainer], 2, 2)
    receive(one + two, 1)
    assert [a.version for a in trainer.all(Announced)] == [1, 2]


def test_replica_that_is_lost_is_not_part_of_the_round(world):
    trainer, one, two = begun(world)
    receive(one, 1)
    two[0].lose()
    store(one, 1)
    one[0].take(0)
    assert outcome(one[0]).held == Held("A", 1)
    assert trainer.last(PublishOutcome).lost == ["two"]


def test_process_that_dies_before_it_knows_is_waited_for_until_its_lease_ends(world):
    _, one, two = begun(world)
    one[0].take(0)
    prepare(one + two, 1)
    store(one, 1)
    two[0].lose()
    world.pass_time(PATIENCE_S - 1)
    assert not one[0].all(SamplerOutcome)
    world.pass_time(1)
    assert outcome(one[0]).held == Held("A", 1)


def test_replica_that_promised_hears_of_the_commit_when_it_is_back(world):
    _, one, two = begun(world)
    prepare(two, 1)
    two[0].lose()
    receive(one, 1)
    two[0].open()
    two[0].join(sink=two[0].last(SamplerJoined).sink, prepared=[Held("A", 1)], promise=PROMISE)
    assert two[0].last(FleetCommit).held == Held("A", 1)
    store(two, 1)
    two[0].take(0)
    assert outcome(two[0]).held == Held("A", 1)


def test_late_joiner_is_not_waited_for_and_takes_what_the_others_decided(world):
    trainer, one, two = begun(world)
    late = world.replica("late")
    admit(late)
    trainer.say(PinsKept(1, 1, True))
    receive(one + two, 1)
    one[0].take(0)
    assert outcome(one[0]).held == Held("A", 1)
    late[0].take(0)
    prepare(late, 1)
    assert outcome(late[0]).held == Held("A", 1)


def test_late_joiner_does_not_run_ahead_of_the_fleet(world):
    trainer, one, two = begun(world)
    late = world.replica("late")
    admit(late)
    trainer.say(PinsKept(1, 1, True))
    late[0].take(0)
    prepare(late, 1)
    prepare(one, 1)
    assert not late[0].all(SamplerOutcome)
    receive(two, 1)
    store(one + late, 1)
    assert outcome(late[0]).held == Held("A", 1)


def test_replica_that_calls_late_gets_what_the_others_got(world):
    trainer, one, two = begun(world)
    receive(one + two, 1)
    publish([trainer], 1, 2)
    assert one[0].last(Fetch).keep == Held("A", 1)
    one[0].take(0)
    for process in one:
        process.took(0)
    prepare(one + two, 2)
    assert result(trainer).error == ""  # that all have received it does not depend on calls
    one[0].take(1)
    assert not one[0].all(FleetCommit)[1:]
    two[0].take(0)
    assert outcome(two[0]).held == Held("A", 1)
    two[0].took(0)
    store(one + two, 2)
    assert outcome(one[0]).held == Held("A", 2)
    two[0].take(1)
    assert outcome(two[0]).held == Held("A", 2)


def test_newer_version_takes_the_place_of_one_that_waits_for_late_callers(world):
    trainer, one, two = begun(world)
    receive(one + two, 1)
    one[0].take(0)
    for process in one:
        process.took(0)
    publish([trainer], 1, 2)
    prepare(one + two, 2)
    publish([trainer], 2, 3)
    prepare(one + two, 3)
    assert result(trainer).error == ""
    two[0].take(0)
    assert outcome(two[0]).held == Held("A", 1)
    two[0].took(0)
    store(one + two, 3)
    one[0].take(1)
    two[0].take(1)
    assert outcome(one[0]).held == outcome(two[0]).held == Held("A", 3)


def test_call_with_a_min_version_passes_over_what_the_others_took(world):
    trainer, one, two = begun(world)
    receive(one + two, 1)
    one[0].take(0)
    for process in one:
        process.took(0)
    two[0].take(0, min_version=2)
    publish([trainer], 1, 2)
    receive(one + two, 2)
    assert outcome(two[0]).held == Held("A", 2)
    one[0].take(1)
    assert outcome(one[0]).held == Held("A", 2)


def test_commit_that_waits_for_late_callers_says_whom(world):
    trainer, one, two = begun(world)
    receive(one + two, 1)
    publish([trainer], 1, 2, wait="committed", timeout_s=5)
    prepare(one + two, 2)
    world.pass_time(5)
    assert "waits until one, two took the one before" in result(trainer).text


def test_version_that_waited_for_late_callers_outlives_the_coordinator(world):
    trainer, one, two = begun(world)
    receive(one + two, 1)
    one[0].take(0)
    for process in one:
        process.took(0)
    publish([trainer], 1, 2)
    prepare(one + two, 2)
    world.restart()
    first, second = Held("A", 1), Held("A", 2)
    promise = Promise(second, ["one", "two"])
    for process in one:
        come_back(process, prepared=[second], promise=promise, committed=first, call=1)
    come_back(two[0], prepared=[first, second], promise=promise, fleet_commit=first)
    come_back(
        trainer, digest="d", manifest=b"m", pinned=[2], newest=2, call=2, replicas=["one", "two"]
    )
    two[0].take(0)
    assert outcome(two[0]).held == first


def test_round_without_replicas_is_over_at_once(world):
    [trainer] = world.trainer()
    publish([trainer], 0, 1)
    assert result(trainer).error == ""


# --- aborts


def test_call_that_fails_names_the_version_that_stays_announced(world):
    trainer, *_ = begun(world, timeout_s=1)
    world.pass_time(1)
    assert result(trainer).error == "SyncTimeoutError"
    assert result(trainer).held == Held("A", 1)


def test_straggler_aborts_the_round_and_all_keep_what_they_have(world):
    trainer, one, two = begun(world)
    receive(one + two, 1)
    one[0].take(0)
    for process in one:
        process.took(0)
    publish([trainer], 1, 2, timeout_s=1000)
    prepare(one, 2)
    world.pass_time(LEASE_S)
    assert result(trainer).error == "SyncTimeoutError"
    assert result(trainer).text == (
        "version 2 is withdrawn: two did not receive it within straggler_timeout"
    )
    assert result(trainer).held is None  # another coordinator is not to tell of it
    assert two[0].last(Abandon).held == Held("A", 2)
    why = "two did not receive it within straggler_timeout"
    for process in one + two:
        assert process.all(Withdrawn) == [Withdrawn(Held("A", 2), why)]
    one[0].take(1, wait=False)
    assert outcome(one[0]).error == "Nothing"
    two[0].take(0)
    assert outcome(two[0]).held == Held("A", 1)  # it was committed, and is kept
    for process in one:
        process.took(1)
    two[0].took(0)
    publish([trainer], 2, 3)
    receive(one + two, 3)
    one[0].take(2)
    assert outcome(one[1]).held == Held("A", 3)


def test_dropped_straggler_does_not_hold_up_the_others():
    world = World(commit="fleet", on_straggler="drop")
    trainer, one, two = begun(world, timeout_s=1000)
    prepare(one, 1)
    world.pass_time(LEASE_S)
    store(one, 1)
    assert result(trainer).error == ""
    assert trainer.last(PublishOutcome).lost == ["two"]
    one[0].take(0)
    assert outcome(one[0]).held == Held("A", 1)
    publish([trainer], 1, 2)
    assert two[0].last(Fetch).held == Held("A", 2)


def test_version_that_its_sources_lost_is_not_waited_for(world):
    trainer, one, two = begun(world)
    prepare(one, 1)
    two[0].fail(1, "VersionError", "gone")
    world.pass_time(1)
    trainer.say(PinsKept(1, 1, False))
    one[0].offer(1, kept=False)
    assert "version 1 is withdrawn" in result(trainer).text
    one[0].take(0, timeout_s=3)
    world.pass_time(3)
    assert "version 1 was withdrawn: two did not receive it" in outcome(one[0]).text


def test_version_that_a_process_could_not_copy_is_withdrawn(world):
    trainer, one, two = begun(world)
    trainer.publish(0, 1, error="ValueError", text="no memory")
    assert result(trainer).text == "process 0: no memory"
    why = "the trainer's process 0: no memory"
    assert one[0].all(Withdrawn) == two[0].all(Withdrawn) == [Withdrawn(Held("A", 1), why)]
    assert two[0].last(Abandon).held == Held("A", 1)
    publish([trainer], 1, 2)
    receive(one + two, 2)
    two[0].take(0)
    assert outcome(two[0]).held == Held("A", 2)


def test_newer_incarnation_aborts_the_round_of_the_older(world):
    _, one, two = begun(world)
    prepare(one, 1)
    [newer] = world.trainer("B")
    publish([newer], 0, 0)
    admit(one + two)
    prepare(one + two, 0, "B")
    store(one + two, 0, "B")
    one[0].take(0)
    assert outcome(one[0]).held == Held("B", 0)


def test_job_that_ends_hands_out_what_is_committed_and_no_more(world):
    trainer, one, two = begun(world)
    receive(one + two, 1)
    publish([trainer], 1, 2)
    prepare(one, 2)
    close([trainer], timeout_s=0)
    for process in one + two:
        assert outcome(process).held == Held("A", 1)
        assert process.last(JobEnded).call == 1


def test_close_does_not_wait_for_a_version_that_was_aborted(world):
    trainer, one, _ = begun(world, timeout_s=1000)
    prepare(one, 1)
    world.pass_time(LEASE_S)
    close([trainer])
    assert one[0].last(JobEnded).call == 0


# --- another coordinator


def test_commit_that_one_process_stored_is_a_commit_after_a_restart(world):
    _, one, two = begun(world)
    prepare(one + two, 1)
    world.restart()
    one[0].take(0)
    come_back(one[1], prepared=[Held("A", 1)], promise=PROMISE)
    come_back(one[0], prepared=[Held("A", 1)], promise=PROMISE)
    one[0].take(0)
    assert not one[0].all(SamplerOutcome)
    come_back(two[0], prepared=[Held("A", 1)], promise=PROMISE, fleet_commit=Held("A", 1))
    assert one[0].last(FleetCommit).held == Held("A", 1)
    store(one + two, 1)
    assert outcome(one[1]).held == Held("A", 1)


def test_version_that_a_lost_replica_returned_is_returned_by_all(world):
    """Whoever returned it, all others had stored the commit before."""
    _, one, two = begun(world)
    receive(one + two, 1)
    two[0].take(0)
    assert outcome(two[0]).held == Held("A", 1)
    world.restart()
    for process in one:
        come_back(process, prepared=[Held("A", 1)], promise=PROMISE, fleet_commit=Held("A", 1))
    one[0].take(0)
    world.pass_time(PATIENCE_S)
    store(one, 1)
    assert outcome(one[1]).held == Held("A", 1)


@pytest.mark.parametrize("how", ["all are back", "lease"])
def test_round_that_nobody_knows_to_be_committed_is_aborted_after_a_restart(world, how):
    _, one, two = begun(world)
    prepare(one, 1)
    world.restart()
    for process in one:
        come_back(process, prepared=[Held("A", 1)], promise=PROMISE)
    one[0].take(0, wait=False)
    assert not one[0].all(Abandon)
    if how == "lease":
        world.pass_time(PATIENCE_S)
    else:
        come_back(two[0])
    [newer] = world.trainer("B")
    publish([newer], 0, 7)
    for process in one:
        process.admit()
    assert one[0].last(Fetch).held == Held("B", 7)
    one[0].took(0)


def test_call_that_is_open_starts_the_round_again(world):
    trainer, one, two = begun(world)
    prepare(one, 1)
    world.restart()
    come_back(trainer, pinned=[1], replicas=["one", "two"])
    publish([trainer], 0, 1)
    for process in one:
        come_back(process, prepared=[Held("A", 1)], promise=PROMISE)
    assert not trainer.all(Announced)
    come_back(two[0])
    assert trainer.all(Announced)
    admit(one + two)
    receive(one + two, 1)
    one[0].take(0)
    assert outcome(one[0]).held == Held("A", 1)
    assert result(trainer).error == ""


def test_call_and_processes_that_know_of_a_commit_agree_after_a_restart(world):
    trainer, one, two = begun(world)
    prepare(one + two, 1)
    store(one, 1)
    world.restart()
    come_back(trainer, pinned=[1], replicas=["one", "two"])
    publish([trainer], 0, 1)
    for process in one:
        come_back(process, prepared=[Held("A", 1)], promise=PROMISE, fleet_commit=Held("A", 1))
    come_back(two[0], prepared=[Held("A", 1)], promise=PROMISE)
    store(one + two, 1)
    assert result(trainer).error == ""
    two[0].take(0)
    assert outcome(two[0]).held == Held("A", 1)


def test_newest_version_is_there_for_late_joiners_after_a_restart(world):
    [trainer] = world.trainer()
    publish([trainer], 0, 1)
    world.restart()
    come_back(trainer, call=1, pinned=[], digest="d", manifest=b"manifest", newest=1)
    late = Sampler(world, "late", 0, 1, "life")
    late.join()
    late.admit()
    trainer.say(PinsKept(1, 1, True))
    assert late.last(Fetch).held == Held("A", 1)
    late.take(0)
    late.prepare(1)
    assert outcome(late).held == Held("A", 1)


def test_timeout_says_for_whom_a_restarted_coordinator_waits(world):
    trainer, one, two = begun(world)
    receive(one + two, 1)
    world.restart()
    for process in one:
        come_back(process, committed=Held("A", 1), call=1)
        process.take(1, timeout_s=1)
    come_back(trainer, call=1, digest="d", manifest=b"m", newest=1, replicas=["one", "two"])
    world.pass_time(1)
    assert "the coordinator was restarted and waits for two" in outcome(one[0]).text


def test_older_version_is_not_handed_out_behind_a_newer_one_after_a_restart():
    world = World(commit="fleet", on_straggler="drop")  # does not wait for who calls late
    trainer, one, two = begun(world)
    receive(one + two, 1)
    publish([trainer], 1, 2)
    receive(one + two, 2)
    one[0].take(0)
    decision = one[0].last(SamplerOutcome)
    assert decision.outcome.held == Held("A", 2)
    world.restart()
    both, promise = [Held("A", 1), Held("A", 2)], Promise(Held("A", 2), ["one", "two"])
    come_back(two[0], prepared=both, promise=promise, fleet_commit=Held("A", 2))
    for process in one:
        come_back(process, prepared=both, promise=promise, outcomes=[decision])
    for process in one:
        process.took(0)
    one[0].take(1, wait=False)
    assert outcome(one[0]).error == "Nothing"


def test_processes_of_a_trainer_have_to_agree(world):
    [first, second] = [Trainer(world, "A", process, 2) for process in range(2)]
    first.join()
    with pytest.raises(SyncError, match="process 0 has commit 'fleet', process 1 'replica'"):
        second.join(commit="replica")


def test_who_comes_back_too_late_follows_what_was_decided_meanwhile(world):
    _, one, two = begun(world)
    prepare(one + two, 1)
    world.restart()
    for process in one:
        come_back(process, prepared=[Held("A", 1)], promise=PROMISE)
    world.pass_time(PATIENCE_S)
    come_back(two[0], prepared=[Held("A", 1)], promise=PROMISE, fleet_commit=Held("A", 1))
    for process in (one[0], two[0]):
        process.take(0, wait=False)
        assert outcome(process).error == "Nothing"


def test_version_whose_transfer_began_after_the_decision_is_decided_after_a_restart(world):
    _, one, _ = begun(world)
    prepare(one, 1)
    world.restart()
    come_back(one[0], prepared=[Held("A", 1)], promise=PROMISE)
    come_back(one[1], prepared=[Held("A", 1)])
    one[0].take(0)
    assert outcome(one[1]).held == Held("A", 1)


def test_aborted_version_does_not_make_the_one_before_come_twice(world):
    trainer, one, two = begun(world)
    receive(one + two, 1)
    publish([trainer], 1, 2)
    prepare(one, 2)
    one[0].take(0)
    world.pass_time(LEASE_S)
    for process in one:
        process.took(0)
    assert one[0].last(Fetch).held == Held("A", 2)
    one[0].take(1, wait=False)
    assert outcome(one[0]).error == "Nothing"


def test_round_that_starts_again_waits_for_who_promised_and_was_away(world):
    trainer, one, two = begun(world)
    prepare(two, 1)
    two[0].lose()
    prepare(one, 1)
    world.restart()
    come_back(trainer, pinned=[1], replicas=["one"])
    publish([trainer], 0, 1)
    for process in one:
        come_back(process, prepared=[Held("A", 1)], promise=PROMISE)
    one[0].take(0)
    store(one, 1)
    assert not one[0].all(SamplerOutcome)
    come_back(two[0], prepared=[Held("A", 1)], promise=PROMISE)
    store(one + two, 1)
    assert outcome(one[0]).held == Held("A", 1)
    two[0].take(0)
    assert outcome(two[0]).held == Held("A", 1)


@pytest.mark.parametrize("knows", [False, True])
def test_who_comes_back_after_the_round_began_again(world, knows):
    """Its promise is broken where the others aborted, unless it knows that they must not."""
    trainer, one, two = begun(world)
    prepare(one + two, 1)
    world.restart()
    slow = world.replica("slow")
    come_back(trainer, pinned=[1], replicas=["one"])
    publish([trainer], 0, 1, timeout_s=1000)
    for process in one:
        come_back(process, prepared=[Held("A", 1)], promise=PROMISE)
    world.pass_time(PATIENCE_S)
    assert trainer.all(Announced)
    admit(one + slow)
    stored = Held("A", 1) if knows else None
    if knows:
        come_back(two[0], prepared=[Held("A", 1)], promise=PROMISE, fleet_commit=stored)
        assert one[0].last(FleetCommit).held == stored
        return
    world.pass_time(LEASE_S)
    assert "version 1 is withdrawn: slow did not" in result(trainer).text
    come_back(two[0], prepared=[Held("A", 1)], promise=PROMISE)
    two[0].take(0, wait=False)
    assert outcome(two[0]).error == "Nothing"
    publish([trainer], 1, 2)
    assert two[0].last(Fetch).held == Held("A", 2)
