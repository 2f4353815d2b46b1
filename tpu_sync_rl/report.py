"""What a call of `sync_weights` did, for people and for logs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

# What Report.staging says.
DIRECT = "direct"
PINNED_HOST = "pinned_host"

Number = TypeVar("Number", int, float)


def shown_nbytes(nbytes: float) -> str:
    """`nbytes` for people, in the unit that fits: 1.500 GB, 12.000 kB, 7 B."""
    for unit, unit_nbytes in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= unit_nbytes:
            return f"{nbytes / unit_nbytes:,.3f} {unit}"
    return f"{nbytes:.0f} B"


@dataclass(frozen=True, slots=True)
class Line:
    """What a NIC is made for, or a pair of them; None where that is not known.

    Attributes:
        mtu_nbytes: most bytes of a packet.
        gbytes_per_s: its speed, in 10^9 bytes.
    """

    mtu_nbytes: int | None = None
    gbytes_per_s: float | None = None

    def to(self, other: "Line") -> "Line":
        """From this NIC to another one: what the weaker one is made for, as far as known."""
        return Line(
            _least(self.mtu_nbytes, other.mtu_nbytes),
            _least(self.gbytes_per_s, other.gbytes_per_s),
        )

    def __str__(self) -> str:
        parts = []
        if self.gbytes_per_s is not None:
            parts.append(f"made for {shown_nbytes(1e9 * self.gbytes_per_s)}/s")
        if self.mtu_nbytes is not None:
            parts.append(f"MTU {self.mtu_nbytes} B")
        return ", ".join(parts)


UNKNOWN_LINE = Line()


def _least(one: Number | None, other: Number | None) -> Number | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


@dataclass(frozen=True, slots=True, kw_only=True)
class RailReport:
    """What went over one rail.

    Attributes:
        nbytes: bytes of chunks that were verified or, at a trainer's end, sent.
        seconds: how long at least one of its streams had a chunk under way.
        num_retries: chunks that had to be asked for again, on this rail or another.
        num_lost: streams that broke, or were broken off by the other end.
        num_streams: those that were there at the end; 0 at a trainer's end, as the next two.
        window_nbytes: bytes that they might ask for ahead of what had come.
        round_trip_s: from here to the other end and back; 0 where that is not known.
        line: what its two NICs are made for.
    """

    nbytes: int = 0
    seconds: float = 0.0
    num_retries: int = 0
    num_lost: int = 0
    num_streams: int = 0
    window_nbytes: int = 0
    round_trip_s: float = 0.0
    line: Line = UNKNOWN_LINE

    @property
    def gbytes_per_s(self) -> float:
        """Bytes per second, in 10^9; 0 where nothing moved."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def beside(self, other: "RailReport") -> "RailReport":
        """Both as one: what another process did on a rail of the same name, at the same time."""
        return RailReport(
            nbytes=self.nbytes + other.nbytes,
            seconds=max(self.seconds, other.seconds),
            num_retries=self.num_retries + other.num_retries,
            num_lost=self.num_lost + other.num_lost,
            num_streams=self.num_streams + other.num_streams,
            window_nbytes=self.window_nbytes + other.window_nbytes,
            round_trip_s=max(self.round_trip_s, other.round_trip_s),
            line=self.line.to(other.line),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "gbytes_per_s": self.gbytes_per_s}

    def __str__(self) -> str:
        parts = [
            f"{shown_nbytes(self.nbytes)} at {shown_nbytes(1e9 * self.gbytes_per_s)}/s",
            str(self.line),
            self._shown_way() if self.round_trip_s else "",
            f"{self.num_retries} retries" if self.num_retries else "",
            f"{self.num_lost} lost streams" if self.num_lost else "",
        ]
        return ", ".join(part for part in parts if part)

    def _shown_way(self) -> str:
        return (
            f"{self.num_streams} streams with {shown_nbytes(self.window_nbytes)} ahead, "
            f"round trip {1e3 * self.round_trip_s:.2f} ms"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """One version's way from the trainer to its samplers, as one program saw it.

    It speaks of the whole program (the job on a trainer, the replica on a sampler) and is equal in
    its processes; `local` is the part of this process and does not count for equality.

    `seconds` has these stages. Those of the clock:

    - "compute": until the params were there; "pin": checking and pinning them (trainer).
    - "compare": summing what several processes of the trainer hold (trainer; of the first version,
      and with its `verify="full"` of each).
    - "d2h": from the start of the first copy to pinned host memory to the end of the last, beside
      "wire" (a trainer's `local`, where versions are staged).
    - "plan": making the plan, before the version came; 0 where an earlier one had it made.
    - "wait": until memory was free, that no older arrays use (sampler).
    - "wire": from the first request to the last verified byte. In a trainer's `local`: how long
      its busiest rail had a chunk under way.
    - "arrays": from there until the jax.Arrays were made.
    - "verify": comparing their memory with the trainer's; with `verify="full"` alone.
    - "h2d": with a copy to a device under way, beside "wire" (where versions are staged).
    - "total": the whole transfer on a sampler, the whole call on a trainer.

    Those of the threads that move bytes, all of a process together, within "wire":

    - "gather": packing and casting at the source (a trainer's `local`), "scatter": putting bytes
      in place that could not be received there.
    - "checksum": CRC32C, at the end that reports. Over shared memory it is a part of "receive".
    - "send", "receive": in calls of the kernel, or copying to and from shared memory.

    Attributes:
        version: what was synced, within `incarnation`.
        incarnation: id of the life of the trainer that published it.
        epoch: grows with every incarnation: (epoch, version) orders all that a job published.
        nbytes: bytes of the params: global ones on a trainer, what the replica holds on a sampler.
        wire_nbytes: bytes that crossed data connections, to all replicas of a trainer.
        seconds: per stage, the longest of the program's processes. On a trainer those of its
            samplers stand beside its own; what its own threads did is in `local`, counted since
            the report before.
        rails: what went over each rail to the samplers; in a trainer's `local`, from this process
            since the report before.
        replicas: per replica the version that it has prepared, None for none yet.
        lost: replicas that were lost during the call, or dropped since they were too slow.
        refused: replicas whose manifest does not fit, with every difference.
        staging: how shards became host memory, or host memory shards: "direct" within PJRT buffers,
            "pinned_host" by a copy between device and host.
        agent: where the data path runs: "process", in the program itself, or "colocated", in
            agents on the hosts of its devices.
    """

    version: int
    incarnation: str
    epoch: int
    nbytes: int
    wire_nbytes: int
    seconds: Mapping[str, float]
    rails: Mapping[str, RailReport]
    replicas: Mapping[str, int | None]
    lost: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    staging: str = DIRECT
    agent: str = "process"
    local: "Report | None" = field(default=None, compare=False, repr=False)

    @property
    def gbytes_per_s(self) -> float:
        """Bytes on the wire per second of the whole, in 10^9 bytes; 0 where nothing moved."""
        total_s = self.seconds.get("total", 0.0)
        return self.wire_nbytes / total_s / 1e9 if total_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, `local` within."""
        return {
            "version": self.version,
            "incarnation": self.incarnation,
            "epoch": self.epoch,
            "nbytes": self.nbytes,
            "wire_nbytes": self.wire_nbytes,
            "gbytes_per_s": self.gbytes_per_s,
            "seconds": dict(self.seconds),
            "rails": {name: rail.to_dict() for name, rail in self.rails.items()},
            "replicas": dict(self.replicas),
            "lost": list(self.lost),
            "refused": dict(self.refused),
            "staging": self.staging,
            "agent": self.agent,
            "local": None if self.local is None else self.local.to_dict(),
        }

    def __str__(self) -> str:
        speed = f"{shown_nbytes(1e9 * self.gbytes_per_s)}/s"
        here = {} if self.local is None else self.local.seconds
        is_default = (self.staging, self.agent) == (DIRECT, "process")
        rows = [
            ("version", f"{self.version} of incarnation {self.incarnation}, epoch {self.epoch}"),
            ("params", shown_nbytes(self.nbytes)),
            ("wire", f"{shown_nbytes(self.wire_nbytes)} at {speed}" if self.wire_nbytes else ""),
            ("program", _shown_seconds(self.seconds)),
            ("this process", _shown_seconds(here)),
            *(("rail", f"{name}: {rail}") for name, rail in self.rails.items()),
            ("replicas", ", ".join(f"{name}: {v}" for name, v in self.replicas.items())),
            ("lost", ", ".join(self.lost)),
            ("refused", "; ".join(f"{name}: {why}" for name, why in self.refused.items())),
            ("path", "" if is_default else f"staging {self.staging}, agent {self.agent}"),
        ]
        return "\n".join(f"{name:<12} {value}" for name, value in rows if value)


def _shown_seconds(seconds: Mapping[str, float]) -> str:
    ordered = sorted(seconds.items(), key=lambda item: item[0] == "total")
    return ", ".join(f"{stage} {spent_s:.4f} s" for stage, spent_s in ordered)
