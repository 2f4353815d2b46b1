"""A trainer process as a source: the params that it serves, version after version."""

import time
from collections.abc import Callable
from typing import Any

from tpu_sync_rl.buffers import AliasResolver
from tpu_sync_rl.errors import ManifestError, SyncTimeoutError
from tpu_sync_rl.manifest import Manifest, changes
from tpu_sync_rl.messages import Pins, PinsKept
from tpu_sync_rl.options import Options
from tpu_sync_rl.pins import PinnedVersions, wait_until_computed
from tpu_sync_rl.program import Program
from tpu_sync_rl.rails import Connection
from tpu_sync_rl.trace import Trace
from tpu_sync_rl.transport import Exporter, Traffic


class Source:
    """What one trainer process serves; nothing before its first version.

    One thread at a time may `pin`, and one ask for `sent`; all else may be called from any thread.

    Attributes:
        manifest: of the params, from the first version on.
        nbytes: of this process's shards.
    """

    def __init__(
        self,
        options: Options,
        program: Program,
        trace: Trace,
        answer: Callable[[PinsKept], None],
    ) -> None:
        """Starts nothing; `answer` tells the coordinator what `on_pins` came to."""
        self.manifest: Manifest | None = None
        self.nbytes = 0
        self._options = options
        self._trace = trace
        self._answer = answer
        self._resolver = AliasResolver(program)
        self._exporter: Exporter | None = None
        self._pins: PinnedVersions | None = None

    @property
    def versions(self) -> list[int]:
        """Versions pinned at this moment, ascending."""
        return [] if self._pins is None else self._pins.versions

    def pin(self, params: Any, version: int, deadline: float) -> dict[str, float]:
        """Waits until `params` are computed and there is room for them, and pins them.

        Returns:
            Seconds per stage.

        Raises:
            SyncTimeoutError: `deadline` passed first.
            ManifestError: they are not like those of the first version.
            ValueError, TypeError: a leaf that can't be synced, by its key.
        """
        began = time.monotonic()
        if not wait_until_computed(params, deadline):
            raise SyncTimeoutError(f"version {version} was not published: it is being computed")
        computed = time.monotonic()
        aliases = self._resolver.resolve(params)
        if self.manifest is None:
            self.manifest = aliases.manifest
            self.nbytes = aliases.shards.nbytes
            self._exporter = Exporter(
                aliases.shards,
                peer_timeout_s=self._options.peer_timeout_s,
                traced=self._trace.is_on,
            )
            self._pins = PinnedVersions(self._exporter, self._answer)
        elif aliases.manifest.digest != self.manifest.digest:
            raise ManifestError(
                "the params differ from those of the first sync_weights of this session: "
                + "; ".join(changes(self.manifest, aliases.manifest))
            )
        assert self._pins is not None
        if not self._pins.wait_for_room(deadline):
            raise SyncTimeoutError(
                f"version {version} was not published: samplers still read versions "
                f"{', '.join(map(str, self._pins.versions))}, and at most two are pinned at once"
            )
        self._pins.pin(version, aliases)
        seconds = {"compute": computed - began, "pin": time.monotonic() - computed}
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
