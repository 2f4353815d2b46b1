"""Samples of a benchmark as figures: median and spread, a table for people, JSON for programs."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity, a sample per round."""

    name: str
    samples: Sequence[float]
    unit: str = "GB/s"

    @property
    def median(self) -> float:
        """The middle sample."""
        return median(self.samples)

    def over(self, limit: "Figure") -> float:
        """Median of the ratios to `limit`, each taken within one round."""
        return median(a / b for a, b in zip(self.samples, limit.samples, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.samples),
            "max": max(self.samples),
            "samples": list(self.samples),
        }


def print_table(title: str, figures: Sequence[Figure], limits: Sequence[Figure]) -> None:
    """Prints `title`, then figures and limits; each figure with its ratio to every limit."""
    console = Console()
    table = Table()
    table.add_column("")
    table.add_column("median", justify="right")
    table.add_column("min to max", justify="right")
    for limit in limits:
        table.add_column(f"of {limit.name}", justify="right")
    for figure in [*figures, *limits]:
        comparable = figure in figures and all(figure.unit == limit.unit for limit in limits)
        table.add_row(
            figure.name,
            f"{figure.median:.2f} {figure.unit}",
            f"{min(figure.samples):.2f} to {max(figure.samples):.2f}",
            *(f"{figure.over(limit):.2f}" if comparable else "" for limit in limits),
        )
    console.print(title, style="bold", soft_wrap=True)
    console.print(table)


def write_json(path: Path, **parts: Any) -> None:
    """Writes `parts`, with the machine and the command that they came from."""
    text = json.dumps({"command": sys.argv, "machine": _machine(), **parts}, indent=1)
    path.write_text(text + "\n")


def _machine() -> dict[str, Any]:
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.split(": ")[1] for line in cpus if "model name" in line), ""),
        "num_cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "congestion": congestion.read_text().strip(),
        "python": platform.python_version(),
        "jax": metadata.version("jax"),
    }
