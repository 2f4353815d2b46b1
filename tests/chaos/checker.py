"""Holds what programs returned against the oracle, and their calls against their deadlines."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from . import weights
from .life import Event, Life

PATIENCE_S = 1.0  # after its deadline a call has so long to end
_HUNG_S = 10.0  # after which one that has not ended counts as hung, however loaded the machine
_PUBLISH_S = 10.0  # a version's announcement, on another pipe, is read by then
_EXPECTED = {"", "SyncTimeoutError", "PeerLostError", "VersionError", "JobEndedError"}

Process = tuple[str, int, int]  # program, life, index


class Checker:
    """Takes events on any thread; `violations` is the verdict."""

    def __init__(self, seed: int, say: Callable[[str], None]) -> None:
        """`say` is called, on any thread, with each violation."""
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.most_late_s = 0.0  # after a deadline, less what the machine kept from the process
        self.most_excused_s = 0.0
        self._seed = seed
        self._say = say
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._published: dict[tuple[str, int], float] = {}
        self._incarnations: list[str] = []
        self._taken: dict[tuple[Process, int], list[tuple[str, int]]] = defaultdict(list)
        self._last_published_at: dict[Process, float] = {}  # of the version last taken
        self._calls: dict[Process, tuple[str, float]] = {}
        self._quiet: dict[tuple[str, int], tuple[str, int]] = {}
        self._last_outcome: dict[Process, str] = {}

    def on_event(self, life: Life, index: int, event: Event) -> None:
        """What a process told."""
        process = (life.name, life.number, index)
        self.counts[event["kind"]] += 1
        match event["kind"]:
            case "publish":
                self._on_publish(event)
            case "published":
                self._on_published(life, event)
            case "update":
                self._on_update(life, process, event)
            case "enter":
                with self._changed:
                    self._calls[process] = (event["call"], event["deadline"])
            case "leave":
                self._on_leave(life, process, event)
            case "quiet":
                with self._changed:
                    self._quiet[life.name, life.number] = (event["incarnation"], event["version"])
            case "wrong":
                self.violate(life, f"process {index}: {event['text']}")

    def violate(self, life: Life | None, text: str) -> None:
        """Notes that a promise was broken."""
        text = text if life is None else f"{life}: {text}"
        self.violations.append(text)
        self._say(f"VIOLATION: {text}")

    def hung(self, life: Life) -> dict[int, str]:
        """Processes of a life, and their calls, that run on far beyond their deadline."""
        found = {}
        now = time.monotonic()
        with self._changed:
            for index in range(len(life.processes)):
                call, deadline = self._calls.get((life.name, life.number, index), ("", now))
                since = life.running_since(index)
                if call == "connect" and len(life.processes) > 1:
                    continue  # by a collective of JAX, which waits for the other processes
                if since is not None and now > max(deadline, since) + PATIENCE_S + _HUNG_S:
                    found[index] = call
        return found

    def describe(self, life: Life) -> str:
        """What the processes of a life do, and what came of their last calls."""
        lines = []
        with self._changed:
            for index in range(len(life.processes)):
                process = (life.name, life.number, index)
                call = self._calls.get(process, ("none", 0.0))[0]
                last = self._last_outcome.get(process, "nothing")
                lines.append(f"  {life}.{index}: call under way: {call}; the last one: {last}")
        return "\n".join(lines)

    def has_since(self, life: Life, moment: float) -> bool:
        """Whether every process of a replica took a version that was published after `moment`."""
        with self._changed:
            taken = [
                self._last_published_at.get((life.name, life.number, index), 0.0)
                for index in range(len(life.processes))
            ]
        return min(taken) >= moment

    def check_agreement(self, fleet: list[Life], moment: float, *, drop: bool) -> None:
        """Whether all replicas of a fleet took the versions that one took, since a calm `moment`.

        With `drop` one that calls late may pass over some.
        """
        with self._changed:
            taken = [self._versions_since(life, moment) for life in fleet]
            last = min(max((held[1] for held in versions), default=-1) for versions in taken)
            for held in set.union(*taken):
                if held[1] <= last:
                    by_all = all(held in versions for versions in taken)
                    self.counts["fleet: by all" if by_all else "fleet: by some"] += 1
                    if not by_all and not drop:
                        self.violate(None, f"the fleet took {held} in part")

    def _versions_since(self, life: Life, moment: float) -> set[tuple[str, int]]:
        return {
            held
            for (process, _), taken in self._taken.items()
            if process[:2] == (life.name, life.number)
            for held in taken
            if self._published.get(held, moment) >= moment
        }

    def newest_of(self, trainer: Life) -> tuple[str, int] | None:
        """The last version that a quiet trainer knows to be announced; None while it publishes."""
        with self._changed:
            return self._quiet.get((trainer.name, trainer.number))

    def has(self, life: Life, newest: tuple[str, int]) -> bool:
        """Whether each process of a replica took `newest` or a later one of its incarnation."""
        with self._changed:
            lasts = {
                process[2]: taken[-1]
                for (process, _), taken in self._taken.items()
                if process[:2] == (life.name, life.number) and taken
            }
        current = [last for last in lasts.values() if last[0] == newest[0] and last >= newest]
        return len(current) == len(life.processes)

    # --- the promises

    def _on_publish(self, event: Event) -> None:
        held = (event["incarnation"], event["version"])
        with self._changed:
            if event["incarnation"] not in self._incarnations:
                self._incarnations.append(event["incarnation"])
            self._published.setdefault(held, event["at"])
            self._changed.notify_all()

    def _on_published(self, life: Life, event: Event) -> None:
        if event["version"] != event["asked"]:
            self.violate(life, f"asked for version {event['asked']}, got {event['version']}")
        if event["refused"]:
            self.violate(life, f"refused {event['refused']}")
        behind = {
            name: version
            for name, version in event["replicas"].items()
            if name not in event["lost"] and (version is None or version < event["asked"])
        }
        if behind and event["wait"] is not None:
            self.counts["replicas_behind"] += len(behind)

    def _on_update(self, life: Life, process: Process, event: Event) -> None:
        held = (event["incarnation"], event["version"])
        with self._changed:
            known = self._changed.wait_for(lambda: held in self._published, _PUBLISH_S)
            published_at = self._published.get(held, event["at"])
        if not known:
            self.violate(life, f"took {held}, which nobody published")
        wrong = weights.differences(self._seed, *held, event["digests"])
        if wrong:
            self.violate(life, f"{held} has wrong bytes: {', '.join(wrong)}")
        with self._changed:
            taken = self._taken[process, event["session"]]
            former, taken[:] = list(taken), [*taken, held]
            self._last_published_at[process] = published_at
            if former and not self._is_newer(held, former[-1]):
                self.violate(life, f"took {held} after {former[-1]}")
            for index in range(len(life.processes)):
                other = self._taken[(life.name, life.number, index), event["session"]]
                if len(other) >= len(taken) and other[len(taken) - 1] != held:
                    text = f"update {len(taken)} of process {process[2]} is {held}"
                    self.violate(life, f"{text}, and of process {index} {other[len(taken) - 1]}")

    def _is_newer(self, held: tuple[str, int], former: tuple[str, int]) -> bool:
        if held[0] == former[0]:
            return held[1] > former[1]
        return self._order(held[0]) > self._order(former[0])

    def _order(self, incarnation: str) -> int:
        return self._incarnations.index(incarnation) if incarnation in self._incarnations else 10**9

    def _on_leave(self, life: Life, process: Process, event: dict[str, Any]) -> None:
        name = event["error"]
        with self._changed:
            self._calls.pop(process, None)
            self._last_outcome[process] = f"{event['call']}: {name or 'ok'} {event['text']}"
        self.counts[f"{event['call']}: {name or 'ok'}"] += 1
        in_use = event["call"] == "connect" and "in use" in event["text"]
        if name not in _EXPECTED and not in_use and not life.faulted:
            self.violate(life, f"{event['call']} raised {name}: {event['text']}")
        if name == "VersionError" and "no longer held" in event["text"]:
            self.violate(life, f"{event['call']} raised {name}: {event['text']}")
        # Processes of one program connect by a collective of JAX, which waits for all of them.
        if event["call"] == "connect" and len(life.processes) > 1:
            return
        late_s = event["at"] - event["deadline"]
        if late_s > PATIENCE_S:
            self.counts["excused"] += 1
            self.most_excused_s = max(self.most_excused_s, late_s)
        late_s -= event["lag_s"]
        self.most_late_s = max(self.most_late_s, late_s)
        if late_s > PATIENCE_S:
            self.counts["excused"] -= 1
            text = f"{late_s:.2f} s late ({event['lag_s']:.2f} s of lag): {name} {event['text']}"
            text = f"process {process[2]}: {event['call']} was {text}"
            self.violate(life, f"{text}\n{life.log(process[2], 8000)}")
