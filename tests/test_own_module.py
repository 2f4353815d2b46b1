"""Children run this package and Python's modules, whatever lies in the folder they start in."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tpu_sync_rl
from tpu_sync_rl.own_module import own_command

PACKAGE = Path(tpu_sync_rl.__file__).parent
# Modules of Python, of what the package needs, and of the package itself.
SHADOWS = ("secrets", "types", "logging", "asyncio", "grpc", "msgspec", "numpy", "tpu_sync_rl")
PROGRAM = """
import jax.numpy as jnp
import tpu_sync_rl as tsr
with tsr.connect_trainer(timeout=30) as trainer:
    print(tsr.sync_weights({"w": jnp.zeros(4)}, to=trainer).version)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One full of modules that must not be imported."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder')\n")
    return folder


def run(command: list[str], folder: Path, *path: Path, code: int = 0) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == code, ran.stderr
    return ran.stdout


def test_modules_run_from_any_folder(folder):
    shown = run([*own_command("tpu_sync_rl.coordinator"), "--help"], folder)
    assert shown.startswith("usage: python -m tpu_sync_rl.coordinator")
    # absl ends with 1 where it has shown what it was asked for.
    assert "--role" in run([*own_command("tpu_sync_rl.launch"), "--help"], folder, code=1)


@pytest.mark.end_to_end
def test_trainer_hosts_its_coordinator_from_any_folder(folder, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert run([sys.executable, str(program)], folder, PACKAGE.parent) == "1\n"


@pytest.mark.end_to_end
def test_trainer_hosts_its_coordinator_from_a_checkout():
    assert run([sys.executable, "-c", PROGRAM], PACKAGE.parent) == "1\n"


@pytest.mark.end_to_end
def test_child_runs_the_package_of_its_parent_and_not_another(folder, tmp_path):
    copy = tmp_path / "installed"
    shutil.copytree(PACKAGE, copy / "tpu_sync_rl", symlinks=True)
    coordinator = copy / "tpu_sync_rl" / "coordinator.py"
    coordinator.write_text(f"print('the copy ran', flush=True)\n{coordinator.read_text()}")
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(copy)!r})\n{PROGRAM}")
    shown = run([sys.executable, str(program)], folder, PACKAGE.parent)
    assert shown == "the copy ran\n1\n"
