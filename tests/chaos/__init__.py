"""A small job to which the worst is done: what samplers return is held against an oracle.

    python -m tests.chaos --faults 1000 --seed 1

A seed gives a schedule of faults (`faults`). The run (`run`) starts a trainer, three replicas and a
coordinator (`place`, `life`), does to them what the schedule says, starts again what has died, and
now and then waits until every replica has the newest version. The programs (`trainer`, `sampler`)
tell by pipes what they called and what came of it (`child`); the checker (`checker`) holds every
tree against the oracle of its version (`weights`), and every call against its deadline.
"""
