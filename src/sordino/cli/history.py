"""`history.jsonl` in a run's directory: how the model did on held-out records while it learnt, one line at a time.

The held-out records are not protected by the guarantee. What is written about those that are was released and paid for.
No times: how long a step took tells how large its draw was, and short runs write a line after every step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from sordino import books
from sordino.errors import InvalidInput
from sordino.names import fits
from sordino.report.run_folder import Folder

FILE = "history.jsonl"
EVALUATIONS = 20


@dataclass(frozen=True)
class Entry:
    """After `step` steps: the held-out accuracy and mean loss, None without any.

    `clip` is the bound in force, where a mechanism chooses it on the way and has released it. `events` is how many the
    ledger held: it must never hold fewer again.
    """

    step: int
    accuracy: float | None
    loss: float | None
    clip: float | None = None
    events: int | None = None


class History:
    """Appends to the file; what a crash lost of the run is cut off when it goes on."""

    def __init__(self, run: Path, position: int) -> None:
        self._path = run / FILE
        self.entries = [entry for entry in read(run) if entry.step <= position]
        text = "".join(_line(entry) for entry in self.entries)
        try:
            books.write_durably(self._path, text.encode())
        except OSError as error:
            raise InvalidInput(f"cannot write {self._path}: {error.strerror}") from error

    @property
    def last(self) -> Entry | None:
        return self.entries[-1] if self.entries else None

    def add(
        self,
        step: int,
        accuracy: float | None,
        loss: float | None,
        clip: float | None = None,
        events: int | None = None,
    ) -> Entry:
        """Write one line, at once."""
        entry = Entry(step, accuracy, loss, clip, events)
        self.entries.append(entry)
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            with os.fdopen(os.open(self._path, flags, 0o666), "a", encoding="utf-8") as file:
                file.write(_line(entry))
        except OSError as error:
            raise InvalidInput(f"cannot write {self._path}: {error.strerror}; what was learnt is saved") from error
        return entry


def read(run: Path) -> Iterator[Entry]:
    """The lines that are whole: a run may be writing, or have been killed while it wrote."""
    for line in (Folder(run).text(FILE) or "").splitlines():
        try:
            said = json.loads(line)
            entry = Entry(**{name: value for name, value in said.items() if name != "seconds"})  # as version 0.1 wrote
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
        if all(fits(getattr(entry, f.name), str(f.type)) for f in fields(entry)):
            yield entry


def _line(entry: Entry) -> str:
    return json.dumps(asdict(entry), allow_nan=False) + "\n"
