"""Several NICs between two network namespaces: all are used, one may be lost and come back."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpu_sync_rl.bench import models, netns, rails
from tpu_sync_rl.bench.cases import Case, Layout
from tpu_sync_rl.bench.netns import CONTROL, Namespaces

pytestmark = pytest.mark.end_to_end
RATES_MBIT = (200, 200)
NBYTES = 20_000_000
OPTIONS = {"same_host": "tcp", "chunk_nbytes": 1 << 18}


@pytest.fixture
def namespaces():
    try:
        netns.check_rights()
    except RuntimeError as error:
        pytest.skip(str(error))
    with Namespaces(RATES_MBIT) as namespaces:
        yield namespaces


@pytest.fixture
def programs(namespaces):
    one = Layout(fsdp=1, tp=1)
    case = Case(leaves=models.model("list", NBYTES), trainer=one, sampler=one)
    with rails.programs_over(namespaces, case, OPTIONS) as programs:
        yield programs


def test_all_rails_carry_a_version_and_a_lost_one_is_made_up_for(namespaces, programs):
    first = programs.sync(rails.CASE, 1)  # every byte is checked
    assert set(first.rails) == {"rail0-rail0", "rail1-rail1"}
    assert all(first.rails.values())
    lost = namespaces.rails[0]

    second = programs.sync(rails.CASE, 2, meanwhile=lambda: namespaces.set_up(lost, False))
    assert second.rails["rail1-rail1"] > second.nbytes / 2
    assert programs.sync(rails.CASE, 3).rails.get("rail0-rail0", 0) == 0

    namespaces.set_up(lost, True)
    versions = range(4, 104)  # more than it takes, but no end is no answer
    assert any(programs.sync(rails.CASE, version).rails["rail0-rail0"] for version in versions)


@pytest.mark.slow
def test_each_side_runs_on_a_host_of_its_own(namespaces, tmp_path, monkeypatch):
    monkeypatch.setenv("TSR_TOKEN", "secret")
    result = tmp_path / "wire.json"
    with contextlib.ExitStack() as exits:
        sides = []
        for role, namespace in (
            ("sampler", namespaces.sampler),
            ("trainer", namespaces.trainer),
        ):
            command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "tpu_sync_rl.bench"]
            command += ["wire", f"--role={role}", f"--coordinator={CONTROL.trainer_host}:8476"]
            command += ["--nics", "rail0", "rail1", "--model=one-big", "--nbytes=4000000"]
            if role == "trainer":
                command += ["--rounds=1", f"--json={result}"]
            side = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            exits.callback(side.kill)
            sides.append(exits.enter_context(side))
        for side in sides:
            errors = side.communicate(timeout=60)[1]
            assert side.returncode == 0, errors
    written = json.loads(result.read_text())
    # Both rails of 25 MB/s, which raw sockets take as well, and not the control network.
    assert set(written["trainer_reports"][0][0]["rails"]) == {"rail0-rail0", "rail1-rail1"}
    sockets = next(x for x in written["figures"] if x["name"] == "raw sockets")
    assert sockets["median"] < 0.06


def test_nothing_stays_behind(namespaces):
    assert {namespaces.trainer, namespaces.sampler} <= _names()
    namespaces.close()
    namespaces.close()
    assert not {namespaces.trainer, namespaces.sampler} & _names()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sign", "number"), [("namespaces", signal.SIGTERM), ("programs", signal.SIGINT)]
)
def test_interrupted_benchmark_leaves_nothing_behind(namespaces, sign, number):
    bench = subprocess.Popen(
        [sys.executable, "-m", "tpu_sync_rl.bench", "rails", "--netns"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with bench:
        own = f"{netns.PREFIX}-{bench.pid}-"
        children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
        deadline = time.monotonic() + 60
        while not (
            any(name.startswith(own) for name in _names())
            and (sign == "namespaces" or len(children.read_text().split()) > 2)
        ):
            assert time.monotonic() < deadline and bench.poll() is None
            time.sleep(0.01)
        while bench.poll() is None:  # JAX drops one that comes while it collects garbage
            assert time.monotonic() < deadline
            bench.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                bench.wait(2)
        errors = bench.communicate()[1]
    assert bench.returncode == 128 + number, errors
    assert not any(name.startswith(own) for name in _names())


def test_rates_that_can_not_be_shaped_leave_nothing_behind(namespaces):
    namespaces.close()
    with pytest.raises(RuntimeError, match=r"tc -n .* rate 0mbit"):
        Namespaces([0])
    # Their names are those of this process, so the next ones have them as well.
    assert not {namespaces.trainer, namespaces.sampler} & _names()


def _names() -> set[str]:
    return {path.name for path in netns.FOLDER.glob("*")} if netns.FOLDER.exists() else set()
