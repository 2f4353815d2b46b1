"""A whole job on this machine: a trainer program and sampler replicas on CPU devices."""

import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_sync_rl.child_programs import ChildFailedError, ChildPrograms
from tpu_sync_rl.own_module import own_command
from tpu_sync_rl.progress import Progress, failures, summarize

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJob:
    """What to run, and for how long.

    Attributes:
        trainer_processes: processes of the trainer program.
        trainer_devices: CPU devices of each.
        sampler_replicas: replicas, of one process each.
        sampler_devices: CPU devices of each.
        steps: number of the last version.
        time_limit_s: all of it ends after that.
        log_dir: folder for the programs' logs; None for a new one, kept unless all went well.
        json_path: file for the numbers of the run; None for none.
        role_flags: arguments that every child gets.
    """

    trainer_processes: int
    trainer_devices: int
    sampler_replicas: int
    sampler_devices: int
    steps: int
    time_limit_s: float
    log_dir: str | None
    json_path: str | None
    role_flags: Sequence[str]

    @property
    def replicas(self) -> list[str]:
        """The names of the replicas."""
        return [f"sampler-{i}" for i in range(self.sampler_replicas)]


def run_local_job(job: LocalJob) -> int:
    """Runs `job` to its end, showing its progress; returns the exit status.

    That is 0 only if every version was proved bit-equal on every sampler, all samplers ended on
    the last one, and the reward rose. Blocks; whatever ends it, the children end too.
    """
    began = time.monotonic()
    log_dir = Path(job.log_dir or tempfile.mkdtemp(prefix="tpu_sync_rl-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    try:
        events, failed = _run_programs(job, log_dir, began + job.time_limit_s)
    except BaseException:  # Ctrl-C, most often.
        print(_where(log_dir), file=sys.stderr)
        raise
    summary = {
        "trainer_processes": job.trainer_processes,
        "sampler_replicas": job.sampler_replicas,
        **summarize(events, job.replicas),
        "seconds": time.monotonic() - began,
    }
    if job.json_path is not None:
        Path(job.json_path).write_text(json.dumps(summary, indent=2) + "\n")
    failed = failed or failures(summary, job.steps)
    if failed:
        print("\n".join([*failed, _where(log_dir)]), file=sys.stderr)
        return 1
    if job.log_dir is None:
        shutil.rmtree(log_dir, ignore_errors=True)
    print(
        f"{summary['versions']} versions, each proved bit-equal on {job.sampler_replicas} "
        f"samplers; reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f} "
        f"(means of the first and last {summary['reward_versions']} versions); "
        f"sync {1e3 * summary['sync_seconds_median']:.1f} ms (median); "
        f"{summary['seconds']:.0f} s in all"
    )
    return 0


def _where(log_dir: Path) -> str:
    return f"the programs' logs are in {log_dir}"


def _run_programs(
    job: LocalJob, log_dir: Path, deadline: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Runs the programs of `job` to their end; their events, and what failed, if anything."""
    events: list[dict[str, Any]] = []
    title = f"{job.trainer_processes} trainer processes, {job.sampler_replicas} sampler replicas"
    token = secrets.token_hex(16)
    with (
        Progress(title, job.replicas) as progress,
        _ReservedPort() as jax_port,
        ChildPrograms(log_dir) as children,
    ):
        progress.say(f"starting {title} on CPU devices")
        _start_trainer(job, children, token, jax_port.port)
        try:
            for name, event in children.events(deadline):
                events.append(event)
                if event["event"] == "start":
                    progress.say(f"coordinator at {event['coordinator']}, samplers are starting")
                    _start_samplers(job, children, token, event)
                else:
                    _show(progress, name, event)
        except ChildFailedError as error:
            return events, [str(error)]
    return events, []


def _show(progress: Progress, name: str, event: dict[str, Any]) -> None:
    match event["event"]:
        case "version":
            progress.show(event)
        case "resume":
            progress.say(f"{name} goes on from the checkpoint of {event['version']}")
        case "checkpoint":
            progress.say(
                f"{name} uses the checkpoint of version {event['version']}, "
                f"reward {event['reward']:.3f}"
            )


def _start_trainer(job: LocalJob, children: ChildPrograms, token: str, jax_port: int) -> None:
    for index in range(job.trainer_processes):
        children.start(
            f"trainer-{index}",
            _command(
                job,
                "trainer",
                coordinator=f"{_LOOPBACK}:0",
                rollouts=f"{_LOOPBACK}:0",
                process_index=index,
                process_count=job.trainer_processes,
                jax_coordinator=f"{_LOOPBACK}:{jax_port}",
            ),
            _environment(token, job.trainer_devices),
        )


def _start_samplers(
    job: LocalJob, children: ChildPrograms, token: str, start: dict[str, Any]
) -> None:
    """Starts the replicas as soon as the trainer has told its addresses."""
    for replica in job.replicas:
        children.start(
            replica,
            _command(
                job,
                "sampler",
                coordinator=start["coordinator"],
                rollouts=start["rollouts"],
                replica=replica,
                process_index=0,
                process_count=1,
            ),
            _environment(token, job.sampler_devices),
        )


def _command(job: LocalJob, role: str, **options: object) -> list[str]:
    command = [*own_command("tpu_sync_rl.launch"), f"--role={role}", "--end_with_stdin"]
    return [*command, *job.role_flags, *(f"--{name}={value}" for name, value in options.items())]


def _environment(token: str, num_devices: int) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("TSR_TOKEN", "TSR_TOKEN_FILE", "JAX_NUM_CPU_DEVICES")
    }
    # XLA takes the last of several values of a flag.
    devices = f"--xla_force_host_platform_device_count={num_devices}"
    return inherited | {
        "TSR_TOKEN": token,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip(),
    }


class _ReservedPort:
    """A free port of loopback that only a listener with SO_REUSEPORT, such as JAX's, can take."""

    def __enter__(self) -> "_ReservedPort":
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((_LOOPBACK, 0))
        self.port: int = self._socket.getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
