"""Thousands of versions with samplers that join and leave: memory, descriptors, threads stay flat.

`pytest tests/test_soak.py -m slow --versions 2000 -s` is the long one.
"""

import gc
import os
import statistics
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh

import tpu_sync_rl as tsr

AXES = ("fsdp", "tp")
SPECS = oracle.ODD_LEAVES
TRAINER = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), AXES)
SAMPLER = Mesh(np.array(jax.devices()[4:8]).reshape(1, 4), AXES)
JOIN_EVERY = 5
MEASURE_EVERY = 5


@dataclass(frozen=True)
class Footprint:
    """What a process takes of the system."""

    rss_mib: float
    num_fds: float
    num_threads: float

    @classmethod
    def of(cls, pid: int) -> "Footprint":
        process = Path(f"/proc/{pid}")
        pages = int((process / "statm").read_text().split()[1])
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            len(os.listdir(process / "fd")),
            len(os.listdir(process / "task")),
        )


# By how much the mean of the last quarter may be above that of the second.
MOST_GROWTH = Footprint(rss_mib=6, num_fds=2, num_threads=2)


def connect(trainer: tsr.TrainerSession, replica: str, same_host: str = "auto"):
    return tsr.connect_sampler(
        coordinator=trainer.coordinator,
        replica=replica,
        like=oracle.like(SPECS, SAMPLER),
        timeout=20,
        same_host=same_host,
    )


def mean(footprints: list[Footprint]) -> Footprint:
    return Footprint(*map(statistics.fmean, zip(*map(astuple, footprints), strict=True)))


@pytest.mark.slow
def test_resources_stay_flat_over_many_versions(request):
    num_versions = request.config.getoption("--versions")
    measured: dict[str, list[Footprint]] = {"programs": [], "coordinator": []}
    with tsr.connect_trainer(timeout=20) as trainer, connect(trainer, "resident") as resident:
        coordinator = trainer._coordinator_process._process.pid
        for version in range(1, num_versions + 1):
            params = oracle.params(SPECS, TRAINER, version)
            tsr.sync_weights(params, to=trainer, version=version)
            update = resident.sync_weights()
            assert update.version == version
            if version % JOIN_EVERY == 0:
                # Names come back and new ones come, by memory and by TCP; some leave untold.
                number = version // JOIN_EVERY
                name = f"guest-{number if number % 4 else 0}"
                with connect(trainer, name, "tcp" if number % 2 else "auto") as guest:
                    if number % 3:
                        late = guest.sync_weights()
                        assert late.version == version
                        oracle.assert_equal(late.params, SPECS, version, SAMPLER)
                        del late
            if version % MEASURE_EVERY == 0:
                gc.collect()
                measured["programs"].append(Footprint.of(os.getpid()))
                measured["coordinator"].append(Footprint.of(coordinator))
        oracle.assert_equal(update.params, SPECS, num_versions, SAMPLER)
    for program, footprints in measured.items():
        quarter = len(footprints) // 4
        second, last = mean(footprints[quarter : 2 * quarter]), mean(footprints[-quarter:])
        print(f"soak of {num_versions} versions, {program}: {second}, then {last}")
        for field in fields(Footprint):
            before, after = getattr(second, field.name), getattr(last, field.name)
            assert after - before <= getattr(MOST_GROWTH, field.name), (program, field.name)
