"""What the processes of `programs.Program` do."""

import random
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tpu_sync_rl as tsr
from tpu_sync_rl.coordinator_process import CoordinatorProcess

AXES = ("fsdp", "tp")
SPECS = oracle.ODD_LEAVES


def _mesh(shape: list[int]) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), AXES)


def _pause(rng: random.Random, most_s: float) -> None:
    if most_s:
        time.sleep(rng.random() * most_s)


def _kill_now_and_then(coordinator: CoordinatorProcess, times: int) -> None:
    rng = random.Random(0)
    for _ in range(times):
        time.sleep(0.2 + rng.random())
        coordinator._process.kill()


def trainer(
    *,
    address_file: str,
    mesh: list[int],
    versions: list[int],
    min_replicas: int,
    wait: str | None = "received",
    most_pause_s: float = 0.0,
    die_after: int | None = None,
    commit: Any = "replica",
    coordinator_dies: int = 0,
    agent: Any = "auto",
    staging: Any = "auto",
) -> Any:
    """Publishes `versions`; what came of each, as (version, replicas, lost).

    Meanwhile its coordinator dies `coordinator_dies` times.
    """
    grid = _mesh(mesh)
    rng = random.Random(jax.process_index())
    session = tsr.connect_trainer(
        min_replicas=min_replicas, timeout=60, commit=commit, agent=agent, staging=staging
    )
    if session._coordinator_process is not None:
        killing = (session._coordinator_process, coordinator_dies)
        threading.Thread(target=_kill_now_and_then, args=killing, daemon=True).start()
    if jax.process_index() == 0:
        programs.write_file(Path(address_file), session.coordinator)
    reports: list[Any] = []
    with session:
        for version in versions:
            params = oracle.params(SPECS, grid, version)
            _pause(rng, most_pause_s)
            done = tsr.sync_weights(params, to=session, version=version, wait=wait)
            report = done.result() if wait is None else done
            reports.append([report.version, dict(report.replicas), list(report.lost)])
            if version == die_after:
                raise SystemExit("as the test wants it")
    return reports


def sampler(
    *,
    address_file: str,
    replica: str,
    mesh: list[int],
    most_pause_s: float = 0.0,
    min_versions: int = 0,
    verify: Any = "wire",
    agent: Any = "auto",
    staging: Any = "auto",
) -> Any:
    """Takes every version until the trainer has closed; checks every byte; the versions taken."""
    grid = _mesh(mesh)
    rng = random.Random(100 + jax.process_index())
    address = programs.wait_for_file(Path(address_file))
    taken = []
    with tsr.connect_sampler(
        coordinator=address,
        replica=replica,
        like=oracle.like(SPECS, grid),
        timeout=60,
        verify=verify,
        agent=agent,
        staging=staging,
    ) as session:
        for update in session:
            oracle.assert_equal(update.params, SPECS, update.version, grid)
            taken.append(update.version)
            _pause(rng, most_pause_s)
    assert len(taken) >= min_versions
    return taken


def diverged_trainer(*, address_file: str) -> Any:
    """Publishes a replicated leaf that each process has otherwise, then equal ones; the failure."""
    mesh = Mesh(np.array(jax.devices()), ("dp",))

    def params(value: float) -> Any:
        part = jax.device_put(np.full((64, 8), value, np.float32), jax.local_devices()[0])
        sharding = NamedSharding(mesh, P())
        return {"w": jax.make_array_from_single_device_arrays((64, 8), sharding, [part])}

    with tsr.connect_trainer(min_replicas=1, timeout=60) as session:
        if jax.process_index() == 0:
            programs.write_file(Path(address_file), session.coordinator)
        try:
            tsr.sync_weights(params(jax.process_index()), to=session)
        except tsr.CorruptionError as error:
            tsr.sync_weights(params(0), to=session)
            return str(error)
    return None


def idle_trainer(
    *, address_file: str, ready_file: str, address: str | None, version: int, **options: Any
) -> Any:
    """Publishes one version, says so, and stays until it is killed."""
    grid = _mesh([2, 2])
    options = {"min_replicas": 1, "timeout": 60, **options}
    with tsr.connect_trainer(coordinator=address, **options) as session:
        programs.write_file(Path(address_file), session.coordinator)
        params = oracle.params(SPECS, grid, version)
        tsr.sync_weights(params, to=session, version=version)
        programs.write_file(Path(ready_file), session.incarnation)
        time.sleep(120)


