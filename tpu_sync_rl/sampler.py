"""The sampler's side of a job: take whole versions of the trainer's params, one after another."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal, overload

from tpu_sync_rl import errors
from tpu_sync_rl.addresses import is_loopback, split_address
from tpu_sync_rl.at_exit import AtExit
from tpu_sync_rl.calls import one_at_a_time
from tpu_sync_rl.client import CoordinatorClient
from tpu_sync_rl.epochs import KnownEpochs
from tpu_sync_rl.errors import JobEndedError, SyncError, SyncTimeoutError, VersionError
from tpu_sync_rl.generation_layout import GenerationLayout
from tpu_sync_rl.generations import notice_dead_arrays
from tpu_sync_rl.maker_process import MakerProcess
from tpu_sync_rl.manifest import Rename
from tpu_sync_rl.message_codec import FromCoordinator
from tpu_sync_rl.messages import Held, TrainerUp
from tpu_sync_rl.nics import numa_nodes
from tpu_sync_rl.offers import Offers
from tpu_sync_rl.options import (
    Options,
    Staging,
    checked_int,
    checked_timeout,
)
from tpu_sync_rl.process_stats import combined
from tpu_sync_rl.program import Program
from tpu_sync_rl.receiver import Receiver
from tpu_sync_rl.sampler_messages import (
    Abandon,
    Fetch,
    FleetCommit,
    FleetCommitStored,
    JobEnded,
    JoinSampler,
    Latest,
    RefusalTaken,
    ReplicaRefused,
    SamplerJoined,
    SamplerOutcome,
    Serve,
)
from tpu_sync_rl.session_log import SessionLog
from tpu_sync_rl.shard_table import shard_table
from tpu_sync_rl.staged_generations import generation_pool
from tpu_sync_rl.take_calls import TakeCalls
from tpu_sync_rl.trace import Trace
from tpu_sync_rl.tree import flatten
from tpu_sync_rl.update import Update
from tpu_sync_rl.updates import Updates


class SamplerSession:
    """One process of a replica in a job. Made by `connect_sampler`.

    Versions are received in the background from the beginning, so that a call only swaps. A context
    manager, and an iterator over updates that stops when the trainer has ended the job: it yields
    the newest prepared version each time and skips older ones. A trainer that wants each version
    taken publishes with `wait="committed"`.
    """

    def __init__(
        self,
        options: Options,
        program: Program,
        staging: Staging,
        *,
        coordinator: str,
        replica: str,
        life: str,
        like: Any,
        rename: Rename,
        cast: bool,
        max_generations: int,
        deadline: float,
    ) -> None:
        """Joins the job: blocks, to the `deadline` at most. On an error nothing stays behind."""
        self._maker = MakerProcess(self)
        keys, leaves, treedef = flatten(like)
        table = shard_table(keys, leaves, wanted=True, program=program)
        self._options = options
        self._program = program
        self._coordinator = coordinator
        self._replica = replica
        self._life = life
        self._turn = threading.Lock()  # of the call under way
        # Single values that no lock guards: the client's thread sets them, others read them.
        self._latest: Held | None = None
        self._fleet_commit: Held | None = None
        self._epochs = KnownEpochs()
        self._closed = False
        over_nics = not is_loopback(split_address(coordinator)[0])
        nodes = numa_nodes(options.nics) if over_nics else ()
        layout = GenerationLayout.of(table, leaves, process=program.index)
        log = SessionLog(options.job, replica, program.index)
        with contextlib.ExitStack() as undo:
            self._pool = generation_pool(
                layout, staging, max_generations=max_generations, nodes=nodes
            )
            undo.callback(self._pool.close)
            self._client = CoordinatorClient(
                coordinator,
                options,
                role="sampler",
                name=replica,
                process_index=program.index,
                join=self._join,
                on_message=self._on_message,
                on_refused=self._on_refused,
            )
            undo.callback(self._client.close)
            self._calls = TakeCalls(program.index, self._client.send)
            self._client.journal.counted(len(leaves))
            self._trace = Trace(
                options.trace,
                name=f"{replica} of {options.job}",
                process=program.index,
                warn=log.warning,
            )
            undo.callback(self._trace.close)
            self._updates = Updates(
                treedef,
                table.order,
                replica=replica,
                agent=program.agent,
                pool=self._pool,
                trace=self._trace,
            )
            self._receiver = Receiver(
                options,
                table.manifest,
                replica=replica,
                process=program.index,
                pool=self._pool,
                rename=rename,
                cast=cast,
                trace=self._trace,
                send=self._client.send,
            )
            undo.callback(self._receiver.close)
            self._offers = Offers(
                options,
                program,
                staging,
                coordinator=coordinator,
                receiver=self._receiver,
                send=self._client.send,
                log=log,
            )
            undo.callback(self._offers.close)
            self._at_exit = AtExit(self._stop)
            undo.callback(self._at_exit.cancel)
            self._client.start(deadline)
            undo.pop_all()

    def __repr__(self) -> str:
        version = None if self.current is None else self.current.version
        return (
            f"SamplerSession(job={self._options.job!r}, replica={self._replica!r}, "
            f"coordinator={self._coordinator!r}, version={version})"
        )

    @property
    def current(self) -> Update | None:
        """What the last successful call returned."""
        return self._updates.current

    @property
    def latest_version(self) -> int | None:
        """The newest version that the trainer has announced, whether or not it is here."""
        return None if self._latest is None else self._latest.version

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
        """Returns the newest version that all processes of the replica hold, newer than `current`.

        Where the trainer has `commit="fleet"`, it is one that all live replicas return.
        Collective over the replica: the n-th call has one outcome in all its processes, and
        process 0's arguments count. Blocks until there is one; copies nothing on CPU. May be
        called from any thread, one call at a time. After any raise `current` stays whole.

        Args:
            timeout: seconds; None for the session's.
            wait: False returns None at once where nothing newer is prepared.
            min_version: take no version below it.

        Raises:
            SyncTimeoutError: nothing came in time; says what is known of the trainer.
            CorruptionError: a chunk came wrong again and again, or `verify="full"` found a
                difference; the version is fetched anew for the next call.
            ManifestError: what the trainer has does not fit `like`; names every differing key.
            JobEndedError: the trainer closed the job, and its last version has been taken.
            VersionError: a newer session took this process's place.
            PeerLostError: another process of the replica is gone for longer than `peer_timeout`.
            SyncError: the version does not fit within `max_device_nbytes` while the application
                holds older arrays. It waits for the next call; `current` stays if it is held.
        """
        self._maker.check()
        timeout_s = checked_timeout(timeout, self._options.timeout_s)
        if min_version is not None:
            min_version = checked_int("min_version", min_version)
        deadline = time.monotonic() + timeout_s
        with one_at_a_time(self._turn, deadline):
            return self._sync(min_version, wait, timeout_s, deadline)

    def __iter__(self) -> Iterator[Update]:
        """Yields the newest prepared version each time, as `sync_weights()` does; skips older ones.

        With a trainer that publishes with `wait="committed"` none is skipped.
        """
        return self

    def __next__(self) -> Update:
        """The next update: blocks and raises as `sync_weights()`, but stops when the job ends."""
        try:
            return self.sync_weights()
        except JobEndedError:
            raise StopIteration from None

    def close(self) -> None:
        """Leaves the job at once; arrays that it returned stay valid. Idempotent.

        Does nothing in a fork of the process that made the session.
        """
        if self._closed or not self._maker.is_this:
            return
        self._closed = True
        self._calls.end(SyncError("this session is closed"))
        self._at_exit.cancel()
        self._stop()

    def _stop(self) -> None:
        """Ends all threads; a call that is under way is left where it is."""
        self._client.close()
        self._offers.close()
        self._receiver.close()
        self._pool.close()
        self._trace.close()

    def __enter__(self) -> "SamplerSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one call

    def _sync(
        self, min_version: int | None, wait: bool, timeout_s: float, deadline: float
    ) -> Update | None:
        notice_dead_arrays()  # of older updates, so that their memory is made ready meanwhile
        decided = self._calls.outcome(
            min_version=min_version, wait=wait, timeout_s=timeout_s, deadline=deadline
        )
        if decided is None:
            least = "" if min_version is None else f" from min_version={min_version} on"
            others = "process 0 has not called it, or was interrupted in it, or "
            raise SyncTimeoutError(
                f"no version{least} for replica {self._replica!r} within {timeout_s:g} s: "
                f"{'' if self._program.index == 0 else others}no answer from "
                f"{self._client.state}; the current version is "
                f"{None if self.current is None else self.current.version}"
            )
        self._check_last(decided.outcome.held, min_version)
        update, error = self._applied(decided)
        self._calls.took()
        if error is not None:
            raise error
        if update is not None:
            self._client.journal.synced(update.report)
        return update

    def _check_last(self, held: Held | None, min_version: int | None) -> None:
        # Of a job that has ended, the last version was handed out before anybody asked for it.
        if held is not None and min_version is not None and held.version < min_version:
            raise JobEndedError(
                f"the trainer has closed the job after version {held.version}, which is not yet "
                f"taken here; min_version={min_version} will not come"
            )

    def _applied(self, decided: SamplerOutcome) -> tuple[Update | None, Exception | None]:
        outcome = decided.outcome
        if outcome.error == "Nothing":
            return None, None
        if outcome.error:
            return None, errors.by_name(outcome.error)(outcome.text)
        held = outcome.held
        assert held is not None
        received = self._receiver.prepared.take(held)
        if received is None:
            return None, VersionError(f"version {held.version} is no longer held by this process")
        try:
            update, leaves = self._updates.swap(received, outcome.epoch, combined(decided.stats))
        except BaseException:
            self._receiver.prepared.add(received)  # for the next call
            raise
        self._offers.take(held, leaves)
        return update, None

    # --- what comes in, on the client's thread

    def _join(self) -> JoinSampler:
        prepared = [received.held for received in self._receiver.prepared]
        here = [held.incarnation for held in (*prepared, self._updates.committed) if held]
        return JoinSampler(
            life=self._life,
            process_count=self._program.count,
            sink=self._receiver.sink,
            prepared=prepared,
            epochs=self._epochs.of(here),
            promise=self._receiver.promise,
            fleet_commit=self._fleet_commit,
            committed=self._updates.committed,
            call=self._calls.next_call,
            outcomes=self._calls.decisions(),
        )

    def _on_message(self, message: FromCoordinator) -> None:
        match message:
            case SamplerJoined():
                self._receiver.sink = message.sink
                self._offers.end()
                self._calls.enter_again()
            case TrainerUp() | Fetch() | Abandon():
                if isinstance(message, TrainerUp):
                    self._epochs.learn(message.incarnation, message.epoch)
                self._receiver.on_message(message)
            case Serve():
                self._offers.on_message(message)
            case FleetCommit():
                self._fleet_commit = message.held
                self._client.send(FleetCommitStored(message.held))
            case Latest():
                self._latest = message.held
            case SamplerOutcome():
                if message.outcome.held is not None:
                    self._epochs.learn(message.outcome.held.incarnation, message.outcome.epoch)
                self._calls.decide(message.call, message)
                self._calls.forget(message.taken)
            case ReplicaRefused():
                self._client.send(RefusalTaken(message.digest))
            case JobEnded():
                self._offers.end()
                self._calls.end(JobEndedError(message.text), message.call)
                self._client.finish()

    def _on_refused(self, error: SyncError) -> None:
        self._calls.end(error)
