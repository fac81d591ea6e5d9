"""Trainings killed with SIGKILL at any moment: nothing that was drawn is missing in the ledger, and they go on.

A third of the kills comes after a random time, a third before a random line of the package, which hits every place
between two statements, and a third between a charge and the noise that it pays for.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sordino.accounting import Ledger
from sordino.errors import SordinoError
from tests.faults import child, witness
from tests.faults.child import sordino
from tests.faults.tally import HANG, TRACEBACK, UNDER_COUNT, UNREADABLE, Book, Tally, in_time
from tests.faults.trainers import BUDGET, trainings

MOST_PER_ROUND = 6
BEGINNING = 5
"""Half of the kills at a draw come so early: a table is prepared then."""
Training = Callable[[Path], None]


@dataclass(frozen=True)
class Extent:
    """How long a training takes when nobody kills it: in seconds, in draws of noise and in lines of the package."""

    seconds: float
    draws: int
    lines: int


def measure(train: Training, folder: Path) -> Extent:
    """Train three times unharmed: here, so that children find everything imported and priced; timed; counting lines."""

    def counted() -> int:
        lines = witness.at_line(-1, lambda: None)
        train(folder / "counted")
        return lines[0]

    def watched() -> float:
        witness.watch(folder / "draws.log")
        began = time.monotonic()
        train(folder / "timed")
        return time.monotonic() - began

    for name in ("warm", "counted", "timed"):
        (folder / name).mkdir(parents=True)
    train(folder / "warm")
    timed, lines = child.run(watched, 300), child.run(counted, 300)
    assert not timed.crash, timed.crash
    assert not lines.crash, lines.crash
    return Extent(timed.value, len(witness.Draws.read(folder / "draws.log")), lines.value)


def victim(train: Training, folder: Path, extent: Extent, dice: random.Random) -> tuple[int, float]:
    """Start a training that will be killed: by itself, or by us after the returned number of seconds."""
    way = dice.randrange(3)
    draw = dice.randint(1, dice.choice((BEGINNING, extent.draws))) if way == 1 else None
    line = dice.randint(1, extent.lines) if way == 2 else None

    def live() -> None:
        witness.watch(folder / "draws.log", kill_at=draw)
        if line is not None:
            witness.at_line(line, lambda: os.kill(os.getpid(), signal.SIGKILL))
        train(folder)

    wait = dice.random() * extent.seconds if way == 0 else child.PATIENCE
    return child.fork(live, folder / "errors"), wait


def ended(pid: int, wait: float) -> int | None:
    """The status of a child that ended within `wait` seconds; afterwards it is killed, and there is no status."""
    end = time.monotonic() + wait
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return None if os.WIFSIGNALED(os.waitpid(pid, 0)[1]) else 0


def look(folder: Path, row: Tally) -> None:
    """After a kill: the ledger can be read and knows of every draw, and so do `report` and `account`."""
    drawn, path = witness.Draws.read(folder / "draws.log"), folder / "run" / "ledger.sqlite"
    if not path.exists():
        if len(drawn):
            row.find(UNDER_COUNT, f"{len(drawn)} draws without a ledger")
        return
    try:
        with Ledger.read(path) as ledger:
            held, events = len(ledger), ledger.events()
    except SordinoError as error:
        row.find(UNREADABLE, f"after a kill: {error}")
        return
    if held < len(drawn) or drawn.missing(events):
        row.find(UNDER_COUNT, f"{len(drawn)} draws, {held} events, missing {drawn.missing(events)[:2]}")
    check_answers(folder, drawn, row)


def check_answers(folder: Path, drawn: witness.Draws, row: Tally) -> None:
    """What `report` and `account` answer is no smaller than the price of the draws."""
    answered = child.run(lambda: answers(folder / "run", folder / "report.html", drawn))
    if answered.hung:
        row.find(HANG, "report or account")
    elif answered.crash:
        row.find(TRACEBACK, answered.crash)
    else:
        for kind, what in answered.value:
            row.find(kind, what)


def answers(run: Path, page: Path, drawn: witness.Draws) -> list[tuple[str, str]]:
    """What is wrong with what `report` and `account` say of an undamaged run."""
    report = sordino("report", run, "--json", "--output", page)
    account = sordino("account", run, "--json", "--delta", BUDGET.delta)
    for said in (report, account):
        if said.traceback:
            return [(TRACEBACK, said.traceback)]
        if said.code != 0:
            return [(UNREADABLE, said.complaint)]
    told = report.json
    terms = told["delta"], told["accountant"], told["adjacency"]
    least = drawn.price(*terms)
    priced = account.json["epsilon"][told["accountant"]]["epsilon"]
    wrong = [e for e in (told["epsilon"], priced) if e != "infinity" and not float(e) >= least * (1 - 1e-9)]
    return [(UNDER_COUNT, f"{wrong[0]} is answered, the draws cost {least}")] if wrong else []


def conclude(folder: Path, row: Tally) -> None:
    """After the last start of a training has ended by itself: all draws of all its lives fit into the budget."""
    look(folder, row)
    drawn = witness.Draws.read(folder / "draws.log")
    report = child.run(lambda: sordino("report", folder / "run", "--json", "--output", folder / "page").json)
    if report.crash or report.hung:
        return  # said already by `look`
    spent = drawn.price(BUDGET.delta, report.value["accountant"], BUDGET.adjacency)
    if spent > BUDGET.epsilon * (1 + 1e-9):
        row.find(UNDER_COUNT, f"the draws of a resumed run cost {spent}, above its budget of {BUDGET.epsilon}")


def kill_many(name: str, train: Training, place: Path, kills: int, dice: random.Random, row: Tally) -> None:
    """Kill, look, start again; a new run after some kills, or when one is done."""
    extent = measure(train, place / "unharmed")
    number, killed_here, row.name = 0, 0, f"kills: {name}"
    folder = place / "0"
    folder.mkdir()
    goal = row.done + kills
    while row.done < goal and in_time():
        spared = killed_here >= MOST_PER_ROUND
        if spared:
            pid, wait = child.fork(lambda folder=folder: survive(train, folder), folder / "errors"), child.PATIENCE
        else:
            pid, wait = victim(train, folder, extent, dice)
        status = ended(pid, wait)
        if status is None or os.WIFSIGNALED(status):
            if wait == child.PATIENCE and status is None:
                row.find(HANG, f"{name}: a training did not end")
            row.done, killed_here = row.done + 1, killed_here + 1
            look(folder, row)
            continue
        if status != 0:
            text = (folder / "errors").read_text()[-1500:]
            row.find(UNREADABLE if "Error" in text or "Refused" in text else TRACEBACK, f"cannot go on: {text[-600:]}")
        else:
            conclude(folder, row)
        shutil.rmtree(folder)
        number, killed_here = number + 1, 0
        folder = place / str(number)
        folder.mkdir()


def survive(train: Training, folder: Path) -> None:
    """The last life of a run: nobody kills it."""
    witness.watch(folder / "draws.log")
    train(folder)


def run(place: Path, count: int, seed: int) -> Book:
    """`count` kills, spread over all trainings, or over the first ones if that were less than three for each."""
    book, dice = Book(), random.Random(seed)
    chosen = list(trainings(place).items())[: max(1, count // 3)]
    for number, (name, train) in enumerate(chosen):
        share = count // len(chosen) + (number < count % len(chosen))
        if share:
            beside = place / f"training-{number}"
            beside.mkdir()
            kill_many(name, train, beside, share, dice, book.row(f"kills: {name}"))
    return book
