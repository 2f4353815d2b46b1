"""Receives versions in the background, into memory that no array of the application uses."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec

from tpu_sync_rl.errors import CorruptionError, PeerLostError, SyncError, VersionError
from tpu_sync_rl.feed import Feed
from tpu_sync_rl.generations import Generation, GenerationPool
from tpu_sync_rl.manifest import Manifest, Rename
from tpu_sync_rl.messages import Held, Message, Promise, TrainerUp
from tpu_sync_rl.options import Options
from tpu_sync_rl.plan import Plan
from tpu_sync_rl.planner import Planner
from tpu_sync_rl.prepared_versions import PreparedVersions, Received
from tpu_sync_rl.process_stats import ProcessStats
from tpu_sync_rl.rail_watch import RailWatch
from tpu_sync_rl.sampler_messages import (
    Abandon,
    Admit,
    Fetch,
    FetchFailed,
    Hindered,
    Prepared,
    Refuse,
)
from tpu_sync_rl.session_log import SessionLog
from tpu_sync_rl.staged_generations import StagedGeneration
from tpu_sync_rl.threads import start_thread
from tpu_sync_rl.trace import Trace
from tpu_sync_rl.verification import Verification

_POLL_S = 0.1
_PAUSE_S = 0.5  # before what failed is tried again
_LOOK_S = 0.01  # how late the end of H2D is noticed
_GOODBYE_S = 0.5
_EXIT_WAITS_S = 10.0  # until JAX has made arrays, or copied them to devices


class Receiver:
    """Turns what the coordinator says about trainers and versions into prepared generations.

    One thread of its own does the work, in the order in which it was told. All methods may be
    called from any thread.

    Attributes:
        prepared: what it holds ready.
        on_shortage: called on its thread, again and again, while it waits for memory.
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
        self._replica = replica
        self._process = process
        self._planner = Planner(
            manifest,
            process=process,
            rename=rename,
            cast=cast,
            chunk_nbytes=options.chunk_nbytes,
        )
        self._log = SessionLog(options.job, replica, process)
        self._pool = pool
        self._trace = trace
        self._send = send
        self.sink = 0
        self._commands: queue.SimpleQueue[TrainerUp | Fetch | _Freed | None] = queue.SimpleQueue()
        # Guards `promise`, _abandoned, _wanted and _newest_incarnation, which are told by other
        # threads, as is `sink`; the rest is of the receiver's own thread.
        self._lock = threading.Lock()
        self.prepared = PreparedVersions()
        self.on_shortage: Callable[[], object] = lambda: None
        self.promise: Promise | None = None
        self._abandoned: Held | None = None
        self._wanted: Fetch | None = None  # the last one told of
        self._newest_incarnation = ""
        # Versions whose memory may still be in use: it is theirs who hold it, and not kept here.
        self._uses: list[tuple[int, Callable[[], bool]]] = []
        self._moved: Received | None = None  # every byte is here, but its digests are not yet
        self._closed = False
        self._trainer: tuple[TrainerUp, Plan] | None = None  # the one that it has met, if it fits
        self._feed: Feed | None = None  # one at a time, so that its threads are all there are
        self._planned_s = 0.0  # until a version came of it
        pool.when_free(partial(self._commands.put, _Freed()))
        self._plans: dict[str, tuple[Plan | None, str]] = {}  # digest -> plan, or differences
        self._thread = start_thread("tsr-receiver", self._run, exit_waits_s=_EXIT_WAITS_S)

    def trainer_keys(self, incarnation: str) -> list[str] | None:
        """What the trainer calls the leaves, in the manifest's order; None of one not known."""
        known = self._trainer
        if known is None or known[0].incarnation != incarnation:
            return None
        plan = known[1]
        return [plan.source.leaves[pair.source_leaf].key for pair in plan.pairs]

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
                    self._wanted = message
        self._commands.put(message)

    def close(self) -> None:
        """Stops receiving, and lets go of what was prepared and not taken.

        Does not wait for trainers that are being dialled, nor long for a plan that is being made.
        """
        self._closed = True
        self.prepared.give_up()
        self._commands.put(None)
        self._thread.join(_GOODBYE_S)

    def _run(self) -> None:
        while (message := self._commands.get()) is not None and not self._closed:
            while not self._obeys(message) and not self._is_outdated(message):
                time.sleep(_PAUSE_S)
        self._close_feed()

    def _obeys(self, message: "TrainerUp | Fetch | _Freed") -> bool:
        """Does what is said; False where that failed, and may be tried again."""
        try:
            match message:
                case TrainerUp():
                    self._meet(message)
                case Fetch():
                    self._receive(message)
                case _Freed():
                    self._prepare()
        except Exception as error:  # no memory or thread is left, say; the job counts on an answer
            self._log.warning(f"{type(error).__name__}: {error}; it is tried again")
            return False
        return True

    def _is_outdated(self, message: "TrainerUp | Fetch | _Freed") -> bool:
        with self._lock:
            match message:
                case TrainerUp():
                    return self._closed or message.incarnation != self._newest_incarnation
                case Fetch():
                    return self._closed or message is not self._wanted
                case _Freed():
                    return True

    def _prepare(self) -> None:
        """Makes the arrays of the version that comes next, until there is something else to do."""
        with contextlib.suppress(Exception):  # whoever receives that version runs into it again
            self._pool.prepare(until=lambda: not self._commands.empty())

    # --- a trainer

    def _meet(self, trainer: TrainerUp) -> None:
        if self._trainer is None or self._trainer[0] != trainer:
            self._close_feed()
            self._trainer = None
            if trainer.digest not in self._plans:
                began = time.monotonic()
                self._plans[trainer.digest] = self._planner.of_trainer(trainer.manifest)
                self._planned_s = time.monotonic() - began
            plan, differences = self._plans[trainer.digest]
            if plan is None:
                self._send(Refuse(trainer.digest, differences))
                return
            self._trainer = trainer, plan
        self._send(Admit(trainer.digest))

    def _opened(self, trainer: TrainerUp, plan: Plan, fetch: Fetch) -> Feed:
        """The feed that `fetch` asks for: the one that is open, or another in its place."""
        reads_from = (trainer, fetch.holder, self.sink)
        if self._feed is not None and self._feed.reads_from == reads_from:
            return self._feed
        if fetch.holder is not None:
            of_holder, differences = self._planner.of_holder(fetch.holder, plan.source)
            if of_holder is None:
                name = f"replica {fetch.holder.replica!r}"
                raise VersionError(
                    f"{name} has version {fetch.held.version} changed: {differences}"
                )
            plan = of_holder
        self._close_feed()
        self._feed = Feed(self._options, plan, *reads_from, traced=self._trace.is_on, log=self._log)
        return self._feed

    def _close_feed(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    # --- a version

    def _receive(self, fetch: Fetch) -> None:
        held, began = fetch.held, time.monotonic()
        received = self.prepared.get(held)
        self.prepared.give_up(but=(held, fetch.keep))
        if self._moved is not None and self._moved.held != held:
            self._moved = None
        if received is not None:  # another process failed, and the replica tries again
            self._send(Prepared(held, received.stats))
            return
        try:
            received = self._fetch(fetch, began)
        except _Stopped:
            return
        except Exception as error:  # whatever it is, the coordinator has to hear of it
            holder = "" if fetch.holder is None else fetch.holder.replica
            self._send(FetchFailed(held, type(error).__name__, str(error), holder))
            return
        self.prepared.add(received)
        self._send(Prepared(held, received.stats))

    def _fetch(self, fetch: Fetch, began: float) -> Received:
        if self._trainer is None or self._trainer[0].incarnation != fetch.held.incarnation:
            version = fetch.held.version
            raise PeerLostError(f"version {version} belongs to a trainer that is not known")
        source = self._opened(*self._trainer, fetch)
        moved = self._moved or self._move(source, fetch, began)
        if source.verification is None:
            return moved
        self._moved = moved  # so that it need not come again where digests can't be had
        verified = self._verify(source, source.verification, fetch, moved)
        self._moved = None
        return verified

    def _move(self, source: Feed, fetch: Fetch, began: float) -> Received:
        held = fetch.held
        generation = self._free_generation(fetch)
        waited = time.monotonic()
        fetcher = source.fetcher
        source.dialler.open_missing()
        fetcher.begin(held.version, generation.sink_addresses)
        try:
            generation.prepare_arrays()
            self._wait(fetch, source, generation)
        finally:
            fetcher.end()
            self._trace.chunks("source", *fetcher.take_events())
        staged = generation if isinstance(generation, StagedGeneration) else None
        leaves = None if staged is not None and staged.waits_for_swap else generation.arrays()
        made = time.monotonic()
        traffic = fetcher.received()
        stages = {"wait": waited - began, "wire": traffic.seconds["wire"]}
        stages["arrays"] = made - began - sum(stages.values())
        self._trace.stages(held.version, began, stages.items())
        if staged is not None and leaves is not None:
            stages["h2d"] = staged.trace(self._trace, held.version)
        seconds = {"plan": self._planned_s, **traffic.seconds, **stages, "total": made - began}
        self._planned_s = 0.0
        plan, rails = source.plan, source.dialler.described(traffic.rails)
        stats = ProcessStats(plan.nbytes, plan.wire_nbytes, seconds, rails)
        return Received(held, generation, leaves, stats)

    def _wait(self, fetch: Fetch, source: Feed, generation: Generation | None = None) -> None:
        """Waits for all that the fetcher has begun; sees to it that it has streams.

        Leaves that go to `generation` are copied on to their devices meanwhile, where that is so.
        """
        silent_since = time.monotonic()
        watch = RailWatch(fetch.held, self._log, self._send)
        while not _is_there(source, generation):
            self._stop_if_told(fetch)
            source.dialler.open_missing()
            watch.look(source.dialler)
            lost = source.dialler.lost()
            if not lost:
                silent_since = time.monotonic()
            elif self._is_hopeless(fetch.held, silent_since):
                lacking = "; ".join(lost.values())
                raise PeerLostError(f"version {fetch.held.version}: {lacking}")

    def _verify(
        self, source: Feed, verification: Verification, fetch: Fetch, moved: Received
    ) -> Received:
        held, began = fetch.held, time.monotonic()
        if moved.leaves is None:
            self._moved = None  # whether there is room is found out while it comes
            raise SyncError(
                f"version {held.version} has no room beside the current one within "
                "max_device_nbytes, where verify='full' has to look at its arrays"
            )
        source.fetcher.begin_digests(held.version, verification.requests)
        try:
            found = verification.digests_of(moved.leaves)  # while the sources compute theirs
            self._wait(fetch, source)
        finally:
            source.fetcher.end()
        differences = verification.differences(found, source.fetcher.digests())
        if differences:
            self._moved = None
            raise CorruptionError(
                f"version {held.version} is not in process {self._process} of replica "
                f"{self._replica!r} what {source.name} has, so it is not used: {differences}"
            )
        verify_s = time.monotonic() - began
        self._trace.stages(held.version, began, [("verify", verify_s)])
        seconds = moved.stats.seconds
        seconds = {**seconds, "verify": verify_s, "total": seconds["total"] + verify_s}
        return replace(moved, stats=msgspec.structs.replace(moved.stats, seconds=seconds))

    def _free_generation(self, fetch: Fetch) -> Generation:
        told: Fetch | None = None  # of the last one that the coordinator knows of a shortage for
        while True:
            generation = self._pool.acquire(_POLL_S)
            if generation is not None:
                if told is not None:
                    self._send(Hindered(fetch.held, ""))
                self._uses = [(version, in_use) for version, in_use in self._uses if in_use()]
                self._uses.append((fetch.held.version, generation.use()))
                return generation
            self.on_shortage()
            self._stop_if_told(fetch)
            if told is not self._wanted:
                told = self._wanted
                self._send(Hindered(fetch.held, self._shortage()))

    def _shortage(self) -> str:
        versions = [str(version) for version, in_use in self._uses if in_use()]
        held = f": arrays of versions {', '.join(versions)}" if versions else ""
        return (
            "has no memory for it: the application still holds older params in all of "
            f"max_generations ({self._pool.max_generations}){held}"
        )

    def _stop_if_told(self, fetch: Fetch) -> None:
        with self._lock:
            wanted = self._wanted
            elsewhere = wanted is not None and (
                wanted.held == fetch.held and wanted.holder != fetch.holder
            )
            if self._closed or elsewhere or self._abandoned == fetch.held:
                raise _Stopped

    def _is_hopeless(self, held: Held, silent_since: float) -> bool:
        """Whether sources without a stream are not worth waiting for any longer."""
        if self._newest_incarnation != held.incarnation:
            return True
        return time.monotonic() - silent_since > self._options.peer_timeout_s


def _is_there(source: Feed, generation: Generation | None) -> bool:
    fetcher, wait_s = source.fetcher, _POLL_S
    if isinstance(generation, StagedGeneration):
        generation.verified(fetcher.take_finished(_LOOK_S))
        wait_s = 0.0
    try:
        return fetcher.wait(wait_s)
    except SyncError as error:  # it knows processes, not programs
        raise type(error)(f"from {source.name}: {error}") from error


class _Freed:
    """The application let go of older params: arrays can be made over their memory beforehand."""


class _Stopped(Exception):
    """Receiving a version was given up because somebody said so."""
