"""Trainer and samplers in one process, each session with a mesh of its own."""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tpu_sync_rl as tsr
from tpu_sync_rl import rails, receiver, same_host
from tpu_sync_rl.coordinator_process import start_coordinator
from tpu_sync_rl.feed import Feed
from tpu_sync_rl.receiver import Receiver
from tpu_sync_rl.sampler_messages import LeaveCall

pytestmark = pytest.mark.end_to_end

AXES = ("fsdp", "tp")
SPECS = oracle.ODD_LEAVES


def mesh(first: int, shape: tuple[int, int]) -> Mesh:
    count = shape[0] * shape[1]
    return Mesh(np.array(jax.devices()[first : first + count]).reshape(shape), AXES)


TRAINER = mesh(0, (2, 2))
SAMPLER = mesh(4, (1, 4))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def trainer() -> Iterator[tsr.TrainerSession]:
    with tsr.connect_trainer(timeout=20) as session:
        yield session


def connect(trainer: tsr.TrainerSession, replica: str = "sampler-0", **options):
    options = {"replica": replica, "like": oracle.like(SPECS, SAMPLER), "timeout": 20, **options}
    return tsr.connect_sampler(coordinator=trainer.coordinator, **options)


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """A signal handler raises InterruptedError in whatever this thread waits for."""

    def interrupt(*_: object) -> None:
        raise InterruptedError

    former = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def publish(trainer: tsr.TrainerSession, version: int | None, **options):
    params = oracle.params(SPECS, TRAINER, version or 0, column_major=["embed/table"])
    return tsr.sync_weights(params, to=trainer, version=version, **options)


def test_every_byte_of_every_version_arrives(trainer, pool):
    with connect(trainer) as sampler:
        for version in (0, 1, 7):
            report = publish(trainer, version)
            update = sampler.sync_weights()
            assert update.version == version == report.version
            assert update.incarnation == trainer.incarnation == report.incarnation
            assert update.epoch == report.epoch == update.report.epoch > 0
            assert sampler.current is update and sampler.latest_version == version
            assert report.replicas == {"sampler-0": version}
            oracle.assert_equal(update.params, SPECS, version, SAMPLER)


def test_reports_tell_what_a_version_took(trainer):
    with connect(trainer) as sampler:
        reports = [publish(trainer, version) for version in (1, 2)]
        received = sampler.sync_weights().report
        for report in reports:
            json.dumps(report.to_dict())
            assert report.nbytes == sum(
                oracle.value(key, spec, 0).nbytes for key, spec in SPECS.items()
            )
            assert 0 <= report.seconds["pin"] < report.seconds["total"] < 20
            assert report.gbytes_per_s == report.wire_nbytes / report.seconds["total"] / 1e9
            # One process sends what the one replica receives.
            assert report.wire_nbytes == received.wire_nbytes
            assert {"plan", "wait", "wire", "checksum", "scatter", "arrays"} < report.seconds.keys()
            local = report.local
            assert {"gather", "checksum", "send", "wire"} < local.seconds.keys()
            assert local.nbytes >= report.nbytes
            for rails in (report.rails, local.rails, received.rails):
                assert rails["shm"].nbytes == report.wire_nbytes
                assert rails["shm"].seconds > 0
        assert reports[0].seconds["plan"] > reports[1].seconds["plan"] == 0.0
        seconds = received.seconds
        stages_s = sum(seconds[stage] for stage in ("wait", "wire", "arrays"))
        assert stages_s == pytest.approx(seconds["total"])
        assert seconds["checksum"] + seconds["receive"] + seconds["scatter"] > 0
        assert received.local == received


def test_traces_of_both_sides_have_a_track_per_stream(tmp_path):
    with (
        tsr.connect_trainer(timeout=20, same_host="tcp", trace=tmp_path / "source") as trainer,
        connect(trainer, trace=tmp_path / "sink") as sampler,
    ):
        report = publish(trainer, 1)
        sampler.sync_weights()
    for side, stages in (("source", {"compute", "pin"}), ("sink", {"wait", "wire", "arrays"})):
        events = json.loads((tmp_path / side).read_text())
        names = {x["tid"]: x["args"]["name"] for x in events if x["name"] == "thread_name"}
        slices = [event for event in events if event["ph"] == "X"]
        assert {x["name"] for x in slices if names[x["tid"]] == "stages"} == stages
        chunks = [x for x in slices if names[x["tid"]].startswith("lo-lo stream ")]
        assert sum(chunk["args"]["nbytes"] for chunk in chunks) == report.wire_nbytes
        assert len(chunks) + len(stages) == len(slices)


