"""The calls of one replica and what was decided on them: once, for all of its processes."""

from collections.abc import Sequence

from tpu_sync_rl.messages import Held, Outcome
from tpu_sync_rl.process_stats import ProcessStats
from tpu_sync_rl.sampler_messages import SamplerOutcome, Take


class CallLog:
    """Numbers the calls of a replica and keeps each decision until every process has taken it.

    Attributes:
        next_call: the lowest call that is not decided.
        taken: the newest version whose outcome every process has taken.
    """

    def __init__(self, process_count: int) -> None:
        self._process_count = process_count
        self._takes: dict[int, Take] = {}  # per process, the last one
        self._deadline = 0.0  # of process 0's last one
        self._decided: dict[int, SamplerOutcome] = {}
        self._took: dict[int, set[int]] = {}
        self.next_call = 0
        self.taken: Held | None = None

    def restore(
        self, process: int, call: int, outcomes: Sequence[SamplerOutcome]
    ) -> list[SamplerOutcome]:
        """Takes from a join what its process knows: its next call, and decisions it heard of.

        Returns those decisions that are news here.
        """
        self._takes.pop(process, None)  # it takes again, if it still waits
        news = [outcome for outcome in outcomes if outcome.call >= self.next_call]
        for outcome in news:
            self._decided[outcome.call] = outcome
            self._took[outcome.call] = set()
        self.next_call = max(self.next_call, call, *(o.call + 1 for o in news), 0)
        for number in sorted(self._decided):
            if number < call:
                self.took(process, number)
        return news

    def leave(self, process: int, call: int) -> None:
        """Notes that `process` does not wait for `call` any more: nobody is to be answered."""
        take = self._takes.get(process)
        if take is not None and take.call == call:
            del self._takes[process]

    def take(self, process: int, take: Take, now: float) -> SamplerOutcome | None:
        """Notes that `process` has entered a call; the outcome if that call is decided."""
        if take.call < self.next_call:
            return self._decided.get(take.call)
        self._takes[process] = take
        if process == 0:
            self._deadline = now + take.timeout_s
        return None

    def took(self, process: int, call: int) -> None:
        """Notes that `process` has returned or raised the outcome of `call`."""
        if call not in self._decided:
            return
        self._took[call].add(process)
        if len(self._took[call]) == self._process_count:
            del self._took[call]
            self.taken = self._decided.pop(call).outcome.held or self.taken

    @property
    def asked(self) -> Take | None:
        """What process 0 asks in the next call; None while it has not entered it."""
        take = self._takes.get(0)
        return take if take is not None and take.call == self.next_call else None

    @property
    def entered(self) -> bool:
        """Whether some process has entered the next call."""
        return any(take.call == self.next_call for take in self._takes.values())

    @property
    def holding(self) -> bool:
        """Whether a version was handed out that some process has not taken yet."""
        return self.handed_out is not None

    @property
    def handed_out(self) -> Held | None:
        """The newest version that is the outcome of a call and not taken by all processes yet."""
        decided = [o.outcome.held for _, o in sorted(self._decided.items())]
        return next((held for held in reversed(decided) if held is not None), None)

    def describe_late(self) -> str:
        """Names the processes that have not taken yet what was handed out."""
        late = {
            process
            for call, took in self._took.items()
            if self._decided[call].outcome.held is not None
            for process in set(range(self._process_count)) - took
        }
        return ", ".join(f"process {process}" for process in sorted(late))

    def expired(self, now: float) -> bool:
        """Whether process 0's deadline for the next call has passed."""
        return self.asked is not None and now >= self._deadline

    def decide(self, outcome: Outcome, stats: list[ProcessStats]) -> SamplerOutcome:
        """Decides the next call, for good."""
        taken = min(self._decided, default=self.next_call)
        decision = SamplerOutcome(self.next_call, outcome, stats, taken)
        self._decided[self.next_call] = decision
        self._took[self.next_call] = set()
        self.next_call += 1
        return decision

    def unheard(self, process: int) -> list[SamplerOutcome]:
        """Decisions that `process` has not taken, which it may have missed."""
        return [o for call, o in sorted(self._decided.items()) if process not in self._took[call]]
