"""`sync_weights` for whatever is on the other side: another mesh, or a session."""

import importlib
import sys
from typing import TYPE_CHECKING, Any, TypeGuard, overload

import jax

from tpu_sync_rl import one_client
from tpu_sync_rl.colocated import are_remote
from tpu_sync_rl.manifest import Rename
from tpu_sync_rl.options import AgentChoice, Wait, check_choice
from tpu_sync_rl.report import Report
from tpu_sync_rl.shard_table import is_array

if TYPE_CHECKING:
    from tpu_sync_rl.sync_handle import SyncHandle
    from tpu_sync_rl.trainer import TrainerSession


@overload
def sync_weights(
    params: Any,
    *,
    to: "TrainerSession",
    version: int | None = None,
    wait: Wait = "received",
    timeout: float | None = None,
) -> Report: ...


@overload
def sync_weights(
    params: Any,
    *,
    to: "TrainerSession",
    version: int | None = None,
    wait: None,
    timeout: float | None = None,
) -> "SyncHandle": ...


@overload
def sync_weights(
    params: Any, *, to: Any, rename: Rename = None, cast: bool = False, agent: AgentChoice = "auto"
) -> Any: ...


def sync_weights(
    params: Any,
    *,
    to: Any,
    version: int | None = None,
    wait: Wait | None = "received",
    timeout: float | None = None,
    rename: Rename = None,
    cast: bool = False,
    agent: AgentChoice = "auto",
) -> Any:
    """Brings `params` to where they are sampled from.

    With a `TrainerSession` as `to`, publishes them as `TrainerSession.sync_weights` does, and
    returns its Report or SyncHandle. With anything else, returns them as new arrays on another
    mesh of this JAX client: see `one_client.sync_weights`. Where their devices belong to other
    processes, as under Pathways, agents there do it, as `agent` of `connect_trainer` says.

    Params may alias NumPy memory on a CPU, as those of `jax.device_put(x)` do. Do not write to it
    before the session has published the next version: a sampler that joins late would get the
    later bytes as this one.

    Example:
        >>> import jax, numpy as np, tpu_sync_rl as tsr
        >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        >>> trainer = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("fsdp", "tp"))
        >>> sampler = Mesh(np.array(jax.devices()[4:8]).reshape(2, 2), ("fsdp", "tp"))
        >>> params = {"w": jax.device_put(np.eye(8), NamedSharding(trainer, P("fsdp", "tp")))}
        >>> synced = tsr.sync_weights(params, to=NamedSharding(sampler, P("tp", "fsdp")))
        >>> bool((synced["w"] == np.eye(8)).all())
        True

    Raises:
        TypeError: an option that the other kind of `to` takes.
    """
    if _is_session(to):
        if rename is not None or cast or agent != "auto":
            raise TypeError(
                "rename= and cast= are the samplers': pass them to connect_sampler, and agent= to "
                "both connect_*"
            )
        return to.sync_weights(params, version=version, wait=wait, timeout=timeout)
    if version is not None or wait != "received" or timeout is not None:
        raise TypeError("version=, wait= and timeout= need a TrainerSession as `to`")
    check_choice("agent", agent, "auto", "process", "colocated")
    if agent == "colocated" or (agent == "auto" and _are_elsewhere(params)):
        # It takes gRPC along, which one client does without elsewhere.
        by_agents = importlib.import_module("tpu_sync_rl.agent_client")
        return by_agents.sync_weights(params, to=to, rename=rename, cast=cast)
    return one_client.sync_weights(params, to=to, rename=rename, cast=cast)


def release_memory() -> None:
    """Gives the memory of dead `sync_weights` results back to the system. Living ones stay.

    Any thread may call.

    Example:
        >>> import tpu_sync_rl as tsr
        >>> tsr.release_memory()
    """
    one_client.release_memory()
    by_agents = sys.modules.get("tpu_sync_rl.agent_client")
    if by_agents is not None:
        by_agents.release_memory()


def _are_elsewhere(params: Any) -> bool:
    # They are of one client, whose devices belong to this process, or not. Of what is no array, or
    # traced, the rest will tell.
    for leaf in jax.tree.leaves(params):
        if is_array(leaf):
            return are_remote(leaf.sharding.device_set)  # a deleted one has that, too
    return False


def _is_session(to: Any) -> "TypeGuard[TrainerSession]":
    # Who has a session has loaded its module. One client does without it, and so without gRPC.
    trainer = sys.modules.get("tpu_sync_rl.trainer")
    return trainer is not None and isinstance(to, trainer.TrainerSession)
