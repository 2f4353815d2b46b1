"""What a run has come to: a table on a terminal, lines elsewhere, and the summary at its end."""

import statistics
from collections.abc import Sequence
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

_LEGEND = (
    "per version: its training step, mean reward of the answers with it, time until every sampler "
    "had it, and the version that each sampler answered with"
)
_ROWS = 12
_REWARD_STEPS = 5


class Progress:
    """Shows versions as they are proved. A context manager."""

    def __init__(self, title: str, replicas: Sequence[str]) -> None:
        self._title = title
        self._replicas = list(replicas)
        self._rows: list[list[str]] = []
        self._console = Console()
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, auto_refresh=False)

    def show(self, event: dict[str, Any]) -> None:
        """Adds a "version" event."""
        step, reward = str(event["version"]), f"{event['reward']:.3f}"
        sync = f"{1e3 * event['sync_s']:.1f} ms"
        at = {replica: str(event["samplers"].get(replica, "-")) for replica in self._replicas}
        self._rows.append([step, reward, sync, *at.values()])
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        if len(self._rows) == 1:
            self.say(_LEGEND)
        samplers = ", ".join(f"{replica} at {version:>2}" for replica, version in at.items())
        line = f"step {step:>3}  reward {reward}  sync {sync:>10}  {samplers}"
        self._console.print(line, soft_wrap=True)

    def say(self, text: str) -> None:
        """Prints a line, above the table if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _header(self) -> list[str]:
        return ["step", "reward", "sync", *self._replicas]

    def _table(self) -> Table:
        caption = _LEGEND if self._rows else "programs are starting"
        table = Table(title=self._title, caption=caption)
        for name in self._header():
            table.add_column(name, justify="right")
        for row in self._rows[-_ROWS:]:
            table.add_row(*row)
        return table


def summarize(events: Sequence[dict[str, Any]], replicas: Sequence[str]) -> dict[str, Any]:
    """The numbers of a run, of plain JSON types.

    Args:
        events: the trainer's; see `examples.rl_loop`.
        replicas: names of the replicas that had to take every version.
    """
    rounds = [event for event in events if event["event"] == "version"]
    rewards = [reward for e in events if e["event"] == "resume" for reward in e["rewards"]]
    rewards += [event["reward"] for event in rounds]
    edge = max(1, min(_REWARD_STEPS, len(rewards) // 2))
    proved = [e for e in rounds if not e["differing"] and set(e["samplers"]) >= set(replicas)]
    return {
        "versions": len(proved),
        "last_version": rounds[-1]["version"] if rounds else None,
        "samplers": rounds[-1]["samplers"] if rounds else {},
        "bitwise_equal": bool(rounds) and len(proved) == len(rounds),
        "rewards": rewards,
        "reward_versions": edge,
        "reward_first": statistics.fmean(rewards[:edge]) if rewards else 0.0,
        "reward_last": statistics.fmean(rewards[-edge:]) if rewards else 0.0,
        "nbytes_per_version": rounds[-1]["nbytes"] if rounds else 0,
        "sync_seconds_median": statistics.median(e["sync_s"] for e in rounds) if rounds else 0.0,
        "gbytes_per_s_median": (
            statistics.median(e["gbytes_per_s"] for e in rounds) if rounds else 0.0
        ),
    }


def failures(summary: dict[str, Any], steps: int) -> list[str]:
    """What a run has promised and not kept; empty where all held."""
    found = []
    if summary["last_version"] != steps:
        found.append(f"the last version is {summary['last_version']}, not {steps}")
    if not summary["bitwise_equal"]:
        found.append("not every version was proved bit-equal on every sampler")
    behind = {name: v for name, v in summary["samplers"].items() if v != summary["last_version"]}
    if behind:
        found.append(f"samplers ended on other versions: {behind}")
    if not summary["reward_last"] > summary["reward_first"]:
        found.append(
            f"the reward did not rise: {summary['reward_first']:.3f} at first, "
            f"{summary['reward_last']:.3f} at last "
            f"(means of {summary['reward_versions']} versions)"
        )
    return found
