"""Samplers' side of a job: transfers, pins, calls, membership."""

import pytest
from job_world import LEASE_S, PATIENCE_S, Sampler, World, admit, prepare, publish

from tpu_sync_rl.errors import VersionError
from tpu_sync_rl.messages import Held, Refused, TrainerUp
from tpu_sync_rl.sampler_messages import (
    Abandon,
    Fetch,
    Hindered,
    Latest,
    LeaveCall,
    ReplicaRefused,
    SamplerJoined,
    SamplerOutcome,
)
from tpu_sync_rl.trainer_messages import Announced, Pins, PinsKept, PublishOutcome


@pytest.fixture
def world():
    return World()


def outcome(process):
    return process.last(SamplerOutcome).outcome


def sinks(program):
    return sorted(process.last(SamplerJoined).sink for process in program)


def pins(trainer):
    return [(m.version, m.sinks, m.ask) for m in trainer.all(Pins)]


def serving(world, num_processes=1, versions=(1,)):
    """A trainer that has announced, and one replica that has admitted it."""
    [trainer] = world.trainer()
    sampler = world.replica("s", num_processes)
    for call, version in enumerate(versions):
        publish([trainer], call, version, wait=None)
    admit(sampler)
    return trainer, sampler


# --- transfers


def test_newest_version_is_fetched_by_all_processes_at_once(world):
    trainer = world.trainer()
    sampler = world.replica("s", 2)
    publish(trainer, 0, 1)
    publish(trainer, 1, 2)
    sampler[0].admit()
    assert not sampler[0].all(Fetch)
    sampler[1].admit()
    assert [process.fetched() for process in sampler] == [[2], [2]]


def test_transfer_that_began_is_finished_and_only_the_newest_follows(world):
    trainer, sampler = serving(world)
    for version in (2, 3, 4):
        publish([trainer], version - 1, version, wait=None)
    assert sampler[0].fetched() == [1]
    prepare(sampler, 1)
    assert sampler[0].fetched() == [1, 4]
    assert not sampler[0].all(Abandon)


def test_late_joiner_hears_of_trainer_and_newest_version(world):
    serving(world)
    [late] = world.replica("late")
    assert [type(m) for m in late.heard] == [SamplerJoined, TrainerUp, Latest]


def test_beginning_a_transfer_withdraws_what_was_prepared(world):
    trainer, sampler = serving(world)
    prepare(sampler, 1)
    publish([trainer], 1, 2, wait=None)
    sampler[0].take(0, wait=False)
    assert outcome(sampler[0]).error == "Nothing"
    prepare(sampler, 2)
    sampler[0].took(0)
    sampler[0].take(1)
    assert outcome(sampler[0]).held == Held("A", 2)


def test_next_transfer_waits_until_every_process_took_the_last(world):
    trainer, sampler = serving(world, 2)
    prepare(sampler, 1)
    sampler[0].take(0)
    publish([trainer], 1, 2, wait=None)
    sampler[0].took(0)
    assert sampler[0].fetched() == [1]
    sampler[1].took(0)
    assert [process.fetched() for process in sampler] == [[1, 2], [1, 2]]


def test_failure_abandons_in_the_others_and_is_tried_again_later_and_later(world):
    trainer, sampler = serving(world, 2)
    for delay_s in (0.5, 1.0, 2.0, 4.0, 5.0, 5.0):
        num_fetches = len(sampler[0].fetched())
        sampler[0].fail(1)
        assert sampler[1].last(Abandon).held == Held("A", 1)
        sampler[1].fail(1)
        world.pass_time(delay_s - 0.01)
        assert len(sampler[0].fetched()) == num_fetches
        world.pass_time(0.01)
        assert len(sampler[0].fetched()) == num_fetches + 1
    prepare(sampler, 1)
    sampler[0].take(0)
    assert outcome(sampler[1]).held == Held("A", 1)
    assert pins(trainer)[-1] == (1, [], 0)


@pytest.mark.parametrize("error", ["CorruptionError", "PlanError", "ManifestError"])
def test_failure_that_no_retry_cures_ends_a_pending_call(world, error):
    _, sampler = serving(world, 2)
    sampler[0].take(0)
    sampler[1].fail(1, error, "leaf w")
    assert [(outcome(p).error, outcome(p).text) for p in sampler] == [(error, "leaf w")] * 2
    world.pass_time(0.5)
    prepare(sampler, 1)
    sampler[0].take(1)
    assert outcome(sampler[0]).held == Held("A", 1)


