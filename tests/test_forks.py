"""Forks of a program that has sessions: they leave these alone, and say so."""

import gc
import json
import multiprocessing
import os
import select
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import pytest

import tpu_sync_rl as tsr
from tpu_sync_rl.generation_layout import GenerationLayout
from tpu_sync_rl.generations import ResultPool
from tpu_sync_rl.shard_table import shard_table

pytestmark = pytest.mark.end_to_end

PATIENCE_S = 20.0


@pytest.fixture
def sessions() -> Iterator[tuple[tsr.TrainerSession, tsr.SamplerSession]]:
    """A trainer and a sampler that have passed a version; afterwards they pass two more."""
    like = {"w": jnp.zeros(1000)}
    with (
        tsr.connect_trainer(timeout=PATIENCE_S) as trainer,
        tsr.connect_sampler(
            coordinator=trainer.coordinator, replica="s", like=like, timeout=PATIENCE_S
        ) as sampler,
    ):
        pass_version(trainer, sampler)
        yield trainer, sampler
        pass_version(trainer, sampler)
        pass_version(trainer, sampler)
        with tsr.connect_sampler(
            coordinator=trainer.coordinator, replica="late", like=like, timeout=PATIENCE_S
        ) as late:
            assert late.sync_weights().version == sampler.current.version


def pass_version(trainer: tsr.TrainerSession, sampler: tsr.SamplerSession) -> None:
    version = 1 if sampler.current is None else sampler.current.version + 1
    report = tsr.sync_weights({"w": jnp.full(1000, float(version))}, to=trainer, version=version)
    assert not report.lost
    assert sampler.sync_weights().params["w"][0] == version


def in_fork(run: Callable[[], object]) -> str:
    """What `run` returned in a fork of this process, or raised."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of forks
        child = os.fork()
    if child == 0:
        try:
            text = str(run())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    try:
        assert select.select([reading], [], [], PATIENCE_S)[0], "the fork hangs"
        return os.read(reading, 1 << 16).decode()
    finally:
        os.close(reading)
        os.waitpid(child, 0)


def leave(session: tsr.TrainerSession | tsr.SamplerSession, kind: type[BaseException] | None):
    session.__exit__(kind, None, None)
    return "left"


def test_fork_that_leaves_or_drops_sessions_changes_nothing(sessions):
    for session in sessions:
        for kind in (None, SystemExit):
            assert in_fork(lambda session=session, kind=kind: leave(session, kind)) == "left"
        assert in_fork(session.close) == "None"


def test_calls_in_a_fork_say_whose_session_it_is(sessions):
    trainer, sampler = sessions
    handle = tsr.sync_weights({"w": jnp.zeros(1000)}, to=trainer, wait=None)
    handle.result()
    sampler.sync_weights()
    for call in (
        lambda: trainer.sync_weights({"w": jnp.zeros(1000)}),
        sampler.sync_weights,
        lambda: next(sampler),
        handle.done,
        handle.result,
    ):
        said = in_fork(call)
        assert said.startswith(f"SyncError: the session is of process {os.getpid()}, and process")
        assert "'spawn'" in said
    assert in_fork(lambda: sampler.current.version) == str(sampler.current.version)


def test_arrays_that_die_in_a_fork_wait_for_no_thread_of_its_parent():
    like = [jnp.zeros(1000)]
    layout = GenerationLayout.of(shard_table(["w"], like, wanted=True), like, process=0)
    pool = ResultPool()
    arrays = pool.generation(layout).arrays()
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            locked.set()
            done.wait(PATIENCE_S)

    def drop() -> str:
        arrays.clear()
        gc.collect()
        return "dropped"

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait(PATIENCE_S)
    try:
        assert in_fork(drop) == "dropped"
    finally:
        done.set()
        thread.join()


def child_of_multiprocessing(session: tsr.TrainerSession) -> None:
    with session:
        pass


def test_processes_of_multiprocessing_by_fork_change_nothing(sessions):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processes = [
            multiprocessing.get_context("fork").Process(
                target=child_of_multiprocessing, args=(session,)
            )
            for session in sessions
        ]
        for process in processes:
            process.start()
    for process in processes:
        process.join(PATIENCE_S)
        assert process.exitcode == 0


# A fork that ends as a program does runs exit handlers and finalizers. Its parent has sessions in
# a module's globals, and in locals of the `with` that the fork leaves.
PROGRAM = """
import os, sys
import jax, jax.numpy as jnp
import tpu_sync_rl as tsr

like = {"w": jnp.zeros(1000)}
trainer = tsr.connect_trainer(timeout=20, trace=sys.argv[1])
sampler = tsr.connect_sampler(coordinator=trainer.coordinator, replica="s", like=like, timeout=20)
with trainer, sampler:
    for version in (1, 2, 3):
        for _ in range(2):
            tsr.sync_weights({"w": jnp.full(1000, float(version))}, to=trainer)
            assert sampler.sync_weights().params["w"][0] == version
        child = os.fork()
        if child == 0:
            if version == 1:
                sys.exit(0)
            if version == 2:
                raise SystemExit("with a text")
            del trainer, sampler
            break
        print(version, os.waitpid(child, 0)[1], flush=True)
    else:
        with tsr.connect_sampler(
            coordinator=trainer.coordinator, replica="late", like=like, timeout=20
        ) as late:
            assert late.sync_weights().version == 6
        print("parent ends", flush=True)
"""


def test_forks_that_end_as_programs_do_end_no_session(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "trace")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.stdout == "1 0\n2 256\n3 0\nparent ends\n", ran.stderr
    assert ran.returncode == 0, ran.stderr
    pids = {event["pid"] for event in json.loads((tmp_path / "trace").read_text())}
    assert len(pids) == 1
