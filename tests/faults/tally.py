"""What was done, how often, and what went wrong: rows of a table whose counts of findings must all be 0."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

UNDER_COUNT = "silent under-counts"
UNREADABLE = "unreadable ledgers"
TRACEBACK = "tracebacks"
CODE = "code executed"
HANG = "hangs"
LEAK = "leaks"
KINDS = (UNDER_COUNT, UNREADABLE, TRACEBACK, CODE, HANG, LEAK)
"""A run that nobody damaged and that cannot be read, priced or gone on with counts as unreadable."""


_end = [math.inf]


def stop_after(seconds: float) -> None:
    """From now on, here and in the children, suites begin nothing new after so many seconds."""
    _end[0] = time.monotonic() + seconds


def in_time() -> bool:
    """Whether something new may be begun; the table states what was done."""
    return time.monotonic() < _end[0]


@dataclass
class Tally:
    """One row: how often something was done, and every finding as (kind, what happened)."""

    name: str
    done: int = 0
    findings: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find(self, kind: str, what: str) -> None:
        """Something that must not happen has happened."""
        assert kind in KINDS
        self.findings.append((kind, what))

    def count(self, kind: str) -> int:
        return sum(found == kind for found, _ in self.findings)


@dataclass
class Book:
    """All rows, by name, in the order in which they were opened."""

    rows: dict[str, Tally] = field(default_factory=dict)

    def row(self, name: str) -> Tally:
        return self.rows.setdefault(name, Tally(name))

    def add(self, other: Iterable[Tally]) -> None:
        for theirs in other:
            ours = self.row(theirs.name)
            ours.done += theirs.done
            ours.findings += theirs.findings
            ours.notes += theirs.notes

    @property
    def findings(self) -> list[tuple[str, str, str]]:
        return [(row.name, kind, what) for row in self.rows.values() for kind, what in row.findings]

    def write(self, path: Path) -> None:
        rows = [[row.name, row.done, row.findings, row.notes] for row in self.rows.values()]
        path.write_text(json.dumps(rows))

    @staticmethod
    def read(path: Path) -> list[Tally]:
        rows = json.loads(path.read_text())
        return [Tally(name, done, [(k, w) for k, w in found], notes) for name, done, found, notes in rows]

    def table(self) -> str:
        """Markdown, as docs/reliability.md shows it."""
        lines = [f"| what was done | how often | {' | '.join(KINDS)} |", "|---" + "|---:" * (len(KINDS) + 1) + "|"]
        for row in self.rows.values():
            counts = " | ".join(str(row.count(kind)) for kind in KINDS)
            lines.append(f"| {row.name} | {row.done:,} | {counts} |")
        total = Counter(kind for _, kind, _ in self.findings)
        counts = " | ".join(f"**{total[kind]}**" for kind in KINDS)
        lines.append(f"| **together** | **{sum(row.done for row in self.rows.values()):,}** | {counts} |")
        return "\n".join(lines)
