"""A vault in one SQLite file: for one machine, or for people who share a folder and trust each other.

Rows can be added but never changed: triggers refuse it. Anyone who can write the file can still replace it; the chain,
and with a key the signatures, reveal that. People are who they say they are. A team that needs more uses PostgreSQL.
"""

from __future__ import annotations

import getpass
import os
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from sordino.accounting.chain import Key, find_key
from sordino.accounting.store import schema_of
from sordino.errors import VaultError, VaultForged
from sordino.vault.history import Draft, Entry, now, require_name, root
from sordino.vault.storing import Own

FORMAT = "sordino-vault-1"
PERSON = "SORDINO_PERSON"
PATIENCE = 60.0
"""How many seconds to wait for others who use the same file."""
_COLUMNS = "dataset, number, kind, run, person, at, cost, nonce, content, chain, signature"
_STATEMENTS = (
    "CREATE TABLE header(key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE entries(sequence INTEGER PRIMARY KEY AUTOINCREMENT, dataset TEXT NOT NULL, number INTEGER NOT NULL, "
    "kind TEXT NOT NULL, run TEXT NOT NULL, person TEXT NOT NULL, at TEXT NOT NULL, cost TEXT NOT NULL, "
    "nonce TEXT NOT NULL UNIQUE, content TEXT NOT NULL, chain BLOB NOT NULL, signature BLOB NOT NULL, "
    "UNIQUE(dataset, number))",
    *(
        f"CREATE TRIGGER no_{action}_{table} BEFORE {action} ON {table} "
        "BEGIN SELECT RAISE(ABORT, 'the vault is append-only'); END"
        for table in ("header", "entries")
        for action in ("UPDATE", "DELETE")
    ),
)


class SqliteStore:
    """The entries in one file; `create` makes it if there is none."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path, self.place, self._key = path, str(path), find_key()
        self._own = Own()
        if not path.is_file():
            if not create:
                raise VaultError(f"no vault at {path}: `sordino budget create NAME` makes one, SORDINO_VAULT names it")
            with _one_line(path):
                path.parent.mkdir(parents=True, exist_ok=True)
        with self.writing("") if create else self.reading():
            pass  # made, or checked
        self.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return SqliteStore, (self.path,)

    @property
    def person(self) -> str:
        return require_name(os.environ.get(PERSON) or getpass.getuser(), PERSON)

    @contextmanager
    def reading(self) -> Iterator[SqliteTransaction]:
        with _one_line(self.path), self._begin("BEGIN") as connection:
            self._check_file(connection)
            yield SqliteTransaction(connection, self._key, self.person)

    @contextmanager
    def writing(self, dataset: str) -> Iterator[SqliteTransaction]:
        with _one_line(self.path), self._begin("BEGIN IMMEDIATE") as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
                self._initialise(connection)
            signed = self._check_file(connection)
            if signed != ("" if self._key is None else self._key.name):
                raise VaultError(
                    f"vault {self.path} is signed by {'no key' if not signed else f'key {signed}'}: set "
                    "SORDINO_LEDGER_KEY or SORDINO_LEDGER_KEY_FILE to that key, or unset both, to write it"
                )
            yield SqliteTransaction(connection, self._key, self.person)

    @contextmanager
    def _begin(self, how: str) -> Iterator[sqlite3.Connection]:
        connection = self._connect()
        _leave(connection)
        try:
            connection.execute(how)
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            _leave(connection)
            raise

    def _connect(self) -> sqlite3.Connection:
        found: sqlite3.Connection | None = self._own.find()
        if found is None:
            found = sqlite3.connect(self.path, isolation_level=None, timeout=PATIENCE)
            found.execute("PRAGMA trusted_schema = OFF")
            found.execute("PRAGMA synchronous = EXTRA")
            found.execute("PRAGMA fullfsync = ON")
            self._own.keep(found)
        return found

    def _initialise(self, connection: sqlite3.Connection) -> None:
        for statement in _STATEMENTS:
            connection.execute(statement)
        signed = "" if self._key is None else self._key.name
        header = {"format": FORMAT, "vault": uuid.uuid4().hex, "signed": signed, "created": now()}
        connection.executemany("INSERT INTO header VALUES (?, ?)", sorted(header.items()))

    def _check_file(self, connection: sqlite3.Connection) -> str:
        """Refuse a file that is no vault, or has anything in it that we did not define; return the name of its key."""
        if schema_of(connection) != _wanted():
            raise VaultForged(f"{self.path} is not a vault as Sordino makes it, or was changed: restore a copy")
        header = dict(connection.execute("SELECT key, value FROM header"))
        if header.get("format") != FORMAT:
            raise VaultError(f"vault {self.path} has format {header.get('format')}, needs {FORMAT}: other version?")
        return str(header.get("signed", ""))

    def check(self, chain: bytes, signature: bytes) -> bool | None:
        return None if self._key is None else self._key.check(chain, signature)

    def find_loss(self) -> str:
        with _one_line(self.path), self._begin("BEGIN") as connection:
            held = connection.execute("SELECT COUNT(*) FROM entries").fetchone()[0]
            query = "SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name = 'entries'"
            issued = connection.execute(query).fetchone()[0]
        return "" if held == issued else f"{issued - held} of its {issued} entries are missing"

    def release(self) -> None:
        if (found := self._own.find()) is not None:
            found.close()
        self._own.keep(None)


class SqliteTransaction:
    """One transaction of a `SqliteStore`."""

    def __init__(self, connection: sqlite3.Connection, key: Key | None, person: str) -> None:
        self._connection, self._key, self._person = connection, key, person

    def datasets(self) -> list[str]:
        rows = self._connection.execute("SELECT DISTINCT dataset FROM entries ORDER BY dataset")
        return [name for (name,) in rows]

    def entries(self, dataset: str, since: int = 1) -> list[Entry]:
        query = f"SELECT {_COLUMNS} FROM entries WHERE dataset = ? AND number >= ? ORDER BY number"
        return [Entry(*row) for row in self._connection.execute(query, (dataset, since))]

    def append(self, draft: Draft) -> Entry:
        query = "SELECT number, chain FROM entries WHERE dataset = ? ORDER BY number DESC LIMIT 1"
        number, chain = self._connection.execute(query, (draft.dataset,)).fetchone() or (0, root(draft.dataset))
        fields = (draft.kind, draft.run, self._person, now(), draft.cost, draft.nonce, draft.content)
        bare = Entry(draft.dataset, number + 1, *fields, b"", b"")
        link = bare.link(chain)
        signature = b"" if self._key is None else self._key.sign(link)
        row = (bare.dataset, bare.number, *fields, link, signature)
        marks = ", ".join("?" * len(row))
        self._connection.execute(f"INSERT INTO entries({_COLUMNS}) VALUES ({marks})", row)
        written = Entry(*row)
        if self.entries(draft.dataset, written.number) != [written]:
            raise VaultForged("the vault did not keep what was written: something in the file swallows rows")
        return written


@cache
def _wanted() -> frozenset[tuple[str, ...]]:
    with sqlite3.connect(":memory:") as connection:
        for statement in _STATEMENTS:
            connection.execute(statement)
        return schema_of(connection)


def _leave(connection: sqlite3.Connection) -> None:
    with suppress(sqlite3.Error):
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite quotes what is damaged
        raise VaultError(f"vault {path} cannot be used ({error}): check the file, its folder and the disk") from error
    except OSError as error:
        raise VaultError(f"vault {path} cannot be used ({error.strerror}): check the file and its folder") from error
