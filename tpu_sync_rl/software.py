"""Which versions of what a process runs."""

import platform
import sys
from importlib import metadata

_PACKAGES = ("jax", "jaxlib", "grpcio")


def versions() -> dict[str, str]:
    """Versions of this package, Python, and what matters to a sync besides; imports nothing.

    A package that is not installed is left out.
    """
    ours = sys.modules[__package__].__version__
    found = {"tpu_sync_rl": ours, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def shown(found: dict[str, str]) -> str:
    """Versions for people: python 3.11.9, jax 0.10.2."""
    return ", ".join(f"{name} {version}" for name, version in found.items()) or "unknown"
