"""Receives versions in the background, into memory that no array of the application uses."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tpu_sync_rl.dialler import Dialler
from tpu_sync_rl.errors import CorruptionError, PeerLostError, SyncError
from tpu_sync_rl.generations import Generation, GenerationPool
from tpu_sync_rl.manifest import Manifest, Rename, match
from tpu_sync_rl.messages import (
    Abandon,
    Admit,
    Fetch,
    FetchFailed,
    Held,
    Message,
    Prepared,
    Promise,
    Refuse,
    TrainerUp,
)
from tpu_sync_rl.options import Options
from tpu_sync_rl.plan import Plan, make_plan
from tpu_sync_rl.process_stats import ProcessStats
from tpu_sync_rl.staged_generations import StagedGeneration
from tpu_sync_rl.trace import Trace
from tpu_sync_rl.transport import Fetcher
from tpu_sync_rl.verification import Verification

_POLL_S = 0.1
_LOOK_S = 0.01  # how late the end of H2D is noticed
_GOODBYE_S = 0.5


@dataclass(frozen=True, slots=True)
class Received:
    """A prepared version: every byte of it that this process needs is verified."""

    held: Held
    generation: Generation
    leaves: list[Any] | None  # jax.Arrays, in the manifest's order; None before H2D at the commit
    stats: ProcessStats


@dataclass(slots=True)
class _Source:
    """The trainer incarnation that this process reads from."""

    trainer: TrainerUp
    sink: int  # under which its processes know this one
    plan: Plan
    fetcher: Fetcher
    dialler: Dialler
    verification: Verification | None  # with verify="full"

    def close(self) -> None:
        self.dialler.close()
        self.fetcher.close()


class Receiver:
    """Turns what the coordinator says about trainers and versions into prepared generations.

    One thread of its own does the work, in the order in which it was told. `prepared` is what it
    holds ready; `take` hands it over. All methods may be called from any thread.

    Attributes:
        sink: id that the coordinator gave to this process; 0 before that.
        promise: to keep the version that it was last told to receive until the fleet decides.
    """

    def __init__(
        self,
        options: Options,
        manifest: Manifest,
        *,
        replica: str,
        process: int,
        pool: GenerationPool,
        rename: Rename,
        cast: bool,
        trace: Trace,
        send: Callable[[Message], None],
    ) -> None:
        self._options = options
        self._manifest = manifest
        self._replica = replica
        self._process = process
        self._pool = pool
        self._rename = rename
        self._cast = cast
        self._trace = trace
        self._send = send
        self.sink = 0
        self._commands: queue.SimpleQueue[TrainerUp | Fetch | _Freed | None] = queue.SimpleQueue()
        # Reentrant: a signal handler may close the session whose thread is in here.
        self._lock = threading.RLock()
        self._prepared: dict[Held, Received] = {}  # oldest first
        self.promise: Promise | None = None
        self._abandoned: Held | None = None
        self._newest_incarnation = ""
        self._closed = False
        self._source: _Source | None = None
        self._planned_s = 0.0  # until a version came of it
        pool.when_free(partial(self._commands.put, _Freed()))
        self._plans: dict[str, tuple[Plan | None, str]] = {}  # digest -> plan, or differences
        self._thread = threading.Thread(target=self._run, name="tsr-receiver", daemon=True)
        self._thread.start()

    @property
    def prepared(self) -> list[Held]:
        """What `take` would hand over, oldest first."""
        with self._lock:
            return list(self._prepared)

    def take(self, held: Held) -> Received | None:
        """Hands over `held` and gives up older ones; None where it is not prepared here."""
        with self._lock:
            if held not in self._prepared:
                return None
            while (older := next(iter(self._prepared))) != held:
                del self._prepared[older]
            return self._prepared.pop(held)

    def put_back(self, received: Received) -> None:
        """Takes back what `take` handed over, for another call."""
        with self._lock:
            self._prepared[received.held] = received

    def on_message(self, message: TrainerUp | Fetch | Abandon) -> None:
        """Takes what the coordinator says; returns at once."""
        with self._lock:
            match message:
                case Abandon():
                    self._abandoned = message.held
                    return
                case TrainerUp():
                    self._newest_incarnation = message.incarnation
                case Fetch():
                    if message.held == self._abandoned:
                        self._abandoned = None  # it is wanted again
                    self.promise = message.promise
        self._commands.put(message)

    def close(self) -> None:
        """Stops receiving, and lets go of what was prepared and not taken.

        Does not wait for trainers that are being dialled, nor long for a plan that is being made.
        """
        with self._lock:
            self._closed = True
            self._prepared.clear()
        self._commands.put(None)
        self._thread.join(_GOODBYE_S)

    def _run(self) -> None:
        while (message := self._commands.get()) is not None and not self._closed:
            match message:
                case TrainerUp():
                    self._meet(message)
                case Fetch():
                    self._receive(message)
                case _Freed():
                    self._prepare()
        if self._source is not None:
            self._source.close()

    def _prepare(self) -> None:
        """Makes the arrays of the version that comes next, until there is something else to do."""
        with contextlib.suppress(Exception):  # whoever receives that version runs into it again
            self._pool.prepare(until=lambda: not self._commands.empty())

    # --- a trainer

    def _meet(self, trainer: TrainerUp) -> None:
        source = self._source
        if source is None or (source.trainer, source.sink) != (trainer, self.sink):
            if source is not None:
                source.close()
                self._source = None
            if trainer.digest not in self._plans:
                began = time.monotonic()
                self._plans[trainer.digest] = self._compare(trainer.manifest)
                self._planned_s = time.monotonic() - began
            plan, differences = self._plans[trainer.digest]
            if plan is None:
                self._send(Refuse(trainer.digest, differences))
                return
            fetcher = Fetcher(
                plan.native,
                peer_timeout_s=self._options.peer_timeout_s,
                traced=self._trace.is_on,
                verify=self._options.verify,
            )
            verification = Verification(plan) if self._options.verify == "full" else None
            dialler = Dialler(
                self._options,
                fetcher,
                {process: trainer.sources[process] for process in plan.source_processes},
                incarnation=trainer.incarnation,
                sink=self.sink,
                tickets=trainer.tickets,
            )
            self._source = _Source(trainer, self.sink, plan, fetcher, dialler, verification)
        self._send(Admit(trainer.digest))

    def _compare(self, manifest: bytes) -> tuple[Plan | None, str]:
        try:
            source = Manifest.decode(manifest)
            pairs, differences = match(source, self._manifest, rename=self._rename, cast=self._cast)
            if differences:
                return None, "\n".join(differences)
            plan = make_plan(
                source,
                self._manifest,
                pairs,
                process=self._process,
                chunk_nbytes=self._options.chunk_nbytes,
            )
        except Exception as error:  # a rename that the application wrote may raise anything
            return None, f"{type(error).__name__}: {error}"
        return plan, ""

    # --- a version

    def _receive(self, fetch: Fetch) -> None:
        held, began = fetch.held, time.monotonic()
        with self._lock:
            kept = {h: r for h, r in self._prepared.items() if h in (held, fetch.keep)}
            self._prepared = kept
            received = kept.get(held)
        if received is not None:  # another process failed, and the replica tries again
            self._send(Prepared(held, received.stats))
            return
        try:
            received = self._fetch(held, began)
        except _Stopped:
            return
        except Exception as error:  # whatever it is, the coordinator has to hear of it
            self._send(FetchFailed(held, type(error).__name__, str(error)))
            return
        with self._lock:
            self._prepared[held] = received
        self._send(Prepared(held, received.stats))

    def _fetch(self, held: Held, began: float) -> Received:
        source = self._source
        if source is None or source.trainer.incarnation != held.incarnation:
            raise PeerLostError(f"version {held.version} belongs to a trainer that is not known")
        generation = self._free_generation(held)
        waited = time.monotonic()
        fetcher = source.fetcher
        source.dialler.open_missing()
        fetcher.begin(held.version, generation.sink_addresses)
        try:
            generation.prepare_arrays()
            self._wait(held, source, generation)
        finally:
            fetcher.end()
            self._trace.chunks("source", *fetcher.take_events())
        staged = generation if isinstance(generation, StagedGeneration) else None
        leaves = None if staged is not None and staged.waits_for_swap else generation.arrays()
        ended = made = time.monotonic()
        traffic = fetcher.received()
        stages = {"wait": waited - began, "wire": traffic.seconds["wire"]}
        stages["arrays"] = made - began - sum(stages.values())
        if source.verification is not None:
            self._verify(held, source, source.verification, leaves)
            ended = time.monotonic()
            stages["verify"] = ended - made
        self._trace.stages(held.version, began, stages.items())
        if staged is not None and leaves is not None:
            stages["h2d"] = staged.trace(self._trace, held.version)
        seconds = {"plan": self._planned_s, **traffic.seconds, **stages, "total": ended - began}
        self._planned_s = 0.0
        plan, rails = source.plan, source.dialler.described(traffic.rails)
        stats = ProcessStats(plan.nbytes, plan.wire_nbytes, seconds, rails)
        return Received(held, generation, leaves, stats)

    def _wait(self, held: Held, source: _Source, generation: Generation | None = None) -> None:
        """Waits for all that the fetcher has begun; sees to it that it has streams.

        Leaves that go to `generation` are copied on to their devices meanwhile, where that is so.
        """
        silent_since = time.monotonic()
        while not _is_there(source.fetcher, generation):
            self._stop_if_told(held)
            source.dialler.open_missing()
            lost = source.dialler.lost()
            if not lost:
                silent_since = time.monotonic()
            elif self._is_hopeless(held, silent_since):
                raise PeerLostError(f"version {held.version}: {'; '.join(lost.values())}")

    def _verify(
        self, held: Held, source: _Source, verification: Verification, leaves: list[Any] | None
    ) -> None:
        if leaves is None:
            raise SyncError(
                f"version {held.version} has no room beside the current one within "
                "max_device_nbytes, where verify='full' has to look at its arrays"
            )
        source.fetcher.begin_digests(held.version, verification.requests)
        try:
            found = verification.digests_of(leaves)  # while the sources compute theirs
            self._wait(held, source)
        finally:
            source.fetcher.end()
        differences = verification.differences(found, source.fetcher.digests())
        if differences:
            raise CorruptionError(
                f"version {held.version} is not in process {self._process} of replica "
                f"{self._replica!r} what the trainer has, so it is not used: {differences}"
            )

    def _free_generation(self, held: Held) -> Generation:
        while True:
            generation = self._pool.acquire(_POLL_S)
            if generation is not None:
                return generation
            self._stop_if_told(held)

    def _stop_if_told(self, held: Held) -> None:
        with self._lock:
            if self._closed or self._abandoned == held:
                raise _Stopped

    def _is_hopeless(self, held: Held, silent_since: float) -> bool:
        """Whether sources without a stream are not worth waiting for any longer."""
        if self._newest_incarnation != held.incarnation:
            return True
        return time.monotonic() - silent_since > self._options.peer_timeout_s


def _is_there(fetcher: Fetcher, generation: Generation | None) -> bool:
    if not isinstance(generation, StagedGeneration):
        return fetcher.wait(_POLL_S)
    generation.verified(fetcher.take_finished(_LOOK_S))
    return fetcher.wait(0.0)


class _Freed:
    """The application let go of older params: arrays can be made over their memory beforehand."""


class _Stopped(Exception):
    """Receiving a version was given up because somebody said so."""
