"""The file underneath the ledger: SQLite connections, the schema and its check, transactions, and the writer's lock.

The file alone holds what was charged. A commit writes the old pages to a rollback journal, then the new ones to the
file, syncs both, and clears the journal. So the file always holds every charge that was acknowledged, even if the
journal is lost. (A write-ahead log is faster, but the newest charges would live in a second file that can get lost.)
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from sordino.errors import LedgerError, LedgerForged

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

Open = TypeVar("Open", sqlite3.Connection, "WriterLock")

FORMAT = "2"
PATIENCE = 30.0
"""How many seconds a writer waits for a reader's query, and a reader for a commit."""

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

_FAR = 2**62
"""A byte far beyond the file's own, and beyond those that SQLite locks (from 2**30)."""


def connect(path: Path | None, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a connection. Every commit of a writer is on disk, in the file itself, before it returns."""
    with one_line_errors(path):
        if path is None:
            return sqlite3.connect(":memory:", isolation_level=None)
        _refuse_foreign_files(path)
        if read_only:
            return _open_reader(path)
        connection = sqlite3.connect(path, isolation_level=None, timeout=PATIENCE)
        with close_on_error(connection):
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
    """Keep the journal's file from commit to commit and clear only its head: as safe, with one sync less."""
    with one_line_errors(path):
        connection.execute("PRAGMA journal_mode = PERSIST")


def tidy(connection: sqlite3.Connection) -> None:
    """Remove the journal's file at the end; it holds nothing between two commits."""
    with suppress(sqlite3.Error):
        leave(connection)
        connection.execute("PRAGMA journal_mode = DELETE")


def _open_reader(path: Path) -> sqlite3.Connection:
    """Open without writing anything; the remains of a crash are repaired in a copy."""
    try:
        if _has_write_ahead_log(path):  # as in version 0.1; to read such a file, SQLite must write beside it
            return _open_copy(path)
        return _ask(path.resolve().as_uri() + "?mode=ro")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
            raise
        return _open_copy(path)  # a journal must be played back, which a reader may not do


def _has_write_ahead_log(path: Path) -> bool:
    with path.open("rb") as file:
        return _beside(path, "-wal").exists() or file.read(20)[18:] == b"\2\2"


def _ask(address: str) -> sqlite3.Connection:
    connection = sqlite3.connect(address, uri=True, isolation_level=None, timeout=0)
    with close_on_error(connection):
        connection.execute("PRAGMA trusted_schema = OFF")
        _begin_reading(connection)
        leave(connection)
    return connection


def _open_copy(path: Path) -> sqlite3.Connection:
    memory = sqlite3.connect(":memory:", isolation_level=None)
    with close_on_error(memory), tempfile.TemporaryDirectory() as place:
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


def _refuse_foreign_files(path: Path) -> None:
    """Refuse foreign files that SQLite would open beside the ledger: a pipe would block, a link could lead anywhere.

    A journal may also name another file, which SQLite deletes after playing the journal back; a ledger's never does.
    """
    for suffix in ("-journal", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(_beside(path, suffix).lstat().st_mode):
                raise LedgerError(
                    f"ledger {path} has a {suffix[1:]} that is not a plain file, and not from Sordino: remove it"
                )
    with suppress(FileNotFoundError), _beside(path, "-journal").open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(_SUPER_JOURNAL)))
        if file.read() == _SUPER_JOURNAL:
            raise LedgerError(f"ledger {path} has a journal that names another file: it was not written by Sordino")


def make(path: Path, fill: Callable[[sqlite3.Connection], None]) -> None:
    """Make a ledger, completely or not at all: fill it under another name, sync it, rename it.

    A process that is killed meanwhile leaves no ledger behind, so its run can simply be started again.
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
    """Write schema and header of a new ledger; call it in a transaction."""
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
    """List every table, index, trigger and view of a file, with its definition."""
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
    """Read the header of a ledger of any format, or raise an error if the file is no ledger."""
    with snapshot(connection, path):
        if connection.execute("SELECT type FROM sqlite_master WHERE name = 'header'").fetchall() != [("table",)]:
            raise LedgerError(f"{path} is not a ledger: give the ledger.sqlite of a run")
        header: dict[str, str] = dict(connection.execute("SELECT key, value FROM header"))
    if not all(isinstance(word, str) for pair in header.items() for word in pair) or "run_id" not in header:
        raise LedgerForged(f"ledger {path} was changed: its header is not text, or names no run; restore a copy")
    return header


def require_file(path: Path) -> Path:
    """Return `path` if there is a file."""
    if not path.is_file():
        raise LedgerError(f"no ledger at {path}: give the ledger.sqlite of a run")
    return path


@contextmanager
def transaction(connection: sqlite3.Connection, path: Path | None) -> Iterator[None]:
    """Commit the whole block or nothing, on disk when it ends; after any interrupt, the next block starts clean."""
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
    """Answer every query in the block from one state of the file; blocks may be nested."""
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
    """Take one state of the file; ask again every millisecond, because a busy writer leaves only short gaps."""
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
    """Abandon a transaction, even one that an interrupt left open."""
    with suppress(sqlite3.Error):  # a full disk may have rolled back already
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextmanager
def close_on_error(opened: Open) -> Iterator[Open]:
    """Yield something open, and close it if the block fails."""
    try:
        yield opened
    except BaseException:
        opened.close()
        raise


@contextmanager
def one_line_errors(path: Path | None) -> Iterator[None]:
    """Turn any objection of SQLite or the file system into one line."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite quotes what is damaged
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
    """Make the new file's name durable too, where directories can be synced (not on Windows)."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# -- the writer's lock ------------------------------------------------------------------------------------------------


class WriterLock:
    """One writer at a time: the lock is held from its creation until `close`, or until the process ends in any way.

    On POSIX an open file description holds it (flock), not the process. A lock of the process (lockf) would be dropped
    as soon as the process opened and closed the file once more, as it does when it copies its own folder. A file beside
    the ledger can be deleted. So the ledger itself is locked as well, in a byte that SQLite does not use, where the
    system has such locks (Linux). On Windows an open file cannot be deleted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptors: list[int] = []
        _held.add(self)
        try:
            # Not through a link: the folder's owner may want to have a file made elsewhere.
            self._hold(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0))
        except BaseException:
            self.close()
            raise

    def hold_file(self) -> None:
        """Lock the ledger itself too, once it exists, where the file system can."""
        if sys.platform == "linux":
            with suppress(OSError):
                self._hold(self._path, os.O_RDWR)

    def _hold(self, file: Path, flags: int) -> None:
        descriptor = os.open(file, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
        self._descriptors.append(descriptor)
        try:
            if sys.platform == "win32":
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            elif sys.platform == "linux" and file == self._path:
                region = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _FAR, 1, 0)
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, region)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise LedgerError(
                f"ledger {self._path} is being written by another process: wait for it or stop it"
            ) from error

    def close(self) -> None:
        """Free the lock."""
        while self._descriptors:
            os.close(self._descriptors.pop())


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _let_go() -> None:
    """Let a forked process drop the lock, so that it does not outlive the process that took it."""
    for lock in list(_held):
        lock.close()  # closes this process's descriptors; the lock stays with the other's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
