"""Where there is no thread left: who says so, what stays behind, and that later calls work."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import tpu_sync_rl as tsr
from tpu_sync_rl.messages import Held
from tpu_sync_rl.offers import Offers
from tpu_sync_rl.sampler_messages import Serve
from tpu_sync_rl.threads import start_thread

LIKE = {"w": jnp.zeros(4)}
PATIENCE_S = 20.0


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], contextlib.AbstractContextManager]:
    """Refuses the thread of a name, as the system does where there is none left."""
    start = threading.Thread.start

    @contextlib.contextmanager
    def without(name: str) -> Iterator[None]:
        refused = []

        def refusing(thread: threading.Thread) -> None:
            if thread.name != name:
                return start(thread)
            refused.append(name)
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refusing)
            yield
        assert refused, f"no thread {name} was wanted"

    return without


@pytest.fixture
def own_threads() -> Callable[[], list[str]]:
    """Names the threads of the library that have begun within the test."""
    before = set(threading.enumerate())
    return lambda: sorted(
        thread.name
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith("tsr-")
    )


def wait_for_threads(own_threads: Callable[[], list[str]], expected: list[str]) -> None:
    """Until those have ended that were told to."""
    deadline = time.monotonic() + PATIENCE_S
    while own_threads() != expected:
        assert time.monotonic() < deadline, own_threads()
        time.sleep(0.01)


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def connect(trainer: tsr.TrainerSession) -> tsr.SamplerSession:
    return tsr.connect_sampler(
        coordinator=trainer.coordinator, replica="s", like=LIKE, timeout=PATIENCE_S
    )


def test_error_says_what_to_raise(scarce):
    with scarce("tsr-test"), pytest.raises(tsr.SyncError) as raised:
        start_thread("tsr-test", lambda: None)
    assert "could start no thread (tsr-test: can't start new thread)" in str(raised.value)
    assert "`ulimit -u`" in str(raised.value) and "pids.max" in str(raised.value)


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", ["tsr-coordinator-watch", "tsr-listener", "tsr-coordinator"])
def test_trainer_that_can_not_connect_leaves_nothing_behind(scarce, own_threads, tmp_path, name):
    with tsr.connect_trainer(timeout=PATIENCE_S):
        pass  # whatever gRPC keeps is there now
    wait_for_threads(own_threads, [])
    fds = num_fds()
    with scarce(name), pytest.raises(tsr.SyncError, match="ulimit -u"):
        tsr.connect_trainer(timeout=PATIENCE_S, trace=tmp_path / "trace")
    wait_for_threads(own_threads, [])
    assert num_fds() <= fds
    with tsr.connect_trainer(timeout=PATIENCE_S) as trainer:
        tsr.sync_weights(LIKE, to=trainer)


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", ["tsr-receiver", "tsr-coordinator"])
def test_sampler_that_can_not_connect_leaves_nothing_behind(scarce, own_threads, name):
    with tsr.connect_trainer(timeout=PATIENCE_S) as trainer:
        with connect(trainer):
            pass
        threads, fds = own_threads(), num_fds()
        with scarce(name), pytest.raises(tsr.SyncError, match="ulimit -u"):
            connect(trainer)
        wait_for_threads(own_threads, threads)
        assert num_fds() <= fds
        with connect(trainer) as sampler:
            tsr.sync_weights(LIKE, to=trainer)
            assert sampler.sync_weights().version == 1


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", ["tsr-computed", "tsr-pins"])
def test_publish_works_again_when_there_are_threads(scarce, name):
    with tsr.connect_trainer(timeout=PATIENCE_S) as trainer, connect(trainer) as sampler:
        with scarce(name), pytest.raises(tsr.SyncError, match="ulimit -u"):
            tsr.sync_weights(LIKE, to=trainer)
        tsr.sync_weights(LIKE, to=trainer)
        assert sampler.sync_weights().version == 1
        with connect(trainer) as late:
            assert late.sync_weights().version == 1


def test_replica_without_a_thread_to_serve_says_that_it_does_not_serve(scarce):
    said: list[tuple[int, bool]] = []
    receiver = SimpleNamespace(
        prepared=SimpleNamespace(get=lambda _: None), trainer_keys=lambda _: None
    )
    offers = Offers(
        None, SimpleNamespace(agent="process"), None,
        coordinator="127.0.0.1:1", receiver=receiver, log=None,
        send=lambda offer: said.append((offer.ask, offer.kept)),
    )  # fmt: skip
    with scarce("tsr-offers"):
        offers.on_message(Serve(Held("incarnation", 1), [1], 7))
    assert said == [(7, False)]
    offers.on_message(Serve(Held("incarnation", 1), [1], 8))  # on its thread, which there is now
    offers.close()
    assert said == [(7, False), (8, False)]
