"""Trainer's side of a job: joins, publish calls, announcements, refusals, the end."""

import numpy as np
import pytest
from job_world import LEASE_S, PATIENCE_S, Sampler, Trainer, World, admit, close, prepare, publish

from tpu_sync_rl import authentication
from tpu_sync_rl.errors import SyncError, VersionError
from tpu_sync_rl.manifest import BoxLayout, Leaf, Manifest
from tpu_sync_rl.messages import Held, JobStatus, Refused, TrainerUp
from tpu_sync_rl.sampler_messages import (
    Abandon,
    Fetch,
    JobEnded,
    Latest,
    RefusalTaken,
    ReplicaRefused,
    SamplerJoined,
    SamplerOutcome,
    Took,
)
from tpu_sync_rl.trainer_messages import (
    Announced,
    GiveUp,
    JobClosed,
    Live,
    PinsKept,
    PublishOutcome,
    TrainerJoined,
)


@pytest.fixture
def world():
    return World()


def outcome(process):
    return process.last(PublishOutcome).outcome


# --- joins


def test_each_incarnation_gets_the_next_epoch(world):
    [first] = world.trainer("A")
    [second] = world.trainer("B")
    assert first.last(TrainerJoined).epoch == 1
    assert second.last(TrainerJoined).epoch == 2


def test_newer_incarnation_fences_the_older(world):
    old = world.trainer("A", 2)
    publish(old[:1], 0, 1)
    world.trainer("B")
    for process in old:
        assert process.last(Refused).error == "VersionError"
        assert "newer incarnation" in process.last(Refused).text
    with pytest.raises(VersionError, match="newer incarnation of the trainer has taken over"):
        old[0].join(epoch=1)


def test_fenced_trainer_is_heard_no_more(world):
    [old] = world.trainer("A")
    [new] = world.trainer("B")
    [sampler] = world.replica()
    old.publish(0, 1)
    assert not sampler.all(TrainerUp)
    publish([new], 0, 1)
    assert sampler.last(TrainerUp).incarnation == "B"


def test_trainer_known_to_another_coordinator_keeps_its_epoch(world):
    [trainer] = world.trainer("A")
    world.restart()
    trainer.open()
    trainer.join(epoch=7)
    assert trainer.last(TrainerJoined).epoch == 7


def test_coordinator_that_knows_a_newer_epoch_refuses_an_incarnation_it_never_saw(world):
    world.trainer("B")
    old = Trainer(world, "A", 0, 1)
    with pytest.raises(VersionError, match="taken over"):
        old.join(epoch=1)


def test_process_beyond_the_program_is_refused(world):
    [trainer] = world.trainer("A")
    other = type(trainer)(world, "A", 1, 1)
    with pytest.raises(SyncError, match="there is no process 1 of 1"):
        other.join()
    with pytest.raises(SyncError, match="trainer 'A' has 1 processes, not 2"):
        other.join(process_count=2)


@pytest.mark.parametrize(("index", "num_processes"), [(-1, 1), (0, 0), (2, 2)])
def test_impossible_process_does_not_disturb_a_replica(world, index, num_processes):
    [sampler] = world.replica()
    with pytest.raises(SyncError, match=f"process {index} of {num_processes}"):
        Sampler(world, "s", index, num_processes, "other").join()
    assert not sampler.all(Refused)


def test_join_has_to_match_the_greeting(world):
    [trainer] = world.trainer("A")
    with pytest.raises(SyncError, match="trainer 'A' joins as trainer 'B'"):
        trainer.join(incarnation="B")
    [sampler] = world.replica()
    with pytest.raises(SyncError, match="a sampler does not send GiveUp"):
        sampler.say(GiveUp(0))
    with pytest.raises(SyncError, match="a trainer does not send Took"):
        trainer.say(Took(0))


# --- publish


