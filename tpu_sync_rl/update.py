"""What a sampler's call returns."""

from dataclasses import dataclass
from typing import Any

from tpu_sync_rl.report import Report


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Update:
    """One version of the params on this sampler.

    Attributes:
        version: the trainer's number for it, within `incarnation`.
        incarnation: id of the life of the trainer that published it.
        epoch: grows with every incarnation of the job: (epoch, version) orders all that was ever
            published in it, also where a trainer that was started again counts from 1.
        params: pytree of jax.Arrays like the session's `like`. They stay valid as long as they
            are held, also after the session was closed.
        report: what its way here took.
    """

    version: int
    incarnation: str
    epoch: int
    params: Any
    report: Report
