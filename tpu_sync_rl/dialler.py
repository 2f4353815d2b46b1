"""Keeps the streams to a program open: on every rail, to every process that is read from."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from tpu_sync_rl import rails
from tpu_sync_rl.errors import AuthError, SyncError
from tpu_sync_rl.options import LEAST_STREAMS, MOST_STREAMS, Options
from tpu_sync_rl.rails import Address, Rail
from tpu_sync_rl.report import RailReport
from tpu_sync_rl.session_log import SessionLog
from tpu_sync_rl.threads import start_thread
from tpu_sync_rl.transport import Fetcher, Trouble

_REDIAL_S = 0.5
_NOT_SHARED_S = 60.0  # that TCP takes the place of memory which could not be shared


class Dialler:
    """Opens the streams that a fetcher lacks. One per program that is read from.

    Each rail is dialled on a thread of its own, so that one that is down holds up no other and
    nobody who calls. A thread lives no longer than what it dials. One thread calls the methods.
    """

    def __init__(
        self,
        options: Options,
        fetcher: Fetcher,
        sources: Mapping[int, Sequence[Address]],
        *,
        name: str,
        incarnation: str,
        sink: int,
        tickets: Sequence[bytes],
        log: SessionLog,
    ) -> None:
        """Dials nothing yet.

        Args:
            options: of the session.
            fetcher: gets the streams.
            sources: where each process listens that something is read from.
            name: of their program, for people; "process 0" and so on follow it.
            incarnation: of the trainer.
            sink: under which its processes know this one.
            tickets: of this sink, to each process of the trainer.
            log: is told why TCP takes the place of shared memory.
        """
        self._options = options
        self._fetcher = fetcher
        self._sources = sources
        self._name = name
        self._incarnation = incarnation
        self._sink = sink
        self._tickets = tickets
        self._log = log
        self._told: set[str] = set()  # why there was TCP in place of memory
        self._tcp_until = dict.fromkeys(sources, 0.0)  # by process; then memory is tried again
        self._next_round = 0.0
        self._under_way: set[str] = set()  # rails that are being dialled
        self._errors: dict[tuple[int, str], str] = {}  # why a process is not reached over a rail
        self._num_wanted: dict[tuple[int, str], int] = {}  # streams, by process and rail
        self._closed = False
        self._rails: dict[str, Rail] = {}  # those that were paired, by name

    def open_missing(self) -> None:
        """Starts to open what is missing; returns at once. May be called as often as one likes.

        Raises SyncError where there is no thread left for that; a later call tries again.
        """
        if time.monotonic() < self._next_round:
            return
        self._next_round = time.monotonic() + _REDIAL_S
        for name, missing in self._missing().items():
            if name not in self._under_way:
                self._under_way.add(name)
                try:
                    start_thread(f"tsr-dial-{name}", partial(self._dial, name, missing))
                except SyncError:
                    self._under_way.discard(name)
                    raise

    def lost(self) -> dict[int, str]:
        """What is wrong with the processes that no stream reaches."""
        reasons = self._fetcher.lost_reasons()
        lost = {}
        for process in self._sources:
            if self._fetcher.num_streams(process) == 0:
                errors = [text for (of, _), text in list(self._errors.items()) if of == process]
                reason = reasons.get(process, "its streams were closed")
                lost[process] = "; ".join(errors) or f"{self._peer(process)}: {reason}"
        return lost

    def troubles(self) -> list[Trouble]:
        """The rails whose streams get nothing, or were lost since the version began."""
        return self._fetcher.troubles()

    def way(self, process: int, rail: str) -> str:
        """A rail to a process, for people."""
        return f"{self._peer(process)}, rail {rail}"

    def described(self, traffic: Mapping[str, RailReport]) -> dict[str, RailReport]:
        """What went over the rails, and what these are made for."""
        return {name: replace(x, line=self._rails[name].line) for name, x in traffic.items()}

    def close(self) -> None:
        """Dials nothing more, but does not wait for what is being dialled."""
        self._closed = True

    def _missing(self) -> dict[str, list[tuple[int, Rail, int]]]:
        """Per rail the processes that lack streams on it, and how many."""
        missing: dict[str, list[tuple[int, Rail, int]]] = {}
        for process, addresses in self._sources.items():
            try:
                pairs = self._pair(process, addresses)
            except ValueError as error:  # every NIC is down
                self._errors[process, ""] = f"{self._peer(process)}: {error}"
                continue
            self._errors.pop((process, ""), None)
            for rail in pairs:
                self._rails[rail.name] = rail
                have = self._fetcher.num_streams(process, rail.name)
                lacking = self._wanted(process, rail.name, have) - have
                if lacking > 0:
                    missing.setdefault(rail.name, []).append((process, rail, lacking))
        return missing

    def _pair(self, process: int, addresses: Sequence[Address]) -> list[Rail]:
        options = self._options
        if time.monotonic() < self._tcp_until[process]:
            options = replace(options, same_host="tcp")
        return rails.pair(options, addresses, partial(self._tell, process))

    def _tell(self, process: int, reason: Exception) -> None:
        if str(reason) not in self._told:  # one line for all processes that it holds for
            self._told.add(str(reason))
            self._log.info(f"reads by TCP, not by memory, from {self._peer(process)}: {reason}")

    def _wanted(self, process: int, rail: str, have: int) -> int:
        """How many streams there are to be: more where those that there are can carry no more."""
        if self._options.streams_per_rail is not None:
            return self._options.streams_per_rail
        wanted = self._num_wanted.get((process, rail), LEAST_STREAMS)
        if have >= wanted and self._fetcher.is_full(process, rail):
            wanted = self._num_wanted[process, rail] = min(2 * wanted, MOST_STREAMS)
        return wanted

    def _dial(self, name: str, missing: list[tuple[int, Rail, int]]) -> None:
        try:
            for process, rail, num_streams in missing:
                try:
                    for _ in range(num_streams):
                        if self._closed:
                            return
                        self._open(process, rail)
                    self._errors.pop((process, name), None)
                except (SyncError, OSError) as error:
                    self._errors[process, name] = str(error)
                    if rail.is_shared and not isinstance(error, AuthError):
                        self._tell(process, error)
                        self._tcp_until[process] = time.monotonic() + _NOT_SHARED_S
                        self._next_round = 0.0
        finally:
            self._under_way.discard(name)

    def _peer(self, process: int) -> str:
        return f"{self._name} process {process}"

    def _open(self, process: int, rail: Rail) -> None:
        connection = rails.dial(
            rail,
            self._options,
            incarnation=self._incarnation,
            sink=self._sink,
            ticket=self._tickets[process],
            peer=self._peer(process),
        )
        self._fetcher.add_stream(process, connection.fd, rail.name, connection.ring_fd)
