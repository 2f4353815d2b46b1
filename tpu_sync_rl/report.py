"""What a call of `sync_weights` did, for people and for logs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def shown_nbytes(nbytes: float) -> str:
    """`nbytes` for people, in the unit that fits: 1.500 GB, 12.000 kB, 7 B."""
    for unit, unit_nbytes in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= unit_nbytes:
            return f"{nbytes / unit_nbytes:,.3f} {unit}"
    return f"{nbytes:.0f} B"


@dataclass(frozen=True, slots=True)
class Report:
    """One version's way from the trainer to its samplers, as one program saw it.

    It speaks of the whole program (the job on a trainer, the replica on a sampler) and is equal in
    its processes; `local` is the part of this process and does not count for equality.

    Attributes:
        version: what was synced, within `incarnation`.
        nbytes: bytes of the params: global ones on a trainer, what the replica holds on a sampler.
        wire_nbytes: bytes that crossed data connections, to all replicas of a trainer.
        seconds: per stage, the longest of the program's processes. On a trainer "compute" waits
            until the params are there, "pin" checks and pins them, and "total" is the whole call,
            with the wait for samplers. On a sampler "wait" lasts until memory is free, "wire"
            until every byte has landed, "arrays" makes jax.Arrays of it, and "total" is the whole
            transfer.
        rails: bytes received per rail; in a trainer's `local`, sent since the report before.
        replicas: per replica the version that it has prepared, None for none yet.
        lost: replicas that were lost during the call, or dropped since they were too slow.
        refused: replicas whose manifest does not fit, with every difference.
        staging: how shards became host memory: "direct" from PJRT buffers.
        agent: where the data path runs: "process", in the program itself.
    """

    version: int
    incarnation: str
    nbytes: int
    wire_nbytes: int
    seconds: Mapping[str, float]
    rails: Mapping[str, int]
    replicas: Mapping[str, int | None]
    lost: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    staging: str = "direct"
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
            "nbytes": self.nbytes,
            "wire_nbytes": self.wire_nbytes,
            "gbytes_per_s": self.gbytes_per_s,
            "seconds": dict(self.seconds),
            "rails": dict(self.rails),
            "replicas": dict(self.replicas),
            "lost": list(self.lost),
            "refused": dict(self.refused),
            "staging": self.staging,
            "agent": self.agent,
            "local": None if self.local is None else self.local.to_dict(),
        }

    def __str__(self) -> str:
        speed = f"{shown_nbytes(1e9 * self.gbytes_per_s)}/s"
        rows = [
            ("version", f"{self.version} of incarnation {self.incarnation}"),
            ("params", shown_nbytes(self.nbytes)),
            ("wire", f"{shown_nbytes(self.wire_nbytes)} at {speed}"),
            ("seconds", ", ".join(f"{stage} {s:.4f}" for stage, s in self.seconds.items())),
            ("rails", ", ".join(f"{rail} {shown_nbytes(n)}" for rail, n in self.rails.items())),
            ("replicas", ", ".join(f"{name}: {v}" for name, v in self.replicas.items())),
            ("lost", ", ".join(self.lost)),
            ("refused", "; ".join(f"{name}: {why}" for name, why in self.refused.items())),
            ("path", f"staging {self.staging}, agent {self.agent}"),
        ]
        return "\n".join(f"{name:<9} {value}" for name, value in rows if value)
