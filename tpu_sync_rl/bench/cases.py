"""What a benchmark runs, and what every process saw of it."""

import argparse
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpu_sync_rl.bench import models
from tpu_sync_rl.bench.figures import count

NUM_WARMUPS = 2  # versions of a case that are not counted: steady state begins with the third


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
class Case:
    """What is synced from which mesh to which."""

    leaves: models.Model
    trainer: Layout
    sampler: Layout
    trainer_dtype: str = models.DTYPE
    sampler_dtype: str = models.DTYPE
    options: Mapping[str, Any] = field(default_factory=dict)  # of its sessions alone

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of the params on the sampler."""
        return models.model_nbytes(self.leaves, self.sampler_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a program runs. The default is this host, over loopback."""

    namespace: str | None = None
    coordinator: str = "127.0.0.1:0"  # where the trainer hosts it
    nics: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the programs sync, and how. The processes of a program are the same in all cases."""

    cases: Mapping[str, Case]
    num_replicas: int = 1
    options: Mapping[str, Any]  # of connect_trainer and connect_sampler alike
    trainer: Place = Place()
    sampler: Place = Place()
    token: bytes | None = field(default_factory=lambda: secrets.token_hex().encode())


class Sample(NamedTuple):
    """One call of sync_weights in one process; times are of its host's time.monotonic()."""

    began: float
    ended: float
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sync:
    """One version's way, as every process saw it."""

    trainers: Sequence[Sample]
    samplers: Sequence[Sample]
    cpu_s: float  # of all processes, until the sampler had it

    @property
    def nbytes(self) -> int:
        """Bytes that crossed data connections."""
        nbytes: int = self.trainers[0].report["wire_nbytes"]
        return nbytes

    @property
    def call_s(self) -> float:
        """Seconds of the whole call on the trainer."""
        return self.ended - min(s.began for s in self.trainers)

    @property
    def ended(self) -> float:
        """When the last process of the trainer had it, by time.monotonic()."""
        return max(s.ended for s in self.trainers)

    @property
    def rails(self) -> Mapping[str, int]:
        """Bytes that each rail carried."""
        return {name: rail["nbytes"] for name, rail in self.trainers[0].report["rails"].items()}

    @property
    def pause_s(self) -> float:
        """Seconds that a sampler's call took, of a version that was prepared."""
        return max(s.ended - s.began for s in self.samplers)

    def stage_s(self, stage: str) -> float:
        """Seconds of a stage of receiving, in the slowest process: "wire", "arrays" or others."""
        return max(float(s.report["seconds"][stage]) for s in self.samplers)

    @property
    def copies_s(self) -> Mapping[str, float]:
        """Seconds of the copies before and behind the wire, and of the wire; where it is staged."""
        d2h_s = max(float(s.report["local"]["seconds"]["d2h"]) for s in self.trainers)
        return {"d2h": d2h_s, "wire": self.stage_s("wire"), "h2d": self.stage_s("h2d")}

    @property
    def pin_s(self) -> float:
        """Seconds until the trainer's buffers were found and pinned, in the slowest process."""
        return max(float(s.report["local"]["seconds"]["pin"]) for s in self.trainers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of sessions."""
    parser.add_argument(
        "--streams", type=count, default=2, help="TCP connections per rail (default: %(default)s)"
    )
    parser.add_argument(
        "--chunk_nbytes", type=count, default=1 << 20, help="of a chunk (default: %(default)s)"
    )
    parser.add_argument(
        "--congestion",
        default="cubic",
        help="TCP congestion control of ours and of raw sockets (default: %(default)s)",
    )
    parser.add_argument("--same_host", default="tcp", choices=["tcp", "auto"])
    parser.add_argument("--verify", default="wire", choices=["off", "wire", "full"])
    parser.add_argument("--staging", default="auto", choices=["auto", "direct", "pinned_host"])


def options(args: argparse.Namespace) -> dict[str, Any]:
    """What `connect_trainer` and `connect_sampler` get of them."""
    return {
        "same_host": args.same_host,
        "verify": args.verify,
        "staging": args.staging,
        "streams_per_rail": args.streams,
        "chunk_nbytes": args.chunk_nbytes,
        "congestion": args.congestion,
    }
