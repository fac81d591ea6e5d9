"""The ledger: every event of a run, append-only and durable before the release that it pays for (law 5).

It is one SQLite file. Rows can be added but never changed: triggers refuse it. Every row carries the SHA-256 of its
content and of the previous row, so an edit, a deletion in the middle or at the end, or a swap is noticed on opening. In
addition to charges, the chain holds declarations: what every guarantee about this ledger must say, and when it was
opened. There is one writer at a time; anyone may read at any time.

A writer that knows what it will charge next may write it together with a charge, in the same transaction: a
*reservation*. Every reader counts it as spent. The writer hands out receipts for the reserved charges one by one,
without touching the disk; until then, and only for the writer, they are not spent. If a writer is killed, its
reservation stays spent. If it closes, its last row says for which charges it gave no receipt, and the next writer of
the same file uses them. If any other row follows that one, they are spent.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from sordino.accounting import legacy, store
from sordino.accounting.chain import KEY, KEY_FILE, OPENING, ORIGIN, UNUSED, Chain, Head, Key, find_key
from sordino.accounting.events import DpEvent, from_json, to_json
from sordino.accounting.store import WriterLock
from sordino.errors import InvalidInput, LedgerError

_log = logging.getLogger("sordino")

ASSUMPTION = "assumption"
SIGNED = "signed"
Signature = Literal["none", "checked", "unchecked", "missing"]
"""Signatures of the rows: none, and none expected; right; by a key that is not here; none, although a key is here."""
_SPENT = "sequence <= (SELECT COALESCE(MAX(sequence), 0) FROM charges) - ?"
"""Reserved charges are always the last ones: any other charge forfeits the rest."""
COPIED = "this run was continued from a copy of its folder; the original must not be continued"

_opened: ContextVar[list[Ledger] | None] = ContextVar("_opened", default=None)
"""Within `collect_ledgers`: the ledgers that may be charged."""


@dataclass(frozen=True)
class Receipt:
    """Proof that `event` is in the ledger, durably, as number `sequence` (from 1)."""

    sequence: int
    event: DpEvent


class Ledger:
    """Open a ledger with `create`, `open`, `read` or `in_memory`; close it, or use it in a `with` statement.

    Guarantees: when `charge` returns, the event is on disk and survives SIGKILL and loss of power; every opening as a
    writer has its own number, `incarnation`; a second writer of one file is refused, and a killed writer blocks no one.
    After an interrupt at any moment, ledger and object stay usable: the event is in the ledger, or it is not.
    Edge cases: a failed charge raises and leaves no row. Use it in the process and thread that opened it.
    """

    def __init__(
        self, connection: sqlite3.Connection, path: Path | None, lock: WriterLock | None, key: Key | None
    ) -> None:
        self.path = path
        self._connection = connection
        self._lock = lock
        self._writable = lock is not None or path is None
        self._home = (os.getpid(), threading.get_ident())
        self._reserved: deque[tuple[int, str]] = deque()
        self._said = 0
        self.forfeits = 0  # how often a reservation was wasted
        self.charged = False  # by this object
        with self.snapshot():
            self.header: Mapping[str, str] = self._check_header()
            self._chain = Chain(connection, path, self.header, self._key_for(key))
            self._verify()
        self._streams = 0
        if self._writable:
            with self._writing():
                unused = self._open_again()
            self._reserved = deque(unused)  # only now: this opening is on disk, and ends what earlier rows said
        self.incarnation = len(self.declared(OPENING))

    # -- opening ------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | Path, *, run_id: str | None = None, header: Mapping[str, str] | None = None) -> Ledger:
        """Start the ledger of a new run at `path`, which must not exist yet; its directory must."""
        file, key = Path(path), find_key()
        return cls._writer(file, key, lambda new: _fill(new, file, _full_header(run_id, header, key)))

    @classmethod
    def open(cls, path: str | Path) -> Ledger:
        """Continue writing the ledger of a run that stopped."""
        return cls._writer(store.require_file(Path(path)), find_key())

    @classmethod
    def read(cls, path: str | Path, key: Key | None = None) -> Ledger:
        """Read a ledger, even while its run is writing; every query sees what was charged so far.

        `key` verifies its signatures; by default it is the key that the environment names.
        """
        file, key = store.require_file(Path(path)), key or find_key()
        with store.close_on_error(store.connect(file, read_only=True)) as connection:
            if _format(connection, file) != legacy.FORMAT:
                return cls(connection, file, None, key)
            with store.snapshot(connection, file):
                old = legacy.read(connection, file)
            connection.close()
        with store.close_on_error(store.connect(None)) as memory:
            with store.transaction(memory, file):
                legacy.convert(memory, file, old)
            return cls(memory, file, None, key)

    @classmethod
    def in_memory(cls, *, run_id: str | None = None, header: Mapping[str, str] | None = None) -> Ledger:
        """Create a ledger that ends with the process: for experiments, or until `copy_to`."""
        connection, key = store.connect(None), find_key()
        _fill(connection, None, _full_header(run_id, header, key))
        ledger, opened = cls(connection, None, None, key), _opened.get()
        if opened is not None:
            opened.append(ledger)
        return ledger

    def copy_to(self, path: str | Path) -> Ledger:
        """Move to a file: copy everything to `path`, close this ledger and return the new writer."""
        file = Path(path)
        copied = self._writer(file, find_key(), lambda new: store.copy(self._connection, new, file))
        if os.getpid() == self._home[0]:
            copied._reserved, self._reserved = self._reserved, copied._reserved
        self.close()
        return copied

    @classmethod
    def _writer(cls, file: Path, key: Key | None, fill: Callable[[sqlite3.Connection], None] | None = None) -> Ledger:
        refuse_files(file)
        if fill is not None:
            _require_new(file)
        with store.one_line_errors(file), store.close_on_error(WriterLock(file)) as lock:
            if fill is not None:
                store.make(_require_new(file), fill)  # again, because another process may have taken the lock first
            lock.hold_file()
            with store.close_on_error(store.connect(file)) as connection:
                if _format(connection, file) == legacy.FORMAT:
                    legacy.modernise(connection, file)
                store.hasten(connection, file)
                return cls(connection, file, lock, key)

    def _key_for(self, key: Key | None) -> Key | None:
        """Return the key that signs and verifies this ledger; a writer needs the right one, a reader may have none."""
        named = self.header.get(SIGNED)
        self.signature: Signature = "unchecked"
        if named is None:
            self.signature = "none" if key is None else "missing"
        if named is not None and key is not None and key.name == named:
            self.signature = "checked"
            return key
        if not self._writable or (named is None and key is None):
            return None
        if named is None:
            raise LedgerError(
                f"ledger {self.path} is not signed, but a key is set: unset {KEY} and {KEY_FILE} to go on "
                "without signatures, or start a new run"
            )
        raise LedgerError(
            f"ledger {self.path} is signed by key {named}: set {KEY} or {KEY_FILE} to that key to write it"
        )

    def _open_again(self) -> list[tuple[int, str]]:
        """Record this opening; if the file is not the one last written it is a copy, and says so from now on.

        Returns the charges that the last writer gave back; none in a copy, because the original may use them too.
        """
        file = "-" if self.path is None else f"{self.path.stat().st_ino:x}"
        before, unused = self._lines(OPENING), self._chain.find_unused()
        copied = bool(before) and "-" not in (file, _file_of(before[-1])) and file != _file_of(before[-1])
        self._chain.declare(OPENING, f"{_now()} {file}")
        if copied:
            _log.warning("ledger %s: %s", self.path, COPIED)
            if COPIED not in self._lines(ASSUMPTION):
                self._chain.declare(ASSUMPTION, COPIED)
        return [] if copied else unused

    # -- writing ------------------------------------------------------------------------------------------------

    def charge(self, event: DpEvent, note: str = "", *, ahead: Callable[[], Sequence[DpEvent]] = lambda: ()) -> Receipt:
        """Record `event`; when this returns it is on disk. Only then may the release that it pays for be made.

        If it is the next event of the reservation, it is already on disk. If not, the rest of the reservation is
        forfeited, and the events in `ahead` are reserved together with this one.
        """
        opened = _opened.get()
        if opened is not None and not any(each is self for each in opened):
            raise InvalidInput("this ledger was opened outside of the trial: charge trial.ledger, or one made in it")
        text, self.charged = to_json(event), True
        if not note and self.holds(event):
            return Receipt(self._reserved.popleft()[0], event)  # an interrupt from here on leaves it spent
        following = [to_json(each) for each in ahead()]
        with self._writing():
            self._require_latest()
            self.forfeit()
            sequence = self._chain.charge(text, note, following)
        self._reserved = deque(enumerate(following, sequence + 1))  # if interrupted before: all of it is spent
        return Receipt(sequence, event)

    @property
    def reserved(self) -> int:
        """How many charges on disk have no receipt yet; everyone but this writer counts them as spent."""
        return len(self._reserved) if os.getpid() == self._home[0] else 0

    def holds(self, event: DpEvent) -> bool:
        """Whether `event` is the next one of the reservation, so that charging it needs no write."""
        at_home = (os.getpid(), threading.get_ident()) == self._home  # anywhere else writing is refused
        return at_home and bool(self._reserved) and self._reserved[0][1] == to_json(event)

    def forfeit(self) -> None:
        """Give the reservation up: it is spent."""
        if self._reserved:
            self.forfeits += 1
            self._reserved.clear()

    @property
    def version(self) -> tuple[int, int]:
        """A number that changes with every charge, whoever made it; declarations do not change it."""
        try:
            return self._connection.total_changes - self._said, len(self._reserved)
        except sqlite3.Error:  # asked at every step, so without a context around it
            with store.one_line_errors(self.path):
                raise

    def declare(self, kind: str, text: str) -> None:
        """Add a line to the chain, durable when this returns; the same line again changes nothing.

        ``"assumption"`` is a line that every guarantee about this ledger must state, ``"plan"`` the canonical JSON of
        the events that a run has planned. A line can be added, but never changed or taken back.
        """
        if kind in (OPENING, ORIGIN, UNUSED) or not kind or not text:
            raise InvalidInput(
                f"kind={kind!r} and text={text!r} cannot be declared: give a kind of your own and a text"
            )
        before = self._connection.total_changes
        with self._writing():
            self._require_latest()
            if text not in self._lines(kind):
                self._chain.declare(kind, text)
        self._said += self._connection.total_changes - before

    def _writing(self) -> AbstractContextManager[None]:
        if os.getpid() != self._home[0]:
            raise LedgerError(
                f"ledger {self.path or 'in memory'} was opened by another process, which forked this one: "
                "only that one may write it; start a new run"
            )
        if not self._writable:
            raise LedgerError(f"ledger {self.path} is open for reading: open it with Ledger.open to charge it")
        return store.transaction(self._connection, self.path)

    def _require_latest(self) -> None:
        """Stop if a second writer got past the lock, as on file systems without locks."""
        if len(self._lines(OPENING)) != self.incarnation:
            raise LedgerError(f"ledger {self.path} was opened by another writer meanwhile: this one may not continue")

    def next_stream(self) -> int:
        """Count the streams of seeded noise begun since this opening: each needs its own number (law 10)."""
        self._streams += 1
        return self._streams - 1

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        return self.header["run_id"]

    @property
    def file(self) -> str:
        """Which file this is, by its number in the file system at the last opening; "-" in memory."""
        openings = self.declared(OPENING)
        return _file_of(openings[-1]) if openings else "-"

    @property
    def incarnations(self) -> list[tuple[int, str]]:
        """Every opening as a writer: its number and when, to the minute."""
        return [(number, text.split(" ")[0]) for number, text in enumerate(self.declared(OPENING), start=1)]

    def __len__(self) -> int:
        return int(self._all("SELECT COALESCE(MAX(sequence), 0) FROM charges")[0][0]) - self.reserved

    def snapshot(self) -> AbstractContextManager[None]:
        """Answer every query in this block from one state of the ledger, while its run keeps writing."""
        if self._writable and os.getpid() == self._home[0]:
            store.leave(self._connection)  # do not count what an interrupt left half-written: nobody acknowledged it
        return store.snapshot(self._connection, self.path)

    def declared(self, kind: str) -> list[str]:
        """Return every line of this kind, in the order in which they were declared."""
        with self.snapshot():
            return self._lines(kind)

    def _lines(self, kind: str) -> list[str]:
        rows = self._connection.execute("SELECT text FROM declarations WHERE kind = ? ORDER BY number", (kind,))
        return [text for (text,) in rows]

    def events(self) -> list[tuple[DpEvent, int]]:
        """Count how often each different event was charged, in the order of first appearance."""
        rows = self._all(
            f"SELECT event, times FROM (SELECT kind, COUNT(*) AS times FROM charges WHERE {_SPENT} GROUP BY kind) "
            "JOIN kinds USING (kind) ORDER BY kind",
            (self.reserved,),
        )
        return [(self._event(text), times) for text, times in rows]

    def history(self) -> Iterator[tuple[int, DpEvent]]:
        """Yield every charge in order: its number and event."""
        query = f"SELECT sequence, event FROM charges JOIN kinds USING (kind) WHERE {_SPENT} ORDER BY sequence"
        for sequence, text in self._all(query, (self.reserved,)):
            yield sequence, self._event(text)

    def notes(self, most: int = 100) -> list[tuple[str, DpEvent]]:
        """The first charges that say what they are for, such as the ranges of a table's columns, with their events."""
        query = (
            f"SELECT note, event FROM charges JOIN kinds USING (kind) WHERE note != '' AND {_SPENT} "
            "ORDER BY sequence LIMIT ?"
        )
        return [(str(note), self._event(text)) for note, text in self._all(query, (self.reserved, most))]

    def head(self) -> Head:
        """Return where the ledger stands now, including reserved charges."""
        with self.snapshot():
            return self._chain.head()

    def passed(self, events: int, head: str) -> bool:
        """Whether the chain once had this `head`, after so many events."""
        with self.snapshot():
            return self._chain.passed(events, _bytes(head))

    def fingerprint(self) -> str:
        """Return one hash of header, charges and declarations: equal only for equal histories."""
        with self.snapshot():
            return self._verify().chain.hex()

    def _check_header(self) -> dict[str, str]:
        header = store.read_header(self._connection, self.path)
        if header.get("format") != store.FORMAT:
            raise LedgerError(
                f"ledger {self.path} has format {header.get('format')}, needs {store.FORMAT}: "
                "use the version that wrote it"
            )
        store.check_schema(self._connection, self.path)
        return header

    def _verify(self) -> Head:
        """Walk along the whole chain, to its end."""
        with store.one_line_errors(self.path):
            return deque(self._chain.walk(), maxlen=1)[0]

    def _event(self, text: str) -> DpEvent:
        try:
            return from_json(text)
        except InvalidInput as error:
            raise LedgerError(f"ledger {self.path} holds an unreadable event: {error}") from error

    def _all(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self.snapshot():
            return self._connection.execute(query, values).fetchall()

    def close(self) -> None:
        """Release the file and the lock; what was charged stays, and what was reserved is given back."""
        unused = list(self._reserved)
        self._reserved.clear()  # first: after an interrupt from here on, no more noise is drawn on them
        if self._lock is not None and os.getpid() == self._home[0]:
            if unused:
                with suppress(LedgerError):  # a full disk or a second writer: they stay spent
                    self._give_back(unused[0][0], unused[-1][0])
            store.tidy(self._connection)
        self._connection.close()
        if self._lock is not None:
            self._lock.close()

    def _give_back(self, first: int, last: int) -> None:
        """Write down for which charges no receipt was given, now that none will be."""
        with self._writing():
            self._require_latest()
            self._chain.declare(UNUSED, f"{first}-{last}")

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def collect_ledgers(*given: Ledger) -> Iterator[list[Ledger]]:
    """Allow charges only to `given` ledgers and to those made in this block and thread, such as a trial of a search.

    Yields the list of these ledgers. None may be on disk: losing trials would leave them behind.
    """
    opened = list(given)
    token = _opened.set(opened)
    try:
        yield opened
    finally:
        _opened.reset(token)


def refuse_files(path: Path) -> None:
    """Within `collect_ledgers`, refuse what would leave a ledger or its folder on disk."""
    if _opened.get() is not None:
        raise InvalidInput(f"a trial of a search leaves no files, and {path} would be one: leave out the folder")


def refuse_in_trials(what: str) -> None:
    """Within `collect_ledgers`, refuse `what`."""
    if _opened.get() is not None:
        raise InvalidInput(f"{what} has no place in a trial of a search: give it to the search, which is paid as one")


def _require_new(file: Path) -> Path:
    if file.exists():
        raise LedgerError(f"ledger {file} exists already: open it to continue its run, or choose another directory")
    return file


def _full_header(run_id: str | None, header: Mapping[str, str] | None, key: Key | None) -> dict[str, str]:
    given = {name: value for name, value in (header or {}).items() if name != SIGNED}
    signed = {} if key is None else {SIGNED: key.name}
    run_id = uuid.uuid4().hex if run_id is None else run_id
    return {**given, **signed, "run_id": run_id, "created": _now(), "format": store.FORMAT}


def _file_of(opening: str) -> str:
    """Return the file that an opening wrote, by its number in the file system: a copy has a different one."""
    return opening.partition(" ")[2] or "-"


def _bytes(head: str) -> bytes:
    try:
        return bytes.fromhex(head)
    except ValueError:
        return b""


def _format(connection: sqlite3.Connection, file: Path) -> str | None:
    return store.read_header(connection, file).get("format")


def _fill(connection: sqlite3.Connection, path: Path | None, header: Mapping[str, str]) -> None:
    with store.transaction(connection, path):
        store.initialise(connection, header)


def _now() -> str:
    """Return the time to the minute: a finer one would reveal how long a draw took, and so what was in it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
