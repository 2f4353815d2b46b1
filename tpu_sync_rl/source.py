"""A process as a source: the params that it serves, version after version."""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from tpu_sync_rl.buffers import Aliases, AliasResolver
from tpu_sync_rl.copy_digests import CopyDigests, LeafDigests
from tpu_sync_rl.errors import SyncTimeoutError
from tpu_sync_rl.local_shards import LocalShards
from tpu_sync_rl.manifest import Manifest, check_unchanged
from tpu_sync_rl.options import Options, Staging
from tpu_sync_rl.pins import MAX_PINNED, PinnedVersions, wait_until_computed
from tpu_sync_rl.program import Program
from tpu_sync_rl.rails import Connection
from tpu_sync_rl.snapshot import Snapshot
from tpu_sync_rl.staging import num_fitting, takes_pinned_host
from tpu_sync_rl.trace import Trace
from tpu_sync_rl.trainer_messages import Pins, PinsKept
from tpu_sync_rl.transport import Exporter, Traffic


class Source:
    """What a process of a trainer, or of a replica, serves; nothing before its first version.

    One thread at a time may `pin` and `land`, and one ask for `sent`; all else may be called from
    any thread.

    Attributes:
        manifest: of the params, from the first version on.
        num_leaves: of the params.
        nbytes: of this process's shards.
        is_staged: whether versions are copied to pinned host memory.
        copies: digests of what other processes hold as well, in the version that was pinned last;
            none where they were not asked for.
    """

    def __init__(
        self,
        options: Options,
        program: Program,
        staging: Staging,
        trace: Trace,
        answer: Callable[[PinsKept], None],
        *,
        max_pinned: int | None = MAX_PINNED,
        keeps_newest: bool = True,
    ) -> None:
        """Starts nothing.

        Args:
            options: of the session.
            program: that this process is of.
            staging: how versions pass from devices to host memory.
            trace: gets stages and chunks.
            answer: tells the coordinator what `on_pins` came to.
            max_pinned: most versions at once; None for any number.
            keeps_newest: whether the newest one can be pinned again when it was let go, as far as
                it is alive. A snapshot is kept alive for that.
        """
        self.manifest: Manifest | None = None
        self.num_leaves = 0
        self.nbytes = 0
        self.is_staged = False
        self.copies: LeafDigests = {}
        self._program = program
        self._options = options
        self._staging = staging
        self._trace = trace
        self._answer = answer
        self._resolver = AliasResolver(program, self._made)
        self._landing: tuple[Snapshot, list[jax.Array]] | None = None
        self._max_pinned = max_pinned or sys.maxsize
        self._keeps_newest = keeps_newest
        self._exporter: Exporter | None = None
        self._pins: PinnedVersions | None = None
        self._copy_digests: CopyDigests | None = None

    @property
    def versions(self) -> list[int]:
        """Versions pinned at this moment, ascending."""
        return [] if self._pins is None else self._pins.versions

    def pin(
        self, params: Any, version: int, deadline: float, *, compares: bool = False
    ) -> dict[str, float]:
        """Waits until `params` are computed and there is room for them, and pins them.

        Where they are staged, sinks may ask for them from now on, and get them as they `land`.
        With `compares` they land here, if other processes hold copies of some, and are summed.

        Returns:
            Seconds per stage.

        Raises:
            SyncTimeoutError: `deadline` passed first.
            ManifestError: they are not like those of the first version.
            SyncError: the system has no thread or descriptor left.
            ValueError, TypeError: a leaf that can't be synced, by its key; or there is too little
                host memory for a version.
        """
        began = time.monotonic()
        if not wait_until_computed(params, deadline):
            raise SyncTimeoutError(f"version {version} was not published: it is being computed")
        computed = time.monotonic()
        aliases, arrays = self._resolver.resolve(params)
        if self.manifest is None or self._pins is None:
            self._start(aliases)
        assert self.manifest is not None and self._pins is not None
        check_unchanged(self.manifest, aliases.manifest)
        if not self._pins.wait_for_room(deadline, self._max_pinned):
            raise SyncTimeoutError(
                f"version {version} was not published: samplers still read versions "
                f"{', '.join(map(str, self._pins.versions))}, and at most {self._max_pinned} "
                "can be pinned at once"
            )
        if isinstance(aliases, Snapshot):
            self._landing = aliases, arrays
        else:
            aliases.pin(arrays)
        seconds = {"compute": computed - began, "pin": time.monotonic() - computed}
        self._trace.stages(version, began, seconds.items())
        self.copies = {}
        if compares:
            seconds |= self._sum_copies(version, aliases, deadline)
        self._pins.pin(version, aliases)
        return seconds

    def _start(self, aliases: Aliases) -> None:
        """Gets ready for versions like the first one, or raises SyncError and stays as it was."""
        exporter = Exporter(
            aliases.shards,
            peer_timeout_s=self._options.peer_timeout_s,
            traced=self._trace.is_on,
        )
        try:
            self._pins = PinnedVersions(exporter, self._answer, self._keeps_newest)
        except BaseException:
            exporter.close()
            raise
        self._exporter = exporter
        self.manifest, self.nbytes = aliases.manifest, aliases.shards.nbytes
        self.num_leaves = len(aliases.manifest.leaves)

    def _sum_copies(self, version: int, aliases: Aliases, deadline: float) -> dict[str, float]:
        """Digests of what others hold, too, before a sink can see it; seconds per stage."""
        if self._copy_digests is None:
            self._copy_digests = CopyDigests(aliases.manifest, aliases.shards, self._program.index)
        if self._copy_digests.is_empty:
            return {}
        landed = self.land(version)
        began = time.monotonic()
        self.copies = self._copy_digests.of(aliases, deadline)
        compared = {"compare": time.monotonic() - began}
        self._trace.stages(version, began, compared.items())
        return {**landed, **compared}

    def land(self, version: int) -> dict[str, float]:
        """Copies a version that is staged to host memory; on return its arrays may be donated.

        Returns:
            Seconds of the stage "d2h"; nothing of a version that is not staged.
        """
        landing, self._landing = self._landing, None
        if landing is None or self._pins is None:
            return {}
        began = time.monotonic()
        snapshot, arrays = landing
        snapshot.stage(arrays, partial(self._pins.add_leaves, version, snapshot))
        seconds = {"d2h": time.monotonic() - began}
        self._trace.stages(version, began, seconds.items())
        return seconds

    def let_go(self, version: int) -> None:
        """Ends the pin of `version`, if there is one; whoever still reads it is cut off."""
        if self._pins is not None:
            self._pins.let_go(version)

    def on_pins(self, message: Pins) -> None:
        """Takes what the coordinator says; returns at once."""
        if self._pins is not None:
            self._pins.on_pins(message)

    def add_connection(self, connection: Connection, sink: int, rail: str) -> None:
        """Takes over a connection to a sink, which dials only after it heard of a version."""
        assert self._exporter is not None
        self._exporter.add_connection(connection.fd, sink, rail, connection.ring_fd)

    def sent(self) -> Traffic:
        """What went to sinks since this was asked last."""
        assert self._exporter is not None
        self._trace.chunks("sink", *self._exporter.take_events())
        return self._exporter.sent()

    def close(self) -> None:
        """Lets go of everything and ends the threads."""
        if self._pins is not None and self._exporter is not None:
            self._pins.close()
            self._exporter.close()
            self._trace.chunks("sink", *self._exporter.take_events())

    def _made(self, manifest: Manifest, shards: LocalShards) -> Aliases:
        if not takes_pinned_host(self._staging.mode, shards):
            return Aliases(manifest, shards)
        self.is_staged = True
        limit = self._staging.max_host_nbytes
        fitting = num_fitting("a snapshot", shards.nbytes, "max_host_nbytes", limit, 1)
        self._max_pinned = min(self._max_pinned, fitting)
        return Snapshot(manifest, shards, window_nbytes=self._staging.window_nbytes)
