"""Run folders as real trainings leave them: finished, killed at a known moment, and as they were before."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.faults import child, witness
from tests.faults.child import sordino
from tests.faults.kills import ended
from tests.runs import AUDIT

STEPS = 16
SAVE_EVERY = 4
EARLY, LATE = 6, 14
TRAIN = ("train", "--data", "digits", "--epsilon", 3, "--steps", STEPS, "--batch-size", 32, "--save-every", SAVE_EVERY)


@dataclass(frozen=True)
class Folder:
    """A run folder that nobody damaged, what was drawn in it, and other folders whose files may be put in its place."""

    name: str
    path: Path
    drawn: witness.Draws
    older: Path
    other: Path
    saved: bool = True


def train(place: Path, *, kill_at: int | None = None, kill_after: float | None = None) -> None:
    """Train in ``place/run`` until the end, or until the noise that it would draw as number `kill_at`."""
    place.mkdir(parents=True, exist_ok=True)

    def live() -> None:
        witness.watch(place / "draws.log", kill_at=kill_at)
        resumed = (place / "run" / "ledger.sqlite").exists()
        words = ("resume", place / "run") if resumed else (*TRAIN, "--run", place / "run")
        said = sordino(*words, "--json")
        assert said.code == 0, said.err + said.traceback

    ended(child.fork(live, place / "errors"), child.PATIENCE if kill_after is None else kill_after)
    assert (place / "run" / "ledger.sqlite").exists(), (place / "errors").read_text()


def copy(source: Path, target: Path) -> Path:
    """A copy of a folder at rest, with everything in it."""
    shutil.copytree(source, target, symlinks=True)
    return target


def warm() -> None:
    """Train, resume, price and serve once in this process, so that children find everything imported and priced."""
    with tempfile.TemporaryDirectory() as made:
        run = Path(made) / "run"
        assert sordino(*TRAIN, "--run", run, "--json").code == 0
        for words in (("report", run), ("account", run), ("resume", run)):
            assert sordino(*words, "--json").code == 0


def make(place: Path) -> list[Folder]:
    """One finished run, one killed late, one killed before its first checkpoint, one killed while its ledger wrote."""
    for name in ("finished", "other"):
        train(place / name)
        (place / name / "run" / "audit.json").write_text(json.dumps(AUDIT))
    train(place / "killed", kill_at=EARLY + 1)
    older = copy(place / "killed" / "run", place / "older")
    train(place / "killed", kill_at=LATE - EARLY + 1)
    train(place / "fresh", kill_at=3)
    torn(place / "torn")

    def folder(name: str, *, older: Path = older, saved: bool = True) -> Folder:
        drawn = witness.Draws.read(place / name / "draws.log")
        return Folder(name, place / name / "run", drawn, older, place / "other" / "run", saved)

    # Before its first checkpoint nothing but the ledger knows of a run, so there is nothing to hold it against.
    return [folder("finished"), folder("killed"), folder("fresh", saved=False), folder("torn", saved=False)]


def torn(place: Path) -> None:
    """A run killed at a moment when a file beside the ledger held something: its log, or a journal to be undone."""
    dice = random.Random(0)
    for _ in range(20):
        shutil.rmtree(place, ignore_errors=True)
        train(place, kill_at=2)
        began = time.monotonic()
        train(place, kill_after=0.2 + dice.random())
        beside = [path for path in (place / "run").glob("ledger.sqlite-*") if path.stat().st_size]
        if beside or time.monotonic() - began > child.PATIENCE:
            return
