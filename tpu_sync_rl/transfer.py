"""How a version gets into a replica: the transfer under way, and tries after one that failed."""

from dataclasses import dataclass, field

from tpu_sync_rl.messages import Held, Promise
from tpu_sync_rl.process_stats import ProcessStats
from tpu_sync_rl.sampler_messages import FetchFailed

_FIRST_PAUSE_S = 0.5
_MOST_PAUSE_S = 5.0


@dataclass(slots=True)
class Transfer:
    """A version on its way into a replica, and the processes that have it."""

    held: Held
    promise: Promise | None  # what its processes were told to promise
    holder: str = ""  # the replica that it comes from; "" for the trainer
    released: bool = False  # the fleet has committed it meanwhile
    stats: dict[int, ProcessStats] = field(default_factory=dict)
    hindrances: dict[int, str] = field(default_factory=dict)  # by process, in words

    def describe(self, process_count: int) -> str:
        """How far it is, for the text of a timeout."""
        had = f"processes that have it: {len(self.stats)} of {process_count}"
        texts = [f"version {self.held.version} is being received ({had})"]
        for process, hindrance in sorted(self.hindrances.items()):
            if hindrance and process not in self.stats:
                texts.append(f"process {process} {hindrance}")
        return "; ".join(texts)


class Retries:
    """When a replica may try again, and why its last try failed.

    Attributes:
        last_failure: in words; "" where the last one did not fail.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begins anew: a transfer went well, or there is a new manifest."""
        self.last_failure = ""
        self._num_failures = 0
        self._due_at = 0.0

    def failed(self, message: FetchFailed, now: float) -> None:
        """A transfer has failed: the next one waits, longer than that one did."""
        self.last_failure = f"the last transfer failed with {message.error}: {message.text}"
        self._due_at = now + min(_FIRST_PAUSE_S * 2**self._num_failures, _MOST_PAUSE_S)
        self._num_failures += 1

    def are_due(self, now: float) -> bool:
        """Whether a transfer may begin."""
        return now >= self._due_at