def test_processes_of_one_host_share_memory(trainer):
    with connect(trainer) as sampler:
        report = publish(trainer, 1)
        update = sampler.sync_weights()
        oracle.assert_equal(update.params, SPECS, 1, SAMPLER)
        assert report.rails.keys() == update.report.rails.keys() == {"shm"}


@pytest.mark.parametrize("side", ["trainer", "sampler"])
def test_same_host_is_by_tcp_where_one_side_wants_it(side):
    options = {"trainer": {}, "sampler": {}}
    options[side]["same_host"] = "tcp"
    with (
        tsr.connect_trainer(timeout=20, **options["trainer"]) as trainer,
        connect(trainer, **options["sampler"]) as sampler,
    ):
        report = publish(trainer, 1)
        oracle.assert_equal(sampler.sync_weights().params, SPECS, 1, SAMPLER)
        assert report.rails.keys() == {"lo-lo"}


def test_memory_out_of_reach_is_made_up_for_by_nics(trainer, monkeypatch):
    monkeypatch.setattr(same_host, "name", lambda _: "\0nobody")
    with connect(trainer) as sampler:
        report = publish(trainer, 1)
        oracle.assert_equal(sampler.sync_weights().params, SPECS, 1, SAMPLER)
        assert report.rails.keys() == {"lo-lo"}


def test_params_may_not_change_their_leaves(trainer):
    publish(trainer, 1)
    params = oracle.params(SPECS, TRAINER, 2)
    params["odd/count"] = jax.device_put(jnp.zeros((2,), jnp.int32), params["odd/count"].sharding)
    params["odd/mask"] = jax.device_put(params["odd/mask"], NamedSharding(TRAINER, P()))
    with pytest.raises(tsr.ManifestError) as raised:
        tsr.sync_weights(params, to=trainer)
    assert "'odd/count': int32[] against int32[2]" in str(raised.value)
    assert "'odd/mask': bool[4, 12] against the same over other devices" in str(raised.value)
    assert publish(trainer, 2).version == 2


def test_sampler_that_joins_before_the_trainer_waits_for_it(pool):
    with tsr.connect_trainer(timeout=20) as first:
        address = first.coordinator
    sampler = pool.submit(
        lambda: tsr.connect_sampler(
            coordinator=address, replica="s", like=oracle.like(SPECS, SAMPLER), timeout=30
        )
    )
    with tsr.connect_trainer(coordinator=address, min_replicas=1, timeout=30) as trainer:
        publish(trainer, 3)
        with sampler.result() as session:
            update = session.sync_weights()
            assert update.version == 3
            oracle.assert_equal(update.params, SPECS, 3, SAMPLER)


def test_late_joiner_gets_the_living_version(trainer):
    params = oracle.params(SPECS, TRAINER, 5)
    tsr.sync_weights(params, to=trainer, version=5)
    with connect(trainer) as sampler:
        oracle.assert_equal(sampler.sync_weights().params, SPECS, 5, SAMPLER)


def test_donating_after_a_sync_changes_nothing_that_samplers_read(trainer):
    sharding = NamedSharding(TRAINER, P("fsdp", "tp"))
    like = {
        "w": jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=NamedSharding(SAMPLER, P("tp")))
    }
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    w = jax.device_put(jnp.zeros((512, 512)), sharding)
    with connect(trainer, like=like) as sampler:
        for version in range(1, 6):
            w = step(w)
            handle = tsr.sync_weights({"w": w}, to=trainer, wait=None)
            expected = np.asarray(w).copy()
            w = step(w)
            report = handle.result(20)
            assert report.version == version == handle.version and handle.done()
            update = sampler.sync_weights(min_version=version)
            assert (np.asarray(update.params["w"]) == expected).all()