@pytest.mark.parametrize("error", ["PeerLostError", "VersionError"])
def test_other_failures_keep_a_call_waiting_and_are_named_at_its_end(world, error):
    _, sampler = serving(world)
    sampler[0].take(0, timeout_s=5)
    sampler[0].fail(1, error, "rail eth0 broke")
    assert not sampler[0].all(SamplerOutcome)
    world.pass_time(5)
    assert outcome(sampler[0]).error == "SyncTimeoutError"
    assert f"the last transfer failed with {error}: rail eth0 broke" in outcome(sampler[0]).text


def test_lost_process_ends_the_transfer_of_its_replica(world):
    trainer, sampler = serving(world, 2)
    prepare(sampler[:1], 1)
    sampler[1].lose()
    assert sampler[0].last(Abandon).held == Held("A", 1)
    assert pins(trainer)[-1] == (1, [], 0)
    prepare(sampler[:1], 1)
    sampler[1].open()
    sampler[1].join(sink=sinks(sampler)[1])
    assert pins(trainer)[-1] == (1, sinks(sampler), 1)
    trainer.say(PinsKept(1, 1, True))
    assert [process.fetched() for process in sampler] == [[1, 1], [1, 1]]


def test_process_that_connects_again_before_it_is_lost_is_lost_all_the_same(world):
    trainer, sampler = serving(world, 2)
    old = sampler[1].member
    sampler[1].open()
    sampler[1].join(sink=sinks(sampler)[1])
    assert sampler[1].last(Refused).text == "this process has connected again"
    assert sampler[0].last(Abandon).held == Held("A", 1)
    assert pins(trainer)[1:] == [(1, [], 0), (1, sinks(sampler), 1)]
    world.job.on_lost(old, world.now)
    trainer.say(PinsKept(1, 1, True))
    assert sampler[1].fetched() == [1, 1]


def test_fetch_is_not_begun_while_a_trainer_process_is_missing(world):
    trainer = world.trainer(num_processes=2)
    sampler = world.replica()
    publish(trainer, 0, 1)
    trainer[1].lose()
    admit(sampler)
    assert not sampler[0].all(Fetch)
    trainer[1].open()
    trainer[1].join(epoch=1, pinned=[1])
    assert sampler[0].fetched() == [1]


def test_new_incarnation_ends_transfers_from_the_old_but_keeps_what_is_prepared(world):
    _, sampler = serving(world)
    other = world.replica("other")
    prepare(sampler, 1)
    admit(other)
    [trainer] = world.trainer("B")
    sampler[0].take(0)
    assert outcome(sampler[0]).held == Held("A", 1)
    sampler[0].took(0)
    publish([trainer], 0, 1)
    admit(sampler)
    assert sampler[0].last(Fetch).held == Held("B", 1)
    prepare(sampler, 1, "B")
    sampler[0].take(1)
    assert outcome(sampler[0]).held == Held("B", 1)


# --- pins


def test_version_is_pinned_until_every_live_replica_has_it(world):
    [trainer] = world.trainer()
    one, two = world.replica("one", 2), world.replica("two")
    publish([trainer], 0, 1)
    admit(one + two)
    prepare(one[:1], 1)
    assert pins(trainer) == [(1, sinks(one + two), 0)]
    prepare(one[1:], 1)
    prepare(two, 1)
    assert pins(trainer)[1:] == [(1, sinks(two), 0), (1, [], 0)]
    assert type(trainer.heard[-1]) is PublishOutcome  # views are let go before the call is over


def test_version_without_readers_is_let_go_at_once(world):
    [trainer] = world.trainer()
    publish([trainer], 0, 1)
    publish([trainer], 1, 2)
    assert pins(trainer) == [(1, [], 0), (2, [], 0)]


def test_superseded_unread_version_is_let_go(world):
    [trainer] = world.trainer()
    one, two = world.replica("one"), world.replica("two")
    publish([trainer], 0, 1)
    admit(one)
    trainer.heard.clear()
    publish([trainer], 1, 2)
    assert pins(trainer) == [(1, sinks(one), 0), (2, sinks(one + two), 0)]
    prepare(one, 1)
    assert (1, [], 0) in pins(trainer)


