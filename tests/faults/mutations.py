"""Every file of a run folder, damaged: each answer is the true ε or a larger one, or an error in one line.

Undamaged, the number of draws is known. A whole folder that is put back consistently, ledger and checkpoints, is not
among the mutations: without a receipt kept elsewhere nobody can tell it from the folder that it was.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from sordino.accounting import Ledger
from sordino.errors import SordinoError
from tests.faults import child, folders, witness
from tests.faults.child import Said, sordino
from tests.faults.folders import Folder
from tests.faults.serving import START, Target, serving
from tests.faults.tally import HANG, TRACEBACK, UNDER_COUNT, Book, in_time

Findings = list[tuple[str, str]]
ALL = 25.0
"""Seconds for each command: one that is not done by then hangs."""
STATED = re.compile(r'data-name="ε">([^<]*)<.*?data-name="δ">([^<]*)<', re.DOTALL)

# -- damage -----------------------------------------------------------------------------------------------------------

Damage = Callable[[Path, Folder, random.Random], bool]


def _rewritten(path: Path, change: Callable[[bytearray], bytes | bytearray]) -> bool:
    content = path.read_bytes()
    changed = bytes(change(bytearray(content)))
    path.write_bytes(changed)
    return changed != content


def delete(path: Path, folder: Folder, dice: random.Random) -> bool:
    path.unlink()
    return True


def truncate(path: Path, folder: Folder, dice: random.Random) -> bool:
    return _rewritten(path, lambda content: content[: dice.randrange(len(content) + 1)])


def flip(path: Path, folder: Folder, dice: random.Random) -> bool:
    def flipped(content: bytearray) -> bytearray:
        for _ in range(dice.choice((1, 1, 8)) if content else 0):
            content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        return content

    return _rewritten(path, flipped)


def zero(path: Path, folder: Folder, dice: random.Random) -> bool:
    def zeroed(content: bytearray) -> bytearray:
        size = min(len(content), dice.choice((16, 512, 4096)))
        start = dice.randrange(len(content) - size + 1)
        content[start : start + size] = bytes(size)
        return content

    return _rewritten(path, zeroed)


def append(path: Path, folder: Folder, dice: random.Random) -> bool:
    return _rewritten(path, lambda content: content + dice.randbytes(dice.choice((1, 100, 5000))))


def garbage(path: Path, folder: Folder, dice: random.Random) -> bool:
    return _rewritten(path, lambda content: dice.randbytes(dice.choice((0, 10, 5000))))


def _replaced(path: Path, source: Path, dice: random.Random) -> bool:
    same = source / path.name
    like = [same] if same.exists() else sorted(source.glob(path.name.split("-0")[0] + "*.pt"))
    if not like or like[-1].read_bytes() == path.read_bytes():
        return False
    shutil.copy(dice.choice(like), path)
    return True


def swap(path: Path, folder: Folder, dice: random.Random) -> bool:
    return folder.saved and _replaced(path, folder.other, dice)


def older(path: Path, folder: Folder, dice: random.Random) -> bool:
    return folder.saved and folder.name != "finished" and _replaced(path, folder.older, dice)


def directory(path: Path, folder: Folder, dice: random.Random) -> bool:
    path.unlink()
    path.mkdir()
    return True


def fifo(path: Path, folder: Folder, dice: random.Random) -> bool:
    path.unlink()
    os.mkfifo(path)
    return True


def link(path: Path, folder: Folder, dice: random.Random) -> bool:
    targets = [Path("/nowhere"), Path("/dev/zero"), path]
    if folder.saved:  # else a link to a run with fewer events would be a swap that nobody can notice
        targets.append(folder.other / path.name)
    path.unlink()
    path.symlink_to(dice.choice(targets))
    return True


DAMAGES: tuple[Damage, ...] = (
    *(delete, truncate, truncate, flip, flip, flip, zero, append, garbage),
    *(swap, older, directory, fifo, link),
)


def kind_of(path: Path) -> str:
    """A file by what it is: checkpoints are one kind, whatever their step."""
    return "checkpoint-….pt" if path.name.startswith("checkpoint-") else path.name


@dataclass(frozen=True)
class Truth:
    """What the draws of a folder cost at least, by every accountant, and how the list of `serve` writes its δ."""

    delta: float
    adjacency: str
    prices: dict[str, float]
    listed_delta: str

    @staticmethod
    def of(folder: Folder, served: Path, server: Target) -> Truth:
        copied = folders.copy(folder.path, served / folder.name)

        def find() -> list[Any]:
            said = sordino("account", copied, "--json")
            assert said.code == 0, said.err + said.traceback
            told = said.json
            names = [name for name, price in told["epsilon"].items() if price["epsilon"] not in (None, "infinity")]
            terms = told["delta"], told["adjacency"]
            return [*terms, {name: folder.drawn.price(terms[0], name, terms[1]) for name in names}]

        found, row = child.run(find), server.row(folder.name, child.PATIENCE)
        assert row is not None
        server.page(row, START)  # the first page starts a reader of its own
        shutil.rmtree(copied)
        assert not found.crash, found.crash
        return Truth(*found.value, STATED.findall(row)[0][1])


# -- questions --------------------------------------------------------------------------------------------------------


def ask(folder: Folder, damaged: Path, truth: Truth, server: Target, work: Path) -> Findings:
    """Ask every command about a damaged copy, in this process; `resume` last, for it writes."""
    found: Findings = []
    for name, question in (
        ("report", lambda: _of_report(folder, damaged, work)),
        ("account", lambda: _of_account(folder, damaged, truth)),
        ("serve", lambda: _of_serve(damaged, truth, server)),
        ("resume", lambda: _of_resume(folder, damaged, work / "draws.log")),
    ):
        try:
            with child.limited(ALL):
                found += [(kind, f"{name}: {what}") for kind, what in question()]
        except TimeoutError as late:
            found.append((HANG, f"{name}: {late}"))
    return found


def _escaped(said: Said) -> Findings | None:
    """What is wrong with an answer that is an error, or None if it is no error."""
    if said.traceback:
        if "TimeoutError: not done after" in said.traceback:
            return [(HANG, said.traceback[-300:])]
        return [(TRACEBACK, said.traceback[-1200:])]
    if said.code == 0:
        return None
    return [] if said.refused_well else [(TRACEBACK, f"exit code {said.code}, not one line: {said.err[-600:]!r}")]


def _too_small(answer: Any, least: float) -> bool:
    return answer is not None and answer != "infinity" and not float(answer) >= least * (1 - 1e-9)


def _of_report(folder: Folder, damaged: Path, work: Path) -> Findings:
    said = sordino("report", damaged, "--json", "--output", work / "page.html")
    if (wrong := _escaped(said)) is not None:
        return wrong
    told = said.json
    least = folder.drawn.price(told["delta"], told["accountant"], told["adjacency"])
    if _too_small(told["epsilon"], least) or told["events"] < len(folder.drawn):
        return [
            (UNDER_COUNT, f"ε {told['epsilon']} of {told['events']} events; {least} of {len(folder.drawn)} is true")
        ]
    return []


def _of_account(folder: Folder, damaged: Path, truth: Truth) -> Findings:
    said = sordino("account", damaged, "--json")
    if (wrong := _escaped(said)) is not None:
        return wrong
    told, least = said.json, truth.prices
    if (told["delta"], told["adjacency"]) != (truth.delta, truth.adjacency):  # other terms are stated: then by those
        least = {"pld": folder.drawn.price(told["delta"], "pld", told["adjacency"])}
    answers = {name: (told["epsilon"][name]["epsilon"], price) for name, price in least.items()}
    small = {name: pair for name, pair in answers.items() if _too_small(*pair)}
    return [(UNDER_COUNT, f"(answered, true): {small}")] if small else []


def _of_serve(damaged: Path, truth: Truth, server: Target) -> Findings:
    try:
        row = server.row(damaged.name, ALL)
        if row is not None:
            server.page(row)
    except TimeoutError:
        raise
    except (OSError, HTTPException) as error:
        return [(TRACEBACK, f"not served: {error!r}")]
    least = truth.prices["pld"]
    for stated, delta in STATED.findall(row or ""):
        number = stated.split(" ")[0].replace(",", "")
        if truth.listed_delta == delta and number != "∞" and _too_small(number, least):
            return [(UNDER_COUNT, f"ε {number} is listed, {least} is true")]
    return []


def held_by(run: Path) -> int | None:
    """How many events a ledger holds, if it can be read."""
    try:
        with Ledger.read(run / "ledger.sqlite") as ledger:
            return len(ledger)
    except SordinoError:
        return None


def _of_resume(folder: Folder, damaged: Path, draws: Path) -> Findings:
    witness.watch(draws)
    said = sordino("resume", damaged, "--json")
    new = witness.Draws.read(draws)
    spent = len(folder.drawn) + len(new)
    held = held_by(damaged)
    if new and (held is None or held < spent):
        return [(UNDER_COUNT, f"{len(new)} new draws after {len(folder.drawn)}, the ledger holds {held}")]
    if (wrong := _escaped(said)) is not None:
        return wrong
    told = said.json
    least = folder.drawn.price(told["delta"], told["accountant"], told["adjacency"])
    return [(UNDER_COUNT, f"ε {told['epsilon']}, {least} is true")] if _too_small(told["epsilon"], least) else []


# -- all of it --------------------------------------------------------------------------------------------------------


def run(place: Path, count: int, seed: int) -> Book:
    """`count` mutations, spread over every file of every folder and over all kinds of damage."""
    book, dice = Book(), random.Random(seed)
    made, served = folders.make(place), place / "served"
    served.mkdir()
    with serving(served, place / "said") as server:
        truths = {folder.name: Truth.of(folder, served, server) for folder in made}
        targets: list[tuple[Folder, Path]] = []
        done = tries = 0
        while done < count and in_time():
            if not targets:
                targets = [(folder, path) for folder in made for path in sorted(folder.path.iterdir())]
                dice.shuffle(targets)
            folder, path = targets.pop()
            case = Case(folder, path, served / f"try-{tries}", place / "at-work", truths[folder.name], server)
            done += mutate(book, case, dice.choice(DAMAGES), dice)
            tries += 1
    if said := (place / "said").read_text().strip():
        book.row("mutations: all").find(TRACEBACK, f"the server said {said[-1200:]}")
    return book


@dataclass(frozen=True)
class Case:
    """A file of a folder that is to be damaged, in a copy below the folder that is served."""

    folder: Folder
    path: Path
    copy: Path
    work: Path
    truth: Truth
    server: Target


def mutate(book: Book, case: Case, damage: Damage, dice: random.Random) -> bool:
    """Damage one file of a copy and ask about it; whether there was anything to damage."""
    shutil.rmtree(case.work, ignore_errors=True)
    case.work.mkdir()
    folders.copy(case.folder.path, case.copy)
    try:
        if not damage(case.copy / case.path.name, case.folder, dice):
            return False
        row = book.row(f"mutations: {kind_of(case.path)}")
        row.done += 1
        ended = child.run(lambda: ask(case.folder, case.copy, case.truth, case.server, case.work), 5 * ALL)
    finally:
        shutil.rmtree(case.copy)
    where = f"{damage.__name__} {case.path.name} of the {case.folder.name} run"
    if ended.hung:
        row.find(HANG, where)
    elif ended.crash:
        row.find(TRACEBACK, f"{where}: {ended.crash[-1200:]}")
    else:
        for kind, what in ended.value:
            row.find(kind, f"{where}: {what}")
    return True
