"""The ledger: every event of a run, append-only and durable before the release that it pays for (law 5).

One SQLite file. Rows can be added, never changed: triggers refuse it, and every row carries the SHA-256 of its content
and of the row before, so that an edit, a deletion in the middle or at the end, or a swap shows on opening.
One writer at a time; readers at any time.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sordino.accounting import store
from sordino.accounting.events import DpEvent, from_json, to_json
from sordino.errors import InvalidInput, LedgerError


@dataclass(frozen=True)
class Receipt:
    """Proof that `event` is in the ledger, durably, as number `sequence` (from 1)."""

    sequence: int
    event: DpEvent


class Ledger:
    """Open one with `create`, `open`, `read` or `in_memory`; close it, or use it in a `with` statement.

    Guarantees: when `charge` returns, the event is on disk and survives SIGKILL and loss of power; every opening as a
    writer has its own number, `incarnation`; two writers of one file are refused, and a killed writer blocks nobody.
    Edge cases: a failed charge raises and leaves no row. Use it from the thread that opened it.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path | None, lock: sqlite3.Connection | None) -> None:
        self.path = path
        self._connection = connection
        self._lock = lock
        self._writable = lock is not None or path is None
        self.header: Mapping[str, str] = store.read_header(connection, path)
        self._chain = self._verified_chain()
        if self._writable:
            self._record_opening()
        self.incarnation = self._one("SELECT COALESCE(MAX(incarnation), 0) FROM openings")

    # -- opening ------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | Path, *, run_id: str | None = None, header: Mapping[str, str] | None = None) -> Ledger:
        """Start the ledger of a new run at `path`, which must not exist yet; its directory must."""
        file = Path(path)
        return cls._writer(file, lambda new: store.initialise(new, file, _full_header(run_id, header)))

    @classmethod
    def open(cls, path: str | Path) -> Ledger:
        """Go on writing the ledger of a run that stopped."""
        return cls._writer(store.require_file(Path(path)))

    @classmethod
    def read(cls, path: str | Path) -> Ledger:
        """Look at a ledger, also while its run is writing; sees what was charged so far at every question."""
        file = store.require_file(Path(path))
        with _closed_on_error(store.connect(file, read_only=True)) as connection:
            return cls(connection, file, None)

    @classmethod
    def in_memory(cls, *, run_id: str | None = None, header: Mapping[str, str] | None = None) -> Ledger:
        """A ledger that dies with the process: for experiments, and until `copy_to`."""
        connection = store.connect(None)
        store.initialise(connection, None, _full_header(run_id, header))
        return cls(connection, None, None)

    def copy_to(self, path: str | Path) -> Ledger:
        """Move on to a file: copies everything to `path`, closes this ledger and returns the writer from now on."""
        file = Path(path)
        copied = self._writer(file, lambda new: store.copy(self._connection, new, file))
        self.close()
        return copied

    @classmethod
    def _writer(cls, file: Path, fill: Callable[[sqlite3.Connection], None] | None = None) -> Ledger:
        if fill is not None:
            _require_new(file)
        with _closed_on_error(store.lock(file)) as lock:
            if fill is not None:
                store.make(_require_new(file), fill)  # again, for another process may have been faster to the lock
            with _closed_on_error(store.connect(file)) as connection:
                return cls(connection, file, lock)

    # -- writing ------------------------------------------------------------------------------------------------

    def charge(self, event: DpEvent, note: str = "") -> Receipt:
        """Record `event`; when this returns it is on disk. Only then may the release that it pays for be made."""
        if not self._writable:
            raise LedgerError(f"ledger {self.path} is open for reading: open it with Ledger.open to charge it")
        text, time = to_json(event), _now()
        sequence = len(self) + 1
        chain = _link(self._chain, sequence, text, note, time)
        with store.transaction(self._connection, self.path):
            self._connection.execute("INSERT OR IGNORE INTO kinds(event) VALUES (?)", (text,))
            self._connection.execute(
                "INSERT INTO charges(sequence, kind, note, time, chain) "
                "SELECT ?, kind, ?, ?, ? FROM kinds WHERE event = ?",
                (sequence, note, time, chain, text),
            )
        self._chain = chain
        return Receipt(sequence, event)

    def _record_opening(self) -> None:
        with store.transaction(self._connection, self.path):
            self._connection.execute("INSERT INTO openings(time) VALUES (?)", (_now(),))

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        return self.header["run_id"]

    @property
    def incarnations(self) -> list[tuple[int, str]]:
        """Every opening as a writer: its number and when."""
        return self._all("SELECT incarnation, time FROM openings ORDER BY incarnation")

    def __len__(self) -> int:
        return self._one("SELECT COALESCE(MAX(sequence), 0) FROM charges")

    def events(self) -> list[tuple[DpEvent, int]]:
        """Every different event with how often it was charged, in the order of first appearance."""
        rows = self._all(
            "SELECT event, times FROM (SELECT kind, COUNT(*) AS times FROM charges GROUP BY kind) "
            "JOIN kinds USING (kind) ORDER BY kind"
        )
        return [(self._event(text), times) for text, times in rows]

    def history(self) -> Iterator[tuple[int, DpEvent, str]]:
        """Every charge in order: its number, event and time."""
        for sequence, text, time in self._all(
            "SELECT sequence, event, time FROM charges JOIN kinds USING (kind) ORDER BY sequence"
        ):
            yield sequence, self._event(text), time

    def fingerprint(self) -> str:
        """One hash of header and charges: equal for equal histories alone."""
        self._chain = self._verified_chain()
        return self._chain.hex()

    def _verified_chain(self) -> bytes:
        chain = hashlib.sha256(json.dumps(dict(self.header), sort_keys=True).encode()).digest()
        expected = 0
        for sequence, text, note, time, stored in self._all(
            "SELECT sequence, event, note, time, chain FROM charges LEFT JOIN kinds USING (kind) ORDER BY sequence"
        ):
            expected += 1
            chain = _link(chain, sequence, text, note, time)
            if sequence != expected or chain != stored:
                raise LedgerError(f"ledger {self.path} was changed at row {expected}: restore it from a copy")
        issued = self._one("SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name = 'charges'")
        if issued > expected:
            raise LedgerError(f"ledger {self.path} lost rows {expected + 1} to {issued}: restore it from a copy")
        return chain

    def _event(self, text: str) -> DpEvent:
        try:
            return from_json(text)
        except InvalidInput as error:
            raise LedgerError(f"ledger {self.path} holds an unreadable event: {error}") from error

    def _all(self, query: str) -> list[Any]:
        with store.one_line_errors(self.path):
            return self._connection.execute(query).fetchall()

    def _one(self, query: str) -> int:
        return int(self._all(query)[0][0])

    def close(self) -> None:
        """Free the file and the lock; what was charged stays."""
        self._connection.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _closed_on_error(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Hand on an open connection, but close it if the block fails."""
    try:
        yield connection
    except BaseException:
        connection.close()
        raise


def _require_new(file: Path) -> Path:
    if file.exists():
        raise LedgerError(f"ledger {file} exists already: open it to go on with its run, or choose another directory")
    return file


def _full_header(run_id: str | None, header: Mapping[str, str] | None) -> dict[str, str]:
    run_id = uuid.uuid4().hex if run_id is None else run_id
    return {**(header or {}), "run_id": run_id, "created": _now(), "format": store.FORMAT}


def _link(chain: bytes, sequence: int, text: str | None, note: str, time: str) -> bytes:
    return hashlib.sha256(chain + json.dumps([sequence, text, note, time]).encode()).digest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