def test_version_is_announced_when_every_process_has_pinned_it(world):
    trainer = world.trainer(num_processes=2)
    [sampler] = world.replica()
    publish(trainer[:1], 0, 1)
    assert not trainer[0].all(Announced)
    assert not sampler.all(Latest)
    publish(trainer[1:], 0, 1)
    assert [process.last(Announced).version for process in trainer] == [1, 1]
    assert sampler.last(Latest).held == Held("A", 1)
    up = sampler.last(TrainerUp)
    assert (up.digest, up.manifest) == ("d", b"manifest")
    assert [[a.port for a in addresses] for addresses in up.sources] == [[1000], [1001]]


def test_every_sink_gets_tickets_of_its_own_to_every_trainer_process(world):
    early = world.replica("early")
    publish(world.trainer(num_processes=2), 0, 1)
    tickets = [sampler.last(TrainerUp).tickets for sampler in (*early, *world.replica("late"))]
    assert tickets == [
        [authentication.ticket(b"secret of %d" % process, sink) for process in range(2)]
        for sink in (100, 101)
    ]


def test_call_without_replicas_is_over_at_once(world):
    trainer = world.trainer(num_processes=2)
    publish(trainer, 0, 5)
    for process in trainer:
        assert outcome(process).error == ""
        assert process.last(PublishOutcome).seconds == {"pin": 0.2, "total": pytest.approx(0.2)}
        assert process.last(PublishOutcome).outcome.held == Held("A", 5)


@pytest.mark.parametrize("versions", [(1, 1), (2, 1)])
def test_version_has_to_grow(world, versions):
    trainer = world.trainer()
    publish(trainer, 0, versions[0])
    publish(trainer, 1, versions[1])
    assert outcome(trainer[0]).error == "VersionError"
    assert f"version {versions[1]} does not grow: {versions[0]}" in outcome(trainer[0]).text


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"version": 2}, "VersionError", "process 0 has version 1, process 1 2"),
        ({"digest": "e"}, "ManifestError", "process 0 has manifest 'd', process 1 'e'"),
        ({"wait": None}, "SyncError", "process 0 has wait 'received', process 1 None"),
        ({"error": "PlanError", "text": "no"}, "PlanError", "process 1: no"),
    ],
)
def test_processes_that_disagree_end_the_call_alike(world, changes, error, text):
    trainer = world.trainer(num_processes=2)
    [sampler] = world.replica()
    publish(trainer[:1], 0, 1)
    trainer[1].publish(0, **({"version": 1} | changes))
    for process in trainer:
        assert outcome(process).error == error
        assert text in outcome(process).text
    assert not sampler.all(Latest)


def test_leaves_that_processes_hold_each_for_itself_are_named(world):
    trainer = world.trainer(num_processes=2)
    for process in (0, 1):
        layout = BoxLayout((), np.zeros((1, 0, 2), np.int64), np.array([0, 1]), np.array([process]))
        manifest = Manifest((Leaf("count", "int32", 4, (), 0),), (layout,), 2)
        trainer[process].publish(0, 1, digest=manifest.digest, manifest=manifest.encoded)
    for process in trainer:
        assert outcome(process).error == "ManifestError"
        assert "'count': int32[] against the same over other devices" in outcome(process).text
        assert "jax.device_put(x, NamedSharding(mesh, P()))" in outcome(process).text


def test_manifest_can_not_change_within_an_incarnation(world):
    trainer = world.trainer()
    publish(trainer, 0, 1)
    publish(trainer, 1, 2, digest="e")
    assert outcome(trainer[0]).error == "ManifestError"
    publish(trainer, 2, 2)
    assert outcome(trainer[0]).error == ""


def test_first_call_needs_the_manifest(world):
    trainer = world.trainer()
    publish(trainer, 0, 1, manifest=None)
    assert "no process sent the manifest" in outcome(trainer[0]).text


def test_received_waits_until_every_process_of_every_replica_has_it(world):
    trainer = world.trainer()
    one, two = world.replica("one"), world.replica("two", 2)
    publish(trainer, 0, 1)
    admit(one + two)
    prepare(one, 1)
    prepare(two[:1], 1)
    assert not trainer[0].all(PublishOutcome)
    prepare(two[1:], 1)
    decided = trainer[0].last(PublishOutcome)
    assert decided.outcome.error == ""
    assert {n: (s.version, len(s.stats)) for n, s in decided.replicas.items()} == {
        "one": (1, 1),
        "two": (1, 2),
    }


