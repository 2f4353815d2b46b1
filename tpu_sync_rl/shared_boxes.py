"""Boxes that several processes of a program hold: copies that are taken for one value."""

import numpy as np

from tpu_sync_rl.manifest import Manifest


class SharedBoxes:
    """The shared boxes of a manifest, in groups by who holds them. Immutable.

    A process is in few groups: one of what all hold, say, and one of what its rank of a data
    parallel axis shares with the others. Groups are numbered as they come up in the manifest, so
    all processes number them alike.

    Attributes:
        groups: the processes of each group, ascending.
    """

    def __init__(self, manifest: Manifest) -> None:
        numbers: dict[bytes, int] = {}
        self.groups: list[tuple[int, ...]] = []
        self._layout_of = [leaf.layout for leaf in manifest.leaves]
        self._boxes: list[dict[int, list[int]]] = []  # per layout, group by group
        for layout in manifest.layouts:
            offsets = layout.holder_offsets
            boxes: dict[int, list[int]] = {}
            for box in np.flatnonzero(offsets[1:] - offsets[:-1] > 1).tolist():
                holders = layout.holders[offsets[box] : offsets[box + 1]]
                group = numbers.setdefault(holders.tobytes(), len(self.groups))
                if group == len(self.groups):
                    self.groups.append(tuple(holders.tolist()))
                boxes.setdefault(group, []).append(box)
            self._boxes.append(boxes)

    def of_process(self, process: int) -> list[int]:
        """The groups that `process` is in."""
        return [group for group, processes in enumerate(self.groups) if process in processes]

    def leaves(self, group: int) -> list[int]:
        """The leaves that have boxes in a group, ascending, as indices in the manifest."""
        return [leaf for leaf, layout in enumerate(self._layout_of) if group in self._boxes[layout]]

    def boxes(self, group: int, leaf: int) -> list[int]:
        """The boxes of a leaf that are in a group, as indices in its layout."""
        return self._boxes[self._layout_of[leaf]].get(group, [])