def idle_sampler(*, address: str, replica: str, ready_file: str) -> Any:
    """Takes one version, says so, and stays until it is killed."""
    grid = _mesh([1, 4])
    like = oracle.like(SPECS, grid)
    with tsr.connect_sampler(
        coordinator=address, replica=replica, like=like, timeout=60
    ) as session:
        update = session.sync_weights()
        assert update is not None
        if jax.process_index() == 0:
            programs.write_file(Path(ready_file), str(update.version))
        time.sleep(120)


def waiting_sampler(*, address: str, ready_file: str) -> Any:
    """Waits for a version that never comes; when it was interrupted, by time.monotonic()."""
    grid = _mesh([1, 4])
    like = oracle.like(SPECS, grid)
    with tsr.connect_sampler(
        coordinator=address, replica="waiting", like=like, timeout=60
    ) as session:
        try:
            programs.write_file(Path(ready_file), "waiting")
            session.sync_weights()
        except KeyboardInterrupt:
            return time.monotonic()
    return None


def alone(*, side: str, done_file: str) -> Any:
    """Process 0 connects twice while the other one does not: how it fails, and after how long."""
    if jax.process_index() == 1:
        programs.wait_for_file(Path(done_file))
        return None
    failures = []
    for timeout_s in (2, 3600):
        began = time.monotonic()
        try:
            if side == "trainer":
                tsr.connect_trainer(timeout=timeout_s)
            else:
                like = oracle.like(SPECS, _mesh([1, 4]))
                address = "127.0.0.1:1"
                tsr.connect_sampler(coordinator=address, replica="s", like=like, timeout=timeout_s)
        except tsr.SyncTimeoutError as error:
            failures.append([time.monotonic() - began, str(error)])
    programs.write_file(Path(done_file), "done")
    return failures


def guarded() -> Any:
    """Connects both sides and syncs where JAX lets nobody transfer; what arrived in each shard."""
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    values = np.arange(8, dtype=np.float32)
    params = {"w": jax.make_array_from_callback(values.shape, rows, lambda index: values[index])}
    # What each process holds is compared, too, here in a copy.
    everywhere, narrow = NamedSharding(rows.mesh, P()), values.astype(jnp.int4)
    params["all"] = jax.make_array_from_callback(narrow.shape, everywhere, lambda _: narrow)
    jax.config.update("jax_transfer_guard", "disallow_explicit")
    with (
        tsr.connect_trainer(timeout=60) as trainer,
        tsr.connect_sampler(
            coordinator=trainer.coordinator, replica="s", like=params, timeout=60
        ) as sampler,
    ):
        tsr.sync_weights(params, to=trainer)
        synced = sampler.sync_weights().params
    jax.config.update("jax_transfer_guard", "allow")
    for shard in synced["all"].addressable_shards:
        np.testing.assert_array_equal(shard.data, narrow)
    return [np.asarray(shard.data).tolist() for shard in synced["w"].addressable_shards]


def agent_client() -> Any:
    """Syncs from the devices of process 0 to those of process 1 and back; what arrived."""
    devices = np.array(jax.devices()).reshape(2, 2)
    first, second = (NamedSharding(Mesh(half, ("x",)), P("x")) for half in devices)
    arrived = []
    for source, sink, value in ((first, second, 1.0), (second, first, 2.0)):
        data = np.full((8,), value, np.float32)
        array = jax.make_array_from_callback(
            (8,), source, lambda i, data=data: data[i], dtype=data.dtype
        )
        synced = tsr.sync_weights({"w": array}, to=sink, agent="colocated")["w"]
        assert synced.sharding == sink
        for shard in synced.addressable_shards:
            assert (np.asarray(shard.data) == value).all()
        arrived.append(value)
    tsr.release_memory()
    return arrived


def agents_left_open() -> Any:
    """Syncs by agents of every kind, and closes none of them."""
    global _left_open
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    tree = {"w": jax.device_put(np.ones((8, 8), np.float32), rows)}
    synced = tsr.sync_weights(tree, to=rows, agent="colocated")
    trainer = tsr.connect_trainer(agent="colocated")
    sampler = tsr.connect_sampler(
        coordinator=trainer.coordinator, replica="sampler", like=synced, agent="colocated"
    )
    tsr.sync_weights(synced, to=trainer)
    _left_open = [trainer, sampler]
    return sampler.sync_weights().version