def test_committed_waits_for_every_application(world):
    trainer = world.trainer()
    sampler = world.replica("s", 2)
    publish(trainer, 0, 1, wait="committed")
    admit(sampler)
    prepare(sampler, 1)
    sampler[0].take(0)
    sampler[0].took(0)
    assert not trainer[0].all(PublishOutcome)
    sampler[1].took(0)
    decided = trainer[0].last(PublishOutcome)
    assert decided.outcome.error == ""
    assert decided.replicas["s"].version == 1


def test_newer_version_satisfies_an_older_call(world):
    trainer = world.trainer()
    sampler = world.replica()
    publish(trainer, 0, 1, wait=None)
    publish(trainer, 1, 2, wait=None)
    admit(sampler)
    assert sampler[0].fetched() == [2]
    prepare(sampler, 2)
    assert [d.outcome.error for d in trainer[0].all(PublishOutcome)] == ["", ""]


def test_who_joins_during_a_call_does_not_extend_it(world):
    trainer = world.trainer()
    early = world.replica("early")
    publish(trainer, 0, 1)
    world.replica("late")
    admit(early)
    prepare(early, 1)
    assert outcome(trainer[0]).error == ""


def test_lost_replica_stands_in_the_report(world):
    trainer = world.trainer()
    one, two = world.replica("one"), world.replica("two", 2)
    publish(trainer, 0, 1)
    admit(one + two)
    prepare(one, 1)
    two[1].lose()
    assert trainer[0].last(PublishOutcome).lost == ["two"]
    assert outcome(trainer[0]).error == ""


def test_replica_that_left_is_not_lost(world):
    trainer = world.trainer()
    sampler = world.replica()
    publish(trainer, 0, 1)
    sampler[0].leave()
    assert trainer[0].last(PublishOutcome).lost == []


def test_replaced_replica_counts_as_lost(world):
    trainer = world.trainer()
    world.replica(life="one")
    publish(trainer, 0, 1)
    world.replica(life="two")
    assert trainer[0].last(PublishOutcome).lost == ["s"]


def test_timeout_says_who_lacks_what_and_the_version_stays(world):
    trainer = world.trainer(num_processes=2)
    sampler = world.replica("s", 2)
    publish(trainer, 0, 1, timeout_s=5)
    admit(sampler)
    prepare(sampler[:1], 1)
    world.pass_time(5)
    for process in trainer:
        assert outcome(process).error == "SyncTimeoutError"
        assert "replica 's' has prepared no version of this incarnation (" in outcome(process).text
        assert "(processes that have it: 1 of 2)" in outcome(process).text
    prepare(sampler[1:], 1)
    sampler[0].take(0)
    assert sampler[1].last(SamplerOutcome).outcome.held == Held("A", 1)


def test_give_up_decides_the_call_for_all_processes(world):
    trainer = world.trainer(num_processes=2)
    world.replica()
    publish(trainer, 0, 1)
    trainer[1].say(GiveUp(0))
    assert [outcome(process).error for process in trainer] == ["SyncTimeoutError"] * 2


def test_call_that_a_process_never_entered_times_out_unannounced(world):
    trainer = world.trainer(num_processes=2)
    [sampler] = world.replica()
    publish(trainer[:1], 0, 1, timeout_s=5)
    world.pass_time(5)
    assert "the trainer's process 1 of 2 has not called" in outcome(trainer[0]).text
    trainer[1].publish(0, 1)
    assert outcome(trainer[1]).error == "SyncTimeoutError"
    assert not sampler.all(Latest)


def test_versions_are_announced_in_the_order_of_calls(world):
    trainer = world.trainer()
    world.replica()
    publish(trainer, 0, 1, min_replicas=2, timeout_s=5)
    publish(trainer, 1, 2)
    assert not trainer[0].all(Announced)
    world.pass_time(5)
    assert [a.version for a in trainer[0].all(Announced)] == [2]


