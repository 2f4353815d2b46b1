"""Samples of a benchmark as figures: median and spread, a table for people, JSON for programs."""

import argparse
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

from tpu_sync_rl import _native


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


@dataclass(frozen=True, slots=True)
class Row:
    """A figure beside its limit: what it is compared with, measured in the same rounds."""

    figure: Figure
    limit: Figure | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        row = self.figure.to_dict()
        if self.limit is not None:
            row |= {"limit": self.limit.to_dict(), "of_limit": self.figure.over(self.limit)}
        return row


def print_table(title: str, rows: Sequence[Row], *, beside: str = "limit") -> None:
    """Prints `title`, then each figure, what it is compared with, and the ratio of the two.

    The title gets the instructions that our kernels use: the best here, or what TSR_CPU names.
    """
    table = Table()
    table.add_column("")
    for column in ("median", "min to max"):
        table.add_column(column, justify="right")
    table.add_column(beside)
    for column in ("its median", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        figure, limit = row.figure, row.limit
        compared = ("", "", "")
        if limit is not None:
            compared = (limit.name, _quantity(limit), f"{figure.over(limit):.2f}")
        spread = f"{min(figure.samples):{_form(figure)}} to {max(figure.samples):{_form(figure)}}"
        table.add_row(figure.name, _quantity(figure), spread, *compared)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"{title}; kernels: {_native.cpu_level()}", style="bold", soft_wrap=True)
    console.print(table)


def _quantity(figure: Figure) -> str:
    return f"{figure.median:{_form(figure)}} {figure.unit}"


def _form(figure: Figure) -> str:
    """Three digits that say something, whatever the size."""
    return ".0f" if abs(figure.median) >= 100 else ".1f" if abs(figure.median) >= 10 else ".3f"


def count(text: str) -> int:
    """The argument `text`, a number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"it has to be 1 or more, not {number}")
    return number


def _file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much is measured, and where it is written."""
    parser.add_argument(
        "--rounds", type=count, default=5, help="samples of each figure (default: %(default)s)"
    )
    parser.add_argument("--json", type=_file, metavar="FILE", help="write every sample here")


def write_json(args: argparse.Namespace, rows: Sequence[Row], **more: Any) -> None:
    """Writes every sample to `args.json`, if that was asked for: with machine and settings."""
    if args.json is None:
        return
    parts = {
        "command": sys.argv,
        "machine": _machine(),
        "settings": {name: value for name, value in vars(args).items() if _is_plain(value)},
        "figures": [row.to_dict() for row in rows],
        **more,
    }
    args.json.write_text(json.dumps(parts, indent=1) + "\n")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | list)


def _read(path: Path) -> str:
    """What a file of the kernel says; "" where a container hides it."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _machine() -> dict[str, Any]:
    cpus = _read(Path("/proc/cpuinfo")).splitlines()
    return {
        "cpu": next((line.split(": ")[1] for line in cpus if "model name" in line), ""),
        "kernels": _native.cpu_level(),
        "num_cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "congestion": _read(Path("/proc/sys/net/ipv4/tcp_congestion_control")).strip(),
        "python": platform.python_version(),
        "jax": metadata.version("jax"),
    }
