"""SQLite underneath the ledger: connections, the schema and its check, transactions, and errors in one line.

The file alone holds what was charged. A commit writes the old pages to a rollback journal, then the new ones to the
file, syncs both, and clears the journal: whoever has the file has every charge that was acknowledged, whatever becomes
of the journal. (A write-ahead log is faster, but the newest charges would live in a second file that can get lost.)
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from sordino.accounting.lock import WriterLock
from sordino.errors import LedgerError, LedgerForged

Open = TypeVar("Open", sqlite3.Connection, WriterLock)

FORMAT = "2"
PATIENCE = 30.0
"""Seconds that a writer waits for a reader to finish its question, and a reader for a commit."""

_TABLES = (
    "CREATE TABLE header(key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE kinds(kind INTEGER PRIMARY KEY, event TEXT NOT NULL UNIQUE)",
    "CREATE TABLE charges(sequence INTEGER PRIMARY KEY AUTOINCREMENT, kind INTEGER NOT NULL REFERENCES kinds(kind), "
    "note TEXT NOT NULL, chain BLOB NOT NULL, signature BLOB NOT NULL)",
    "CREATE TABLE declarations(number INTEGER PRIMARY KEY AUTOINCREMENT, after INTEGER NOT NULL, kind TEXT NOT NULL, "
    "text TEXT NOT NULL, chain BLOB NOT NULL, signature BLOB NOT NULL)",
)
_APPEND_ONLY = (
    "CREATE TRIGGER no_{action}_{table} BEFORE {action} ON {table} "
    "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
)
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""How a journal ends that names another file, which SQLite would open and delete. Ours never do."""


def connect(path: Path | None, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection in which every commit of a writer is on disk, in the file itself, before it returns."""
    with one_line_errors(path):
        if path is None:
            return sqlite3.connect(":memory:", isolation_level=None)
        _refuse_strange_company(path)
        _refuse_foreign_journal(path)
        if read_only:
            return _reader(path)
        connection = sqlite3.connect(path, isolation_level=None, timeout=PATIENCE)
        with closed_on_error(connection):
            connection.execute("PRAGMA trusted_schema = OFF")
            if connection.execute("PRAGMA journal_mode = TRUNCATE").fetchone() != ("truncate",):  # ends a log of 0.1
                raise LedgerError(
                    f"ledger {path} is being read in a way that blocks its writer: close it and try again"
                )
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone leaves data in the drive's cache
            connection.execute("PRAGMA secure_delete = ON")
        return connection


def hasten(connection: sqlite3.Connection, path: Path | None) -> None:
    """Keep the journal's file from commit to commit and clear its head alone: as safe, and one sync less."""
    with one_line_errors(path):
        connection.execute("PRAGMA journal_mode = PERSIST")


def tidy(connection: sqlite3.Connection) -> None:
    """Take the journal's file away at the end; it holds nothing between two commits."""
    with suppress(sqlite3.Error):
        leave(connection)
        connection.execute("PRAGMA journal_mode = DELETE")


def _reader(path: Path) -> sqlite3.Connection:
    """Open without writing anything; what a crash left behind is put in order in a copy."""
    try:
        if _has_write_ahead_log(path):  # as those of version 0.1; to read one, SQLite must write beside it
            return _reader_of_copy(path)
        return _question(path.resolve().as_uri() + "?mode=ro")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
            raise
        return _reader_of_copy(path)  # a journal must be played back, which a reader may not do


def _has_write_ahead_log(path: Path) -> bool:
    with path.open("rb") as file:
        return _beside(path, "-wal").exists() or file.read(20)[18:] == b"\2\2"


def _question(address: str) -> sqlite3.Connection:
    connection = sqlite3.connect(address, uri=True, isolation_level=None, timeout=0)
    with closed_on_error(connection):
        connection.execute("PRAGMA trusted_schema = OFF")
        _begin_reading(connection)
        leave(connection)
    return connection


def _reader_of_copy(path: Path) -> sqlite3.Connection:
    memory = sqlite3.connect(":memory:", isolation_level=None)
    with closed_on_error(memory), tempfile.TemporaryDirectory() as place:
        for suffix in ("-journal", "-wal", ""):
            if _beside(path, suffix).exists():
                shutil.copyfile(_beside(path, suffix), Path(place) / ("ledger" + suffix))
        copied = sqlite3.connect(Path(place) / "ledger", isolation_level=None)
        try:
            copied.backup(memory)
        finally:
            copied.close()
        memory.execute("PRAGMA query_only = ON")
    return memory


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _refuse_strange_company(path: Path) -> None:
    """What lies beside a ledger is a plain file: a pipe is waited for, a link can lead to a device without end."""
    for suffix in ("-journal", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(_beside(path, suffix).lstat().st_mode):
                raise LedgerError(f"{_beside(path, suffix)} is no plain file: remove it and look where it came from")


def _refuse_foreign_journal(path: Path) -> None:
    """A journal may name another file, which SQLite deletes when it has played the journal back: never for a ledger."""
    with suppress(FileNotFoundError), _beside(path, "-journal").open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(_SUPER_JOURNAL)))
        if file.read() == _SUPER_JOURNAL:
            raise LedgerError(f"ledger {path} has a journal that names another file: it was not written by Sordino")