# --- stragglers


def test_straggler_is_waited_for_until_the_deadline_of_the_call(world):
    trainer = world.trainer()
    quick, slow = world.replica("quick"), world.replica("slow")
    publish(trainer, 0, 1, timeout_s=2 * LEASE_S)
    admit(quick + slow)
    prepare(quick, 1)
    world.pass_time(LEASE_S)
    assert slow[0].all(Abandon) and not trainer[0].all(PublishOutcome)
    world.pass_time(LEASE_S)
    assert outcome(trainer[0]).error == "SyncTimeoutError"
    assert "replica 'slow' has prepared no version" in outcome(trainer[0]).text


def test_straggler_that_is_dropped_counts_as_lost_for_that_version():
    world = World(on_straggler="drop")
    trainer = world.trainer()
    quick, slow = world.replica("quick"), world.replica("slow")
    publish(trainer, 0, 1, timeout_s=1000)
    admit(quick + slow)
    prepare(quick, 1)
    world.pass_time(LEASE_S - 1)
    assert not trainer[0].all(PublishOutcome)
    world.pass_time(1)
    assert outcome(trainer[0]).error == ""
    assert trainer[0].last(PublishOutcome).lost == ["slow"]
    publish(trainer, 1, 2)
    prepare(quick + slow, 2)
    decided = trainer[0].last(PublishOutcome)
    assert decided.lost == [] and decided.replicas["slow"].version == 2


def test_application_that_takes_its_time_is_no_straggler():
    world = World(on_straggler="drop")
    trainer, sampler = world.trainer(), world.replica()
    publish(trainer, 0, 1, timeout_s=1000, wait="committed")
    admit(sampler)
    prepare(sampler, 1)
    world.pass_time(2 * LEASE_S)
    assert not trainer[0].all(PublishOutcome)
    sampler[0].take(0)
    sampler[0].took(0)
    assert outcome(trainer[0]).error == ""
    assert trainer[0].last(PublishOutcome).lost == []


# --- min_replicas and refusals


def test_min_replicas_waits_for_that_many_admissions(world):
    trainer = world.trainer()
    one, two = world.replica("one"), world.replica("two")
    publish(trainer, 0, 1, min_replicas=2)
    admit(one)
    assert not trainer[0].all(Announced)
    admit(two)
    assert trainer[0].all(Announced)


def test_timeout_of_a_committed_call_says_what_was_taken(world):
    [trainer] = world.trainer()
    [sampler] = world.replica("s")
    publish([trainer], 0, 1)
    sampler.admit()
    sampler.prepare(1)
    sampler.take(0)
    sampler.took(0)
    publish([trainer], 1, 2, wait="committed", timeout_s=5)
    sampler.prepare(2)
    world.pass_time(5)
    assert outcome(trainer).text == (
        "version 2 stays announced, but replica 's' has taken only version 1 "
        "(version 2 is prepared and not taken)"
    )


def test_min_replicas_times_out_naming_what_is_there(world):
    trainer = world.trainer()
    one = world.replica("one")
    world.replica("two", 2)[1].lose()
    publish(trainer, 0, 1, min_replicas=2, timeout_s=5)
    admit(one)
    world.pass_time(5)
    text = outcome(trainer[0]).text
    assert outcome(trainer[0]).error == "SyncTimeoutError"
    assert "version 1 was not announced and may be published again" in text
    assert "waits for 2 replicas, 1 admitted: one" in text
    assert "'two' (process 1 of 2 is lost)" in text


def test_refused_replica_is_told_and_reported(world):
    trainer = world.trainer()
    bad, good = world.replica("bad", 2), world.replica("good")
    publish(trainer, 0, 1)
    bad[1].refuse("w: (2,) here, (3,) there")
    for process in bad:
        assert process.last(ReplicaRefused).digest == "d"
    admit(good)
    prepare(good, 1)
    assert trainer[0].last(PublishOutcome).refused == {"bad": "w: (2,) here, (3,) there"}
    assert outcome(trainer[0]).error == ""
    assert not bad[0].all(Fetch)
    bad[0].take(0)
    decided = bad[1].last(SamplerOutcome).outcome
    assert (decided.error, decided.text) == ("ManifestError", "w: (2,) here, (3,) there")


