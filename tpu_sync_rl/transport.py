"""Moves bytes between processes: the exporter of a trainer process, the fetcher of a sampler's.

Both give their work to a few native threads; no call waits with the GIL held. They own the
descriptors that they are given, also where the call fails.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpu_sync_rl import _native, tcp
from tpu_sync_rl.local_shards import LocalShards
from tpu_sync_rl.options import MAX_CHUNK_NBYTES, Verify
from tpu_sync_rl.report import RailReport, shown_nbytes
from tpu_sync_rl.trace import ChunkEvent

_Counters = dict[str, dict[str, float]]


def shard_directory(shards: LocalShards) -> _native.ShardDirectory:
    """`shards` as the native core has them. Raises ValueError where they contradict themselves."""
    return _native.ShardDirectory(
        shards.leaf,
        shards.box,
        shards.itemsize,
        shards.kind,
        shards.rank,
        shards.ranges,
        shards.num_leaves,
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went over the rails of one end, and the seconds that it took.

    Attributes:
        rails: bytes that were sent, or verified, and more of each rail.
        seconds: per stage, in the words of `Report.seconds`.
    """

    rails: dict[str, RailReport]
    seconds: dict[str, float]


class Trouble(NamedTuple):
    """What is wrong on one rail to a source process: streams get nothing, or were lost.

    Attributes:
        num_stalled: streams that wait for what they have asked for, a second at least.
        stalled_nbytes: of chunks that these have asked for.
        stalled_s: since something came on the one that has waited longest.
        num_lost: streams that were lost since the version began.
        lost_reason: of the last of them.
    """

    source_process: int
    rail: str
    num_stalled: int
    stalled_nbytes: int
    stalled_s: float
    num_lost: int
    lost_reason: str

    def is_news_after(self, former: "Trouble | None") -> bool:
        """Whether a user who was told `former` should hear of this one."""
        if former is None:
            return True
        return self.num_lost > former.num_lost or self.num_stalled > former.num_stalled

    def __str__(self) -> str:
        parts = []
        if self.num_stalled:
            parts.append(
                f"{self.num_stalled} streams get nothing, for {self.stalled_s:.0f} s, with "
                f"{shown_nbytes(self.stalled_nbytes)} asked for (where large packets vanish, "
                "python -m tpu_sync_rl.doctor --coordinator=… finds it)"
            )
        if self.num_lost:
            parts.append(f"{self.num_lost} streams were lost, the last since: {self.lost_reason}")
        return ", ".join(parts)


def _since(before: _Counters, now: _Counters) -> tuple[dict[str, RailReport], dict[str, float]]:
    """What each rail did from one reading of the counters to another; and sums over all rails.

    Its streams, their window and round trip are those of the second reading.
    """
    rails: dict[str, RailReport] = {}
    sums: dict[str, float] = defaultdict(float)
    for name, counters in now.items():
        at_first = before.get(name, {})
        done = {counter: value - at_first.get(counter, 0) for counter, value in counters.items()}
        rails[name] = RailReport(
            nbytes=int(done["nbytes"]),
            seconds=done["busy_s"],
            num_retries=int(done["num_retries"]),
            num_lost=int(done["num_lost"]),
            num_streams=int(counters["num_streams"]),
            window_nbytes=int(counters["window_nbytes"]),
            round_trip_s=counters["round_trip_s"],
        )
        for counter, value in done.items():
            sums[counter] += value
    return rails, sums


def _taken(end: _native.Exporter | _native.Fetcher) -> tuple[list[ChunkEvent], int]:
    events, num_dropped = end.take_events()
    return [ChunkEvent(*event) for event in events], num_dropped


