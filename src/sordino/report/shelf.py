"""The runs below a folder. They are found by listing the folder, never by joining words of a request to a path."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path

from sordino.books import LEDGER
from sordino.errors import InvalidInput
from sordino.report import briefs, reader
from sordino.report.briefs import Brief
from sordino.report.facts import Facts
from sordino.report.reader import Reader, Reply
from sordino.report.run_folder import Folder, is_regular

MOST_RUNS = 500
SHARE = 0.1
"""The share of its time that a live run's page may cost: it is priced on the machine that trains."""
PAUSE = 2.0
MOST_PATIENCE = 90.0
"""How many seconds the page of one run may take."""


@dataclass(frozen=True)
class Shelved:
    """A run folder; `ident` names it in addresses."""

    ident: str
    path: Path

    @property
    def name(self) -> str:
        return Folder(self.path).name


@dataclass(frozen=True)
class Listed:
    """A run in the list: its line, or why it has none, or neither while the line is being computed."""

    entry: Shelved
    facts: Brief | None = None
    problem: str = ""
    idle: float | None = None

    @property
    def live(self) -> bool:
        """Whether its ledger was written a moment ago."""
        return self.idle is not None and self.idle < 30 and not (self.facts and self.facts.finished)


@dataclass
class _Kept:
    """Facts about files as they were, or why there are none, and when they may be computed again."""

    signature: object
    value: Reply
    again: float


@dataclass
class _Cache:
    """What was read about each run. It is read again when its files change, but not more often than it can afford."""

    reader: Callable[[], Reader]
    brief: bool
    _kept: dict[str, _Kept] = field(default_factory=dict)
    _asked: dict[str, Future[Reply]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, entry: Shelved, patience: float) -> Reply | None:
        """Return the newest facts that are known within this many seconds; None if there are none yet."""
        with self._lock:
            now, signature = time.monotonic(), _read_signature(entry.path)
            old = self._kept.get(entry.ident)
            if old is not None and (old.signature == signature or now < old.again):
                return old.value
            if entry.ident not in self._asked:
                self._asked[entry.ident] = self.reader().ask(entry.path, brief=self.brief)
                self._asked[entry.ident].add_done_callback(lambda done: self._keep(entry, signature, now, done))
            asked = self._asked[entry.ident]
        wait([asked], timeout=max(0.0, patience))
        with self._lock:
            kept = self._kept.get(entry.ident)
        return None if kept is None else kept.value

    def _keep(self, entry: Shelved, signature: object, began: float, done: Future[Reply]) -> None:
        error, now = done.exception(), time.monotonic()
        value = done.result() if error is None else str(error)
        with self._lock:
            self._kept[entry.ident] = _Kept(signature, value, now + max(PAUSE, (now - began) / SHARE))
            self._asked.pop(entry.ident, None)


@dataclass
class Shelf:
    """All runs of `root`."""

    root: Path
    _brief: _Cache = field(default_factory=lambda: _Cache(reader.start_for_lists, brief=True))
    _full: _Cache = field(default_factory=lambda: _Cache(reader.start_for_pages, brief=False))

    def __post_init__(self) -> None:
        if not self.root.is_dir():
            raise InvalidInput(f"{self.root} is not a folder: give one that holds runs, such as runs/")

    def find_entries(self) -> dict[str, Shelved]:
        """Find the folder itself and its subfolders that hold a ledger, by `ident`; links are not followed."""
        found = [path for path in (self.root, *self._inside()) if is_regular(path / LEDGER)]
        named = (Shelved(hashlib.sha256(os.fsencode(path)).hexdigest()[:16], path) for path in found[:MOST_RUNS])
        return {entry.ident: entry for entry in named}

    def _inside(self) -> Iterator[Path]:
        try:
            with os.scandir(self.root) as entries:
                folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return
        yield from sorted(folders, reverse=True)

    def list_runs(self, patience: float) -> list[Listed]:
        """List every run, newest name first; runs not priced within `patience` seconds are priced next time."""
        reader.start_for_lists().warm_up()
        end = time.monotonic() + patience
        return [self._list(entry, end) for entry in self.find_entries().values()]

    def _list(self, entry: Shelved, end: float) -> Listed:
        """List one run: the cached line of a finished run, or one that is priced now."""
        signature, idle = _read_signature(entry.path), _measure_idle(entry.path)
        kept = briefs.recall(entry.path, signature)
        if kept is not None:
            return Listed(entry, facts=kept, idle=idle)
        value = self._brief.get(entry, end - time.monotonic())
        if value is None or isinstance(value, str):
            return Listed(entry, problem=value or "", idle=idle)
        line = briefs.summarise_facts(value)
        briefs.remember(entry.path, signature, line)
        return Listed(entry, facts=line, idle=idle)

    def read_facts(self, entry: Shelved) -> Facts:
        """Read everything about one run."""
        reader.start_for_pages().warm_up()
        value = self._full.get(entry, MOST_PATIENCE)
        if value is None:
            raise InvalidInput("this run is still being priced: look again in a minute")
        if isinstance(value, str):
            raise InvalidInput(value)
        return value


def _read_signature(path: Path) -> object:
    try:
        with os.scandir(path) as entries:
            stats = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    except OSError:
        return None
    return sorted((name, found.st_mtime_ns, found.st_size) for name, found in stats if not name.endswith("-shm"))


def _measure_idle(path: Path) -> float | None:
    """Return the seconds since the ledger was last written."""
    times = [_read_time(path / f"{LEDGER}{suffix}") for suffix in ("", "-wal")]
    known = [moment for moment in times if moment is not None]
    return max(0.0, time.time() - max(known)) if known else None


def _read_time(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except OSError:
        return None
