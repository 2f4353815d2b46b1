"""The trainer and sampler programs that a benchmark drives, word by word, over pipes.

Each process answers every word, so the timed part of one never meets the untimed part of another.
One pair of programs runs several cases in turn, each as a job of its own, so that figures that are
compared come from the same processes.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import jax

import tpu_sync_rl as tsr
from tpu_sync_rl.bench import models, netns
from tpu_sync_rl.bench.cases import NUM_WARMUPS, Layout, Place, Sample, Settings, Sync
from tpu_sync_rl.bench.processes import Pipe, Processes, answer, cpu_s, words

TIMEOUT_S = 120.0


class Programs(Processes):
    """A trainer and its samplers, running. They end when it is closed, or with this process.

    Args:
        settings: what they sync, and how.
        there: leads to a sampler on another host, which is then the only one.
    """

    def __init__(self, settings: Settings, there: Pipe | None = None) -> None:
        super().__init__()
        cases = list(settings.cases.values())
        try:
            layouts = [case.trainer for case in cases]
            self._trainers = self._start(_trainer, settings, layouts)
            coordinator, *_ = [answer(pipe, "connecting") for pipe in self._trainers]
            self._samplers: list[Pipe] = [there] if there else []
            layouts = [case.sampler for case in cases]
            for index in range(0 if there else settings.num_replicas):
                replica = f"sampler-{index}"
                self._samplers += self._start(sampler, settings, layouts, coordinator, replica)
        except BaseException:
            self.kill()
            raise

    def sync(self, case: str, version: int, *, meanwhile: Callable[[], None] | None = None) -> Sync:
        """Makes, syncs and checks a version of a case.

        `meanwhile` is called once the trainer has been told to sync.

        Raises:
            RuntimeError: bytes differ on a sampler, or a program failed.
        """
        _ask(self._trainers, "make", case, version)
        used_s = sum(map(cpu_s, self.pids))
        _tell(self._trainers, "sync", case, version)
        if meanwhile is not None:
            meanwhile()
        trainers = [answer(pipe, f"'sync' of {case}, {version}") for pipe in self._trainers]
        samplers = [Sample(*x) for x in _ask(self._samplers, "take", case, version)]
        used_s = sum(map(cpu_s, self.pids)) - used_s
        wrong = [key for keys in _ask(self._samplers, "check", case, version) for key in keys]
        models.refuse_wrong(wrong, f"{case}: version {version} on a sampler")
        return Sync(trainers, samplers, used_s)

    def __enter__(self) -> "Programs":
        return self

    def _start(
        self,
        role: Callable[..., None],
        settings: Settings,
        layouts: Sequence[Layout],
        *arguments: str,
    ) -> list[Connection]:
        num_processes = layouts[0].num_processes
        num_devices = max(layout.num_devices for layout in layouts) // num_processes
        address = _free_address() if num_processes > 1 else None
        begins = [Begin(num_devices, address, num_processes, i) for i in range(num_processes)]
        return [self.start(role, settings, begin, *arguments) for begin in begins]


def interleaved(
    programs: Programs,
    cases: Sequence[str],
    num_rounds: int,
    limits: Mapping[str, Callable[[], float]] | None = None,
) -> tuple[dict[str, list[Sync]], dict[str, list[float]]]:
    """Syncs all cases and samples all limits in every round, one after the other.

    So a noisy machine treats them alike. The warm-ups come first and are not counted.
    """
    syncs: dict[str, list[Sync]] = {case: [] for case in cases}
    samples: dict[str, list[float]] = {limit: [] for limit in limits or {}}
    for version in range(1, NUM_WARMUPS + num_rounds + 1):
        counts = version > NUM_WARMUPS
        for limit, sample in (limits or {}).items():
            value = sample()
            if counts:
                samples[limit].append(value)
        for case in cases:
            sync = programs.sync(case, version)
            if counts:
                syncs[case].append(sync)
    return syncs, samples


def _ask(pipes: Sequence[Pipe], word: str, case: str, version: int) -> list[Any]:
    _tell(pipes, word, case, version)
    return [answer(pipe, f"{word!r} of {case}, {version}") for pipe in pipes]


def _tell(pipes: Sequence[Pipe], word: str, case: str, version: int) -> None:
    for pipe in pipes:
        pipe.send((word, case, version))


@dataclass(frozen=True, slots=True)
class Begin:
    """How a process starts JAX."""

    num_devices: int  # of its own
    distributed: str | None
    num_processes: int
    index: int


def _trainer(pipe: Connection, settings: Settings, begin: Begin) -> None:
    _start_jax(begin, settings.trainer)
    with contextlib.ExitStack() as exits:
        sessions: dict[str, tsr.TrainerSession] = {}
        likes, params = {}, {}
        coordinator = settings.trainer.coordinator
        for name, case in settings.cases.items():
            likes[name] = models.structs(case.leaves, _mesh(case.trainer), case.trainer_dtype)
            params[name] = models.make_params(likes[name], 0)
            sessions[name] = exits.enter_context(
                tsr.connect_trainer(
                    coordinator=coordinator,
                    host_coordinator=not sessions,
                    job=name,
                    min_replicas=settings.num_replicas,
                    timeout=TIMEOUT_S,
                    token=settings.token,
                    nics=settings.trainer.nics,
                    **{**settings.options, **case.options},
                )
            )
            coordinator = sessions[name].coordinator
        pipe.send(coordinator)
        for word, name, version in words(pipe):
            if word == "make":
                params[name] = models.make_params(likes[name], version, params[name])
                pipe.send(None)
            else:
                began = time.monotonic()
                report = sessions[name].sync_weights(params[name], version=version)
                assert isinstance(report, tsr.Report)
                pipe.send(Sample(began, time.monotonic(), report.to_dict()))


def sampler(pipe: Pipe, settings: Settings, begin: Begin, coordinator: str, replica: str) -> None:
    """A process of a sampler: does what the pipe says about each case and version."""
    _start_jax(begin, settings.sampler)
    with contextlib.ExitStack() as exits:
        sessions = {
            name: exits.enter_context(
                tsr.connect_sampler(
                    coordinator=coordinator,
                    job=name,
                    replica=replica,
                    like=models.structs(case.leaves, _mesh(case.sampler), case.sampler_dtype),
                    cast=case.trainer_dtype != case.sampler_dtype,
                    timeout=TIMEOUT_S,
                    token=settings.token,
                    nics=settings.sampler.nics,
                    **{**settings.options, **case.options},
                )
            )
            for name, case in settings.cases.items()
        }
        for word, name, version in words(pipe):
            if word == "take":
                began = time.monotonic()
                update = next(sessions[name])
                pipe.send(Sample(began, time.monotonic(), update.report.to_dict()))
            else:
                made_as = settings.cases[name].trainer_dtype
                pipe.send(models.wrong_leaves(update.params, version, made_as))


def _start_jax(begin: Begin, place: Place) -> None:
    if place.namespace is not None:
        netns.enter(place.namespace)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", begin.num_devices)
    if begin.distributed is not None:
        jax.distributed.initialize(begin.distributed, begin.num_processes, begin.index)


def _mesh(layout: Layout) -> jax.sharding.Mesh:
    return jax.make_mesh(
        (layout.fsdp, layout.tp),
        models.AXES,
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[: layout.num_devices],
    )


def _free_address() -> str:
    # jax.distributed takes a port by number only, so it can't be kept open until then.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"