class Exporter:
    """Serves the shards of published versions. One per trainer process; any thread may call.

    Memory of a version is read from `publish` until `withdraw`, `drop_leaves` or `close` has
    returned, and never after: whoever is in the middle of sending it is cut off.
    """

    def __init__(
        self,
        shards: LocalShards,
        *,
        peer_timeout_s: float,
        num_workers: int = 2,
        traced: bool = False,
    ) -> None:
        """Starts `num_workers` threads; what a sink asks for is held against `shards`.

        With `traced` it keeps what `take_events` tells.

        Raises:
            ValueError: `shards` contradicts itself.
            SyncError: the system has no thread or descriptor left.
        """
        directory = shard_directory(shards)
        self._native = _native.Exporter(
            directory, num_workers, MAX_CHUNK_NBYTES, peer_timeout_s, traced
        )
        self._before: _Counters = {}

    def publish(
        self,
        version: int,
        addresses: NDArray[np.uint64],
        strides: NDArray[np.int64],
        coming: bool = False,
        layouts: Mapping[int, _native.ShardLayout] = MappingProxyType({}),
    ) -> None:
        """Makes a version readable. One that is published gets the leaves back that it dropped.

        Args:
            version: names the bytes.
            addresses: first element of each shard, in the order of `shards`. shape=[num_shards]
            strides: bytes between neighbours along each dimension, one shard after another.
            coming: all leaves are still to be added, and who asks for them waits. Their addresses
                and strides are void. Changes nothing of a version that is published.
            layouts: of the leaves whose shards lie in tiles; their strides mean nothing.

        Raises:
            ValueError: their numbers don't fit the shards, or a layout does not.
        """
        self._native.publish(version, addresses, strides, coming, dict(layouts))

    def add_leaves(
        self,
        version: int,
        leaves: Sequence[int],
        addresses: NDArray[np.uint64],
        strides: NDArray[np.int64],
        layouts: Mapping[int, _native.ShardLayout] = MappingProxyType({}),
    ) -> None:
        """Makes more leaves of a version readable; what is given for the other leaves is void.

        Raises:
            VersionError: the version is not published.
        """
        self._native.add_leaves(version, leaves, addresses, strides, dict(layouts))

    def drop_leaves(self, version: int, leaves: Sequence[int]) -> None:
        """Stops reading these leaves of a version. Waits for the workers, some milliseconds.

        Raises:
            VersionError: the version is not published.
        """
        self._native.drop_leaves(version, leaves)

    def withdraw(self, version: int) -> None:
        """Stops reading a version; nothing where it isn't published. Waits as `drop_leaves`."""
        self._native.withdraw(version)

    def finished_leaves(self, version: int, sinks: Sequence[int]) -> list[int]:
        """Leaves, ascending, of which every one of `sinks` has verified all that it reads here.

        A sink that has not shown yet what it reads has finished nothing.
        """
        return self._native.finished_leaves(version, sinks)

    def add_connection(self, fd: int, sink: int, rail: str, ring_fd: int = -1) -> None:
        """Takes over the connection `fd` to a sink that has proved its id.

        Args:
            fd: the connection.
            sink: the proved id.
            rail: what it is counted under.
            ring_fd: the memory that both ends share, or -1.

        Raises:
            PeerLostError: that memory is not what it has to be.
        """
        self._native.add_connection(fd, sink, rail, ring_fd)

    def stats(self) -> _Counters:
        """Counters of each rail since the start: nbytes, num_chunks, num_lost and more."""
        return self._native.stats()

    def sent(self) -> Traffic:
        """What was sent since this was asked last; stages "gather", "checksum", "send", "wire"."""
        before, self._before = self._before, self.stats()
        rails, spent_s = _since(before, self._before)
        stages = {"gather": "copy_s", "checksum": "checksum_s", "send": "wire_s"}
        seconds = {stage: spent_s[counter] for stage, counter in stages.items()}
        seconds["wire"] = max((rail.seconds for rail in rails.values()), default=0.0)
        return Traffic(rails, seconds)

    def take_events(self) -> tuple[list[ChunkEvent], int]:
        """The chunks sent since this was asked last, and how many more there was no room for."""
        return _taken(self._native)

    def close(self) -> None:
        """Closes every connection and ends the threads. May be called twice."""
        self._native.close()


