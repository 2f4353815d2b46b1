"""The trainer and sampler programs that a benchmark drives, word by word, over pipes.

Each process answers every word, so the timed part of one never meets the untimed part of another.
"""

import contextlib
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import jax

import tpu_sync_rl as tsr
from tpu_sync_rl.bench import models

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Mesh and number of processes of a program."""

    fsdp: int
    tp: int
    num_processes: int = 1

    @classmethod
    def parse(cls, mesh: str, num_processes: int) -> "Layout":
        """The layout of "FSDPxTP".

        Raises:
            ValueError: that is not its form, or the processes don't divide its devices.
        """
        sides = mesh.split("x")
        if len(sides) != 2 or not all(side.isdecimal() and int(side) for side in sides):
            raise ValueError(f"a mesh is FSDPxTP, such as 1x4, not {mesh!r}")
        layout = cls(fsdp=int(sides[0]), tp=int(sides[1]), num_processes=num_processes)
        if num_processes < 1 or layout.num_devices % num_processes:
            raise ValueError(
                f"{num_processes} processes can't share the {layout.num_devices} devices of {mesh}"
            )
        return layout

    @property
    def num_devices(self) -> int:
        """Devices of all processes."""
        return self.fsdp * self.tp

    def __str__(self) -> str:
        return f"{self.fsdp}x{self.tp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the programs sync, and how."""

    leaves: models.Model
    trainer: Layout
    sampler: Layout
    num_replicas: int = 1
    options: Mapping[str, Any]  # of connect_trainer and connect_sampler alike


@dataclass(frozen=True, slots=True)
class Sample:
    """One call of sync_weights in one process; times are of time.monotonic()."""

    began: float
    ended: float
    report: dict[str, Any]


class Programs:
    """A trainer and its samplers, running. They end when it is closed, or with this process."""

    def __init__(self, settings: Settings) -> None:
        self._exits = contextlib.ExitStack()
        self._trainers = self._start(_trainer, settings, settings.trainer, [])
        coordinator, *_ = _answers(self._trainers, "connecting the trainer")
        self._samplers = [
            pipe
            for index in range(settings.num_replicas)
            for pipe in self._start(
                _sampler, settings, settings.sampler, [coordinator, f"sampler-{index}"]
            )
        ]

    def sync(self, version: int) -> tuple[list[Sample], list[Sample]]:
        """Makes, syncs and checks `version`; samples per trainer and per sampler process.

        Raises:
            RuntimeError: bytes differ on a sampler, or a program failed.
        """
        _ask(self._trainers, "make", version)
        samples = _ask(self._samplers + self._trainers, "sync", version)
        wrong = {key for keys in _ask(self._samplers, "check", version) for key in keys}
        if wrong:
            raise RuntimeError(f"version {version} differs on a sampler in {sorted(wrong)}")
        return samples[len(self._samplers) :], samples[: len(self._samplers)]

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _start(
        self,
        role: Callable[..., None],
        settings: Settings,
        layout: Layout,
        arguments: list[str],
    ) -> list[Connection]:
        spawn = multiprocessing.get_context("spawn")
        pipes, processes = [], []
        distributed = _free_address() if layout.num_processes > 1 else None
        for index in range(layout.num_processes):
            pipe, theirs = spawn.Pipe()
            process = spawn.Process(
                target=role,
                args=(theirs, settings, distributed, index, *arguments),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(pipe)
            processes.append(process)
        # jax.distributed ends all processes of a program together: first all are told, then joined.
        for process in processes:
            self._exits.callback(process.join, TIMEOUT_S)
        for pipe in pipes:
            self._exits.callback(pipe.close)
        return pipes


def _ask(pipes: list[Connection], word: str, version: int) -> list[Any]:
    for pipe in pipes:
        pipe.send((word, version))
    return _answers(pipes, f"{word!r} of version {version}")


def _answers(pipes: list[Connection], what: str) -> list[Any]:
    try:
        return [pipe.recv() for pipe in pipes]
    except EOFError:  # its traceback stands above, on the terminal
        raise RuntimeError(f"a program failed in {what}") from None


def _words(pipe: Connection) -> Iterator[tuple[str, int]]:
    with contextlib.suppress(EOFError):
        while True:
            yield pipe.recv()


def _trainer(pipe: Connection, settings: Settings, distributed: str | None, index: int) -> None:
    mesh = _start_jax(settings.trainer, distributed, index)
    like = models.structs(settings.leaves, mesh)
    params = models.make_params(like, 0)
    with tsr.connect_trainer(
        min_replicas=settings.num_replicas, timeout=TIMEOUT_S, **settings.options
    ) as session:
        pipe.send(session.coordinator)
        for word, version in _words(pipe):
            if word == "make":
                params = models.make_params(like, version, params)
                pipe.send(None)
            else:
                began = time.monotonic()
                report = session.sync_weights(params, version=version)
                assert isinstance(report, tsr.Report)
                pipe.send(Sample(began, time.monotonic(), report.to_dict()))


def _sampler(
    pipe: Connection,
    settings: Settings,
    distributed: str | None,
    index: int,
    coordinator: str,
    replica: str,
) -> None:
    mesh = _start_jax(settings.sampler, distributed, index)
    like = models.structs(settings.leaves, mesh)
    with tsr.connect_sampler(
        coordinator=coordinator,
        replica=replica,
        like=like,
        timeout=TIMEOUT_S,
        **settings.options,
    ) as session:
        for word, version in _words(pipe):
            if word == "sync":
                began = time.monotonic()
                update = next(session)
                pipe.send(Sample(began, time.monotonic(), update.report.to_dict()))
            else:
                pipe.send(models.wrong_leaves(update.params, version))


def _start_jax(layout: Layout, distributed: str | None, index: int) -> jax.sharding.Mesh:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", layout.num_devices // layout.num_processes)
    if distributed is not None:
        jax.distributed.initialize(distributed, layout.num_processes, index)
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((layout.fsdp, layout.tp), ("fsdp", "tp"), axis_types=(auto, auto))


def _free_address() -> str:
    # jax.distributed takes a port by number only, so it can't be kept open until then.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"