def test_updates_stay_whole_while_newer_ones_arrive(trainer):
    with connect(trainer, max_generations=4) as sampler:
        held = []
        for version in (1, 2, 3):
            publish(trainer, version)
            held.append(sampler.sync_weights())
        for update in held:
            oracle.assert_equal(update.params, SPECS, update.version, SAMPLER)
    for update in held:
        oracle.assert_equal(update.params, SPECS, update.version, SAMPLER)


def test_arrays_of_the_next_version_are_made_while_it_is_awaited(trainer, monkeypatch):
    with connect(trainer) as sampler:
        made = threading.Event()
        prepare = sampler._pool.prepare

        def observed(until):
            prepare(until)
            made.set()

        monkeypatch.setattr(sampler._pool, "prepare", observed)
        for version in (1, 2):
            publish(trainer, version)
            sampler.sync_weights()
        assert sampler.sync_weights(wait=False) is None
        assert made.wait(20)
        beforehand = [array for array in sampler._pool._prepared._arrays if array is not None]
        publish(trainer, 3)
        update = sampler.sync_weights()
        oracle.assert_equal(update.params, SPECS, 3, SAMPLER)
        handed_out = {id(leaf) for leaf in jax.tree.leaves(update.params)}
        assert beforehand and {id(array) for array in beforehand} <= handed_out


def test_iteration_stops_when_the_trainer_closed(pool):
    with tsr.connect_trainer(timeout=20, min_replicas=1) as trainer:
        session = connect(trainer)
        seen = pool.submit(lambda: [update.version for update in session])
        for version in (1, 2, 3):
            publish(trainer, version, wait="committed")
    assert seen.result(20) == [1, 2, 3]
    with pytest.raises(tsr.JobEndedError):
        session.sync_weights(timeout=5)
    session.close()


def test_sampler_that_finds_nothing_newer_returns_none_or_times_out(trainer):
    with connect(trainer) as sampler:
        assert sampler.sync_weights(wait=False) is None
        with pytest.raises(tsr.SyncTimeoutError, match=r"sampler-0|trainer|announced"):
            sampler.sync_weights(timeout=0.2)
        publish(trainer, 1)
        first = sampler.sync_weights()
        assert sampler.sync_weights(wait=False) is None
        with pytest.raises(TimeoutError):
            sampler.sync_weights(timeout=0.2)
        assert sampler.current is first
        oracle.assert_equal(first.params, SPECS, 1, SAMPLER)


MISMATCHES: dict[str, tuple[Callable[[dict], dict], str]] = {
    "a key the trainer lacks": (
        lambda like: {**like, "extra": like["odd/scalar"]},
        r"'extra'.*the trainer has no such leaf",
    ),
    "a key the sampler lacks": (
        lambda like: {k: v for k, v in like.items() if k != "odd/mask"},
        r"'odd/mask'.*the sampler has no such leaf",
    ),
    "another shape": (
        lambda like: {
            **like,
            "block/bias": jax.ShapeDtypeStruct(
                (52,), jnp.float16, sharding=NamedSharding(SAMPLER, P())
            ),
        },
        r"'block/bias': shape \[48\] on the trainer, \[52\] on the sampler",
    ),
    "another dtype": (
        lambda like: {
            **like,
            "embed/table": jax.ShapeDtypeStruct(
                (64, 32), jnp.bfloat16, sharding=NamedSharding(SAMPLER, P())
            ),
        },
        r"'embed/table': dtype float32 on the trainer, bfloat16 on the sampler",
    ),
}


@pytest.mark.parametrize("change, message", MISMATCHES.values(), ids=MISMATCHES.keys())
def test_mismatched_replica_is_refused_and_harms_nobody(trainer, change, message):
    with (
        connect(trainer, "good") as good,
        connect(trainer, "bad", like=change(oracle.like(SPECS, SAMPLER))) as bad,
    ):
        for version in (1, 2):
            report = publish(trainer, version)
            assert report.replicas == {"good": version}
            assert list(report.refused) == ["bad"]
            oracle.assert_equal(good.sync_weights().params, SPECS, version, SAMPLER)
            with pytest.raises(tsr.ManifestError, match=message):
                bad.sync_weights(timeout=5)


