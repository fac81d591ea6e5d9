"""Readers beside a run that writes, and second writers: no false alarm for the ones, no admission for the others."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

from sordino.accounting import Ledger
from sordino.accounting.events import GaussianDpEvent
from sordino.errors import SordinoError
from tests.faults import child
from tests.faults.child import sordino
from tests.faults.tally import HANG, TRACEBACK, UNDER_COUNT, UNREADABLE, Book, Tally, in_time
from tests.faults.trainers import bind

COMMAND_EVERY = 25


def write_for_ever(path: Path) -> None:
    """Charge as fast as the disk allows."""
    with Ledger.open(path) as ledger:
        while len(ledger) < 20_000:
            ledger.charge(GaussianDpEvent(10.0 + len(ledger) % 3))


def read(path: Path, row: Tally, acknowledged: int, with_command: bool) -> int:
    """Look once; the number of events, which never falls."""
    try:
        with Ledger.read(path) as ledger:
            held = len(ledger)
            if sum(count for _, count in ledger.events()) < held:
                row.find(UNDER_COUNT, f"fewer events than {held} beside a writer")
            ledger.fingerprint()
    except SordinoError as error:
        row.find(UNREADABLE, f"false alarm: {error}")
        return acknowledged
    if held < acknowledged:
        row.find(UNDER_COUNT, f"{held} events after {acknowledged}")
    if with_command:
        ask(path.parent, row)
    return held


def ask(run: Path, row: Tally) -> None:
    said = child.run(lambda: vars(sordino("account", run, "--json", "--delta", 1e-5)))
    if said.hung:
        row.find(HANG, "account beside a writer")
    elif said.crash or said.value["traceback"]:
        row.find(TRACEBACK, said.crash or said.value["traceback"])
    elif said.value["code"] != 0:
        row.find(UNREADABLE, f"false alarm of account: {said.value['err']}")


def read_many(place: Path, count: int, row: Tally) -> None:
    """`count` looks at a ledger that is being written, by the library and now and then by a command."""
    path = place / "ledger.sqlite"
    Ledger.create(path).close()
    writer = child.fork(lambda: write_for_ever(path))
    held = 0
    try:
        for number in range(count):
            if not in_time():
                break
            held = read(path, row, held, with_command=number % COMMAND_EVERY == 0)
            row.done += 1
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)


# -- second writers ---------------------------------------------------------------------------------------------------


def hold(run: Path, trick: str) -> None:
    """A training that copies its own folder, or whose lock file somebody deletes, and which goes on afterwards."""
    private = bind("dpsgd", run=run)
    private.step()
    if trick == "copies its own folder":
        shutil.copytree(run, run.with_name("copy"))
    elif trick == "reads its own ledger":
        with Ledger.read(run / "ledger.sqlite") as ledger:
            len(ledger)
    elif trick == "reads the bytes of its files":
        for path in run.iterdir():
            path.read_bytes()
    private.step()
    run.with_name("ready").touch()
    time.sleep(child.PATIENCE)


def intrude(run: Path) -> str:
    """A second writer on the run of another process: it must be refused."""
    try:
        with bind("dpsgd") as private:
            private.load(run)
            private.step()
    except SordinoError as refusal:
        return f"refused: {refusal}"
    return "admitted"


TRICKS = (
    *("copies its own folder", "reads its own ledger", "reads the bytes of its files", "sleeps"),
    *("its lock file is deleted", "its lock file is replaced"),
)


def admit(place: Path, number: int, row: Tally, dice: random.Random) -> None:
    """One attempt of a second writer."""
    folder, trick = place / str(number), TRICKS[number % len(TRICKS)]
    folder.mkdir(parents=True)
    run = folder / "run"
    holder = child.fork(lambda: hold(run, trick), folder / "errors")
    try:
        end = time.monotonic() + child.PATIENCE
        while not (folder / "ready").exists():
            assert time.monotonic() < end, (folder / "errors").read_text()
            time.sleep(0.01)
        for lock in run.glob("*lock*"):
            if "lock file" in trick:
                lock.unlink()
            if trick.endswith("replaced"):
                lock.touch()
        said = child.run(lambda: intrude(run))
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    row.done += 1
    if said.hung:
        row.find(HANG, f"a second writer, {trick}")
    elif said.crash:
        row.find(TRACEBACK, f"a second writer, {trick}: {said.crash[-1000:]}")
    elif said.value == "admitted":
        row.find(UNDER_COUNT, f"a second writer was admitted: the first one {trick}")


def run(place: Path, count: int, seed: int) -> Book:
    """`count` looks, and a second writer for every hundred of them, at least one of each kind."""
    book, dice = Book(), random.Random(seed)
    with bind("dpsgd") as private:
        private.step()
    live = place / "live"
    live.mkdir()
    read_many(live, count, book.row("reads beside a writing run"))
    for number in range(max(len(TRICKS), count // 100)):
        admit(place / "held", number, book.row("second writers on one run"), dice)
    return book