def make(path: Path, fill: Callable[[sqlite3.Connection], None]) -> None:
    """Make a ledger whole or not at all: filled beside its final name, synced, renamed.

    A process that is killed meanwhile leaves no ledger behind, so that its run can simply be started again.
    """
    beside = _beside(path, ".partial")
    with one_line_errors(path):
        beside.unlink(missing_ok=True)
        try:
            connection = sqlite3.connect(beside, isolation_level=None)
            try:
                # A journal on disk could outlive its file, and undo the next.
                connection.execute("PRAGMA journal_mode = MEMORY")
                connection.execute("PRAGMA synchronous = EXTRA")
                connection.execute("PRAGMA fullfsync = ON")
                fill(connection)
            finally:
                connection.close()
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def initialise(connection: sqlite3.Connection, header: Mapping[str, str]) -> None:
    """Write schema and header of a new ledger; to be called in a transaction."""
    for statement in _statements():
        connection.execute(statement)
    connection.executemany("INSERT INTO header VALUES (?, ?)", sorted(header.items()))


def _statements() -> Iterator[str]:
    yield from _TABLES
    for table in ("header", "kinds", "charges", "declarations"):
        for action in ("UPDATE", "DELETE"):
            yield _APPEND_ONLY.format(action=action, table=table)


def copy(source: sqlite3.Connection, target: sqlite3.Connection, path: Path) -> None:
    """Copy a whole ledger into a new file."""
    with one_line_errors(path):
        source.backup(target)


@cache
def _schema(statements: tuple[str, ...]) -> frozenset[tuple[str, ...]]:
    with sqlite3.connect(":memory:") as connection:
        for statement in statements:
            connection.execute(statement)
        return schema_of(connection)


def schema_of(connection: sqlite3.Connection) -> frozenset[tuple[str, ...]]:
    """Every table, index, trigger and view of a file, with its definition."""
    return frozenset(connection.execute("SELECT type, name, tbl_name, COALESCE(sql, '') FROM sqlite_master"))


def check_schema(connection: sqlite3.Connection, path: Path | None, statements: tuple[str, ...] | None = None) -> None:
    """Refuse a file with anything in it that we did not define: a view or trigger can hide or swallow rows."""
    wanted, found = _schema(tuple(_statements()) if statements is None else statements), schema_of(connection)
    if found != wanted:
        kind, name, *_ = sorted(found ^ wanted)[0]
        raise LedgerForged(
            f"ledger {path or 'in memory'} was changed: its {kind} {name!r} is not as Sordino makes it; restore a copy"
        )


def read_header(connection: sqlite3.Connection, path: Path | None) -> dict[str, str]:
    """The header of a ledger, of whichever format, or an error if this is none."""
    with snapshot(connection, path):
        if connection.execute("SELECT type FROM sqlite_master WHERE name = 'header'").fetchall() != [("table",)]:
            raise LedgerError(f"{path} is not a ledger: give the ledger.sqlite of a run")
        header: dict[str, str] = dict(connection.execute("SELECT key, value FROM header"))
    if not all(isinstance(word, str) for pair in header.items() for word in pair) or "run_id" not in header:
        raise LedgerForged(f"ledger {path} was changed: its header is not text, or names no run; restore a copy")
    return header


def require_file(path: Path) -> Path:
    """`path` itself if there is a file."""
    if not path.is_file():
        raise LedgerError(f"no ledger at {path}: give the ledger.sqlite of a run")
    return path


@contextmanager
def transaction(connection: sqlite3.Connection, path: Path | None) -> Iterator[None]:
    """All of it or nothing, on disk when the block is left; whatever interrupts it, the next one starts afresh."""
    with one_line_errors(path):
        leave(connection)
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.execute("COMMIT")
        except BaseException:
            leave(connection)
            raise


@contextmanager
def snapshot(connection: sqlite3.Connection, path: Path | None) -> Iterator[None]:
    """Every question in the block is answered from one state of the file; blocks may stand inside one another."""
    with one_line_errors(path):
        if connection.in_transaction:
            yield
            return
        try:
            _begin_reading(connection)
            yield
        finally:
            leave(connection)


def _begin_reading(connection: sqlite3.Connection) -> None:
    """Take one state of the file; asks again every millisecond, for a busy writer leaves short gaps only."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            connection.execute("BEGIN")
            connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            leave(connection)
            time.sleep(0.001)


def leave(connection: sqlite3.Connection) -> None:
    """Give up a transaction, also one that an interrupt left open."""
    with suppress(sqlite3.Error):  # a full disk may have rolled back already
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextmanager
def closed_on_error(opened: Open) -> Iterator[Open]:
    """Hand on something open, but close it if the block fails."""
    try:
        yield opened
    except BaseException:
        opened.close()
        raise


@contextmanager
def one_line_errors(path: Path | None) -> Iterator[None]:
    """Turn whatever SQLite or the file system objects to into one line."""
    try:
        yield
    except sqlite3.Error as error:
        if isinstance(error, sqlite3.ProgrammingError) and "thread" in str(error):
            raise LedgerError(
                f"ledger {path or 'in memory'} was opened in another thread: make the run or strategy in the "
                "thread that takes its steps"
            ) from error
        raise LedgerError(
            f"ledger {path or 'in memory'} cannot be used ({error}): check the file, its directory and the disk"
        ) from error
    except OSError as error:
        raise LedgerError(
            f"ledger {path} cannot be used ({error.strerror}): check the file and its directory"
        ) from error


def sync_directory(directory: Path) -> None:
    """Make the new file's name durable too, where directories can be synchronised (not on Windows)."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
