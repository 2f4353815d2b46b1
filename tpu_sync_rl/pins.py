"""The versions that a process keeps readable, let go leaf by leaf as samplers have them."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import jax

from tpu_sync_rl.buffers import Aliases
from tpu_sync_rl.deadline import seconds_left
from tpu_sync_rl.errors import VersionError
from tpu_sync_rl.threads import start_thread
from tpu_sync_rl.trainer_messages import Pins, PinsKept
from tpu_sync_rl.transport import Exporter

MAX_PINNED = 2
_POLL_S = 0.02
_MOMENT_S = 0.2


def wait_until_computed(params: Any, deadline: float) -> bool:
    """Waits for the step that makes `params`; False when `deadline` passed first.

    Unlike JAX's own wait it can be interrupted. A step that failed, or a leaf that is deleted, ends
    it too: whoever resolves the leaves finds out. SyncError where there is no thread left.
    """
    ended = threading.Event()

    def wait() -> None:
        with contextlib.suppress(Exception):
            jax.block_until_ready(params)
        ended.set()

    start_thread("tsr-computed", wait, exit_waits_s=inf)
    # A moment at least, so that params that are there pass whatever the deadline.
    return ended.wait(max(_MOMENT_S, seconds_left(deadline)))


class PinnedVersions:
    """Aliases of announced versions and the sinks that may still read them.

    One thread of its own handles what the coordinator says about pins, and drops the view of each
    leaf as soon as every sink has it: a view that is held makes a donating step copy the buffer.
    All methods may be called from any thread.
    """

    def __init__(
        self, exporter: Exporter, answer: Callable[[PinsKept], None], keeps_newest: bool = True
    ) -> None:
        """Starts the thread, which calls `answer`; SyncError where there is none left.

        With `keeps_newest` that version can be pinned again as long as it is alive.
        """
        self._keeps_newest = keeps_newest
        self._exporter = exporter
        self._answer = answer
        self._changed = threading.Condition()  # guards all below
        self._pinned: dict[int, Aliases] = {}
        self._sinks: dict[int, list[int]] = {}  # of pinned versions that are announced
        self._newest: tuple[int, Aliases] | None = None  # let go, but perhaps alive
        self._messages: deque[Pins] = deque()
        self._closed = False
        self._thread = start_thread("tsr-pins", self._run)

    @property
    def versions(self) -> list[int]:
        """Versions pinned at this moment, ascending."""
        with self._changed:
            return sorted(self._pinned)

    def wait_for_room(self, deadline: float, most: int = MAX_PINNED) -> bool:
        """Waits until one more version may be pinned; False when `deadline` passed first.

        Args:
            deadline: by time.monotonic().
            most: that may be pinned at once. The newest one, where it is let go but may be alive,
                makes room as well.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._pinned) < most, seconds_left(deadline)):
                return False
            if len(self._pinned) + 1 >= most:
                self._newest = None
            return True

    def pin(self, version: int, aliases: Aliases) -> None:
        """Makes `version` readable for sinks, those leaves of it that have landed."""
        landed = aliases.landed
        memory = (aliases.addresses, aliases.strides)
        self._exporter.publish(version, *memory, landed is not None, aliases.layouts)
        if landed is not None:
            self._exporter.add_leaves(version, landed, *memory, aliases.layouts)
        with self._changed:
            self._pinned[version] = aliases
            self._newest = None

    def add_leaves(self, version: int, aliases: Aliases, leaves: Sequence[int]) -> None:
        """Makes leaves of `version` readable that have landed; nothing where it was let go."""
        with contextlib.suppress(VersionError):
            self._exporter.add_leaves(
                version, leaves, aliases.addresses, aliases.strides, aliases.layouts
            )

    def on_pins(self, message: Pins) -> None:
        """Takes what the coordinator says; returns at once."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    def let_go(self, version: int) -> None:
        """Ends the pin of `version`, if there is one; whoever still reads it is cut off."""
        with self._changed:
            aliases = self._pinned.pop(version, None)
            self._sinks.pop(version, None)
        if aliases is None:
            return
        self._exporter.withdraw(version)
        aliases.drop_all()
        with self._changed:
            newer = [] if self._newest is None else [self._newest[0]]
            if self._keeps_newest and version > max([*self._pinned, *newer], default=-1):
                self._newest = (version, aliases)
            self._changed.notify_all()

    def close(self) -> None:
        """Lets go of everything and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for version in self.versions:
            self.let_go(version)
        with self._changed:
            self._newest = None

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._messages and not self._closed:
                    if not self._changed.wait(_POLL_S if any(self._sinks.values()) else None):
                        break
                if self._closed:
                    return
                message = self._messages.popleft() if self._messages else None
            if message is not None:
                self._handle(message)
            self._drop_finished()

    def _handle(self, message: Pins) -> None:
        version = message.version
        if message.ask:
            kept = self._take_again(version)
            self._answer(PinsKept(version, message.ask, kept))
            if not kept:
                return
        if not message.sinks:
            self.let_go(version)
            return
        with self._changed:
            if version in self._pinned:
                self._sinks[version] = message.sinks

    def _take_again(self, version: int) -> bool:
        """Whether every leaf of `version` is readable, after views were taken again."""
        with self._changed:
            aliases = self._pinned.get(version)
            if aliases is None and self._newest is not None and self._newest[0] == version:
                aliases = self._newest[1]
        if aliases is None or not aliases.retake():
            return False
        self.pin(version, aliases)
        return True

    def _drop_finished(self) -> None:
        with self._changed:
            reading = [(v, self._pinned[v], sinks) for v, sinks in self._sinks.items() if sinks]
        for version, aliases, sinks in reading:
            finished = [
                leaf
                for leaf in self._exporter.finished_leaves(version, sinks)
                if aliases.holds(leaf)
            ]
            # Another thread may have let go of the version meanwhile, and of all its leaves.
            if finished:
                with contextlib.suppress(VersionError):
                    self._exporter.drop_leaves(version, finished)
                    aliases.drop(finished)
