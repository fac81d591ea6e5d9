"""A run's progress, recorded and shown: steps, time left, ε spent, held-out accuracy. Nothing about private records.

`history.jsonl` in a run's directory says how the model did on held-out records while it learnt, one line at a time. The
guarantee does not protect held-out records; what is written about protected ones was released and paid for. There are
no times: how long a step took tells how large its draw was, and short runs write a line after every step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from sordino.accounting.events import fits
from sordino.books import HISTORY, write_durably
from sordino.cli.session import Session
from sordino.cli.terminal import messages
from sordino.errors import InvalidInput
from sordino.figures import round_up, to_plain
from sordino.report.run_folder import Folder

EVALUATIONS = 20
_PAUSE, _SHARE = 0.5, 0.05
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Evaluation:
    """The held-out accuracy and mean loss after `step` steps; None without held-out records.

    `clip` is the bound in force, if a mechanism chooses it along the way and has released it. `events` is how many
    events the ledger held: it must never hold fewer again.
    """

    step: int
    accuracy: float | None
    loss: float | None
    clip: float | None = None
    events: int | None = None


class History:
    """Appends to `history.jsonl`. When a run continues after a crash, lines about lost steps are cut off."""

    def __init__(self, run: Path, position: int) -> None:
        self._path = run / HISTORY
        self.entries = [entry for entry in read_history(run) if entry.step <= position]
        text = "".join(_format_line(entry) for entry in self.entries)
        try:
            write_durably(self._path, text.encode())
        except OSError as error:
            raise InvalidInput(f"cannot write {self._path}: {error.strerror}") from error

    @property
    def last(self) -> Evaluation | None:
        return self.entries[-1] if self.entries else None

    def add(self, entry: Evaluation) -> None:
        """Write one line, at once."""
        self.entries.append(entry)
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            with os.fdopen(os.open(self._path, flags, 0o666), "a", encoding="utf-8") as file:
                file.write(_format_line(entry))
        except OSError as error:
            raise InvalidInput(f"cannot write {self._path}: {error.strerror}; what was learnt is saved") from error


def read_history(run: Path) -> Iterator[Evaluation]:
    """Read the lines that are whole: a run may be writing, or may have been killed while it wrote."""
    for line in (Folder(run).text(HISTORY) or "").splitlines():
        try:
            said = json.loads(line)
            said.pop("seconds", None)  # as version 0.1 wrote
            entry = Evaluation(**said)
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
        if all(fits(getattr(entry, f.name), str(f.type)) for f in fields(entry)):
            yield entry


def _format_line(entry: Evaluation) -> str:
    return json.dumps(asdict(entry), allow_nan=False) + "\n"


def open_bar(title: str) -> Progress:
    """Open a progress bar on stderr; if that is no terminal, only its last state is printed."""
    return Progress(
        SpinnerColumn(),
        TextColumn(title),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=messages(),
    )


class Bars:
    """Two bars, one for steps and one for ε, and the course of the held-out accuracy."""

    def __init__(self, session: Session) -> None:
        self._session = session
        private = session.private
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            TextColumn("{task.fields[note]}"),
            console=messages(),
        )
        self._began, self._from = time.monotonic(), private.position
        self._steps = self._progress.add_task(
            "private training", total=private.total, completed=private.position, note=self._count(private.position)
        )
        budget = private.bench.recipe.budget
        self._limit = budget.epsilon if budget else None
        self._epsilon = self._progress.add_task("[magenta]ε spent[/magenta]", total=self._limit, completed=0, note="")
        self._accuracy: TaskID | None = None
        self._next_price = time.monotonic() + _PAUSE

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._price()
        self._progress.stop()

    def show(self, step: int) -> None:
        """Count the step; price it only now and then, so that pricing takes at most a small share of the time."""
        self._progress.update(self._steps, completed=step, note=self._count(step))
        if (began := time.monotonic()) >= self._next_price:
            self._price()
            now = time.monotonic()
            self._next_price = now + max(_PAUSE, (now - began) / _SHARE)

    def show_evaluation(self, entries: Sequence[Evaluation]) -> None:
        values = [entry.accuracy for entry in entries if entry.accuracy is not None]
        if not values:
            return
        note = f"{values[-1]:.1%}  {draw_sparkline(values)}"
        if self._accuracy is None:
            self._accuracy = self._progress.add_task("held-out accuracy", total=1.0, completed=0, note="")
        self._progress.update(self._accuracy, completed=values[-1], note=note)

    def _count(self, step: int) -> str:
        total, taken = self._session.private.total, step - self._from
        spent = time.monotonic() - self._began
        left = f" · {format_clock(spent / taken * (total - step))} left" if taken > 0 and step < total else ""
        return f"{step}/{total}{left or f' · {format_clock(spent)}'}"

    def _price(self) -> None:
        private = self._session.private
        spent, planned = private.guarantee(stopped="in advance").epsilon, private.guarantee().epsilon
        limit = self._limit if self._limit is not None else planned
        words = f"ε {round_up(spent)} of {round_up(planned)} planned"
        self._progress.update(self._epsilon, total=limit, completed=min(spent, limit), note=words)


class Lines:
    """For machines: one JSON object per evaluation on stderr, and only the outcome on stdout."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._began, self._from = time.monotonic(), session.private.position

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        sys.stderr.flush()

    def show(self, step: int) -> None:
        return

    def show_evaluation(self, entries: Sequence[Evaluation]) -> None:
        private, last = self._session.private, entries[-1]
        taken = max(1, last.step - self._from)
        left = (time.monotonic() - self._began) / taken * (private.total - last.step)
        progress = {
            "event": "progress",
            **vars(last),
            "total": private.total,
            "epsilon": to_plain(private.guarantee().epsilon),
            "epsilon_so_far": to_plain(private.guarantee(stopped="in advance").epsilon),
            "seconds_left": 60 * round(left / 60),  # finer times would tell how long a step took
        }
        print(json.dumps(progress, allow_nan=False), file=sys.stderr, flush=True)


def draw_sparkline(values: Sequence[float]) -> str:
    """Draw values between their extremes, one character each."""
    low, high = min(values), max(values)
    if high == low:
        return _BARS[0] * len(values)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)


def format_clock(seconds: float) -> str:
    """Write a duration as 1:05, or 1:02:05 from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