def test_refusal_that_leaves_min_replicas_unmet_waits_for_acknowledgements(world):
    trainer = world.trainer()
    bad = world.replica("bad", 2)
    publish(trainer, 0, 1, min_replicas=1)
    bad[0].refuse()
    bad[0].say(RefusalTaken("d"))
    assert not trainer[0].all(PublishOutcome)
    bad[1].say(RefusalTaken("d"))
    assert outcome(trainer[0]).error == "ManifestError"
    assert "replica 'bad': w: shape" in outcome(trainer[0]).text
    assert trainer[0].last(PublishOutcome).refused == {"bad": "w: shape"}


@pytest.mark.parametrize("how", ["lost", "lease"])
def test_refused_processes_that_do_not_acknowledge_are_not_waited_for(world, how):
    trainer = world.trainer()
    bad = world.replica("bad", 2)
    publish(trainer, 0, 1, min_replicas=1, timeout_s=1000)
    bad[0].refuse()
    bad[0].say(RefusalTaken("d"))
    if how == "lost":
        bad[1].lose()
    else:
        world.pass_time(LEASE_S)
    assert outcome(trainer[0]).error == "ManifestError"


def test_undecided_replica_may_still_meet_min_replicas(world):
    trainer = world.trainer()
    bad, slow = world.replica("bad"), world.replica("slow")
    publish(trainer, 0, 1, min_replicas=1)
    bad[0].refuse()
    bad[0].say(RefusalTaken("d"))
    assert not trainer[0].all(PublishOutcome)
    admit(slow)
    assert trainer[0].all(Announced)


def test_new_incarnation_asks_a_refused_replica_again(world):
    publish(world.trainer("A"), 0, 1)
    sampler = world.replica()
    sampler[0].refuse()
    publish(world.trainer("B"), 0, 1, digest="e")
    assert sampler[0].last(TrainerUp).digest == "e"
    sampler[0].admit("d")
    assert not sampler[0].all(Fetch)
    sampler[0].admit("e")
    assert sampler[0].last(Fetch).held == Held("B", 1)


# --- a process that could not copy what it has pinned


def test_copy_that_fails_ends_the_call_of_every_process(world):
    trainer = world.trainer(num_processes=2)
    sampler = world.replica()
    publish(trainer, 0, 1)
    admit(sampler)
    trainer[1].publish(0, 1, error="ValueError", text="no memory")
    for process in trainer:
        assert outcome(process).error == "ValueError"
        assert outcome(process).text == "process 1: no memory"
    publish(trainer, 1, 2)
    assert trainer[0].last(Announced).version == 2


def test_copy_that_fails_before_the_announcement_withdraws_the_version(world):
    trainer = world.trainer(num_processes=2)
    [sampler] = world.replica()
    publish(trainer[:1], 0, 1)
    trainer[0].publish(0, 1, error="ValueError", text="no memory")
    publish(trainer[1:], 0, 1)
    assert outcome(trainer[1]).text == "process 0: no memory"
    assert not sampler.all(Latest)


# --- loss of a trainer process


def test_loss_before_the_announcement_withdraws_the_version(world):
    trainer = world.trainer(num_processes=2)
    [sampler] = world.replica()
    publish(trainer[:1], 0, 1)
    trainer[1].lose()
    assert outcome(trainer[0]).error == "PeerLostError"
    assert "process 1 of 2 is lost" in outcome(trainer[0]).text
    assert not sampler.all(Latest)


def test_loss_after_the_announcement_ends_the_call_but_samplers_keep_the_version(world):
    trainer = world.trainer(num_processes=2)
    sampler = world.replica()
    publish(trainer, 0, 1)
    admit(sampler)
    trainer[1].lose()
    assert outcome(trainer[0]).error == "PeerLostError"
    prepare(sampler, 1)
    sampler[0].take(0)
    assert sampler[0].last(SamplerOutcome).outcome.held == Held("A", 1)


