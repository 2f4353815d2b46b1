"""What runs on the hosts: a trainer's or a sampler's session, driven by a controller elsewhere.

Nothing here holds up the controller for longer than it asks for: what takes its time runs on a
thread, and the controller polls. A session ends when the controller says so, or with its process;
nothing waits for a destructor, since those of agents run at any time.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Generic, TypeVar

import jax

from tpu_sync_rl.agent_arrays import from_data, to_data
from tpu_sync_rl.colocated import (
    Agent,
    answers,
    asked,
    asked_program,
)
from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.generation_layout import held_elsewhere
from tpu_sync_rl.nics import find_nics
from tpu_sync_rl.options import Options, Staging
from tpu_sync_rl.pins import MAX_PINNED
from tpu_sync_rl.program import Program
from tpu_sync_rl.sampler import SamplerSession
from tpu_sync_rl.staging import num_fitting
from tpu_sync_rl.threads import start_thread
from tpu_sync_rl.trainer import TrainerSession
from tpu_sync_rl.update import Update

# Calls whose outcome, of a few kB, is kept: the controller may ask for those of handles late.
_NUM_KEPT_CALLS = 1000
_EXIT_WAITS_S = 1.0  # for what JAX does in a call; the rest of it may wait for hours
_MOST_COPIES = MAX_PINNED + 1  # of a trainer's params: those that are read, and the next one

Likes = Mapping[str, jax.ShapeDtypeStruct]  # every leaf by key, on the agents' CPU devices


class _Call:
    """Something that takes its time, on a thread of its own."""

    def __init__(self, run: Callable[["_Call"], Any]) -> None:
        self._run = run
        self._changed = threading.Condition()  # guards _status
        self._status: dict[str, Any] = {"begun": None, "over": None}
        start_thread("tsr-agent-call", self._finish, exit_waits_s=_EXIT_WAITS_S)

    def begin(self, value: Any) -> None:
        """Lets the controller know `value`, for which some calls wait before the end."""
        with self._changed:
            self._status["begun"] = value
            self._changed.notify_all()

    def status(self, until: str, wait_s: float) -> dict[str, Any]:
        """What is known, as soon as the call has "begun" or is "over", or `wait_s` are."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._status["over"] or self._status[until] is not None, wait_s
            )
            return dict(self._status)

    def _finish(self) -> None:
        outcome: dict[str, Any]
        try:
            outcome = {"value": self._run(self)}
        except BaseException as error:  # the controller raises it
            outcome = {"error": type(error).__name__, "text": str(error)}
        del self._run
        with self._changed:
            self._status |= {**outcome, "over": True}
            self._changed.notify_all()


Session = TypeVar("Session", bound=TrainerSession | SamplerSession)


class SessionAgent(Agent, Generic[Session]):
    """An agent with a session, once it has joined, and the calls of it that are under way."""

    def __init__(
        self,
        options: Options,
        staging: Staging,
        likes: Likes,
        groups: Sequence[Sequence[str]],
        settings: Mapping[str, Any],
        *,
        are_copied: bool,
    ) -> None:
        """Joins nothing yet.

        Args:
            options: of the session.
            staging: likewise.
            likes: its leaves.
            groups: keys of leaves that one call takes or returns.
            settings: further arguments of its class.
            are_copied: whether what the controller passes and takes is copied on the way.
        """
        super().__init__()
        self._options = options
        self._staging = staging
        self._likes = likes
        self._groups = groups
        self._settings = settings
        self._are_copied = are_copied
        self._session: Session | None = None
        self._calls: dict[int, _Call] = {}

    @answers
    def join(
        self, request: jax.Array, *, number: int, processes: list[int], count: int, timeout_s: float
    ) -> None:
        """Call `number`: joins the job. Asked with a row for each device, and their processes."""
        program = asked_program(request, processes, count)
        deadline = time.monotonic() + timeout_s

        def run(_: _Call) -> None:
            if self._options.nics is not None:
                find_nics(self._options.nics)  # says what is wrong: later it is in the background
            self._join(program, deadline)

        self._start(number, run)

    @answers
    def poll(self, _: jax.Array, *, number: int, until: str, wait_s: float) -> dict[str, Any]:
        """How call `number` is doing; waits for `wait_s` at most."""
        call = self._calls.get(number)
        if call is None:
            raise SyncError(f"the outcome is known no more: {_NUM_KEPT_CALLS} calls came after it")
        return call.status(until, wait_s)

    def _join(self, program: Program, deadline: float) -> None:
        raise NotImplementedError

    def _joined(self) -> Session:
        if self._session is None:
            raise SyncError("this agent has not joined the job")
        return self._session

    def _start(self, number: int, run: Callable[[_Call], Any]) -> None:
        for old in [n for n in self._calls if n <= number - _NUM_KEPT_CALLS]:
            del self._calls[old]
        self._calls[number] = _Call(run)


