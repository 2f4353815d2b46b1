"""Calls to agents: objects that run beside devices, on their hosts, in the memory of their host.

By `jax.experimental.colocated_python`, which is outside of JAX's compatibility promise. Its calls
take and return arrays alone, so a request is JSON in an array of bytes with a row per device, the
same in all, and an answer is one page of JSON in such an array; `Agent.page` gets the others.
"""

import atexit
import functools
import importlib.util
import itertools
import json
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.colocated_python import colocated_python_class
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tpu_sync_rl import errors, software
from tpu_sync_rl.addresses import is_loopback
from tpu_sync_rl.agent_arrays import Devices
from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.generation_layout import held_elsewhere
from tpu_sync_rl.maker_process import MakerProcess
from tpu_sync_rl.moving import moving
from tpu_sync_rl.options import Options, check_choice
from tpu_sync_rl.program import Program

_ROW_NBYTES = 4096  # requests are padded to a multiple, so that few shapes are compiled
_PAGE_NBYTES = 4096  # of an answer, its length within; polls ask for many
_LENGTH_NBYTES = 8
_TEXT_NBYTES = _PAGE_NBYTES - _LENGTH_NBYTES


# --- on the hosts


class Agent:
    """What runs on one host. Its methods may run at the same time."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(8)
        self._long_answers: dict[int, bytes] = {}  # by request, until the last page is read

    def meet(self, request: jax.Array) -> jax.Array:
        """Says which versions run here."""
        return self._first_page(request, software.versions)

    def page(self, request: jax.Array) -> jax.Array:
        """Another page of an earlier answer; an empty one where that was shorter than others'."""
        number, index = asked(request)["request"], asked(request)["index"]
        answer = self._long_answers.get(number, b"")
        if len(answer) <= (index + 1) * _TEXT_NBYTES:
            self._long_answers.pop(number, None)
        return _page(request, answer, index)

    def _first_page(self, request: jax.Array, call: Callable[[], Any]) -> jax.Array:
        try:
            found = {"value": call()}
        except Exception as error:  # it is raised where the request came from
            found = {"error": type(error).__name__, "text": str(error)}
        answer = json.dumps({"agent": self._name, **found}).encode()
        if len(answer) > _TEXT_NBYTES:
            self._long_answers[_request(request)["request"]] = answer
        return _page(request, answer, 0)


