"""The way from what the user typed to a trained model, for `train` and `demo`. It also finishes a resumed run."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from sordino.cli import announcing, searching, tabular
from sordino.cli.announcing import Outcome
from sordino.cli.choosing import choose, read_sheet
from sordino.cli.config import Config, read_config
from sordino.cli.lookup import build_model, is_benchmark
from sordino.cli.progress import EVALUATIONS, Bars, Evaluation, History, Lines, open_bar
from sordino.cli.session import Session, begin, compute_losses, measure
from sordino.cli.terminal import caution, console
from sordino.cli.train import Flags
from sordino.lab import machine
from sordino.records import Records
from sordino.tables.preparing import draft_schema


def train_and_report(flags: Flags) -> None:
    """Train, save and report the outcome; or only draft a schema."""
    if flags.draft_schema is not None:
        sheet = read_sheet(flags)
        draft_schema(sheet.train, sheet.target, flags.draft_schema)
        console().print(f"Wrote {flags.draft_schema}. Make it say what is public, then: --schema {flags.draft_schema}")
        return
    if flags.preset is not None:
        from sordino.cli import presets  # it needs the laboratory

        presets.train(flags)
        return
    base = read_config(flags.config) if flags.config else Config()
    if flags.tune or flags.given(*searching.OPTIONS):
        searching.search(flags, base)
        return
    if tabular.wants_learning(flags, base):
        tabular.train(flags, base)
        return
    chosen = choose(flags)
    session = begin(chosen, flags.run, lambda: None if flags.json else announcing.announce_release(chosen))
    try:
        if not flags.json:
            announcing.announce_training(session)
        outcome = finish(session, as_json=flags.json)
        twin = None
        if flags.non_private_twin and not outcome.interrupted:
            if not is_benchmark(session.config.data.source):
                caution("the twin and its accuracy are not private: show them only to those who may see the records")
            twin = _train_twin(session)
            outcome = outcome.assuming("the accuracy of the non-private twin, which was shown, is not covered")
    finally:
        session.private.close()
    announcing.report(outcome, as_json=flags.json, twin_accuracy=twin)


def finish(session: Session, *, as_json: bool = False) -> Outcome:
    """Take the remaining steps; now and then, and at the end, save and measure on held-out records."""
    machine.keep()
    private, started = session.private, time.monotonic()
    share = max(1, private.total // EVALUATIONS)
    every = session.config.run.save_every or share
    history = History(session.run, private.position)
    display = Lines(session) if as_json else Bars(session)
    with stop_on_signal() as stop, display:
        for step in session.steps():
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
    return _sum_up(session, status, history.last, time.monotonic() - started)


def _evaluate(session: Session, history: History, display: Bars | Lines) -> None:
    private = session.private
    clip, events = session.find_released_clip(), len(private.bench.ledger)
    history.add(Evaluation(private.position, *session.measure(), clip, events))
    display.show_evaluation(history.entries)


def _sum_up(session: Session, status: str, last: Evaluation, seconds: float) -> Outcome:
    private = session.private
    noise = private.bench.recipe.noise_multiplier
    assert noise is not None
    head = private.bench.ledger.head()
    runs_code = any(":" in (name or "") for name in (session.config.model.name, session.config.recipe_code))
    tuned = session.config.finetuning is not None  # it says itself what to do next
    source = session.config.data.source
    return Outcome(
        status=status,
        run=str(session.run),
        steps=private.position,
        total=private.total,
        noise_multiplier=noise,
        guarantee=session.guarantee(),
        held_out_accuracy=last.accuracy,
        seconds=round(seconds),
        events=head.events,
        head=head.chain.hex(),
        runs_code=runs_code,
        held_out_loss=last.loss,
        next=() if tuned else announcing.list_next(session.run, source, runs_code=runs_code),
    )


def _train_twin(session: Session) -> float | None:
    """Return the held-out accuracy of a twin: same model, optimizer and steps, without clipping and without noise.

    The twin is for comparison and protects nobody: neither the twin nor its steps are kept.
    """
    if not session.has_held_out:
        return None
    recipe, seed = session.private.bench.recipe, session.config.run.seed
    model = build_model(session.config.model, seed)
    optimizer = recipe.optimizer.build(model.parameters())
    records = Records(session.data.train_set)
    generator = torch.Generator()
    generator.manual_seed(seed) if seed is not None else generator.seed()
    steps = session.private.total
    with open_bar("non-private twin") as progress:
        task = progress.add_task("", total=steps, note="")
        for _ in range(steps):
            drawn = torch.randint(records.count, (recipe.batch_size,), generator=generator)
            batch = records.fetch(drawn, torch.device("cpu"))
            optimizer.zero_grad()
            compute_losses(model, batch.data).mean().backward()
            optimizer.step()
            progress.advance(task)
    return measure(model, session.data.test)[0]


@dataclass
class Stop:
    """Whether somebody asked to stop."""

    requested: bool = False


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Ctrl-C or SIGTERM lets the current step finish; a second one ends the program at once."""
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
