"""A run's folder as a whole: what its checkpoints, its history and its outcome know must be in its ledger.

Each of them says how many events it had seen, and checkpoints and outcome also where the ledger's chain stood. If any
knows of more than the ledger holds, or saw another chain, the ledger was rolled back, replaced or went another way.
Then what was spent is unknown, and the answer is an error, never a smaller ε. Nothing here needs torch, or trusts a
file.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino.accounting.chain import Key
from sordino.accounting.ledger import Ledger
from sordino.errors import LedgerError, LedgerForked, LedgerRolledBack

LEDGER, HISTORY, OUTCOME = "ledger.sqlite", "history.jsonl", "outcome.json"
CHECKPOINT = "sordino-checkpoint-2"
"""First word of a checkpoint; then checksum, length, events and head. Version 0.1 wrote -1, without the last two."""
MOST_BYTES = 8_000_000
_NAME = re.compile(r"checkpoint-(\d{1,12})\.pt")
_HEAD = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Claim:
    """What a file of the folder knows: at least so many events, and the head of the chain after them, if it says so."""

    file: str
    events: int
    head: str | None = None


def claims(directory: Path) -> list[Claim]:
    """What the files beside the ledger know; damaged ones know nothing."""
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError:
        return []
    found = [_of_checkpoint(directory, name) for name in names if _NAME.fullmatch(name)]
    history = (_of_json(HISTORY, "step", line) for line in _start(directory / HISTORY, MOST_BYTES).splitlines())
    return [*found, *history, _of_json(OUTCOME, "steps", _start(directory / OUTCOME, MOST_BYTES))]


def check(ledger: Ledger, known: list[Claim]) -> None:
    """Refuse a ledger that does not hold what is `known`; read that first, for a run may be writing both."""
    with ledger.snapshot():
        held = len(ledger)
        for claim in known:
            if claim.events > held:
                raise LedgerRolledBack(
                    f"{claim.file} knows of {claim.events} events, its ledger {ledger.path} holds {held}: the ledger "
                    "was replaced or cut short, so what was spent is unknown; restore its newest copy"
                )
            if claim.head is not None and not ledger.passed(claim.events, claim.head):
                raise LedgerForked(
                    f"{claim.file} saw another history of {claim.events} events than its ledger {ledger.path} holds: "
                    "the ledger was replaced, so what was spent is unknown; restore the one that belongs to it"
                )


@contextmanager
def reading(directory: Path, key: Key | None = None) -> Iterator[Ledger]:
    """The ledger of the run in `directory`, checked against the other files; one state of it for the whole block."""
    known = claims(directory)
    with Ledger.read(directory / LEDGER, key) as ledger, ledger.snapshot():
        check(ledger, known)
        yield ledger


def reopen(directory: Path) -> Ledger:
    """Go on writing the ledger of the run in `directory`, if it holds all that the other files know of."""
    with reading(directory):
        pass  # before anything is written
    return Ledger.open(directory / LEDGER)


def require_fresh(directory: Path) -> None:
    """Refuse to begin a run where there was one: its budget would be granted anew."""
    if (directory / LEDGER).exists():
        raise LedgerError(f"{directory} holds a run already: choose another directory, or load it to go on with it")
    if any(claim.events for claim in claims(directory)) or any(directory.glob("checkpoint-*.pt")):
        raise LedgerError(
            f"{directory} holds checkpoints or a history without their ledger, so what they cost is unknown: "
            "put the ledger back, or choose another directory"
        )


def _of_checkpoint(directory: Path, name: str) -> Claim:
    fields = _start(directory / name, 400).partition("\n")[0].split(" ")
    named = _NAME.fullmatch(name)
    assert named is not None
    position = int(named[1])  # every step was charged, so that there are at least as many events
    if len(fields) != 5 or fields[0] != CHECKPOINT or not re.fullmatch(r"\d{1,12}", fields[3]):
        return Claim(name, position)
    return Claim(name, max(position, int(fields[3])), fields[4] if _HEAD.fullmatch(fields[4]) else None)


def _of_json(file: str, steps: str, text: str) -> Claim:
    try:
        said: Any = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        return Claim(file, 0)
    counted = [said[key] for key in (steps, "events") if type(said.get(key)) is int]
    head = said.get("head") if type(said.get("events")) is int else None
    return Claim(file, max(counted, default=0), head if isinstance(head, str) and _HEAD.fullmatch(head) else None)


def _start(path: Path, most: int) -> str:
    """The beginning of a regular file, or nothing: a link, a pipe or a missing file knows nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return ""
    with os.fdopen(descriptor, "rb") as file:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return file.read(most).decode("utf-8", "replace") if regular else ""
