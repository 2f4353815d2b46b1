"""Runs a module of this very package in a process of its own: the command for it, and its script.

`python -m` looks for modules in the current folder first, where a `secrets.py` of the user's would
be taken for Python's. So this file is run as a script, without that folder, and finds the package
that it is of by itself, whichever others there are.
"""

import importlib.util
import runpy
import sys
from pathlib import Path


def own_command(module: str) -> list[str]:
    """A command that runs `module`, such as "tpu_sync_rl.coordinator", as `python -m` does."""
    return [sys.executable, "-P", str(Path(__file__).resolve()), module]


def _find_package() -> None:
    folder = Path(__file__).resolve().parent
    found = importlib.util.spec_from_file_location(
        folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert found is not None and found.loader is not None
    sys.modules[folder.name] = package = importlib.util.module_from_spec(found)
    found.loader.exec_module(package)
    # What it needs may lie beside it, where the parent has put both on its path by itself.
    sys.path.append(str(folder.parent))


if __name__ == "__main__":
    del sys.argv[0]
    _find_package()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
