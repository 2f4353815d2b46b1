"""The publish calls of one incarnation of a trainer: what is open, and what was decided last."""

from collections.abc import Sequence

from tpu_sync_rl.publish_call import PublishCall
from tpu_sync_rl.trainer_messages import LeafDigests, Publish, PublishOutcome

# Decided calls that are kept for a process that missed their end.
_NUM_KEPT_CALLS = 64


class PublishLog:
    """Calls by their number, which all processes of the program count alike."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._calls: dict[int, PublishCall] = {}

    def restore(self, outcomes: Sequence[PublishOutcome]) -> list[PublishOutcome]:
        """Takes what a process heard from another coordinator; returns what is news here."""
        news = []
        for outcome in outcomes:
            known = self._calls.get(outcome.call)
            if known is None or (known.outcome is None and known.held is None):
                self._calls[outcome.call] = PublishCall.decided(outcome, self._incarnation)
                news.append(outcome)
        return news

    def entered(self, publish: Publish, now: float) -> PublishCall:
        """The call that a process has entered, maybe as the first one."""
        call = self._calls.get(publish.call)
        if call is None:
            call = PublishCall(publish.call, self._incarnation, publish.timeout_s, now)
            self._calls[publish.call] = call
            for number in sorted(self._calls)[:-_NUM_KEPT_CALLS]:
                if self._calls[number].outcome is not None:
                    del self._calls[number]
        return call

    def give_up(self, number: int, now: float) -> None:
        """The deadline of a call has passed in some process."""
        if number in self._calls:
            self._calls[number].give_up(now)

    def told_digests(self, process: int, message: LeafDigests) -> None:
        """A process has said what tells its leaves apart from those of another."""
        if message.call in self._calls:
            self._calls[message.call].copies.answer(process, message)

    def since(self, number: int) -> list[PublishCall]:
        """The calls from `number` on, in their order."""
        return [call for at, call in sorted(self._calls.items()) if at >= number]

    @property
    def undecided(self) -> list[PublishCall]:
        """The calls that have no end yet, in their order."""
        return [call for _, call in sorted(self._calls.items()) if call.outcome is None]
