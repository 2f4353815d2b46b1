"""What the arrays of a sampler's versions take on its devices, held against a limit."""

import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tpu_sync_rl.errors import SyncError
from tpu_sync_rl.generation_layout import GenerationLayout
from tpu_sync_rl.staging import num_fitting


class DeviceMemory:
    """Who may copy a version to the devices, so that no device has more than it is allowed.

    Arrays count while somebody holds them, which is the application's to decide. All methods may be
    called from any thread; `generation` is whoever copies, and is not kept alive.
    """

    def __init__(self, layout: GenerationLayout, most_nbytes: int | None) -> None:
        """Allows `most_nbytes` on each device; any number where that is None.

        Raises:
            ValueError: not even one version fits.
        """
        self._most_nbytes = most_nbytes
        self._of_leaf = [
            (leaf.devices, layout.shards.shard_nbytes_of(index))
            for index, leaf in enumerate(layout.leaves)
        ]
        self._lock = threading.Lock()  # guards all below
        self._taken: list[tuple[int, weakref.ref[Any]]] = []  # leaf and array
        self._copying: weakref.ref[Any] | None = None  # has room, and no arrays yet
        self._waiting: weakref.ref[Any] | None = None  # has none, and comes first when there is
        nbytes = max(self._on_devices([*range(len(self._of_leaf))]).values(), default=0)
        num_fitting("a version on a device", nbytes, "max_device_nbytes", most_nbytes, 1)

    def is_free_for(self, generation: Any) -> bool:
        """Whether there is room beside what lives, which it has then; else it waits for a swap."""
        with self._lock:
            if _is_alive(self._waiting) or self._missing_nbytes() > 0:
                self._waiting = weakref.ref(generation)
                return False
            self._copying = weakref.ref(generation)
            return True

    def check_swap(self) -> None:
        """Sees to it that there is room now for the generation that waits.

        Raises:
            SyncError: there is not, since the application holds arrays of former versions.
        """
        with self._lock:
            missing_nbytes = self._missing_nbytes()
        if missing_nbytes > 0:
            raise SyncError(
                f"the next version needs {missing_nbytes} bytes more than max_device_nbytes on a "
                "device: the application holds arrays of former versions; let go of them, and of "
                "their Update, before the call"
            )

    def took(self, generation: Any, arrays: Sequence[Any]) -> None:
        """The arrays of `generation` are there."""
        if self._most_nbytes is None:
            return
        with self._lock:
            if self._copying is not None and self._copying() is generation:
                self._copying = None
            if self._waiting is not None and self._waiting() is generation:
                self._waiting = None
            alive = [(leaf, array) for leaf, array in self._taken if array() is not None]
            self._taken = alive + [(leaf, weakref.ref(x)) for leaf, x in enumerate(arrays)]

    def _missing_nbytes(self) -> int:
        """How much is missing for one more version on the fullest device."""
        if self._most_nbytes is None:
            return 0
        num_versions = 2 if _is_alive(self._copying) else 1
        alive = [leaf for leaf, array in self._taken if array() is not None]
        used = self._on_devices([*range(len(self._of_leaf))] * num_versions + alive)
        return max(0, max(used.values(), default=0) - self._most_nbytes)

    def _on_devices(self, leaves: Sequence[int]) -> Counter[Any]:
        used: Counter[Any] = Counter()
        for leaf in leaves:
            devices, nbytes = self._of_leaf[leaf]
            for device in devices:
                used[device] += nbytes
        return used


def _is_alive(reference: "weakref.ref[Any] | None") -> bool:
    return reference is not None and reference() is not None