def test_unmet_min_replicas_raises_what_was_refused(pool):
    with tsr.connect_trainer(timeout=20, min_replicas=1) as trainer:
        like = {
            "only": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(SAMPLER, P()))
        }
        with connect(trainer, like=like), pytest.raises(tsr.ManifestError, match="'only'"):
            publish(trainer, 1)


def test_cast_and_rename_on_the_way(trainer):
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    params = {"layer": {"w": jax.device_put(w, NamedSharding(TRAINER, P("fsdp", "tp")))}}
    like = {
        "kernel": jax.ShapeDtypeStruct(
            (64, 64), jnp.bfloat16, sharding=NamedSharding(SAMPLER, P("tp"))
        )
    }
    with connect(trainer, like=like, cast=True, rename={"layer/w": "kernel"}) as sampler:
        tsr.sync_weights(params, to=trainer)
        update = sampler.sync_weights()
        assert update.version == 1
        found = np.asarray(update.params["kernel"])
        assert found.tobytes() == np.asarray(params["layer"]["w"].astype(jnp.bfloat16)).tobytes()
        assert update.report.wire_nbytes == 64 * 64 * 2


def test_versions_must_grow(trainer):
    params = oracle.params(SPECS, TRAINER, 0)
    assert tsr.sync_weights(params, to=trainer, version=4).version == 4
    with pytest.raises(tsr.VersionError, match="version 4 does not grow: 4 was published"):
        tsr.sync_weights(params, to=trainer, version=4)
    with pytest.raises(ValueError, match="version must be from 0"):
        tsr.sync_weights(params, to=trainer, version=-1)
    with pytest.raises(TypeError, match="version must be an int"):
        tsr.sync_weights(params, to=trainer, version=1.5)
    assert tsr.sync_weights(params, to=trainer).version == 5


def test_second_session_of_a_replica_fences_the_first(trainer):
    with connect(trainer) as first, connect(trainer) as second:
        publish(trainer, 1)
        assert second.sync_weights().version == 1
        with pytest.raises(tsr.VersionError):
            first.sync_weights(timeout=5)


def test_newer_incarnation_fences_the_older(trainer):
    with connect(trainer) as sampler:
        publish(trainer, 9)
        assert sampler.sync_weights().version == 9
        with tsr.connect_trainer(
            coordinator=trainer.coordinator, host_coordinator=False, timeout=20
        ) as newer:
            publish(newer, 2)
            update = sampler.sync_weights()
            assert (update.version, update.incarnation) == (2, newer.incarnation)
            with pytest.raises(tsr.VersionError):
                publish(trainer, 10)


def test_stranger_without_the_token_is_refused():
    with tsr.connect_trainer(token="secret", timeout=20) as trainer:
        for token in (None, "wrong"):
            with pytest.raises(tsr.AuthError):
                connect(trainer, token=token)
        with connect(trainer, token="secret") as sampler:
            publish(trainer, 1)
            oracle.assert_equal(sampler.sync_weights().params, SPECS, 1, SAMPLER)


def test_busy_address_is_said(trainer):
    with pytest.raises(tsr.SyncError, match="in use"):
        tsr.connect_trainer(coordinator=trainer.coordinator, timeout=10)


def test_third_version_waits_for_a_pin(trainer):
    with connect(trainer) as sampler:
        for version in range(1, 20):
            publish(trainer, version, wait=None)
        update = sampler.sync_weights(min_version=19)
        oracle.assert_equal(update.params, SPECS, 19, SAMPLER)


def test_sessions_show_their_place_and_version(trainer):
    incarnation, address = trainer.incarnation, trainer.coordinator
    with connect(trainer) as sampler:
        assert repr(sampler) == (
            f"SamplerSession(job='policy', replica='sampler-0', coordinator='{address}', "
            "version=None)"
        )
        publish(trainer, 3)
        sampler.sync_weights()
        assert repr(sampler).endswith("version=3)")
        assert repr(trainer) == (
            f"TrainerSession(job='policy', incarnation='{incarnation}', coordinator='{address}', "
            "version=3)"
        )


