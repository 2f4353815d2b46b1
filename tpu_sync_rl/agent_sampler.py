"""The sampler's side of a job whose arrays are in other processes than the controller's Python."""

import threading
import time
from typing import Any, Literal, overload

import jax
import msgspec
from jax.experimental.layout import Format
from jax.sharding import Sharding

from tpu_sync_rl.agent import SamplerAgent
from tpu_sync_rl.agent_arrays import from_data
from tpu_sync_rl.agent_calls import LATE_S, AgentCalls, AgentLeaves, outcome
from tpu_sync_rl.calls import one_at_a_time
from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.generation_layout import placement
from tpu_sync_rl.maker_process import MakerProcess
from tpu_sync_rl.moving import moving
from tpu_sync_rl.options import Options, Staging, checked_int, checked_timeout
from tpu_sync_rl.report import Report
from tpu_sync_rl.sampler import SamplerSession
from tpu_sync_rl.tree import flatten
from tpu_sync_rl.update import Update


class AgentSamplerSession(SamplerSession):
    """A `SamplerSession` to its users, with agents in its place. Made by `connect_sampler`.

    Each host keeps its generations in the memory of its agent. Where the arrays are not on CPUs,
    a generation is used again as soon as its bytes are copied to the devices.
    """

    def __init__(
        self,
        options: Options,
        staging: Staging,
        *,
        like: Any,
        deadline: float,
        **settings: Any,
    ) -> None:
        """Makes the agents and has them join; `settings` are others of `SamplerSession`."""
        if staging.max_device_nbytes is not None:
            raise ValueError("max_device_nbytes= is not kept by agents: leave it out")
        keys, leaves, self._treedef = flatten(like)
        self._leaves = AgentLeaves(keys, leaves, wanted=True)
        self._targets = [_target(key, leaf) for key, leaf in zip(keys, leaves, strict=True)]
        self._maker = MakerProcess(self)
        self._options = options
        self._settings = settings
        self._turn = threading.Lock()
        self._under_way: int | None = None  # a call whose outcome nobody has heard
        self._current: Update | None = None
        self._closed = False
        self._front = AgentCalls(SamplerAgent, self._leaves, options, staging, settings, deadline)

    def __repr__(self) -> str:
        version = None if self._current is None else self._current.version
        return (
            f"AgentSamplerSession(job={self._options.job!r}, "
            f"replica={self._settings['replica']!r}, version={version})"
        )

    @property
    def current(self) -> Update | None:
        """What the last successful call returned."""
        return self._current

    @property
    def latest_version(self) -> int | None:
        """The newest version that the trainer has announced, whether or not it is here."""
        self._maker.check()
        latest: int | None = self._front.agents.call("latest")[0]
        return latest

    @overload
    def sync_weights(
        self,
        *,
        timeout: float | None = None,
        wait: Literal[True] = True,
        min_version: int | None = None,
    ) -> Update: ...

    @overload
    def sync_weights(
        self, *, timeout: float | None = None, wait: bool, min_version: int | None = None
    ) -> Update | None: ...

    def sync_weights(
        self, *, timeout: float | None = None, wait: bool = True, min_version: int | None = None
    ) -> Update | None:
        """As `SamplerSession.sync_weights`.

        A call that was interrupted goes on in the agents: its outcome is that of the next one.
        """
        self._maker.check()
        timeout_s = checked_timeout(timeout, self._options.timeout_s)
        if min_version is not None:
            min_version = checked_int("min_version", min_version)
        deadline = time.monotonic() + timeout_s
        with one_at_a_time(self._turn, deadline):
            if self._closed:
                raise SyncError("this session is closed")
            if self._under_way is None:
                self._under_way = self._front.start(
                    "sync", deadline, wait=wait, min_version=min_version
                )
            found = self._front.status(self._under_way, "over", deadline + LATE_S)
            if found is not None:
                self._under_way = None
            return self._taken(outcome(found))

    def close(self) -> None:
        """Leaves the job at once; arrays that it returned stay valid. Idempotent."""
        if not self._closed and self._maker.is_this:
            self._closed = True
            self._front.leave()

    @moving()
    def _taken(self, found: dict[str, Any] | None) -> Update | None:
        if found is None:
            return None
        leaves, agents = self._leaves, self._front.agents
        arrays: list[Any] = [None] * len(leaves.keys)
        for group, positions in enumerate(leaves.groups):
            likes = [leaves.likes[leaves.keys[i]] for i in positions]
            taken = agents.arrays("take", leaves.devices_of_group[group], likes, group=group)
            for position, array, like in zip(positions, taken, likes, strict=True):
                arrays[position] = from_data(array, like)
        params = jax.device_put(arrays, self._targets)
        if leaves.are_copied:
            jax.block_until_ready(params)
        agents.call("taken")
        self._current = Update(
            found["version"],
            found["incarnation"],
            found["epoch"],
            jax.tree.unflatten(self._treedef, params),
            msgspec.convert(found["report"], Report),
        )
        return self._current


def _target(key: str, like: Any) -> Sharding | Format:
    """Where a leaf of the controller is to be.

    Raises:
        ValueError: it is not committed to its devices, as arrays that agents return are.
    """
    if not getattr(like, "committed", True):
        raise ValueError(
            f"leaf {key!r} of like= is not committed to its device, as what agents return is: "
            "jax.device_put(x, x.sharding) commits it"
        )
    return placement(like)