def test_process_that_comes_back_hears_how_its_call_ended(world):
    trainer = world.trainer(num_processes=2)
    world.replica()
    publish(trainer, 0, 1)
    trainer[1].lose()
    trainer[1].heard.clear()
    trainer[1].open()
    trainer[1].join(epoch=1, pinned=[1])
    kinds = [type(m) for m in trainer[1].heard]
    assert kinds[:4] == [TrainerJoined, Live, Announced, PublishOutcome]
    assert outcome(trainer[1]).error == "PeerLostError"
    publish(trainer, 1, 2)
    assert trainer[0].last(Announced).version == 2


def test_restarted_coordinator_keeps_an_outcome_that_one_process_heard_of(world):
    trainer = world.trainer(num_processes=2)
    publish(trainer, 0, 1)
    decided = trainer[0].last(PublishOutcome)
    world.restart()
    for process in trainer:
        process.open()
        process.heard.clear()
    trainer[1].join(epoch=1, call=0)
    trainer[1].publish(0, 1)
    trainer[0].join(epoch=1, call=1, outcomes=[decided])
    assert trainer[1].last(PublishOutcome) == decided


@pytest.fixture
def restarted(world):
    """A trainer and one of two replicas, back with a coordinator that another one preceded."""
    [trainer] = world.trainer()
    back, away = world.replica("back"), world.replica("away")
    publish([trainer], 0, 1)
    assert trainer.last(Live).replicas == ["away", "back"]
    world.restart()
    for process in (trainer, *back, *away):
        process.open()
        process.heard.clear()
    trainer.join(epoch=1, replicas=["away", "back"], pinned=[1])
    publish([trainer], 0, 1)
    back[0].join(sink=100)
    return trainer, back, away


def test_call_waits_for_replicas_that_the_trainer_knew_before_a_restart(restarted):
    trainer, back, away = restarted
    assert not trainer.all(Announced)
    away[0].join(sink=101)
    assert trainer.all(Announced)
    admit(back + away)
    prepare(back, 1)
    assert not trainer.all(PublishOutcome)
    prepare(away, 1)
    assert outcome(trainer).error == ""


def test_replica_that_does_not_come_back_after_a_restart_is_lost(world, restarted):
    trainer, back, _ = restarted
    world.pass_time(PATIENCE_S)
    admit(back)
    prepare(back, 1)
    assert outcome(trainer).error == ""
    assert trainer.last(PublishOutcome).lost == ["away"]


def test_deadline_of_a_call_holds_after_a_restart(world, restarted):
    trainer, _, _ = restarted
    trainer.say(GiveUp(0))
    assert outcome(trainer).error == "SyncTimeoutError"
    assert "the coordinator was restarted and waits for away" in outcome(trainer).text


def test_late_joiner_of_a_restarted_coordinator_gets_the_newest_version(world):
    [trainer] = world.trainer()
    publish([trainer], 0, 7)
    world.restart()
    trainer.open()
    trainer.heard.clear()
    trainer.join(epoch=1, call=1, digest="d", manifest=b"manifest", newest=7)
    [late] = world.replica("late")
    assert late.last(TrainerUp).digest == "d"
    assert late.last(Latest).held == Held("A", 7)
    late.admit()
    trainer.say(PinsKept(7, 1, True))
    assert late.fetched() == [7]
    late.take(0)
    late.prepare(7)
    assert late.last(SamplerOutcome).outcome.held == Held("A", 7)
    publish([trainer], 1, 7)
    assert "version 7 does not grow" in outcome(trainer).text


def test_calls_fail_at_once_when_a_process_is_gone_for_good(world):
    trainer = world.trainer(num_processes=2)
    trainer[1].lose()
    publish(trainer[:1], 0, 1, timeout_s=1000)
    assert not trainer[0].all(PublishOutcome)
    world.pass_time(PATIENCE_S)
    assert outcome(trainer[0]).error == "PeerLostError"
    publish(trainer[:1], 1, 2)
    assert outcome(trainer[0]).error == "PeerLostError"


