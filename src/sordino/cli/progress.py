"""What is shown while a run goes on: step, time left, ε spent, held-out accuracy. Nothing about private records."""

from __future__ import annotations

import time
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from sordino.cli.common import messages, rounded_up
from sordino.cli.session import Session


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


class Display:
    """The progress of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seldom = Seldom()
        self._progress = bar("private training")
        private = session.private
        self._task = self._progress.add_task("", total=private.total, completed=private.position, note="")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._progress.update(self._task, note=self._note())
        self._progress.stop()

    def show(self, step: int) -> None:
        """Count the step; price and evaluate only now and then, because both take time."""
        self._progress.update(self._task, completed=step)
        if self._seldom.due:
            with self._seldom:
                self._progress.update(self._task, note=self._note())

    def _note(self) -> str:
        spent = f"ε {rounded_up(self._session.private.guarantee().epsilon)}"
        budget = self._session.private.bench.recipe.budget
        words = [f"{spent} of {budget.epsilon:g}" if budget else spent]
        accuracy = self._session.accuracy()
        if accuracy is not None:
            words.append(f"held-out {accuracy:.1%}")
        return " · ".join(words)
