"""The trainer's side of a job whose params are in other processes than the controller's Python."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, overload

import jax
import msgspec

from tpu_sync_rl.agent import TrainerAgent
from tpu_sync_rl.agent_arrays import to_data
from tpu_sync_rl.agent_calls import AgentCalls, AgentLeaves
from tpu_sync_rl.buffers import check_alive
from tpu_sync_rl.calls import one_at_a_time
from tpu_sync_rl.coordinator_process import CoordinatorProcess
from tpu_sync_rl.errors import ManifestError, SyncError, SyncTimeoutError
from tpu_sync_rl.maker_process import MakerProcess
from tpu_sync_rl.manifest import check_unchanged
from tpu_sync_rl.moving import moving
from tpu_sync_rl.options import Options, Staging, Wait, check_wait, checked_timeout
from tpu_sync_rl.pins import wait_until_computed
from tpu_sync_rl.report import Report
from tpu_sync_rl.shard_table import signature
from tpu_sync_rl.sync_handle import SyncHandle
from tpu_sync_rl.trainer import TrainerSession
from tpu_sync_rl.tree import flatten


class AgentTrainerSession(TrainerSession):
    """A `TrainerSession` to its users, with agents in its place. Made by `connect_trainer`.

    The agents are on the hosts whose devices hold the params, and join at the first
    `sync_weights`. They read a copy of the params in the memory of those hosts, which lives until
    the next version; where the params are on CPUs they are read where they are.
    """

    def __init__(
        self,
        options: Options,
        staging: Staging,
        *,
        coordinator_process: CoordinatorProcess | None,
        **settings: Any,
    ) -> None:
        """Contacts nobody yet; `settings` are further arguments of `TrainerSession`."""
        # Nothing of the parent's state: that is what each agent has.
        self._maker = MakerProcess(self)
        self.coordinator = settings["coordinator"]
        self.incarnation = settings["incarnation"]
        self._options = options
        self._staging = staging
        self._settings = settings
        self._coordinator_process = coordinator_process
        self._turn = threading.Lock()
        self._known: tuple[Any, ...] = ()  # treedef and signature of the leaves last seen
        self._leaves: AgentLeaves | None = None
        self._front: AgentCalls | None = None
        self._closed = False

    def __repr__(self) -> str:
        return (
            f"AgentTrainerSession(job={self._options.job!r}, incarnation={self.incarnation!r}, "
            f"coordinator={self.coordinator!r})"
        )

    @overload
    def sync_weights(
        self,
        params: Any,
        *,
        version: int | None = None,
        wait: Wait = "received",
        timeout: float | None = None,
    ) -> Report: ...

    @overload
    def sync_weights(
        self,
        params: Any,
        *,
        version: int | None = None,
        wait: None,
        timeout: float | None = None,
    ) -> SyncHandle: ...

    def sync_weights(
        self,
        params: Any,
        *,
        version: int | None = None,
        wait: Wait | None = "received",
        timeout: float | None = None,
    ) -> Report | SyncHandle:
        """As `TrainerSession.sync_weights`."""
        self._maker.check()
        check_wait(wait)
        deadline = time.monotonic() + checked_timeout(timeout, self._options.timeout_s)
        with one_at_a_time(self._turn, deadline):
            calls, number = self._begin(params, version, wait, deadline)
            finish = partial(_report, calls, number, deadline)
            if wait is None:
                is_over = partial(_is_over, calls, number)
                begun = calls.begun(number, deadline)
                return SyncHandle(begun, deadline, is_over=is_over, finish=finish)
            return finish()

    def close(self, timeout: float | None = None) -> None:
        """As `TrainerSession.close`."""
        timeout_s = checked_timeout(timeout, self._options.timeout_s)
        if not self._maker.is_this:
            return
        if self._front is not None:
            deadline = time.monotonic() + timeout_s
            with suppress(SyncError):  # whatever is wrong with agents, there is nothing to drain
                self._front.outcome(self._front.start("close", deadline), deadline)
        self._end()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._maker.is_this:
            if self._front is not None:
                self._front.leave()
            self._end()

    def _end(self) -> None:
        self._closed = True
        self._front = None
        if self._coordinator_process is not None:
            self._coordinator_process.stop()

    def _begin(
        self, params: Any, version: int | None, wait: str | None, deadline: float
    ) -> tuple[AgentCalls, int]:
        """Starts a call of the agents; its number."""
        if self._closed:
            raise SyncError("this session is closed")
        arrays = jax.tree.leaves(params)
        leaves = self._described(params, arrays)
        # Where agents get copies, their calls begin when those are made, and know no deadline.
        if leaves.are_copied and not wait_until_computed(params, deadline):
            raise SyncTimeoutError("no version was published: the params are being computed")
        if self._front is None:
            self._front = AgentCalls(
                TrainerAgent, leaves, self._options, self._staging, self._settings, deadline
            )
        agents = self._front.agents
        with moving():
            copies = jax.device_put([to_data(array) for array in arrays], leaves.shardings)
        for group, positions in enumerate(leaves.groups):
            devices = leaves.devices_of_group[group]
            agents.call("give", *(copies[i] for i in positions), devices=devices, group=group)
        return self._front, self._front.start("publish", deadline, version=version, wait=wait)

    def _described(self, params: Any, arrays: Sequence[Any]) -> AgentLeaves:
        known = (jax.tree.structure(params), signature(arrays))
        if self._leaves is not None and known == self._known:
            check_alive(self._leaves.keys, arrays)
            return self._leaves
        keys = flatten(params)[0]
        check_alive(keys, arrays)
        leaves = AgentLeaves(keys, arrays, wanted=False)
        first = self._leaves or leaves
        check_unchanged(first.manifest, leaves.manifest)
        if (leaves.devices, leaves.keys_of_group) != (first.devices, first.keys_of_group):
            raise ManifestError(
                "the params are on other devices than those of the first sync_weights of this "
                "session, beside which its agents are"
            )
        self._leaves, self._known = leaves, known
        return leaves


def _is_over(calls: AgentCalls, number: int, deadline: float) -> bool:
    return calls.status(number, "over", deadline) is not None


def _report(calls: AgentCalls, number: int, deadline: float) -> Report:
    return msgspec.convert(calls.outcome(number, deadline), Report)
