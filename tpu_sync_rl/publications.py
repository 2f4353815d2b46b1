"""What a trainer process has published: how far each version has come, as far as is known here."""

from collections.abc import Mapping
from types import MappingProxyType

from tpu_sync_rl.errors import VersionError
from tpu_sync_rl.options import checked_int
from tpu_sync_rl.trainer_messages import (
    Announced,
    LeafDigests,
    LeafDigestsWanted,
    Publish,
    PublishOutcome,
)

_NO_DIGESTS: Mapping[int, bytes] = MappingProxyType({})


class Publications:
    """The versions of one session. All methods may be called from any thread.

    Attributes:
        newest: the newest version that samplers were told of; -1 before there is one.
    """

    def __init__(self) -> None:
        self._open: dict[int, Publish] = {}  # per call, until that is over
        self._digests: dict[int, Mapping[int, bytes]] = {}  # likewise, if any: of leaves, by group
        self._announced: set[int] = set()  # of these, calls whose version samplers know
        self._newest_done = -1  # by a call that is over
        self.newest = -1

    def next_version(self, version: int | None) -> int:
        """`version`, where it grows; the next one for None.

        Raises:
            VersionError: it does not grow.
            ValueError, TypeError: it is no version.
        """
        last = max([self.newest, *self._open_versions()])
        if version is None:
            version = max(last, 0) + 1
        version = checked_int("version", version)
        if not 0 <= version < 1 << 63:
            raise ValueError(f"version must be from 0 to 2**63 - 1, not {version}")
        if version <= last:
            raise VersionError(f"version {version} does not grow: {last} was published before")
        return version

    def add(self, publish: Publish, digests: Mapping[int, bytes] = _NO_DIGESTS) -> None:
        """A call has begun; `digests` are what its `copies` were made of."""
        self._open[publish.call] = publish
        if digests:
            self._digests[publish.call] = digests

    def leaf_digests(self, wanted: LeafDigestsWanted) -> LeafDigests:
        """What a coordinator asks for that found different copies."""
        digests = self._digests.get(wanted.call, {}).get(wanted.group, b"")
        return LeafDigests(wanted.call, wanted.group, digests)

    def undecided(self) -> list[Publish]:
        """What a coordinator has to hear again that may have missed it."""
        return [publish for _, publish in sorted(self._open.copy().items())]

    @property
    def newest_done(self) -> int:
        """The newest version that needs no call any more to be told of; -1 if there is none."""
        done = self._newest_done
        return done if all(done < version for version in self._open_versions()) else -1

    def announced(self, message: Announced) -> None:
        """Samplers have been told of a version."""
        self.newest = max(self.newest, message.version)
        self._announced.add(message.call)

    def over(self, message: PublishOutcome) -> int | None:
        """A call is over. Returns its version if no sampler was told, nor will be, of it."""
        publish = self._open.pop(message.call, None)
        self._digests.pop(message.call, None)
        if publish is None or publish.error:
            return None
        if message.call not in self._announced:
            return publish.version if message.outcome.error else None
        self._announced.discard(message.call)
        if message.outcome.held is not None:
            self._newest_done = max(self._newest_done, publish.version)
        return None

    def _open_versions(self) -> list[int]:
        # Not those that failed here: they were never announced and may be published again.
        return [publish.version for publish in self._open.copy().values() if not publish.error]
