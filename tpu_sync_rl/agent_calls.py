"""What a controller asks of the agents of one session, and where they have its leaves."""

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax

from tpu_sync_rl import errors
from tpu_sync_rl.agent import SessionAgent
from tpu_sync_rl.agent_arrays import Devices, beside, cpu_devices, devices_of, to_data
from tpu_sync_rl.calls import GRACE_S
from tpu_sync_rl.colocated import Agents
from tpu_sync_rl.deadline import seconds_left
from tpu_sync_rl.errors import SyncError, SyncTimeoutError
from tpu_sync_rl.options import Options, Staging
from tpu_sync_rl.shard_table import shard_table

_POLL_S = 0.05  # how long a call may keep an agent's host
LATE_S = GRACE_S + 0.2  # how long past its deadline a call of a session may go on, in an agent


class AgentLeaves:
    """Leaves of a tree, and where agents have them: on the CPU devices beside their own.

    Attributes:
        keys: in the order of the leaves.
        manifest: of them, as the controller sees it.
        likes: per key what the agents have.
        shardings: of that as calls take it: see `to_data`.
        groups: positions of leaves: a call of the agents takes and returns arrays that are on the
            same devices in the same order. By key, whatever the order of the leaves.
        keys_of_group: the keys of each.
        devices_of_group: the devices of each.
        devices: all of them, and so one on each host that has an agent.
        are_copied: whether an agent's arrays are not those of the controller.
    """

    def __init__(self, keys: Sequence[str], leaves: Sequence[Any], *, wanted: bool) -> None:
        """Describes `leaves` at `keys`, arrays that there are or (`wanted`) that are to be.

        Raises:
            ValueError, TypeError: a leaf that can't be synced, or not by agents, by its key.
        """
        self.keys = keys
        self.manifest = shard_table(keys, leaves, wanted=wanted).manifest
        own = [beside(key, leaf.sharding) for key, leaf in zip(keys, leaves, strict=True)]
        self.likes = {
            key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for key, leaf, sharding in zip(keys, leaves, own, strict=True)
        }
        self.shardings = [
            beside(key, to_data(leaf).sharding) if isinstance(leaf, jax.Array) else sharding
            for key, leaf, sharding in zip(keys, leaves, own, strict=True)
        ]
        groups: dict[Devices, list[int]] = {}
        for position in sorted(range(len(keys)), key=keys.__getitem__):
            groups.setdefault(devices_of(own[position]), []).append(position)
        self.devices_of_group, self.groups = list(groups), list(groups.values())
        self.keys_of_group = [[keys[i] for i in positions] for positions in self.groups]
        held = {device for devices in groups for device in devices}
        # Where controllers are several, each has an agent, also without a shard.
        if jax.process_count() > 1 or not held:
            held |= set(cpu_devices(tuple(jax.devices())))
        self.devices: Devices = tuple(sorted(held, key=lambda device: device.id))
        self.are_copied = not held.issuperset(
            device for leaf in leaves for device in leaf.sharding.device_set
        )


class AgentCalls:
    """The agents of one session, and its calls that take their time there. Thread-safe."""

    def __init__(
        self,
        kind: type[SessionAgent[Any]],
        leaves: AgentLeaves,
        options: Options,
        staging: Staging,
        settings: Mapping[str, Any],
        deadline: float,
    ) -> None:
        """Makes the agents, and has them join the job by `deadline`.

        Raises:
            SyncError: agents can't run here, or the coordinator does not take them.
        """
        self.agents = Agents(
            kind,
            leaves.devices,
            options,
            staging,
            leaves.likes,
            leaves.keys_of_group,
            settings,
            are_copied=leaves.are_copied,
        )
        self._numbers = itertools.count()
        number = next(self._numbers)
        try:
            self.agents.call_on_all_devices(
                "join",
                number=number,
                processes=self.agents.processes,
                count=self.agents.count,
                timeout_s=seconds_left(deadline),
            )
            self.outcome(number, deadline)
        except BaseException:
            self.leave()
            raise

    def start(self, method: str, deadline: float, **asked: Any) -> int:
        """Starts a call that has until `deadline`; its number."""
        number = next(self._numbers)
        self.agents.call(method, number=number, timeout_s=seconds_left(deadline), **asked)
        return number

    def status(self, number: int, until: str, deadline: float) -> list[dict[str, Any]] | None:
        """What each agent says of a call, once that has "begun" or is "over" in all of them.

        None where it has not, or is not, by the `deadline`.
        """
        while True:
            wait_s = min(_POLL_S, seconds_left(deadline))
            found = self.agents.call("poll", number=number, until=until, wait_s=wait_s)
            if all(status["over"] or status[until] is not None for status in found):
                return found
            if time.monotonic() >= deadline:
                return None

    def leave(self) -> None:
        """Has the agents leave the job at once."""
        with suppress(SyncError):  # who can't be called has no controller, and so no session
            self.agents.call("leave")

    def begun(self, number: int, deadline: float) -> Any:
        """What a call began with. Raises as `outcome` does where it ended before that."""
        found = self.status(number, "begun", deadline + LATE_S)
        if found is not None and all(status["begun"] is not None for status in found):
            return found[0]["begun"]
        return outcome(found)

    def outcome(self, number: int, deadline: float) -> Any:
        """What a call came to on the first agent, or what it raised on any."""
        return outcome(self.status(number, "over", deadline + LATE_S))


def outcome(found: list[dict[str, Any]] | None) -> Any:
    """The value in what `AgentCalls.status` said of a call that is over. Raises what it raised."""
    if found is None:
        raise SyncTimeoutError("the agents did not end a call in time")
    for status in found:
        if "error" in status:
            raise errors.by_name(status["error"])(status["text"])
    return found[0]["value"]