def test_refused_replica_is_not_pinned_for(world):
    [trainer] = world.trainer()
    [sampler] = world.replica()
    publish([trainer], 0, 1)
    sampler.refuse()
    assert pins(trainer)[-1] == (1, [], 0)


def test_late_joiner_is_served_only_when_every_trainer_process_kept_the_version(world):
    trainer = world.trainer(num_processes=2)
    publish(trainer, 0, 1)
    late = world.replica("late", 2)
    admit(late)
    assert pins(trainer[0])[-1] == (1, sinks(late), 1)
    trainer[0].say(PinsKept(1, 1, True))
    assert not late[0].all(Fetch)
    trainer[1].say(PinsKept(1, 1, True))
    assert late[1].fetched() == [1]
    prepare(late, 1)
    assert pins(trainer[1])[-1] == (1, [], 0)


def test_late_joiner_waits_for_the_next_version_when_one_process_let_go(world):
    trainer = world.trainer(num_processes=2)
    publish(trainer, 0, 1)
    late = world.replica("late")
    admit(late)
    trainer[0].say(PinsKept(1, 1, True))
    trainer[1].say(PinsKept(1, 1, False))
    assert pins(trainer[0])[-1] == (1, [], 0)
    world.pass_time(100)
    assert not late[0].all(Fetch)
    publish(trainer, 1, 2)
    assert late[0].fetched() == [2]


def test_late_joiner_of_a_version_in_transfer_is_asked_for_too(world):
    trainer, sampler = serving(world)
    late = world.replica("late")
    admit(late)
    assert pins(trainer)[-1] == (1, sinks(sampler + late), 1)
    trainer.say(PinsKept(1, 1, False))
    assert pins(trainer)[-1] == (1, sinks(sampler), 0)
    assert not late[0].all(Fetch)
    prepare(sampler, 1)
    assert pins(trainer)[-1] == (1, [], 0)


def test_answer_to_an_older_question_counts_for_nothing(world):
    [trainer] = world.trainer()
    publish([trainer], 0, 1)
    late = world.replica("late")
    admit(late)
    late[0].lose()
    late[0].open()
    late[0].join(sink=sinks(late)[0])
    assert pins(trainer)[-1] == (1, sinks(late), 2)
    trainer.say(PinsKept(1, 1, True))
    assert not late[0].all(Fetch)
    trainer.say(PinsKept(1, 2, True))
    assert late[0].all(Fetch)


def test_trainer_process_that_comes_back_is_asked_again(world):
    trainer = world.trainer(num_processes=2)
    publish(trainer, 0, 1)
    late = world.replica("late")
    admit(late)
    trainer[0].say(PinsKept(1, 1, True))
    trainer[1].lose()
    trainer[1].open()
    trainer[1].heard.clear()
    trainer[1].join(epoch=1, pinned=[])
    assert pins(trainer[1]) == [(1, sinks(late), 1)]
    trainer[1].say(PinsKept(1, 1, True))
    assert late[0].all(Fetch)


def test_version_that_a_source_no_longer_has_is_asked_for_before_the_next_try(world):
    trainer, sampler = serving(world)
    sampler[0].fail(1, "VersionError", "gone")
    world.pass_time(0.5)
    assert sampler[0].fetched() == [1]
    assert pins(trainer)[-1] == (1, sinks(sampler), 1)
    trainer.say(PinsKept(1, 1, True))
    assert sampler[0].fetched() == [1, 1]


def test_trainer_process_that_comes_back_lets_go_of_what_nobody_needs(world):
    [trainer] = world.trainer()
    publish([trainer], 0, 1)
    publish([trainer], 1, 2)
    trainer.lose()
    trainer.open()
    trainer.heard.clear()
    trainer.join(epoch=1, pinned=[1, 2, 3])
    assert sorted(pins(trainer)) == [(1, [], 0), (2, [], 0)]


# --- leases


def test_straggler_loses_its_lease_and_gets_only_newer_versions(world):
    trainer, sampler = serving(world)
    world.pass_time(LEASE_S - 1)
    assert not sampler[0].all(Abandon)
    world.pass_time(1)
    assert sampler[0].last(Abandon).held == Held("A", 1)
    assert pins(trainer)[-1] == (1, [], 0)
    world.pass_time(100)
    assert sampler[0].fetched() == [1]
    assert pins(trainer)[-1] == (1, [], 0)
    publish([trainer], 1, 2)
    assert sampler[0].fetched() == [1, 2]


