"""The trainer's side of a job: publish versions of the params, wait until samplers have them."""

import contextlib
import threading
import time
from functools import partial
from typing import Any, overload

import msgspec

from tpu_sync_rl import errors
from tpu_sync_rl.at_exit import AtExit
from tpu_sync_rl.calls import GRACE_S, Call, Calls, one_at_a_time
from tpu_sync_rl.client import GOODBYE_S, CoordinatorClient
from tpu_sync_rl.coordinator_process import CoordinatorProcess
from tpu_sync_rl.copy_digests import combined as combined_copies
from tpu_sync_rl.deadline import seconds_left
from tpu_sync_rl.errors import SyncError, SyncTimeoutError
from tpu_sync_rl.listener import Listener
from tpu_sync_rl.maker_process import MakerProcess
from tpu_sync_rl.message_codec import FromCoordinator
from tpu_sync_rl.messages import Address
from tpu_sync_rl.options import (
    Commit,
    OnStraggler,
    Options,
    Staging,
    Wait,
    check_wait,
    checked_timeout,
)
from tpu_sync_rl.program import Program
from tpu_sync_rl.publications import Publications
from tpu_sync_rl.publish_report import report_of
from tpu_sync_rl.report import Report
from tpu_sync_rl.session_log import SessionLog
from tpu_sync_rl.source import Source
from tpu_sync_rl.sync_handle import SyncHandle
from tpu_sync_rl.trace import Trace
from tpu_sync_rl.trainer_messages import (
    Announced,
    CloseJob,
    EpochRaised,
    GiveUp,
    JobClosed,
    JoinTrainer,
    LeafDigestsWanted,
    Live,
    Pins,
    Publish,
    PublishOutcome,
    TrainerJoined,
)

# Outcomes that are kept for a process that missed them when the coordinator died. It is behind by
# no more calls than have published and wait, which pins keep to a few.
_NUM_KEPT_CALLS = 8