def test_trainer_that_comes_back_goes_on_with_its_calls(world):
    [trainer] = world.trainer()
    [sampler] = world.replica()
    trainer.publish(0, 1, timeout_s=100)
    sampler.admit()
    trainer.publish(1, 2, timeout_s=100, min_replicas=2)
    trainer.lose()
    world.pass_time(2 * PATIENCE_S)
    late = world.replica("late")
    admit(late)
    assert sampler.last(Latest).held == Held("A", 1), "nobody could serve version 2"
    trainer.open()
    trainer.heard.clear()
    trainer.join(epoch=1, pinned=[1, 2])
    trainer.publish(0, 1, timeout_s=80)
    trainer.publish(1, 2, timeout_s=80, min_replicas=2)
    assert not trainer.all(PublishOutcome)
    assert trainer.last(Announced).version == 2
    prepare((sampler, *late), 1)
    prepare((sampler, *late), 2)
    assert [message.outcome.error for message in trainer.all(PublishOutcome)] == ["", ""]


def test_call_of_a_trainer_that_does_not_come_back_in_time_ends_at_its_deadline(world):
    [trainer] = world.trainer()
    trainer.publish(0, 1, timeout_s=20, min_replicas=1)
    trainer.lose()
    world.pass_time(20)
    trainer.open()
    trainer.join(epoch=1, pinned=[1])
    assert outcome(trainer).error == "SyncTimeoutError"
    text = "version 1 was not announced: the trainer's process 0 of 1 is lost"
    assert text in outcome(trainer).text


def test_process_that_left_is_not_waited_for(world):
    trainer = world.trainer(num_processes=2)
    trainer[1].leave()
    publish(trainer[:1], 0, 1)
    assert "process 1 of 2 has left" in outcome(trainer[0]).text


def test_stream_that_is_opened_twice_belongs_to_the_second(world):
    [trainer] = world.trainer()
    old = trainer.member
    trainer.open()
    trainer.join(epoch=1)
    world.job.on_lost(old, world.now)
    publish([trainer], 0, 1)
    assert outcome(trainer).error == ""


# --- the end


def test_close_waits_until_live_replicas_have_committed(world):
    trainer = world.trainer(num_processes=2)
    sampler = world.replica()
    publish(trainer, 0, 1, wait=None)
    admit(sampler)
    close(trainer)
    prepare(sampler, 1)
    assert not trainer[0].all(JobClosed)
    sampler[0].take(0)
    assert not trainer[0].all(JobClosed)
    sampler[0].took(0)
    assert trainer[0].all(JobClosed)
    assert trainer[1].all(JobClosed)
    assert sampler[0].last(JobEnded).call == 1


def test_close_waits_for_every_live_process_of_the_trainer(world):
    trainer = world.trainer(num_processes=2)
    close(trainer[:1])
    assert not trainer[0].all(JobClosed)
    trainer[1].lose()
    assert trainer[0].all(JobClosed)


def test_close_ends_at_its_timeout_and_hands_out_what_is_prepared(world):
    trainer = world.trainer()
    sampler, slow = world.replica("s", 2), world.replica("slow")
    publish(trainer, 0, 1, wait=None)
    admit(sampler + slow)
    prepare(sampler, 1)
    close(trainer, timeout_s=5)
    world.pass_time(5)
    assert trainer[0].all(JobClosed)
    assert trainer[0].last(PublishOutcome).outcome.error == "SyncError"
    for process in sampler:
        assert process.last(SamplerOutcome).outcome.held == Held("A", 1)
        assert process.last(JobEnded).call == 1
    assert slow[0].all(Abandon)
    assert slow[0].last(JobEnded).call == 0
    assert "closed job 'policy' after version 1" in slow[0].last(JobEnded).text


