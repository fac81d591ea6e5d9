"""A run's folder: the names of its files, how they are written, and whether they belong together.

What checkpoints, history and outcome know must be in the ledger. Each of them says how many events it had seen, and
checkpoints and outcome also where the ledger's chain stood. If any of them knows of more than the ledger holds, or saw
another chain, the ledger was rolled back, replaced or forked. Then what was spent is unknown, and the answer is an
error, never a smaller ε. Nothing here needs torch or trusts a file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.accounting import plans
from sordino.accounting.chain import Key
from sordino.accounting.ledger import Ledger
from sordino.errors import LedgerError, LedgerForked, LedgerRolledBack

if TYPE_CHECKING:
    from sordino.recipe import Recipe

LEDGER, RECIPE, HISTORY, OUTCOME = "ledger.sqlite", "recipe.toml", "history.jsonl", "outcome.json"
CHECKPOINTS = "checkpoint-*.pt"
CHECKPOINT = "sordino-checkpoint-2"
"""First word of a checkpoint; then checksum, length, events and head. Version 0.1 wrote -1, without the last two."""
MOST_BYTES = 8_000_000
MOST_STEPS = 1_000_000
"""Longer plans are not worked out from a recipe.toml, because such a file can name any number."""
_NAME = re.compile(r"checkpoint-(\d{1,12})\.pt")
_HEAD = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Sighting:
    """What a file of the folder has seen: at least so many events, and the chain's head at that time, if it says."""

    file: str
    events: int
    head: str | None = None


def read_sightings(directory: Path) -> list[Sighting]:
    """Read what the files beside the ledger know; damaged files know nothing."""
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError:
        return []
    found = [_see_checkpoint(directory, name) for name in names if _NAME.fullmatch(name)]
    history = (_see_json(HISTORY, "step", line) for line in _read_start(directory / HISTORY, MOST_BYTES).splitlines())
    return [*found, *history, _see_json(OUTCOME, "steps", _read_start(directory / OUTCOME, MOST_BYTES))]


def check(ledger: Ledger, known: list[Sighting]) -> None:
    """Refuse a ledger that does not hold what is `known`; read that first, for a run may be writing both."""
    with ledger.snapshot():
        held = len(ledger)
        for seen in known:
            if seen.events > held:
                raise LedgerRolledBack(
                    f"{seen.file} knows of {seen.events} events, its ledger {ledger.path} holds {held}: the ledger "
                    "was replaced or cut short, so what was spent is unknown; restore its newest copy"
                )
            if seen.head is not None and not ledger.passed(seen.events, seen.head):
                raise LedgerForked(
                    f"{seen.file} saw another history of {seen.events} events than its ledger {ledger.path} holds: "
                    "the ledger was replaced, so what was spent is unknown; restore the one that belongs to it"
                )


@contextmanager
def reading(directory: Path, key: Key | None = None) -> Iterator[Ledger]:
    """Open the ledger of the run in `directory`, checked against the other files; the block sees one state of it."""
    known = read_sightings(directory)
    with Ledger.read(directory / LEDGER, key) as ledger, ledger.snapshot():
        check(ledger, known)
        yield ledger


def reopen(directory: Path) -> Ledger:
    """Continue writing the ledger of the run in `directory`, if it holds everything that the other files know of.

    The ledger may say that charges were given back unused. If a file without a head knows of them, they count as spent:
    the ledger may be an older one of the same length.
    """
    known = read_sightings(directory)
    with reading(directory):
        pass  # before anything is written
    ledger = Ledger.open(directory / LEDGER)
    if any(seen.head is None and seen.events > len(ledger) for seen in known):
        ledger.forfeit()
    return ledger


def require_fresh(directory: Path) -> None:
    """Refuse to begin a run in a folder that holds one: its budget would be granted a second time."""
    if (directory / LEDGER).exists():
        raise LedgerError(f"{directory} holds a run already: choose another directory, or load it to continue it")
    if any(seen.events for seen in read_sightings(directory)) or any(directory.glob(CHECKPOINTS)):
        raise LedgerError(
            f"{directory} holds checkpoints or a history without their ledger, so what they cost is unknown: "
            "put the ledger back, or choose another directory"
        )


def find_plans(recipe: Recipe | None, header: Mapping[str, str]) -> list[plans.Plan]:
    """Find the plan of a ledger that declares none, as in version 0.1: that of `recipe`, if it began with this one."""
    if recipe is None or header.get("recipe") != recipe.fingerprint():
        return []
    if recipe.noise_multiplier is None or recipe.sampler is None or not 1 <= (recipe.steps or 0) <= MOST_STEPS:
        return []
    return [plans.Plan(() if recipe.rdp_filter else tuple(recipe.plan()), 0, recipe.fingerprint())]


def write_durably(path: Path, content: bytes) -> None:
    """Write, sync, rename, sync the directory: after a crash the file is the old one or the new one.

    The directory may come from someone else: nothing is written through a link, neither `path` nor the files beside it.
    """
    beside = path.with_name(path.name + ".partial")
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, which could lead anywhere: remove it", str(path))
    try:
        beside.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        with os.fdopen(os.open(beside, flags, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _see_checkpoint(directory: Path, name: str) -> Sighting:
    fields = _read_start(directory / name, 400).partition("\n")[0].split(" ")
    named = _NAME.fullmatch(name)
    assert named is not None
    position = int(named[1])  # every step was charged, so there are at least as many events
    if len(fields) != 5 or fields[0] != CHECKPOINT or not re.fullmatch(r"\d{1,12}", fields[3]):
        return Sighting(name, position)
    return Sighting(name, max(position, int(fields[3])), fields[4] if _HEAD.fullmatch(fields[4]) else None)


def _see_json(file: str, steps: str, text: str) -> Sighting:
    try:
        said: Any = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        return Sighting(file, 0)
    counted = [said[key] for key in (steps, "events") if type(said.get(key)) is int]
    head = said.get("head") if type(said.get("events")) is int else None
    return Sighting(file, max(counted, default=0), head if isinstance(head, str) and _HEAD.fullmatch(head) else None)


def _read_start(path: Path, most: int) -> str:
    """Read the beginning of a regular file; nothing for a link, a pipe or a missing file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return ""
    with os.fdopen(descriptor, "rb") as file:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return file.read(most).decode("utf-8", "replace") if regular else ""