def test_timeout_without_a_coordinator_says_who_gave_no_answer(monkeypatch):
    monkeypatch.setenv("TSR_TOKEN", "a very secret token")
    process = start_coordinator(
        "127.0.0.1", 0, token=b"a very secret token", peer_timeout=10, insecure=False
    )
    like = oracle.like(SPECS, SAMPLER)
    try:
        sampler = tsr.connect_sampler(coordinator=process.address, replica="s", like=like)
    finally:
        process.stop()
    with sampler, pytest.raises(tsr.SyncTimeoutError) as error:
        sampler.sync_weights(timeout=0.2)
    address = process.address
    assert str(error.value).startswith(
        f"no version for replica 's' within 0.2 s: no answer from coordinator {address}: "
    )
    assert str(error.value).endswith("; it is dialled again; the current version is None")


def test_version_that_was_never_announced_may_be_published_again(pool):
    with tsr.connect_trainer(timeout=20, min_replicas=1) as trainer:
        for _ in range(2):
            with pytest.raises(tsr.SyncTimeoutError, match="it waits for 1 replica, 0 admitted"):
                publish(trainer, 0, timeout=0.2)
        with connect(trainer) as sampler:
            publish(trainer, 0)
            oracle.assert_equal(sampler.sync_weights().params, SPECS, 0, SAMPLER)


def test_refused_leaves_are_named_and_use_up_no_version(trainer):
    params = oracle.params(SPECS, TRAINER, 1)
    deleted = {**params, "odd/mask": params["odd/mask"].copy()}
    deleted["odd/mask"].delete()
    with pytest.raises(ValueError, match="'odd/mask' has been deleted"):
        tsr.sync_weights(deleted, to=trainer)
    with pytest.raises(TypeError, match="'odd/scalar' is a float"):
        tsr.sync_weights({**params, "odd/scalar": 1.0}, to=trainer)
    assert tsr.sync_weights(params, to=trainer).version == 1