def test_lease_counts_from_the_begin_of_the_transfer(world):
    trainer, sampler = serving(world)
    world.pass_time(LEASE_S - 1)
    prepare(sampler, 1)
    sampler[0].take(0)
    publish([trainer], 1, 2)
    world.pass_time(LEASE_S - 1)
    sampler[0].took(0)
    assert sampler[0].fetched() == [1, 2]
    world.pass_time(LEASE_S - 1)
    assert not sampler[0].all(Abandon)
    world.pass_time(1)
    assert sampler[0].last(Abandon).held == Held("A", 2)


def test_lease_of_a_superseded_version_ends_as_well(world):
    trainer, sampler = serving(world)
    publish([trainer], 1, 2, wait=None)
    world.pass_time(LEASE_S)
    assert sampler[0].last(Abandon).held == Held("A", 1)
    assert (1, [], 0) in pins(trainer)


def test_retries_do_not_prolong_a_lease(world):
    _, sampler = serving(world)
    for _ in range(13):
        sampler[0].fail(1)
        world.pass_time(5)
    assert sampler[0].fetched().count(1) <= 13
    num_fetches = len(sampler[0].fetched())
    world.pass_time(100)
    assert len(sampler[0].fetched()) == num_fetches


# --- calls


def test_waiting_call_takes_a_version_the_moment_it_is_prepared(world):
    _, sampler = serving(world, 2)
    sampler[0].take(0)
    prepare(sampler, 1)
    for process in sampler:
        assert process.last(SamplerOutcome).call == 0
        assert outcome(process).held == Held("A", 1)
        assert len(process.last(SamplerOutcome).stats) == 2


def test_outcome_is_pushed_to_a_process_that_has_not_entered_the_call(world):
    _, sampler = serving(world, 2)
    prepare(sampler, 1)
    sampler[0].take(0)
    assert outcome(sampler[1]).held == Held("A", 1)
    sampler[1].heard.clear()
    sampler[1].take(0)
    assert outcome(sampler[1]).held == Held("A", 1)


def test_only_process_zero_decides(world):
    _, sampler = serving(world, 2)
    prepare(sampler, 1)
    sampler[1].take(0, wait=False, timeout_s=0)
    world.pass_time(1)
    assert not sampler[1].all(SamplerOutcome)


def test_nothing_newer_and_no_wait_is_an_outcome(world):
    _, sampler = serving(world, 2)
    sampler[0].take(0, wait=False)
    assert outcome(sampler[1]).error == "Nothing"
    prepare(sampler, 1)
    sampler[0].take(1, wait=False)
    assert sampler[1].last(SamplerOutcome).call == 1
    assert outcome(sampler[1]).held == Held("A", 1)


def test_min_version_waits_for_it(world):
    trainer, sampler = serving(world)
    prepare(sampler, 1)
    sampler[0].take(0, min_version=2)
    assert not sampler[0].all(SamplerOutcome)
    publish([trainer], 1, 2)
    prepare(sampler, 2)
    assert outcome(sampler[0]).held == Held("A", 2)


def test_min_version_is_about_the_newest_incarnation(world):
    _, sampler = serving(world, versions=(7,))
    prepare(sampler, 7)
    [trainer] = world.trainer("B")
    sampler[0].take(0, min_version=2)
    assert not sampler[0].all(SamplerOutcome)
    publish([trainer], 0, 2)
    admit(sampler)
    prepare(sampler, 2, "B")
    assert outcome(sampler[0]).held == Held("B", 2)


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ("alone", "no trainer has joined job 'policy'"),
        ("trainer", "the trainer has not announced a version yet"),
        ("incomplete", "the trainer's process 1 of 2 is lost"),
        ("receiving", "version 1 is being received (processes that have it: 0 of 1)"),
        ("taken", "version 1 is the newest announced"),
        ("too old", "version 1 is prepared and not taken"),
    ],
)
def test_timeout_says_what_is_known(world, stage, text):
    [sampler] = world.replica()
    if stage == "incomplete":
        world.trainer(num_processes=2)[1].lose()
    elif stage != "alone":
        [trainer] = world.trainer()
    call = 0
    if stage in ("receiving", "taken", "too old"):
        publish([trainer], 0, 1)
        sampler.admit()
    if stage in ("taken", "too old"):
        sampler.prepare(1)
    if stage == "taken":
        sampler.take(0)
        sampler.took(0)
        call = 1
    sampler.take(call, timeout_s=3, min_version=5)
    world.pass_time(2.9)
    assert len(sampler.all(SamplerOutcome)) == call
    world.pass_time(0.1)
    assert outcome(sampler).error == "SyncTimeoutError"
    assert "replica 's' got no new version in time" in outcome(sampler).text
    assert text in outcome(sampler).text


