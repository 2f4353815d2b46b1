"""The examples run as modules and as files, from another folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import free_port

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def command(name, as_file, *arguments):
    program = [str(EXAMPLES / f"{name}.py")] if as_file else ["-m", f"tpu_sync_rl.examples.{name}"]
    return [sys.executable, *program, *arguments]


@pytest.mark.parametrize("as_file", [False, True], ids=["module", "file"])
def test_one_client_moves_and_checks_params(tmp_path, as_file):
    done = subprocess.run(
        command("one_client", as_file),
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "kernel: bfloat16[1024, 512] sharded P" in done.stdout


@pytest.mark.end_to_end
def test_sampler_follows_trainer_to_its_last_version(tmp_path):
    coordinator = f"127.0.0.1:{free_port()}"
    options = {"cwd": tmp_path, "env": ENVIRONMENT, "text": True, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen(command("sampler", True, coordinator, "me"), **options) as sampler,
        subprocess.Popen(command("trainer", False, coordinator), **options) as trainer,
    ):
        published, _ = trainer.communicate(timeout=60)
        taken, _ = sampler.communicate(timeout=60)
    assert trainer.returncode == sampler.returncode == 0
    assert "step 19: 8 bytes to ['me']" in published
    assert taken.splitlines()[-1].startswith("version 19: f(1) = 4.999")


@pytest.mark.parametrize("name", ["trainer", "sampler"])
def test_help_is_a_usage_line(name):
    done = subprocess.run(
        command(name, False, "--help"), env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    assert "[coordinator]" in done.stdout.splitlines()[0]


@pytest.mark.parametrize("name", ["one_client", "trainer", "sampler"])
def test_example_fits_on_a_page(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60