def test_close_does_not_hand_out_less_than_a_call_asks_for(world):
    trainer = world.trainer()
    sampler = world.replica()
    publish(trainer, 0, 1)
    admit(sampler)
    prepare(sampler, 1)
    sampler[0].take(0, min_version=2)
    close(trainer, timeout_s=5)
    world.pass_time(5)
    assert sampler[0].last(JobEnded).call == 0


def test_close_does_not_wait_for_who_can_not_get_the_version(world):
    trainer = world.trainer()
    publish(trainer, 0, 1)
    late = world.replica("late")
    admit(late)
    trainer[0].say(PinsKept(1, 1, False))
    close(trainer)
    assert trainer[0].all(JobClosed)


def test_process_that_missed_the_end_hears_of_it(world):
    trainer, sampler = world.trainer(), world.replica("s", 2)
    publish(trainer, 0, 1)
    admit(sampler)
    prepare(sampler, 1)
    sampler[1].lose()
    close(trainer)
    assert sampler[0].last(JobEnded).call == 1
    sampler[1].open()
    sampler[1].join(sink=sampler[1].sink)
    assert sampler[1].last(SamplerOutcome).outcome.held == Held("A", 1)
    assert sampler[1].last(JobEnded).call == 1
    trainer[0].lose()
    trainer[0].open()
    trainer[0].heard.clear()
    trainer[0].join(epoch=1)
    assert trainer[0].all(JobClosed)


def test_replica_that_comes_back_to_another_coordinator_after_the_end_hears_of_it(world):
    trainer, sampler = world.trainer(), world.replica("s", 2)
    publish(trainer, 0, 1)
    admit(sampler)
    prepare(sampler, 1)
    world.restart()
    trainer[0].open()
    trainer[0].join(epoch=1, call=1)
    close(trainer)
    assert trainer[0].all(JobClosed)
    for process in sampler:
        assert not process.all(JobEnded)
        sink = process.last(SamplerJoined).sink
        process.open()
        process.join(sink=sink, committed=Held("A", 1), call=1)
    for process in sampler:
        assert process.last(JobEnded).call == 1
    [new] = world.replica("new")
    assert not new.all(JobEnded)


def test_next_trainer_begins_without_the_replicas_that_were_told_of_the_end(world):
    world.replica("old")
    close(world.trainer("A"))
    [trainer] = world.trainer("B")
    new = world.replica("new")
    publish([trainer], 0, 1)
    admit(new)
    prepare(new, 1, "B")
    assert set(trainer.last(PublishOutcome).replicas) == {"new"}
    [again] = world.replica("old", life="next")
    assert again.all(TrainerUp)


def test_trainer_that_leaves_without_closing_does_not_end_the_job(world):
    trainer, sampler = world.trainer(), world.replica()
    publish(trainer, 0, 1)
    trainer[0].leave()
    assert not sampler[0].all(JobEnded)
    publish(world.trainer("B"), 0, 1)
    admit(sampler)
    assert sampler[0].last(Fetch).held == Held("B", 1)


def test_job_does_not_end_before_every_process_of_the_trainer_has_joined(world):
    first, second = (Trainer(world, "A", process, 2) for process in range(2))
    first.join()
    close([first])
    assert not first.all(JobClosed)
    second.join()
    assert not first.all(JobClosed)
    close([second])
    assert first.all(JobClosed) and second.all(JobClosed)


# --- what a doctor is told


def test_status_names_everybody_and_changes_nothing(world):
    assert world.job.status() == JobStatus(100, None, None, {}, [])
    trainer, [sampler] = world.trainer(num_processes=2), world.replica()
    publish(trainer, 0, 1)
    heard = len(sampler.heard)
    status = world.job.status()
    assert status.sink not in (100, sampler.last(SamplerJoined).sink)
    assert status.trainer.tickets[0] == authentication.ticket(b"secret of 0", status.sink)
    assert status.newest == Held("A", 1)
    assert status.replicas == {"s": ""}
    assert [(p.role, p.name, p.process_index) for p in status.processes] == [
        ("trainer", "A", 0),
        ("trainer", "A", 1),
        ("sampler", "s", 0),
    ]
    assert len(sampler.heard) == heard