def test_timeout_says_which_min_version_is_asked_and_what_is_the_newest(world):
    _, [sampler] = serving(world, versions=(1, 2))
    sampler.prepare(2)
    sampler.take(0, timeout_s=3, min_version=5)
    world.pass_time(3)
    assert outcome(sampler).text == (
        "replica 's' got no new version in time from min_version=5 on: version 2 is prepared and "
        "not taken; version 2 is the newest announced"
    )


def test_both_sides_hear_that_a_process_has_no_memory(world):
    [trainer], sampler = world.trainer(), world.replica("s", 2)
    publish([trainer], 0, 1, timeout_s=3)
    admit(sampler)
    sampler[1].say(Hindered(Held("A", 1), "has no memory for it: the application holds versions 0"))
    sampler[0].take(0, timeout_s=3)
    world.pass_time(3)
    text = "process 1 has no memory for it: the application holds versions 0"
    assert text in outcome(sampler[0]).text
    publish([trainer], 1, 2, timeout_s=3)
    world.pass_time(3)
    assert text in trainer.last(PublishOutcome).outcome.text
    sampler[1].say(Hindered(Held("A", 1), ""))
    publish([trainer], 2, 3, timeout_s=3)
    world.pass_time(3)
    assert "no memory" not in trainer.last(PublishOutcome).outcome.text


def test_what_was_said_of_another_version_holds_nothing_up(world):
    [trainer], [sampler] = world.trainer(), world.replica()
    publish([trainer], 0, 1, timeout_s=3)
    sampler.admit()
    sampler.take(0, timeout_s=3)
    sampler.say(Hindered(Held("A", 9), "reads from trainer process 0: 2 streams get nothing"))
    world.pass_time(3)
    assert "get nothing" not in outcome(sampler).text


def test_call_that_was_left_is_not_decided_before_it_is_entered_again(world):
    _, [sampler] = serving(world)
    sampler.take(0, timeout_s=3)
    sampler.say(LeaveCall(0))
    sampler.prepare(1)
    world.pass_time(3)
    assert not sampler.all(SamplerOutcome)
    sampler.take(0)
    assert outcome(sampler).held == Held("A", 1)


def test_call_that_was_left_while_the_stream_was_lost_is_not_decided(world):
    _, [sampler] = serving(world)
    sampler.take(0, timeout_s=3)
    sampler.lose()
    known = sinks([sampler])[0]
    sampler.open()
    sampler.join(sink=known)
    world.pass_time(3)
    assert not sampler.all(SamplerOutcome)


def test_trainer_hears_who_has_not_taken_what_was_handed_out(world):
    trainer, sampler = serving(world, 2)
    prepare(sampler, 1)
    sampler[0].take(0)
    sampler[0].took(0)
    trainer.publish(1, 2, timeout_s=3)
    world.pass_time(3)
    assert trainer.last(PublishOutcome).outcome.text.endswith(
        "(version 1 is handed out, and not taken by process 1)"
    )


def test_timeout_says_that_a_version_can_not_be_had_any_more(world):
    [trainer], [sampler] = world.trainer(), world.replica()
    publish([trainer], 0, 1)
    sampler.admit()
    publish([trainer], 1, 2, timeout_s=2 * LEASE_S)
    world.pass_time(LEASE_S)
    sampler.take(0, timeout_s=0)
    assert "version 2 can't be had here any more: it took longer" in outcome(sampler).text
    world.pass_time(LEASE_S)
    assert (
        "version 2 can't be had here any more: it took longer"
        in trainer.last(PublishOutcome).outcome.text
    )


def test_call_of_an_incomplete_replica_names_who_is_missing(world):
    sampler = Sampler(world, "s", 0, 2, "life")
    sampler.join()
    sampler.take(0, timeout_s=3)
    world.pass_time(3)
    assert "process 1 of 2 has not joined" in outcome(sampler).text


