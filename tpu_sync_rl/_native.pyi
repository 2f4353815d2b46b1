from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

class BoxLayout:
    def __init__(
        self,
        shape: NDArray[np.int64],
        boxes: NDArray[np.int64],
        holder_offsets: NDArray[np.uint32],
        holders: NDArray[np.uint32],
    ) -> None: ...

class Plan:
    @property
    def nbytes(self) -> int: ...
    @property
    def wire_nbytes(self) -> int: ...
    @property
    def num_regions(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    def sources(self) -> list[tuple[int, int, int]]: ...
    def regions(self) -> dict[str, NDArray[np.generic]]: ...
    def encode_table(self, source_index: int) -> bytes: ...

def make_plan(
    layouts: list[BoxLayout], pairs: NDArray[np.uint32], sink_process: int, chunk_nbytes: int
) -> Plan: ...

class ShardDirectory:
    def __init__(
        self,
        leaf: NDArray[np.uint32],
        box: NDArray[np.uint32],
        itemsize: NDArray[np.uint32],
        kind: NDArray[np.uint8],
        rank: NDArray[np.uint32],
        ranges: NDArray[np.int64],
        num_leaves: int,
    ) -> None: ...

class HostMemory:
    def __init__(self, nbytes: int, num_threads: int, nodes: Sequence[int] = ()) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class ShardLayout:
    def __init__(
        self,
        extents: Sequence[int],
        itemsize: int,
        major_to_minor: Sequence[int],
        tiles: Sequence[Sequence[int]],
    ) -> None: ...
    @property
    def nbytes(self) -> int: ...

class LocalCopy:
    def __init__(
        self,
        plan: Plan,
        directory: ShardDirectory,
        addresses: NDArray[np.uint64],
        strides: NDArray[np.int64],
        sink_addresses: NDArray[np.uint64],
        num_threads: int,
        sink_layouts: Mapping[int, ShardLayout] = {},
    ) -> None: ...
    def set_pinned(self, num_shards: int, layout: ShardLayout | None = None) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...

def digests(
    addresses: NDArray[np.uint64],
    itemsizes: NDArray[np.uint32],
    ranks: NDArray[np.uint32],
    shapes: NDArray[np.int64],
    ranges: NDArray[np.int64],
    strides: NDArray[np.int64],
    num_threads: int,
) -> NDArray[np.uint64]: ...
def crc32c(buffer: Buffer, crc: int = 0) -> int: ...
def crc32c_implementation() -> str: ...

class Exporter:
    def __init__(
        self,
        directory: ShardDirectory,
        num_workers: int,
        max_chunk_nbytes: int,
        peer_timeout_s: float,
        traced: bool,
    ) -> None: ...
    def publish(
        self,
        version: int,
        addresses: NDArray[np.uint64],
        strides: NDArray[np.int64],
        coming: bool,
        layouts: Mapping[int, ShardLayout],
    ) -> None: ...
    def add_leaves(
        self,
        version: int,
        leaves: Sequence[int],
        addresses: NDArray[np.uint64],
        strides: NDArray[np.int64],
        layouts: Mapping[int, ShardLayout],
    ) -> None: ...
    def drop_leaves(self, version: int, leaves: Sequence[int]) -> None: ...
    def withdraw(self, version: int) -> None: ...
    def finished_leaves(self, version: int, sinks: Sequence[int]) -> list[int]: ...
    def add_connection(self, fd: int, sink: int, rail: str, ring_fd: int = -1) -> None: ...
    def stats(self) -> dict[str, dict[str, float]]: ...
    def take_events(
        self,
    ) -> tuple[list[tuple[str, int, int, int, int, int, int, float, float]], int]: ...
    def close(self) -> None: ...

class DigestRequest:
    def __init__(
        self, leaf: int, box: int, op: int, shape: Sequence[int], ranges: Sequence[int]
    ) -> None: ...

def shard_digests(
    directory: ShardDirectory,
    requests: Sequence[DigestRequest],
    addresses: NDArray[np.uint64],
    strides: NDArray[np.int64],
    layouts: Mapping[int, ShardLayout],
    num_threads: int,
) -> NDArray[np.uint64]: ...

class Fetcher:
    def __init__(
        self,
        plan: Plan,
        num_workers: int,
        window: int,
        peer_timeout_s: float,
        full_nbytes: int,
        traced: bool,
        checksums: bool,
        tells_done: bool,
    ) -> None: ...
    def add_stream(self, source_process: int, fd: int, rail: str, ring_fd: int = -1) -> None: ...
    def num_streams(self, source_process: int, rail: str | None = None) -> int: ...
    def is_full(self, source_process: int, rail: str) -> bool: ...
    def begin(
        self,
        version: int,
        sink_addresses: NDArray[np.uint64],
        sink_layouts: Mapping[int, ShardLayout],
    ) -> None: ...
    def begin_digests(self, version: int, requests: list[list[DigestRequest]]) -> None: ...
    def digests(self) -> list[list[int]]: ...
    def wait(self, timeout_s: float) -> bool: ...
    def take_finished(self, timeout_s: float) -> list[int]: ...
    def progress_nbytes(self) -> int: ...
    def fetch_seconds(self) -> float: ...
    def lost_reasons(self) -> dict[int, str]: ...
    def troubles(self) -> list[tuple[int, str, int, int, float, int, str]]: ...
    def end(self) -> None: ...
    def stats(self) -> dict[str, dict[str, float]]: ...
    def take_events(
        self,
    ) -> tuple[list[tuple[str, int, int, int, int, int, int, float, float]], int]: ...
    def close(self) -> None: ...
