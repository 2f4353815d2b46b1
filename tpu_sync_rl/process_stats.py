"""What one process measured of a version's way, and the sum of several."""

from collections.abc import Sequence

from msgspec import Struct


class ProcessStats(Struct, frozen=True):
    """What one sampler process measured while it received a version."""

    nbytes: int
    wire_nbytes: int
    seconds: dict[str, float]  # per stage
    rails: dict[str, int]  # bytes received per rail


def combined(parts: Sequence[ProcessStats]) -> ProcessStats:
    """All of `parts` as one: bytes add up, of each stage the longest counts."""
    seconds: dict[str, float] = {}
    rails: dict[str, int] = {}
    for part in parts:
        for stage, spent_s in part.seconds.items():
            seconds[stage] = max(seconds.get(stage, 0.0), spent_s)
        for rail, nbytes in part.rails.items():
            rails[rail] = rails.get(rail, 0) + nbytes
    return ProcessStats(
        nbytes=sum(part.nbytes for part in parts),
        wire_nbytes=sum(part.wire_nbytes for part in parts),
        seconds=seconds,
        rails=rails,
    )