class TrainerAgent(SessionAgent[TrainerSession]):
    """Serves the shards that one host has of a trainer's params.

    Copies, which nobody else has, are kept until the next version for who joins late.
    """

    def __init__(self, *arguments: Any, are_copied: bool) -> None:
        """As any `SessionAgent`."""
        super().__init__(*arguments, are_copied=are_copied)
        self._given: dict[str, jax.Array] = {}
        self._kept: dict[str, jax.Array] = {}

    @answers
    def give(self, _: jax.Array, *arrays: jax.Array, group: int) -> None:
        """Takes leaves of the version that is published next; of PRNG keys their data."""
        for key, array in zip(self._groups[group], arrays, strict=True):
            self._given[key] = from_data(array, self._likes[key])

    @answers
    def publish(
        self,
        _: jax.Array,
        *,
        number: int,
        version: int | None,
        wait: str | None,
        timeout_s: float,
    ) -> None:
        """Call `number`: publishes what was given. Has begun when that may be donated."""
        given = [self._params()]
        self._kept = given[0] if self._are_copied else {}

        def run(call: _Call) -> Any:
            params, session = given.pop, self._joined()
            if wait == "committed":
                report = session.sync_weights(
                    params(), version=version, wait="committed", timeout=timeout_s
                )
            else:
                handle = session.sync_weights(
                    params(), version=version, wait=None, timeout=timeout_s
                )
                call.begin(handle.version)
                report = handle.result()
            return report.to_dict()

        self._start(number, run)

    @answers
    def close(self, _: jax.Array, *, number: int, timeout_s: float) -> None:
        """Call `number`: drains and ends the job."""
        self._start(number, lambda _: self._joined().close(timeout_s))

    @answers
    def leave(self, _: jax.Array) -> None:
        """Leaves as a trainer that failed: samplers wait for the next one."""
        if self._session is not None:
            self._session.__exit__(SyncError)

    def _join(self, program: Program, deadline: float) -> None:
        if self._are_copied:
            nbytes = sum(_nbytes_here(like, program) for like in self._likes.values())
            limit = self._staging.max_host_nbytes
            num_fitting("copies of the params", nbytes, "max_host_nbytes", limit, _MOST_COPIES)
        self._session = TrainerSession(
            self._options,
            program,
            self._staging,
            coordinator_process=None,
            deadline=deadline,
            **self._settings,
        )

    def _params(self) -> dict[str, jax.Array]:
        given, self._given = self._given, {}
        return {
            key: given[key] if key in given else held_elsewhere(like)
            for key, like in self._likes.items()
        }


def _nbytes_here(like: jax.ShapeDtypeStruct, program: Program) -> int:
    """What the shards of a leaf take in this process; each device has its own."""
    sharding = like.sharding
    num_devices = sum(program.holder(x) == program.index for x in sharding.device_set)
    nbytes: int = prod(sharding.shard_shape(like.shape)) * like.dtype.itemsize
    return num_devices * nbytes


class _AgentsSession(SamplerSession):
    """What an agent has, whose arrays may be copied to where they are used."""

    def release_current(self) -> None:
        """Gives the memory of `current` back at once: its params must not be read any more."""
        self._maker.check()
        self._updates.release()


class SamplerAgent(SessionAgent[_AgentsSession]):
    """Receives the shards that one host has of a replica's params."""

    def __init__(self, *arguments: Any, are_copied: bool) -> None:
        """As any `SessionAgent`."""
        super().__init__(*arguments, are_copied=are_copied)
        self._update: Update | None = None

    @answers
    def sync(
        self,
        _: jax.Array,
        *,
        number: int,
        wait: bool,
        min_version: int | None,
        timeout_s: float,
    ) -> None:
        """Call `number`: takes a version, for `take`; its value is an `Update` without params."""

        def run(_: _Call) -> Any:
            update = self._joined().sync_weights(
                timeout=timeout_s, wait=wait, min_version=min_version
            )
            if update is None:
                return None
            self._update = update
            return {
                "version": update.version,
                "incarnation": update.incarnation,
                "epoch": update.epoch,
                "report": update.report.to_dict(),
            }

        self._start(number, run)

    def take(self, request: jax.Array) -> list[jax.Array]:
        """Leaves of the version that `sync` took; of PRNG keys their data."""
        assert self._update is not None
        keys = self._groups[asked(request)["group"]]
        return [to_data(self._update.params[key]) for key in keys]

    @answers
    def taken(self, _: jax.Array) -> None:
        """The controller has all leaves, in memory of its own where they are copied."""
        self._update = None
        if self._are_copied:
            self._joined().release_current()

    @answers
    def latest(self, _: jax.Array) -> int | None:
        """The newest version that the trainer has announced."""
        return self._joined().latest_version

    @answers
    def leave(self, _: jax.Array) -> None:
        """Leaves the job; the arrays stay valid."""
        self._update = None
        if self._session is not None:
            self._session.close()

    def _join(self, program: Program, deadline: float) -> None:
        self._session = _AgentsSession(
            self._options,
            program,
            self._staging,
            like=self._likes,
            deadline=deadline,
            **self._settings,
        )
