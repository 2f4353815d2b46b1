"""Every order of events in small jobs: versions, calls and the fleet's decisions hold in all."""

import os
import random

import pytest
from job_model import PAIR, Model, explore, walk

ONE = {"publish": 1, "enter": 1}

SMALL = {
    "replica joins late": {
        "replicas": PAIR,
        "late": ("b",),
        "budget": ONE,
        "commit": "fleet",
    },
    "messages come twice": {
        "replicas": PAIR,
        "budget": ONE | {"repeat": 1, "echo": 1},
        "commit": "fleet",
    },
    "newer incarnation": {
        "replicas": {"a": 1},
        "budget": {"publish": 1, "enter": 2, "succeed": 1},
        "commit": "fleet",
    },
    "newer incarnation with a coordinator of its own": {
        "replicas": {"a": 1},
        "budget": {"publish": 1, "enter": 2, "replace": 1},
        "commit": "fleet",
    },
    "the same, whose clock is late": {
        "replicas": {"a": 1},
        "budget": {"publish": 1, "enter": 2, "replace": 1},
        "commit": "fleet",
        "clock_is_late": True,
    },
    "trainer dies in the middle of a round": {
        "replicas": PAIR,
        "budget": ONE | {"orphan": 1, "fail": 1},
        "commit": "fleet",
    },
    "two versions": {"replicas": PAIR, "budget": {"publish": 2, "enter": 2}, "commit": "fleet"},
    "interrupted calls": {
        "replicas": {"a": 2},
        "budget": ONE | {"leave": 1, "lose": 1},
    },
    "two trainer processes": {
        "replicas": {"a": 1},
        "num_trainers": 2,
        "budget": ONE | {"crash": 1},
    },
}

LARGER = {
    "coordinator dies": {"replicas": PAIR, "budget": ONE | {"crash": 1}, "commit": "fleet"},
    "stream breaks": {"replicas": PAIR, "budget": ONE | {"lose": 1}, "commit": "fleet"},
    "replica dies": {
        "replicas": PAIR,
        "budget": ONE | {"die": 1, "patience": 1},
        "commit": "fleet",
    },
    "straggler": {"replicas": PAIR, "budget": ONE | {"lease": 1}, "commit": "fleet"},
    "dropped straggler": {
        "replicas": PAIR,
        "budget": ONE | {"lease": 1},
        "commit": "fleet",
        "on_straggler": "drop",
    },
    "processes of a replica call at different times": {
        "replicas": {"a": 2},
        "budget": {"publish": 1, "enter": 2, "crash": 1},
    },
}

HELD = {
    "replica joins late, and the trainer's arrays are gone": {
        "replicas": PAIR,
        "late": ("b",),
        "budget": ONE | {"fade": 1},
    },
    "replica joins late, and the trainer is dead": {
        "replicas": PAIR,
        "late": ("b",),
        "budget": ONE | {"orphan": 1},
    },
}
WIDE = {
    "replica joins late, the trainer is dead, and a stream breaks": {
        "replicas": PAIR,
        "late": ("b",),
        "budget": ONE | {"orphan": 1, "lose": 1},
    },
    "newer incarnation, two replicas": {
        "replicas": PAIR,
        "budget": ONE | {"succeed": 1},
        "commit": "fleet",
    },
    "newer incarnation with a coordinator of its own, two replicas": {
        "replicas": PAIR,
        "budget": ONE | {"replace": 1},
        "commit": "fleet",
    },
    "the same, whose clock is late, one of them late": {
        "replicas": PAIR,
        "late": ("b",),
        "budget": ONE | {"replace": 1},
        "clock_is_late": True,
    },
    "coordinator dies twice": {
        "replicas": PAIR,
        "budget": ONE | {"crash": 2, "die": 1},
        "commit": "fleet",
    },
    "coordinator dies, two versions": {
        "replicas": {"a": 2},
        "budget": {"publish": 2, "enter": 2, "crash": 1},
    },
    "coordinator dies, replica of two": {
        "replicas": {"a": 2, "b": 1},
        "budget": ONE | {"crash": 1},
        "commit": "fleet",
    },
    "late and lost": {
        "replicas": PAIR,
        "budget": ONE | {"lease": 1, "lose": 1},
        "commit": "fleet",
        "on_straggler": "drop",
    },
}


@pytest.mark.parametrize("options", SMALL.values(), ids=SMALL.keys())
def test_nothing_breaks_in_any_order(options):
    assert explore(Model(**options), run_out_every=100) > 100


@pytest.mark.slow
@pytest.mark.parametrize("options", LARGER.values(), ids=LARGER.keys())
def test_nothing_breaks_in_any_order_of_larger_jobs(options):
    assert explore(Model(**options), run_out_every=100) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("options", HELD.values(), ids=HELD.keys())
def test_all_get_what_one_replica_holds_in_any_order(options):
    assert explore(Model(**options), run_out_every=10) > 1000


@pytest.mark.random
@pytest.mark.parametrize("first_seed", range(0, 600, 100))
def test_nothing_breaks_on_long_ways_through_larger_jobs(first_seed, seed):
    for each in range(seed + first_seed, seed + first_seed + 100):
        assert walk(random.Random(each)), f"seed {each}"


@pytest.mark.skipif(os.environ.get("TSR_MODEL") != "wide", reason="minutes: set TSR_MODEL=wide")
@pytest.mark.parametrize("options", WIDE.values(), ids=WIDE.keys())
def test_nothing_breaks_in_any_order_of_the_largest(options):
    assert explore(Model(**options), run_out_every=200) > 1000
