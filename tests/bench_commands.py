"""Runs commands of `tpu_sync_rl.bench`, and reads what they wrote."""

import json
import os
import subprocess
import sys

import pytest

from tpu_sync_rl.bench import netns


def run_bench(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tpu_sync_rl.bench", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def measured(tmp_path, *arguments):
    """Ratios and samples of a command, per name of its figures; its table has them all."""
    result = tmp_path / "result.json"
    done = run_bench(*arguments, f"--json={result}")
    assert done.returncode == 0, done.stderr
    figures = json.loads(result.read_text())["figures"]
    assert all(figure["name"].strip() in done.stdout for figure in figures)
    return figures


def add_to_path(folder, monkeypatch):
    """Lets programs that start from now on import what is in `folder`."""
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{before}")


def has_namespaces():
    try:
        netns.check_rights()
    except RuntimeError:
        return False
    return True


needs_namespaces = pytest.mark.skipif(not has_namespaces(), reason="network namespaces need root")
