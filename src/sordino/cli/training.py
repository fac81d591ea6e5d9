"""Run a session to its end, or to where somebody stops it; then say what was spent."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from rich.padding import Padding
from rich.text import Text

from sordino.accounting import Guarantee
from sordino.accounting.guarantee import read_versions, round_up, to_plain
from sordino.cli.common import INTERRUPTED, console, keep_json, print_json
from sordino.cli.history import EVALUATIONS, History
from sordino.cli.progress import Bars, Display, Lines, clock
from sordino.cli.session import Session
from sordino.lab import machine


@dataclass
class Stop:
    """Whether somebody asked to stop."""

    requested: bool = False


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Ctrl-C or SIGTERM lets the step in hand finish; the same signal once more ends the program at once."""
    stop = Stop()

    def request(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        signal.signal(number, before[number])

    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Outcome:
    """How a run ended, all of it public."""

    status: str
    run: str
    steps: int
    total: int
    noise_multiplier: float
    guarantee: Guarantee
    held_out_accuracy: float | None
    seconds: int
    events: int
    head: str
    runs_code: bool = False

    @property
    def interrupted(self) -> bool:
        return self.status == "interrupted"

    def assuming(self, more: str) -> Outcome:
        """The same outcome with one more assumption."""
        return replace(self, guarantee=replace(self.guarantee, assumptions=(*self.guarantee.assumptions, more)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the guarantee's fields among the others."""
        plain = {**vars(self), **self.guarantee.to_dict(), "epsilon": to_plain(self.guarantee.epsilon)}
        del plain["guarantee"], plain["runs_code"]
        return {**plain, "versions": read_versions()}


def run(session: Session, *, as_json: bool = False) -> Outcome:
    """Take the steps that are left; save now and then and at the end, and try the model on held-out records."""
    machine.keep()
    private, started = session.private, time.monotonic()
    share = max(1, private.total // EVALUATIONS)
    every = session.config.run.save_every or share
    history = History(session.run, private.position)
    display: Display = Lines(session) if as_json else Bars(session)
    with stop_on_signal() as stop, display:
        for step in private.steps():
            display.show(step.number)
            if step.number % share == 0:
                _evaluate(session, history, display)
            if stop.requested:
                break
            if step.number % every == 0:
                private.save()
        private.save()
        if history.last is None or history.last.step != private.position:
            _evaluate(session, history, display)
    finished = private.position == private.total
    status = "finished" if finished else "interrupted" if stop.requested else "budget spent"
    assert history.last is not None
    return _outcome(session, status, history.last.accuracy, time.monotonic() - started)


def _evaluate(session: Session, history: History, display: Display) -> None:
    clip, events = session.released_clip(), len(session.private.bench.ledger)
    history.add(session.private.position, session.accuracy(), session.loss(), clip, events)
    display.evaluated(history.entries)


def _outcome(session: Session, status: str, accuracy: float | None, seconds: float) -> Outcome:
    private = session.private
    noise = private.bench.recipe.noise_multiplier
    assert noise is not None
    head = private.bench.ledger.head()
    return Outcome(
        status=status,
        run=str(session.run),
        steps=private.position,
        total=private.total,
        noise_multiplier=noise,
        guarantee=session.guarantee(),
        held_out_accuracy=accuracy,
        seconds=round(seconds),
        events=head.events,
        head=head.chain.hex(),
        runs_code=":" in (session.config.model.name or ""),
    )


def report(outcome: Outcome, *, as_json: bool, twin_accuracy: float | None = None) -> None:
    """The end of `train`, `resume` and `demo`, kept for the report; an interrupted run exits with its own code."""
    twin = {} if twin_accuracy is None else {"twin_accuracy": twin_accuracy}
    told = {**outcome.to_dict(), **twin}
    keep_json(Path(outcome.run) / "outcome.json", told)
    if as_json:
        print_json(told)
    else:
        _say(outcome, twin_accuracy)
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def _say(outcome: Outcome, twin_accuracy: float | None) -> None:
    out = console()
    wide = not out.is_terminal  # a file gets whole lines, a terminal whole words
    out.print(f"\n{_ending(outcome)}\n", markup=False)
    out.print(f"Guarantee. {replace(outcome.guarantee, assumptions=())}", markup=False, soft_wrap=wide)
    out.print("Assumptions:")
    for assumption in outcome.guarantee.assumptions:
        line = Text(f"- {assumption}")
        out.print(Text("  ") + line if wide else Padding(line, (0, 0, 0, 2)), soft_wrap=wide)
    out.print()
    if outcome.held_out_accuracy is None:
        out.print("Held-out accuracy: not measured (--held-out 0.2 keeps a fifth of the records for it)")
    else:
        out.print(f"Held-out accuracy: {outcome.held_out_accuracy:.1%}")
    if twin_accuracy is not None:
        out.print(f"The non-private twin: {twin_accuracy:.1%} (same model and steps, neither clipping nor noise)")
    out.print(f"Saved in {outcome.run}", markup=False)


def _ending(outcome: Outcome) -> str:
    taken = f"{outcome.steps} of {outcome.total} steps"
    if outcome.interrupted:
        spent = (
            f"ε {round_up(outcome.guarantee.epsilon)} is that of the whole plan: whoever stops after a look has "
            "chosen among all that it would have released"
        )
        again = f"sordino resume {shlex.quote(outcome.run)}{' --trust-code' if outcome.runs_code else ''}"
        return f"Interrupted after {taken}; the model is saved. {spent}.\nGo on with: {again}"
    if outcome.status == "budget spent":
        return f"The budget is spent after {taken}: an earlier interruption lost work that was paid for."
    return f"Finished {taken} in {clock(outcome.seconds)}."
