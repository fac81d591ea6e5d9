"""Loops as in a notebook: Ctrl-C at any moment, caught, and on with the next cell.

Half of the interrupts come as a signal after a random time, half before a random line of the package, which hits every
place between two statements. Now and then a forked child tries a step: it may be refused, and must do no harm.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from sordino import Private
from sordino.accounting import Ledger
from sordino.errors import BudgetExhausted, SordinoError
from tests.faults import child, witness
from tests.faults.kills import check_answers
from tests.faults.tally import HANG, TRACEBACK, UNDER_COUNT, UNREADABLE, Book, Tally, in_time
from tests.faults.trainers import SAVE_EVERY, bind

RECIPES = ("dpsgd", "dpsgd", "dpsur", "dpis")
LINES = 4000
"""About so many lines of the package run in a step and a save."""
SECONDS = 0.03


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def interrupt(dice: random.Random, act: Callable[[], None]) -> None:
    """Ctrl-C falls somewhere into `act`, or into the lines around it; it is caught, as Jupyter does."""
    try:
        try:
            if dice.random() < 0.5:
                witness.at_line(dice.randint(1, LINES), _interrupt)
            else:
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-4, SECONDS))
            act()
        finally:
            _calm()
    except KeyboardInterrupt:
        _calm()


def _calm() -> None:
    """No interrupt comes from now on, not even one that is under way."""
    for _ in range(3):
        with suppress(KeyboardInterrupt):
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_REAL, 0)


def try_in_child(private: Private) -> None:
    """A forked child, such as a worker of a data loader, takes a step: refused or not, the parent must not notice."""

    def step() -> None:
        with suppress(SordinoError):
            private.step()

    os.waitpid(child.fork(step), 0)


def take(private: Private, number: int) -> None:
    """A step, and now and then a checkpoint."""
    private.step()
    if number % SAVE_EVERY == 0:
        private.save()


def loop(folder: Path, recipe: str, seed: int) -> None:
    """A whole session: steps, saves, interrupts, and steps again until the budget is spent."""
    dice = random.Random(seed)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
    witness.watch(folder / "draws.log")
    private = bind(recipe, run=folder / "run")
    for number in range(20):
        if number and dice.random() < 0.1:
            try_in_child(private)
        try:
            interrupt(dice, partial(take, private, number))
        except BudgetExhausted:
            break
    private.save()
    private.close()


def run(place: Path, count: int, seed: int) -> Book:
    """`count` loops."""
    book = Book()
    row = book.row("interrupted loops, continued")
    for name in set(RECIPES[:count]):  # imported and priced before anything is forked
        with bind(name) as private:
            private.step()
    for number in range(count):
        if not in_time():
            break
        folder = place / str(number)
        folder.mkdir()
        row.done += 1
        recipe = RECIPES[number % len(RECIPES)]
        ended = child.run(
            lambda folder=folder, recipe=recipe, number=number: loop(folder, recipe, 1000 * seed + number)
        )
        judge(folder, ended, row)
    return book


def judge(folder: Path, ended: child.Ended, row: Tally) -> None:
    """The ledger can be read, opened for writing and priced, and knows of every draw."""
    drawn = witness.Draws.read(folder / "draws.log")
    try:
        with Ledger.read(folder / "run" / "ledger.sqlite") as ledger:
            held, events = len(ledger), ledger.events()
    except SordinoError as error:
        row.find(UNREADABLE, f"after an interrupted loop: {error}")
        return
    if held < len(drawn) or drawn.missing(events):
        row.find(UNDER_COUNT, f"{len(drawn)} draws, {held} events, missing {drawn.missing(events)[:2]}")
    if ended.hung:
        row.find(HANG, "an interrupted loop")
    elif ended.crash:
        row.find(TRACEBACK, ended.crash[-1500:])
    else:
        check_answers(folder, drawn, row)
