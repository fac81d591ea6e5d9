"""What is shown while a run goes on: steps, time left, ε spent, held-out accuracy. Nothing about private records."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from sordino.accounting.guarantee import round_up, to_plain
from sordino.cli.common import messages
from sordino.cli.history import Entry
from sordino.cli.session import Session

_BARS = "▁▂▃▄▅▆▇█"


class Seldom:
    """Says when something is due again: at most every `pause` seconds, and never more than `share` of the time."""

    def __init__(self, pause: float = 0.5, share: float = 0.05) -> None:
        self._pause, self._share = pause, share
        self._next = time.monotonic() + pause
        self._started = 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = time.monotonic()
        self._next = now + max(self._pause, (now - self._started) / self._share)


class Display(Protocol):
    """Shows a run to somebody."""

    def show(self, step: int) -> None:
        """A step was taken."""
        ...

    def evaluated(self, entries: Sequence[Entry]) -> None:
        """The model was tried on held-out records."""
        ...

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def bar(title: str) -> Progress:
    """A progress bar on stderr; where that is no terminal, only its last state is printed."""
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
    """Two bars, one of steps and one of ε, and the held-out accuracy as it went."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seldom = Seldom()
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

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._price()
        self._progress.stop()

    def show(self, step: int) -> None:
        """Count the step; price only now and then, because it takes time."""
        self._progress.update(self._steps, completed=step, note=self._count(step))
        if self._seldom.due:
            with self._seldom:
                self._price()

    def evaluated(self, entries: Sequence[Entry]) -> None:
        values = [entry.accuracy for entry in entries if entry.accuracy is not None]
        if not values:
            return
        note = f"{values[-1]:.1%}  {sparkline(values)}"
        if self._accuracy is None:
            self._accuracy = self._progress.add_task("held-out accuracy", total=1.0, completed=0, note="")
        self._progress.update(self._accuracy, completed=values[-1], note=note)

    def _count(self, step: int) -> str:
        total, taken = self._session.private.total, step - self._from
        spent = time.monotonic() - self._began
        left = f" · {clock(spent / taken * (total - step))} left" if taken > 0 and step < total else ""
        return f"{step}/{total}{left or f' · {clock(spent)}'}"

    def _price(self) -> None:
        private = self._session.private
        spent, planned = private.guarantee(stopped="in advance").epsilon, private.guarantee().epsilon
        limit = self._limit if self._limit is not None else planned
        words = f"ε {round_up(spent)} of {round_up(planned)} planned"
        self._progress.update(self._epsilon, total=limit, completed=min(spent, limit), note=words)


class Lines:
    """For machines: one JSON object per evaluation on stderr, the outcome alone on stdout."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._began, self._from = time.monotonic(), session.private.position

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stderr.flush()

    def show(self, step: int) -> None:
        return

    def evaluated(self, entries: Sequence[Entry]) -> None:
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


def sparkline(values: Sequence[float]) -> str:
    """The course of some values between their extremes, in as many characters."""
    low, high = min(values), max(values)
    if high == low:
        return _BARS[0] * len(values)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)


def clock(seconds: float) -> str:
    """1:05, or 1:02:05 from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
