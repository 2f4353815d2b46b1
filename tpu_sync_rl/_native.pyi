import numpy as np
from numpy.typing import NDArray

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