class Fetcher:
    """Pulls versions as a plan says. One per sampler process and trainer incarnation.

    Any thread may call. Memory is written between `begin` and `end`, and never after.
    """

    def __init__(
        self,
        plan: _native.Plan,
        *,
        peer_timeout_s: float,
        num_workers: int = 2,
        window: int = 3,
        traced: bool = False,
        verify: Verify = "wire",
    ) -> None:
        """Starts `num_workers` threads; each stream keeps `window` requests in flight, or more.

        Those that are small, and those on a long way, are so many as it takes to fill the way.

        With `traced` it keeps what `take_events` tells. With `verify="off"` chunks have no
        checksums; with "full" sources are not told which are verified, since digests are asked for
        afterwards, of memory that they have to keep until then.

        Raises:
            SyncError: the system has no thread or descriptor left.
        """
        checksums, tells_done = verify != "off", verify != "full"
        self._native = _native.Fetcher(
            plan,
            num_workers,
            window,
            peer_timeout_s,
            # From about three quarters of it on a connection waits for its buffers. The peer may
            # have been left as it comes.
            min(tcp.most_flight_nbytes(), tcp.DEFAULT_NBYTES) // 2,
            traced,
            checksums,
            tells_done,
        )
        self._sources = [process for process, _, _ in plan.sources()]
        self._before: _Counters = {}

    def add_stream(self, source_process: int, fd: int, rail: str, ring_fd: int = -1) -> None:
        """Takes over the connection `fd`, and the memory that both ends share, where it isn't -1.

        The stream takes part at once.
        """
        self._native.add_stream(source_process, fd, rail, ring_fd)

    def num_streams(self, source_process: int, rail: str | None = None) -> int:
        """How many streams to a source are alive, on `rail` or on all."""
        return self._native.num_streams(source_process, rail)

    def is_full(self, source_process: int, rail: str) -> bool:
        """Whether the streams to a source on `rail` carry what the kernel's buffers let them."""
        return self._native.is_full(source_process, rail)

    def begin(
        self,
        version: int,
        sink_addresses: NDArray[np.uint64],
        sink_layouts: Mapping[int, _native.ShardLayout] = MappingProxyType({}),
    ) -> None:
        """Starts to fetch; returns at once. Chunks of a source without a stream wait for one.

        Args:
            version: published by the sources.
            sink_addresses: memory of each box of the sink, dense and row-major; pair after pair
                of the plan, boxes in the order of the sink's layout.
            sink_layouts: of the pairs of the plan whose boxes lie in tiles instead.

        Raises:
            ValueError: another number of addresses, a layout that does not fit the boxes, or the
                version before has not ended.
        """
        self._before = self._native.stats()
        self._native.begin(version, sink_addresses, dict(sink_layouts))

    def begin_digests(
        self, version: int, requests: Mapping[int, Sequence[_native.DigestRequest]]
    ) -> None:
        """Starts to ask for digests of a version; returns at once. Ends with `end`, as a fetch.

        Args:
            version: published by the sources.
            requests: to each source process of the plan that is asked for any.

        Raises:
            ValueError: the version before has not ended.
        """
        asked = [list(requests.get(process, ())) for process in self._sources]
        self._native.begin_digests(version, asked)

    def digests(self) -> dict[int, list[int]]:
        """What sources answered to `begin_digests`, once `wait` says that all have."""
        return dict(zip(self._sources, self._native.digests(), strict=True))

    def wait(self, timeout_s: float) -> bool:
        """Waits until every chunk, or digest, has come; False when `timeout_s` passed first.

        Raises:
            VersionError: a source no longer holds the version, or a leaf of it.
            CorruptionError: a chunk did not match its checksum again and again.
            PlanError: a source refused the chunk table.
        """
        return self._native.wait(timeout_s)

    def take_finished(self, timeout_s: float) -> list[int]:
        """Pairs of the plan all of whose bytes are verified, each told of once.

        Waits for one; returns none where the version is there or has failed, or `timeout_s` passed.
        """
        return self._native.take_finished(timeout_s)

    def progress_nbytes(self) -> int:
        """Bytes of the version that are verified."""
        return self._native.progress_nbytes()

    def lost_reasons(self) -> dict[int, str]:
        """Per source process why the stream that was lost last was lost."""
        return self._native.lost_reasons()

    def troubles(self) -> list[Trouble]:
        """The rails whose streams get nothing, or were lost since the version began."""
        return [Trouble(*trouble) for trouble in self._native.troubles()]

    def end(self) -> None:
        """Stops what is in flight; no byte lands after it returns. May be called twice.

        Streams that were not in the middle of something stay for the next version.
        """
        self._native.end()

    def received(self) -> Traffic:
        """What of the version that began last came in so far.

        Stages "wire", "receive", "checksum" and "scatter".
        """
        rails, spent_s = _since(self._before, self._native.stats())
        stages = {"receive": "wire_s", "checksum": "checksum_s", "scatter": "copy_s"}
        seconds = {stage: spent_s[counter] for stage, counter in stages.items()}
        return Traffic(rails, {"wire": self._native.fetch_seconds(), **seconds})

    def take_events(self) -> tuple[list[ChunkEvent], int]:
        """The chunks taken since this was asked last, and how many more there was no room for."""
        return _taken(self._native)

    def close(self) -> None:
        """Closes every stream and ends the threads; a waiting call fails. May be called twice."""
        self._native.close()