def answers(method: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Makes a method of an `Agent` answer requests with what it returns, plain JSON types.

    It gets the request, the arrays of the call, and what was asked as keyword arguments.
    """

    @functools.wraps(method)
    def answering(self: Agent, request: jax.Array, *arrays: jax.Array) -> jax.Array:
        return self._first_page(request, lambda: method(self, request, *arrays, **asked(request)))

    return answering


def asked_program(request: jax.Array, processes: Sequence[int], count: int) -> Program:
    """The program of all agents, in the one that got `request`, whose rows are all devices."""
    devices = request.sharding.devices_indices_map(request.shape)
    holder = {device: processes[index[0].start or 0] for device, index in devices.items()}
    own = request.addressable_shards[0].device
    return Program(holder[own], count, holder, agent="colocated")


def asked(request: jax.Array) -> dict[str, Any]:
    """What the controller asks for, in an agent."""
    wanted: dict[str, Any] = _request(request)["asked"]
    return wanted


@moving()
def _request(request: jax.Array) -> dict[str, Any]:
    row = np.asarray(request.addressable_shards[0].data)
    found: dict[str, Any] = json.loads(row.tobytes().rstrip(b"\0"))
    return found


def _page(request: jax.Array, answer: bytes, index: int) -> jax.Array:
    text = answer[index * _TEXT_NBYTES :][:_TEXT_NBYTES]
    page = np.frombuffer(len(answer).to_bytes(_LENGTH_NBYTES, "little") + text, np.uint8)
    return _rows(request.sharding, request.shape[0], page, _PAGE_NBYTES)


@moving()
def _rows(sharding: Sharding, count: int, row: np.ndarray, nbytes: int) -> jax.Array:
    """An array with `row`, filled up to `nbytes`, for each of `count` devices."""
    padded = np.zeros((1, nbytes), np.uint8)
    padded[0, : len(row)] = row
    return jax.make_array_from_callback((count, nbytes), sharding, lambda _: padded)


# --- on the controller


class Agents:
    """One agent on each host of some devices, as seen from the controller. Thread-safe.

    In a program of several controllers each sees its own agent alone, and all make the same calls.

    Attributes:
        controller_nbytes: bytes of requests and answers so far: all that passed through here.
    """

    def __init__(
        self, kind: type[Agent], devices: Devices, *arguments: Any, **options: Any
    ) -> None:
        """Makes a `kind(*arguments, **options)` on each host; `devices` are CPU devices.

        Raises:
            SyncError: agents can't run here, or run other versions than this process.
        """
        if importlib.util.find_spec("cloudpickle") is None:
            raise SyncError(
                "agents need the package cloudpickle: pip install 'tpu_sync_rl[agents]', here and "
                "in the image of the colocated-Python sidecar"
            )
        self.controller_nbytes = 0
        self._devices = devices
        self._numbers = itertools.count()
        self._agents: Any = colocated_python_class(kind)(*arguments, **options)
        self._maker = MakerProcess(self)
        _alive.add(self)
        met = self._exchange("meet", devices)
        for answer in met.values():
            _check_versions(answer["value"])
        if jax.process_count() > 1:
            self.count = jax.process_count()
            self.processes = [device.process_index for device in devices]
        else:
            names = list(dict.fromkeys(answer["agent"] for answer in met.values()))
            self.count = len(names)
            self.processes = [names.index(met[row]["agent"]) for row in range(len(devices))]
        firsts = {process: row for row, process in reversed([*enumerate(self.processes)])}
        self._leaders = tuple(devices[row] for _, row in sorted(firsts.items()))

    def call(
        self,
        method: str,
        *arrays: jax.Array,
        devices: Devices | None = None,
        **asked: Any,
    ) -> list[Any]:
        """What each agent answers, in the order of their processes. Blocks while they work.

        Args:
            method: one with `answers`.
            arrays: all on `devices`, in this order.
            devices: whose agents are called; None calls all.
            asked: plain JSON types.

        Raises:
            SyncError, ValueError, TypeError: what one of them raised, or that they can't be called.
        """
        found = self._exchange(method, devices or self._leaders, *arrays, **asked)
        by_agent = {answer["agent"]: answer for answer in found.values()}
        for answer in by_agent.values():
            if "error" in answer:
                raise errors.by_name(answer["error"])(answer["text"])
        return [answer["value"] for answer in by_agent.values()]

    def forget(self) -> None:
        """Lets JAX end the agents whenever it likes. No call may follow. Nothing in a fork."""
        if self._maker.is_this:
            self._agents = None

    def call_on_all_devices(self, method: str, **asked: Any) -> None:
        """As `call`, with a row for each device: see `asked_program`."""
        self.call(method, devices=self._devices, **asked)

    def arrays(
        self, method: str, devices: Devices, likes: Sequence[jax.ShapeDtypeStruct], **asked: Any
    ) -> list[jax.Array]:
        """The arrays, like `likes` on `devices`, that a method returns. It must not raise."""
        if not _any_here(devices):
            return [held_elsewhere(like) for like in likes]
        return list(self._run(method, self._request(devices, next(self._numbers), asked)))

    def _exchange(
        self, method: str, devices: Devices, *arrays: jax.Array, **asked: Any
    ) -> dict[int, dict[str, Any]]:
        """Answers by row; where one controller is not alone, those of its own rows."""
        if not _any_here(devices):
            return {}
        number = next(self._numbers)
        request = self._request(devices, number, asked)
        read = self._read(self._run(method, request, *arrays))
        texts = {row: text for row, (text, _) in read.items()}
        longest = max(length for _, length in read.values())
        for index in range(1, -(-longest // _TEXT_NBYTES)):
            page = {"request": number, "index": index}
            read = self._read(self._run("page", self._request(devices, number, page)))
            texts = {row: text + read[row][0] for row, text in texts.items()}
        return {row: json.loads(text) for row, text in texts.items()}

    @moving()
    def _run(self, method: str, request: jax.Array, *arrays: jax.Array) -> Any:
        try:
            return getattr(self._agents, method)(request, *arrays)
        except jax.errors.JaxRuntimeError as error:
            raise SyncError(
                f"the agents could not be called ({method}): {error}; beside each worker there "
                "must be a colocated-Python sidecar with the Python, JAX and tpu_sync_rl of this "
                "process"
            ) from error

    def _request(self, devices: Devices, number: int, asked: Mapping[str, Any]) -> jax.Array:
        text = np.frombuffer(json.dumps({"request": number, "asked": asked}).encode(), np.uint8)
        nbytes = -(-len(text) // _ROW_NBYTES) * _ROW_NBYTES
        self.controller_nbytes += nbytes * len(devices)
        return _rows(_row_sharding(devices), len(devices), text, nbytes)

    @moving()
    def _read(self, page: jax.Array) -> dict[int, tuple[bytes, int]]:
        """Per row here the text on this page, and the length of the whole."""
        read = {}
        for shard in page.addressable_shards:
            row = np.asarray(shard.data).tobytes()
            self.controller_nbytes += len(row)
            length = int.from_bytes(row[:_LENGTH_NBYTES], "little")
            read[shard.index[0].start or 0] = row[_LENGTH_NBYTES:].rstrip(b"\0"), length
        return dict(sorted(read.items()))


_alive: "weakref.WeakSet[Agents]" = weakref.WeakSet()


@atexit.register
def _forget_all() -> None:
    """Destructors of JAX that run when its modules are gone print errors that mean nothing."""
    for agents in list(_alive):
        agents.forget()


@functools.lru_cache
def _row_sharding(devices: Devices) -> NamedSharding:
    """The same object each time, by which JAX finds what it made of a call before."""
    return NamedSharding(Mesh(devices, ("device",)), PartitionSpec("device"))


def _check_versions(theirs: Mapping[str, str]) -> None:
    ours = software.versions()
    names = [name for name in ("tpu_sync_rl", "python", "jax") if ours[name] != theirs.get(name)]
    if names:
        raise SyncError(
            "an agent runs other versions than this process: "
            + ", ".join(f"{name} {theirs.get(name)}, here {ours[name]}" for name in names)
            + "; make the sidecar's image of the same ones"
        )


def _any_here(devices: Devices) -> bool:
    """Whether this controller drives any of `devices`."""
    own = jax.process_index()
    return jax.process_count() == 1 or any(device.process_index == own for device in devices)


def are_remote(devices: Iterable[jax.Device]) -> bool:
    """Whether the memory of `devices` is in other processes, though this one alone drives them."""
    return jax.process_count() == 1 and any(
        "pathways" in getattr(device.client, "runtime_type", "")
        or device.process_index != jax.process_index()
        for device in devices
    )


def takes_agents(
    agent: str, devices: Iterable[jax.Device], options: Options, coordinator_host: str
) -> bool:
    """Whether a session with `devices` takes agents, which `agent=` decides.

    Raises:
        ValueError: they could not do what another option asks for, or reach the coordinator.
    """
    check_choice("agent", agent, "auto", "process", "colocated")
    remote = are_remote(devices)
    if agent == "process" or (agent == "auto" and not remote):
        return False
    if options.metrics is not None:
        raise ValueError("metrics= is not kept by agents: leave it out, or pass agent='process'")
    if remote and is_loopback(coordinator_host):
        raise ValueError(
            f"agents on other hosts can't dial {coordinator_host}: pass coordinator='host:port' "
            "with an address of this host that they reach"
        )
    return True