def test_call_fails_when_a_process_of_the_replica_is_gone(world):
    sampler = world.replica("s", 3)
    sampler[1].take(0)
    sampler[2].lose()
    world.pass_time(PATIENCE_S - 1)
    assert not sampler[0].all(SamplerOutcome)
    world.pass_time(1)
    for process in sampler[:2]:
        assert outcome(process).error == "PeerLostError"
        assert "replica 's': process 2 of 3 is lost" in outcome(process).text


def test_replica_that_comes_back_goes_on_with_its_call(world):
    trainer, [sampler] = serving(world)
    sampler.take(0, timeout_s=100)
    sampler.lose()
    world.pass_time(2 * PATIENCE_S)
    sampler.open()
    sampler.join(sink=sinks([sampler])[0])
    sampler.take(0, timeout_s=100 - 2 * PATIENCE_S)
    trainer.say(PinsKept(1, pins(trainer)[-1][2], True))
    assert not sampler.all(SamplerOutcome)
    sampler.prepare(1)
    assert outcome(sampler).held == Held("A", 1)


def test_processes_that_come_back_have_time_for_it_from_the_first_one_on(world):
    sampler = world.replica("s", 2)
    known = sinks(sampler)
    for process in sampler:
        process.take(0, timeout_s=100)
        process.lose()
    world.pass_time(2 * PATIENCE_S)
    for process, sink in zip(sampler, known, strict=True):
        process.open()
        process.join(sink=sink)
        process.take(0, timeout_s=50)
        world.pass_time(PATIENCE_S - 1)
        assert not process.all(SamplerOutcome)


def test_process_that_comes_back_alone_hears_which_other_one_is_lost(world):
    sampler = world.replica("s", 2)
    known = sinks(sampler)
    for process in sampler:
        process.take(0, timeout_s=100)
        process.lose()
    world.pass_time(2 * PATIENCE_S)
    sampler[0].open()
    sampler[0].join(sink=known[0])
    sampler[0].take(0, timeout_s=50)
    world.pass_time(PATIENCE_S)
    assert outcome(sampler[0]).error == "PeerLostError"
    assert "replica 's': process 1 of 2 is lost" in outcome(sampler[0]).text


def test_missed_outcome_is_sent_again_until_it_is_taken(world):
    _, sampler = serving(world, 2)
    prepare(sampler, 1)
    sampler[1].lose()
    sampler[0].take(0)
    sampler[0].took(0)
    sampler[1].open()
    sampler[1].join(sink=sinks(sampler)[1], prepared=[Held("A", 1)])
    assert outcome(sampler[1]).held == Held("A", 1)
    sampler[1].lose()
    sampler[1].open()
    sampler[1].heard.clear()
    sampler[1].join(sink=7, committed=Held("A", 1), call=1)
    assert not sampler[1].all(SamplerOutcome)


# --- membership


def test_sinks_differ_and_stay(world):
    sampler = world.replica("s", 2)
    before = sinks(sampler)
    assert len(set(before)) == 2
    sampler[0].open()
    sampler[0].join(sink=before[0])
    assert sinks(sampler) == before


def test_another_life_fences_the_former_one(world):
    old = world.replica("s", 2, life="one")
    new = world.replica("s", 1, life="two")
    for process in old:
        assert process.last(Refused).error == "VersionError"
        assert "newer session" in process.last(Refused).text
    for sink in (0, 100):
        with pytest.raises(VersionError, match="taken the place of replica 's'"):
            old[0].join(sink=sink)
    new[0].take(0, timeout_s=0)
    assert outcome(new[0]).error == "SyncTimeoutError"


def test_fresh_life_begins_with_nothing(world):
    _, sampler = serving(world)
    prepare(sampler, 1)
    [fresh] = world.replica(life="two")
    fresh.take(0, wait=False)
    assert outcome(fresh).error == "Nothing"


def test_process_that_joins_a_refused_replica_is_told(world):
    [trainer] = world.trainer()
    sampler = world.replica("s", 2)
    publish([trainer], 0, 1)
    sampler[1].lose()
    sampler[0].refuse()
    sampler[1].open()
    sampler[1].join(sink=sinks(sampler)[1])
    assert sampler[1].last(ReplicaRefused).digest == "d"


# --- another coordinator


