"""SQLite underneath the ledger: connections, the schema, the writer's lock, and its errors in one line."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from sordino.errors import LedgerError

FORMAT = "1"

_TABLES = """
CREATE TABLE header(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE kinds(kind INTEGER PRIMARY KEY, event TEXT NOT NULL UNIQUE);
CREATE TABLE charges(
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    kind INTEGER NOT NULL REFERENCES kinds(kind),
    note TEXT NOT NULL,
    time TEXT NOT NULL,
    chain BLOB NOT NULL
);
CREATE TABLE openings(incarnation INTEGER PRIMARY KEY AUTOINCREMENT, time TEXT NOT NULL);
"""

_APPEND_ONLY = """
CREATE TRIGGER no_{action}_{table} BEFORE {action} ON {table}
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
"""


def connect(path: Path | None, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection in which every commit of a writer is on disk before it returns."""
    with one_line_errors(path):
        if path is None:
            return sqlite3.connect(":memory:", isolation_level=None)
        if read_only:
            return _reader(path)
        connection = sqlite3.connect(path, isolation_level=None, timeout=30)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone leaves data in the drive's cache
        except BaseException:
            connection.close()
            raise
        return connection


def _reader(path: Path) -> sqlite3.Connection:
    address = path.resolve().as_uri() + "?mode=ro"
    if not path.with_name(path.name + "-wal").exists() and not os.access(path.parent, os.W_OK):
        address += "&immutable=1"  # a finished run in a directory where SQLite cannot keep its index
    return sqlite3.connect(address, uri=True, isolation_level=None, timeout=30)


def lock(path: Path) -> sqlite3.Connection:
    """Take the writer's lock of the ledger at `path`: an exclusive transaction on a file beside it, held open.

    The kernel frees it when the process ends, however it ends, and SQLite makes it work on every platform.
    """
    beside = path.with_name(path.name + ".lock")
    with one_line_errors(path):
        connection = sqlite3.connect(beside, isolation_level=None, timeout=0)
        try:
            connection.execute("PRAGMA journal_mode = MEMORY")  # nothing is ever written: leave no second file behind
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            connection.close()
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise LedgerError(
                    f"ledger {path} is being written by another process: wait for it or stop it"
                ) from error
            raise
        return connection


def make(path: Path, fill: Callable[[sqlite3.Connection], None]) -> None:
    """Make a ledger whole or not at all: filled beside its final name, synced, renamed.

    A process that is killed meanwhile leaves no ledger behind, so that its run can simply be started again.
    """
    beside = path.with_name(path.name + ".partial")
    with one_line_errors(path):
        beside.unlink(missing_ok=True)
        try:
            connection = sqlite3.connect(beside, isolation_level=None)
            try:
                connection.execute(
                    "PRAGMA journal_mode = MEMORY"
                )  # one on disk could outlive its file, and undo the next
                connection.execute("PRAGMA synchronous = EXTRA")
                connection.execute("PRAGMA fullfsync = ON")
                fill(connection)
            finally:
                connection.close()
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        _sync_directory(path.parent)


def initialise(connection: sqlite3.Connection, path: Path | None, header: Mapping[str, str]) -> None:
    """Write schema and header of a new ledger."""
    with transaction(connection, path):
        for statement in filter(str.strip, _TABLES.split(";")):
            connection.execute(statement)
        for table in ("header", "kinds", "charges", "openings"):
            for action in ("UPDATE", "DELETE"):
                connection.execute(_APPEND_ONLY.format(action=action, table=table))
        connection.executemany("INSERT INTO header VALUES (?, ?)", sorted(header.items()))


def copy(source: sqlite3.Connection, target: sqlite3.Connection, path: Path) -> None:
    """Copy a whole ledger into a new file."""
    with one_line_errors(path):
        source.backup(target)


def read_header(connection: sqlite3.Connection, path: Path | None) -> dict[str, str]:
    """The header of a ledger, or an error if this is none or one of another format."""
    with one_line_errors(path):
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'header'").fetchone():
            raise LedgerError(f"{path} is not a ledger: give the ledger.sqlite of a run")
        header: dict[str, str] = dict(connection.execute("SELECT key, value FROM header"))
    if header.get("format") != FORMAT:
        raise LedgerError(
            f"ledger {path} has format {header.get('format')}, needs {FORMAT}: use the version that wrote it"
        )
    return header


def require_file(path: Path) -> Path:
    """`path` itself if there is a file."""
    if not path.is_file():
        raise LedgerError(f"no ledger at {path}: give the ledger.sqlite of a run")
    return path


@contextmanager
def transaction(connection: sqlite3.Connection, path: Path | None) -> Iterator[None]:
    """All of it or nothing, on disk when the block is left."""
    with one_line_errors(path):
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # a full disk may have rolled back already
                connection.execute("ROLLBACK")
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


def _sync_directory(directory: Path) -> None:
    """Make the new file's name durable too, where directories can be synchronised (not on Windows)."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
