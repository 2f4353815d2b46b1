"""What is done to a job, and when: a schedule that follows from a seed."""

import random
from dataclasses import dataclass

PEER_TIMEOUT_S = 1.5
SAMPLERS = ("a", "b", "c")
PROGRAMS = ("trainer", *SAMPLERS)

# How often each kind comes, as shares.
_SHARES = {
    "kill": 24,
    "stop": 20,
    "usurp": 5,
    "close": 4,
    "control_delay": 8,
    "control_hold": 6,
    "control_cut": 8,
    "duplicate": 7,
    "clock": 6,
    "memory": 4,
    "link": 12,
}
_MOST_GAP_S = 1.2


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: see `run.Run`, which has a method for each.
        target: a program, "coordinator", "control" or the index of a link.
        process: index of the process that is hit; None for all of the program.
        seconds: for how long, or after which pause what died comes back.
        amount: a delay in seconds, a probability, a jump of the clock in seconds, or bytes.
        gap_s: pause after it.
    """

    kind: str
    target: str
    process: int | None
    seconds: float
    amount: float
    gap_s: float

    def __str__(self) -> str:
        where = self.target if self.process is None else f"{self.target}.{self.process}"
        return f"{self.kind} {where} for {self.seconds:.2f} s ({self.amount:.3g})"


def schedule(
    seed: int, num_faults: int, *, num_processes: dict[str, int], links: int, hosted: bool
) -> list[Fault]:
    """The faults of a run, in order. Equal arguments give equal schedules."""
    rng = random.Random(f"{seed} faults")
    kinds = [kind for kind in _SHARES if kind != "link" or links]
    shares = [_SHARES[kind] for kind in kinds]
    return [
        _fault(rng, rng.choices(kinds, shares)[0], num_processes, links, hosted)
        for _ in range(num_faults)
    ]


def _fault(
    rng: random.Random, kind: str, num_processes: dict[str, int], links: int, hosted: bool
) -> Fault:
    target, seconds, amount = rng.choice(PROGRAMS), rng.uniform(0.0, 1.0), 0.0
    if kind in ("kill", "stop") and rng.random() < 0.2:
        target = "coordinator"
    elif kind == "usurp":
        target = rng.choice(SAMPLERS if hosted else PROGRAMS)
        seconds = rng.uniform(0.1, 2.0) * PEER_TIMEOUT_S
    elif kind == "close":
        target = "trainer"
    elif kind.startswith("control"):
        target, seconds, amount = "control", rng.uniform(0.3, 3.0), rng.uniform(0.05, 0.8)
    elif kind == "duplicate":
        seconds, amount = rng.uniform(2.0, 6.0), rng.uniform(0.1, 1.0)
    elif kind == "clock":
        amount = rng.choice((-1, 1)) * 10 ** rng.uniform(1, 8)
    elif kind == "memory":
        target, seconds = rng.choice(SAMPLERS), rng.uniform(1.0, 3.0)
        amount = rng.uniform(1, 32) * 2**20
    elif kind == "link":
        target, seconds = rng.choice([*map(str, range(links)), "all"]), rng.uniform(0.5, 3.0)
    if kind == "stop":  # for less than peer_timeout, and for more
        seconds = rng.choice((rng.uniform(0.1, 0.7), rng.uniform(1.3, 2.5))) * PEER_TIMEOUT_S
    process = None
    if kind in ("kill", "stop") and rng.random() < 0.6:
        process = rng.randrange(num_processes.get(target, 1))
    return Fault(kind, target, process, seconds, amount, rng.uniform(0.0, _MOST_GAP_S))
