"""JAX-native weight sync from RL trainers to samplers.

Importing this package starts nothing, and loads JAX only when a name that needs it is first used:
the coordinator runs without.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_sync_rl.connect import connect_sampler, connect_trainer
    from tpu_sync_rl.errors import (
        AuthError,
        CorruptionError,
        JobEndedError,
        ManifestError,
        PeerLostError,
        PlanError,
        SyncError,
        SyncTimeoutError,
        VersionError,
    )
    from tpu_sync_rl.one_client import explain
    from tpu_sync_rl.plan import Plan
    from tpu_sync_rl.report import Report
    from tpu_sync_rl.sampler import SamplerSession
    from tpu_sync_rl.sync import release_memory, sync_weights
    from tpu_sync_rl.sync_handle import SyncHandle
    from tpu_sync_rl.tls import TLS
    from tpu_sync_rl.trainer import TrainerSession
    from tpu_sync_rl.update import Update

__version__ = "0.1.0"

_HOMES = {
    "connect": ("connect_sampler", "connect_trainer"),
    "errors": (
        "AuthError",
        "CorruptionError",
        "JobEndedError",
        "ManifestError",
        "PeerLostError",
        "PlanError",
        "SyncError",
        "SyncTimeoutError",
        "VersionError",
    ),
    "one_client": ("explain",),
    "plan": ("Plan",),
    "report": ("Report",),
    "sampler": ("SamplerSession",),
    "sync": ("release_memory", "sync_weights"),
    "update": ("Update",),
    "sync_handle": ("SyncHandle",),
    "tls": ("TLS",),
    "trainer": ("TrainerSession",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "TLS",
    "AuthError",
    "CorruptionError",
    "JobEndedError",
    "ManifestError",
    "PeerLostError",
    "Plan",
    "PlanError",
    "Report",
    "SamplerSession",
    "SyncError",
    "SyncHandle",
    "SyncTimeoutError",
    "TrainerSession",
    "Update",
    "VersionError",
    "connect_sampler",
    "connect_trainer",
    "explain",
    "release_memory",
    "sync_weights",
]


# What the library logs is the application's to show.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