class TrainerSession:
    """One life of a trainer in a job: an incarnation. Made by `connect_trainer`.

    A context manager: leaving it cleanly drains and ends the job; leaving it by an exception lets
    samplers keep what they have and wait for the next incarnation.
    """

    def __init__(
        self,
        options: Options,
        program: Program,
        staging: Staging,
        *,
        incarnation: str,
        min_replicas: int,
        straggler_timeout_s: float,
        on_straggler: OnStraggler,
        commit: Commit,
        coordinator: str,
        coordinator_process: CoordinatorProcess | None,
        deadline: float,
    ) -> None:
        """Joins the job: blocks, to the `deadline` at most. On an error nothing stays behind."""
        self._maker = MakerProcess(self)
        self.coordinator = coordinator
        self.incarnation = incarnation
        self._options = options
        self._program = program
        self._min_replicas = min_replicas
        self._straggler_timeout_s = straggler_timeout_s
        self._on_straggler: OnStraggler = on_straggler
        self._commit: Commit = commit
        self._coordinator_process = coordinator_process
        self._turn = threading.Lock()  # of the call under way; guards _next_call
        self._calls: Calls[PublishOutcome] = Calls()
        self._closing: Calls[JobClosed] = Calls()
        self._publications = Publications()
        self._next_call = 0
        # Single values that no lock guards: one thread sets each, and others take what is there.
        self._live: list[str] = []  # replicas; set by the client's thread
        self._epoch = 0  # likewise
        self._close_by: float | None = None  # when draining ends; set by `close`
        self._closed = False
        log = SessionLog(options.job, None, program.index)
        with contextlib.ExitStack() as undo:
            self._trace = Trace(
                options.trace,
                name=f"trainer of {options.job}",
                process=program.index,
                warn=log.warning,
            )
            undo.callback(self._trace.close)
            self._client = CoordinatorClient(
                coordinator,
                options,
                role="trainer",
                name=incarnation,
                process_index=program.index,
                join=self._join,
                on_message=self._on_message,
                on_refused=self._on_refused,
            )
            undo.callback(self._client.close)
            self._source = Source(options, program, staging, self._trace, self._client.send)
            undo.callback(self._source.close)
            self._listener = Listener(
                options,
                coordinator=coordinator,
                incarnation=incarnation,
                on_stream=self._source.add_connection,
                log=log,
            )
            undo.callback(self._listener.close)
            self._goodbye_s = GOODBYE_S  # that a coordinator gets which answers
            self._at_exit = AtExit(self._stop)
            undo.callback(self._at_exit.cancel)
            self._client.start(deadline)
            undo.pop_all()

    def __repr__(self) -> str:
        version = self._publications.newest if self._publications.newest >= 0 else None
        return (
            f"TrainerSession(job={self._options.job!r}, incarnation={self.incarnation!r}, "
            f"coordinator={self.coordinator!r}, version={version})"
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
        """Publishes `params` as `version` and waits until samplers have it.

        Collective over the trainer program, with one outcome in all its processes. Donating the
        params after it returns is safe, whatever `wait` is. Copies nothing: samplers read from
        the arrays' own memory; or from a copy in pinned host memory, where `staging` is that, and
        it returns when that is whole, at the earliest. Blocks; may be called from any thread, one
        call at a time.

        Params may alias NumPy memory on a CPU, as those of `jax.device_put(x)` do. Do not write to
        it before the next version is published: samplers that join late read it again, and would
        get the later bytes as this version. `jnp.array(x)` copies.

        Args:
            params: pytree of jax.Arrays, the same leaves in every call of a session.
            version: int ≥ 0 that grows; None is the last one + 1, and 1 at first.
            wait: "received": every live replica has prepared this version or a newer one.
                "committed": every live replica's application took it. None: returns a
                `SyncHandle` as soon as the params are pinned, or copied.
            timeout: seconds; None for the session's.

        Raises:
            ValueError, TypeError: a leaf that can't be synced, by its key, or a bad argument.
            ManifestError: the leaves differ from those of the first call, or too few replicas fit.
            VersionError: `version` does not grow, or a newer incarnation took over.
            CorruptionError: processes hold different copies of the same boxes, which are named;
                no sampler has heard of the version.
            SyncTimeoutError: who lacks what. The version stays announced, or was never announced
                and may be published again, or the fleet has withdrawn it: the text says which.
            PeerLostError: another process of the trainer is gone.
        """
        self._maker.check()
        check_wait(wait)
        deadline = time.monotonic() + checked_timeout(timeout, self._options.timeout_s)
        with one_at_a_time(self._turn, deadline):
            call, publish = self._publish(params, version, wait, deadline)
            if wait is None:
                return SyncHandle(
                    publish.version,
                    deadline,
                    is_over=partial(self._calls.is_over_by, call),
                    finish=partial(self._finish, call, publish, deadline),
                )
            return self._finish(call, publish, deadline)

    def close(self, timeout: float | None = None) -> None:
        """Drains and ends the job; samplers then see JobEndedError after the last version.

        Waits at most `timeout` seconds (None: the session's) until every live replica has
        committed the last version, left, or can no longer get it. Idempotent. Does nothing in a
        fork of the process that made the session.
        """
        timeout_s = checked_timeout(timeout, self._options.timeout_s)
        if self._closed or not self._maker.is_this:
            return
        self._close_by = time.monotonic() + timeout_s
        self._client.send(CloseJob(timeout_s))
        try:
            self._calls.raise_if_ended(0)
            if self._closing.wait(self._closing.open(0), self._close_by + GRACE_S) is None:
                self._goodbye_s = 0.0
        except SyncError:
            pass  # fenced or refused: the job is another's, and there is nothing to drain
        self._end()

    def __enter__(self) -> "TrainerSession":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._maker.is_this:
            self._end()

    def _end(self) -> None:
        self._closed = True
        self._calls.end(SyncError("this session is closed"))
        self._at_exit.cancel()
        self._stop()

    def _stop(self) -> None:
        """Ends all threads; a call that is under way is left where it is."""
        self._client.close(self._goodbye_s)
        self._listener.close()
        self._source.close()
        if self._coordinator_process is not None:
            self._coordinator_process.stop(self._goodbye_s)
        self._trace.close()

    # --- one call

    def _publish(
        self, params: Any, wanted: int | None, wait: str | None, deadline: float
    ) -> tuple[Call[PublishOutcome], Publish]:
        self._calls.raise_if_ended(self._next_call)
        call = self._calls.open(self._next_call)
        self._calls.forget(call.number - _NUM_KEPT_CALLS)
        self._next_call += 1
        version = -1
        seconds: dict[str, float] = {}
        tell = partial(self._tell, call.number, wait, deadline)
        try:
            version = self._publications.next_version(wanted)
            seconds = self._source.pin(params, version, deadline, compares=self._compares)
            self._client.journal.counted(self._source.num_leaves)
            publish = tell(version, seconds)
            landed = self._source.land(version)
        except BaseException as error:
            self._source.let_go(version)
            tell(version, seconds, error)
            raise
        return call, msgspec.structs.replace(publish, seconds={**seconds, **landed})

    @property
    def _compares(self) -> bool:
        """Whether copies on several processes are compared before samplers hear of a version."""
        return self._options.verify == "full" or self._publications.newest < 0

    def _tell(
        self,
        call: int,
        wait: str | None,
        deadline: float,
        version: int,
        seconds: dict[str, float],
        failure: BaseException | None = None,
    ) -> Publish:
        """Says that this process has done its part of a call, or could not: others wait for it."""
        manifest = self._source.manifest
        publish = Publish(
            call=call,
            version=version,
            digest="" if manifest is None else manifest.digest,
            manifest=None,
            wait=wait,
            min_replicas=self._min_replicas,
            timeout_s=seconds_left(deadline),
            seconds=seconds,
            error="" if failure is None else type(failure).__name__,
            text="" if failure is None else str(failure),
            copies={} if failure is not None else combined_copies(self._source.copies),
        )
        self._publications.add(publish, self._source.copies)
        self._send_publish(publish)
        return publish

    def _send_publish(self, publish: Publish) -> None:
        manifest = self._source.manifest
        if manifest is not None and self._publications.newest < 0:
            publish = msgspec.structs.replace(publish, manifest=manifest.encoded)
        self._client.send(publish)

    def _finish(self, call: Call[PublishOutcome], publish: Publish, deadline: float) -> Report:
        decided = self._calls.wait(
            call, deadline, past_deadline=lambda: self._client.send(GiveUp(call.number))
        )
        if decided is None:
            raise SyncTimeoutError(
                f"version {publish.version}: no answer in time from {self._client.state}"
            )
        if decided.outcome.error:
            raise errors.by_name(decided.outcome.error)(decided.outcome.text)
        report = report_of(publish, decided, self._source, self._program)
        self._client.journal.synced(report)
        return report

    # --- what comes in, on other threads

    def _join(self) -> JoinTrainer:
        manifest = self._source.manifest if self._publications.newest >= 0 else None
        return JoinTrainer(
            incarnation=self.incarnation,
            epoch=self._epoch,
            process_count=self._program.count,
            addresses=[Address(*address) for address in self._listener.addresses],
            ticket_secret=self._listener.ticket_secret,
            straggler_timeout_s=self._straggler_timeout_s,
            on_straggler=self._on_straggler,
            commit=self._commit,
            pinned=self._source.versions,
            call=min(self._calls.numbers(), default=self._next_call),
            outcomes=self._calls.decisions(),
            replicas=self._live,
            digest="" if manifest is None else manifest.digest,
            manifest=None if manifest is None else manifest.encoded,
            newest=self._publications.newest_done,
            verify=self._options.verify,
        )

    def _on_message(self, message: FromCoordinator) -> None:
        match message:
            case TrainerJoined():
                self._epoch = message.epoch
                for publish in self._publications.undecided():
                    self._send_publish(publish)
                if self._close_by is not None:
                    self._client.send(CloseJob(seconds_left(self._close_by)))
            case EpochRaised():
                self._epoch = message.epoch
            case Announced():
                self._publications.announced(message)
            case LeafDigestsWanted():
                self._client.send(self._publications.leaf_digests(message))
            case Live():
                self._live = message.replicas
            case Pins():
                self._source.on_pins(message)
            case PublishOutcome():
                withdrawn = self._publications.over(message)
                if withdrawn is not None:
                    self._source.let_go(withdrawn)
                self._calls.decide(message.call, message)
            case JobClosed():
                self._closing.decide(0, message)

    def _on_refused(self, error: SyncError) -> None:
        self._calls.end(error)
        for version in self._source.versions:
            self._source.on_pins(Pins(version, [], 0))
