"""What the doctor found, for people and for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

_STYLES = {"ok": "green", "note": "yellow", "broken": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what that was.
        verdict: "ok"; "note" where something could be better; "broken" where syncs fail.
        seen: what is the case.
        advice: what to do about it; "" for nothing.
    """

    subject: str
    verdict: Literal["ok", "note", "broken"]
    seen: str
    advice: str = ""


def exit_status(findings: Sequence[Finding]) -> int:
    """1 if something is broken, else 0."""
    return int(any(finding.verdict == "broken" for finding in findings))


def print_table(findings: Sequence[Finding]) -> None:
    """Prints the findings to stdout, as wide as the terminal is."""
    table = Table(show_edge=False)
    for name in ("", "subject", "seen", "what to do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, _STYLES[finding.verdict])
        # As Text, since brackets in a text are not meant as markup.
        table.add_row(verdict, *map(Text, (finding.subject, finding.seen, finding.advice)))
    Console().print(table)


def to_json(findings: Sequence[Finding]) -> str:
    """The findings as a JSON array of objects."""
    return json.dumps([asdict(finding) for finding in findings], indent=2)