def test_restarted_coordinator_keeps_decisions_that_one_process_heard_of(world):
    _, sampler = serving(world, 2)
    prepare(sampler, 1)
    sampler[0].take(0)
    decision = sampler[0].last(SamplerOutcome)
    ids = sinks(sampler)
    world.restart()
    for process in sampler:
        process.open()
        process.heard.clear()
    sampler[1].join(sink=ids[1], prepared=[Held("A", 1)])
    sampler[0].join(sink=ids[0], call=1, committed=Held("A", 1), outcomes=[decision])
    assert sampler[1].last(SamplerOutcome) == decision
    sampler[0].take(1, wait=False)
    assert sampler[0].last(SamplerOutcome).call == 1
    assert outcome(sampler[0]).error == "Nothing"


def test_restarted_coordinator_decides_nothing_until_all_have_said_what_they_know(world):
    _, sampler = serving(world, 2)
    ids = sinks(sampler)
    world.restart()
    for process in sampler:
        process.open()
        process.heard.clear()
    sampler[0].join(sink=ids[0], prepared=[Held("A", 1)])
    sampler[0].take(0, wait=False, timeout_s=0)
    assert not sampler[0].all(SamplerOutcome)
    sampler[1].join(sink=ids[1], prepared=[Held("A", 1)])
    assert outcome(sampler[1]).held == Held("A", 1)


def test_version_that_was_committed_before_a_restart_is_not_fetched_again(world):
    [trainer] = world.trainer()
    world.restart()
    trainer.open()
    trainer.join(epoch=3, pinned=[4, 5])
    sampler = Sampler(world, "s", 0, 1, "life")
    sampler.join(sink=5, committed=Held("A", 5), call=3)
    trainer.publish(5, 5)
    sampler.admit()
    assert not sampler.all(Fetch)
    assert trainer.last(PublishOutcome).outcome.error == ""
    assert pins(trainer) == [(4, [], 0), (5, [], 0)]
    trainer.publish(6, 6)
    assert sampler.fetched() == [6]


def test_inherited_pins_are_let_go_when_nobody_publishes_them_again(world):
    [trainer] = world.trainer()
    world.restart()
    trainer.open()
    trainer.join(epoch=3, pinned=[4, 5])
    trainer.publish(5, 5, min_replicas=1, timeout_s=1000)
    world.pass_time(PATIENCE_S)
    assert pins(trainer) == [(4, [], 0)]


def test_inherited_pins_of_calls_that_follow_are_kept(world):
    [trainer] = world.trainer()
    world.restart()
    trainer.open()
    trainer.join(epoch=3, pinned=[4, 5])
    trainer.publish(4, 4, wait=None)
    assert pins(trainer) == [(4, [], 0)]
    trainer.publish(5, 5, wait=None)
    assert pins(trainer) == [(4, [], 0), (5, [], 0)]
    assert [m.version for m in trainer.all(Announced)] == [4, 5]


def test_version_that_is_being_taken_during_a_restart_is_not_fetched_again(world):
    _, sampler = serving(world)
    prepare(sampler, 1)
    sampler[0].take(0)
    decision = sampler[0].last(SamplerOutcome)
    world.restart()
    [trainer] = world.trainer()
    trainer.open()
    trainer.join(epoch=1, pinned=[1])
    # Its call has taken it out of what is prepared, and has not returned yet.
    sampler[0].open()
    sampler[0].heard.clear()
    sampler[0].join(sink=100, outcomes=[decision])
    trainer.publish(0, 1)
    sampler[0].admit()
    sampler[0].took(0)
    assert not sampler[0].all(Fetch)
    sampler[0].take(1, wait=False)
    assert outcome(sampler[0]).error == "Nothing"


def test_process_that_is_calls_behind_hears_of_them_all_after_a_restart(world):
    ahead, behind = world.replica("s", 2)
    for call in range(3):
        ahead.take(call, wait=False)
        ahead.took(call)
    decided = ahead.all(SamplerOutcome)
    assert [decision.taken for decision in decided] == [0, 0, 0]  # by both
    world.restart()
    for process in (ahead, behind):
        process.open()
        process.heard.clear()
    ahead.join(sink=100, call=3, outcomes=decided)
    behind.join(sink=101)
    assert behind.all(SamplerOutcome) == decided
    for call in range(3):
        behind.took(call)
    ahead.take(3, wait=False)
    assert ahead.last(SamplerOutcome).taken == 3