def test_rename_that_raises_is_what_the_call_raises(trainer):
    def rename(key: str) -> str:
        raise KeyError("no name for " + key)

    with connect(trainer, rename=rename) as sampler:
        assert list(publish(trainer, 1).refused) == ["sampler-0"]
        with pytest.raises(tsr.ManifestError, match="KeyError: 'no name for"):
            sampler.sync_weights()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is cleared, no step comes to its end."""
    event = threading.Event()
    event.set()
    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", lambda _: event.wait(20))
        yield event
        event.set()


def test_deadline_holds_while_params_are_computed(trainer, computed):
    params = oracle.params(SPECS, TRAINER, 1)
    computed.clear()
    with pytest.raises(tsr.SyncTimeoutError, match="being computed"):
        tsr.sync_weights(params, to=trainer, timeout=0.2)


def test_interrupted_call_announces_nothing(trainer, computed):
    params = oracle.params(SPECS, TRAINER, 2)
    with connect(trainer) as sampler:
        publish(trainer, 1)
        computed.clear()
        main = (
            threading.get_ident()
        )  # a signal to another thread would not end the wait of this one
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            tsr.sync_weights(params, to=trainer, version=2)
        computed.set()
        tsr.sync_weights(params, to=trainer, version=2)
        assert sampler.sync_weights().version == 2 == sampler.latest_version
        oracle.assert_equal(sampler.current.params, SPECS, 2, SAMPLER)


def test_sampler_without_threads_for_a_while_gets_versions_afterwards(trainer, monkeypatch):
    failures = iter([tsr.SyncError("thread: Resource temporarily unavailable"), MemoryError()])

    class ScarceFeed(Feed):
        def __init__(self, *args: object, **options: object) -> None:
            failure = next(failures, None)
            if failure is not None:
                raise failure
            super().__init__(*args, **options)

    monkeypatch.setattr(receiver, "Feed", ScarceFeed)
    with connect(trainer) as sampler:
        publish(trainer, 1)
        oracle.assert_equal(sampler.sync_weights().params, SPECS, 1, SAMPLER)
    assert next(failures, None) is None


def test_timeout_says_that_older_params_leave_no_memory(trainer):
    with connect(trainer, max_generations=2) as sampler:
        held = []
        for version in (1, 2):
            publish(trainer, version)
            held.append(sampler.sync_weights())
        publish(trainer, 3, wait=None)
        text = (
            "process 0 has no memory for it: the application still holds older params in all of "
            r"max_generations \(2\): arrays of versions 1, 2"
        )
        with pytest.raises(tsr.SyncTimeoutError, match=text):
            sampler.sync_weights(timeout=1)
        with pytest.raises(tsr.SyncTimeoutError, match=text):
            publish(trainer, 4, timeout=1)
        held.clear()
        assert sampler.sync_weights().version == 3


@pytest.mark.parametrize("is_heard", [True, False])
def test_call_after_an_interrupted_one_has_its_own_deadline(trainer, monkeypatch, is_heard):
    with connect(trainer) as sampler:
        send = sampler._client.send
        if not is_heard:  # as where the coordinator has decided at that very moment
            monkeypatch.setattr(
                sampler._client, "send", lambda x: isinstance(x, LeaveCall) or send(x)
            )
        with interrupted_after(0.2), pytest.raises(InterruptedError):
            sampler.sync_weights(timeout=0.5)
        time.sleep(0.5)  # its deadline passes
        publish(trainer, 1, wait=None)
        oracle.assert_equal(sampler.sync_weights(timeout=20).params, SPECS, 1, SAMPLER)


def test_fencing_ends_a_publish_that_waits_for_a_pin(trainer, pool):
    with connect(trainer, max_generations=2) as sampler:
        held = []
        for version in (1, 2):
            publish(trainer, version)
            held.append(sampler.sync_weights())
        for version in (3, 4):
            publish(trainer, version, wait=None)
        waiting = pool.submit(publish, trainer, 5)
        with (
            tsr.connect_trainer(
                coordinator=trainer.coordinator, host_coordinator=False, timeout=20
            ),
            pytest.raises(tsr.VersionError, match="newer incarnation"),
        ):
            waiting.result(10)


def test_transfers_that_fail_leave_their_memory_to_the_next_ones(trainer, monkeypatch):
    failures = iter(range(3))

    def fail(*_: object) -> None:
        if next(failures, None) is not None:
            raise tsr.PeerLostError("as the test wants it")

    wait = Receiver._wait
    monkeypatch.setattr(Receiver, "_wait", lambda *args: (fail(), wait(*args)))
    with connect(trainer, max_generations=2) as sampler:
        publish(trainer, 1)
        oracle.assert_equal(sampler.sync_weights().params, SPECS, 1, SAMPLER)
    assert next(failures, None) is None


def test_closing_a_sampler_does_not_wait_for_its_dialling(trainer, monkeypatch):
    dialled, release, ended = threading.Event(), threading.Event(), threading.Event()

    def dial(*_: object, **__: object) -> int:
        dialled.set()
        release.wait(20)
        ended.set()
        raise tsr.PeerLostError("as the test wants it")

    monkeypatch.setattr(rails, "dial", dial)
    with connect(trainer):
        publish(trainer, 1, wait=None)
        assert dialled.wait(20)
    assert not ended.is_set()
    release.set()


@pytest.mark.parametrize(
    "wrong",
    [
        {"rename": 3},
        {"max_generations": 1},
        {"max_generations": 2.5},
        {"replica": ""},
        {"nics": ["eth77"]},
    ],
)
def test_options_of_a_sampler_are_checked(trainer, wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        connect(trainer, **wrong)


def test_nics_of_a_trainer_are_checked_where_loopback_needs_none_too():
    with pytest.raises(ValueError, match="nics: 'eth77' is no NIC with an address, and no address"):
        tsr.connect_trainer(timeout=20, nics=["eth77"])


def test_version_stays_within_64_bits(trainer):
    params = oracle.params(SPECS, TRAINER, 1)
    assert tsr.sync_weights(params, to=trainer, version=2**63 - 1).version == 2**63 - 1
    with pytest.raises(ValueError, match="version must be from 0 to 2"):
        tsr.sync_weights(params, to=trainer)


def test_last_version_of_an_ended_job_is_not_newer_than_it_is():
    with tsr.connect_trainer(timeout=20, min_replicas=1) as trainer:
        sampler = connect(trainer)
        publish(trainer, 1)
        trainer.close(timeout=0)
    with sampler:
        with pytest.raises(
            tsr.JobEndedError, match=r"after version 1.*min_version=7 will not come"
        ):
            sampler.sync_weights(min_version=7)
        assert sampler.sync_weights(min_version=1).version == 1
        with pytest.raises(tsr.JobEndedError):
            sampler.sync_weights()
