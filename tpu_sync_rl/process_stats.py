"""What one process measured of a version's way, and the sum of several."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import Struct

from tpu_sync_rl.report import RailReport


class ProcessStats(Struct, frozen=True):
    """What one sampler process measured while it received a version."""

    nbytes: int
    wire_nbytes: int
    seconds: dict[str, float]  # per stage
    rails: dict[str, RailReport]


def combined(parts: Sequence[ProcessStats]) -> ProcessStats:
    """All of `parts` as one: bytes add up, of each stage the longest counts."""
    seconds: dict[str, float] = {}
    rails: dict[str, RailReport] = {}
    for part in parts:
        for stage, spent_s in part.seconds.items():
            seconds[stage] = max(seconds.get(stage, 0.0), spent_s)
        for name, rail in part.rails.items():
            rails[name] = rails[name].beside(rail) if name in rails else rail
    return ProcessStats(
        nbytes=sum(part.nbytes for part in parts),
        wire_nbytes=sum(part.wire_nbytes for part in parts),
        seconds=seconds,
        rails=rails,
    )


def on_lines_of(
    known: Mapping[str, RailReport], rails: Mapping[str, RailReport]
) -> dict[str, RailReport]:
    """`rails` with the lines that `known` has of them: both NICs of a rail are known at one end."""
    return {
        name: replace(rail, line=known[name].line) if name in known else rail
        for name, rail in rails.items()
    }
