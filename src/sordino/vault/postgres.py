"""A vault in PostgreSQL, for a team: the login says who is at work, and the database itself keeps the rules.

`postgres.sql` holds them. One function adds entries: it checks the caller's role, adds up what the dataset's filter
limits, computes the chain and signs with a key that only it can read. Rows are visible only to people involved with a
dataset. The database cannot know what an event costs: the client says it, and `verify` computes it again.

Members of ``sordino_owner`` create budgets; ``sordino_trainer`` reserve and settle; ``sordino_auditor`` read all.
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any, LiteralString

from sordino.accounting.chain import Key, find_key
from sordino.errors import BudgetExhausted, InvalidInput, VaultError
from sordino.vault.history import Draft, Entry, now
from sordino.vault.storing import ConnectionLost, Own

if TYPE_CHECKING:
    import psycopg

FORMAT = "sordino-vault-1"
REFUSED, EXHAUSTED = "SV002", "SV003"
"""The database's codes for "this person may not do this" and "there is not enough left"."""
CONNECT = 10
"""How many seconds to wait for the server."""
_BLOCK = 64
_COLUMNS = "dataset, number, kind, run, person, at, cost, nonce, content, chain, signature"


class PostgresStore:
    """The entries in one schema of a database; `create` makes the schema if there is none and the login may."""

    def __init__(self, address: str, *, create: bool = False) -> None:
        self._driver = _load_driver()
        try:
            parts = self._driver.conninfo.conninfo_to_dict(address)
        except self._driver.Error:
            raise InvalidInput("the vault's address is invalid: give postgresql://USER@HOST:PORT/DATABASE") from None
        host, base = parts.get("host", "localhost"), parts.get("dbname", "")
        self.place = f"postgresql://{host}:{parts.get('port', 5432)}/{base}"  # neither user nor password
        self._address, self._key, self._person = address, find_key(), ""
        self._own = Own()
        try:
            with self._transaction() as connection:
                self._prepare(connection, create)
        except ConnectionLost as error:
            raise VaultError(f"{error}: check its address and that the server runs") from None
        self.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return PostgresStore, (self._address,)

    def _prepare(self, connection: psycopg.Connection[Any], create: bool) -> None:
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('sordino vault', 0))")
        there = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'sordino'").fetchone()
        if there is None and not create:
            raise VaultError(f"no vault at {self.place}: `sordino budget create NAME` makes one")
        if there is None:
            self._initialise(connection)
        header = dict(connection.execute("SELECT key, value FROM sordino.header").fetchall())
        if header.get("format") != FORMAT:
            raise VaultError(f"vault {self.place} has format {header.get('format')}, needs {FORMAT}: other version?")
        self._signer = str(header.get("signed", ""))

    def _initialise(self, connection: psycopg.Connection[Any]) -> None:
        """Create everything in one transaction; the key comes from the environment, or is a new one kept inside."""
        connection.execute(files(__package__).joinpath("postgres.sql").read_bytes())
        key = self._key or Key(secrets.token_bytes(32))
        secret = key.secret if len(key.secret) <= _BLOCK else hashlib.sha256(key.secret).digest()
        padded = secret.ljust(_BLOCK, b"\0")
        pads = (bytes(byte ^ 0x36 for byte in padded), bytes(byte ^ 0x5C for byte in padded))
        connection.execute("INSERT INTO sordino.secret VALUES (%s, %s)", pads)
        header = {"format": FORMAT, "vault": uuid.uuid4().hex, "signed": key.name, "created": now()}
        for pair in sorted(header.items()):
            connection.execute("INSERT INTO sordino.header VALUES (%s, %s)", pair)
        connection.execute("DO $$ BEGIN EXECUTE format('GRANT sordino_owner TO %I', session_user); END $$")

    @property
    def person(self) -> str:
        if not self._person:
            with self._transaction() as connection:
                self._person = str(_ask(connection, "SELECT session_user"))
        return self._person

    @contextmanager
    def reading(self) -> Iterator[PostgresTransaction]:
        with self._transaction() as connection:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield PostgresTransaction(connection)

    @contextmanager
    def writing(self, dataset: str) -> Iterator[PostgresTransaction]:
        with self._transaction() as connection:
            connection.execute("SET LOCAL synchronous_commit = on")
            connection.execute("SELECT sordino.lock(%s)", (dataset,))
            yield PostgresTransaction(connection)

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection[Any]]:
        """Open a transaction, or continue the open one; an objection of the server is one line."""
        driver = self._driver
        try:
            connection = self._connect()
            if connection.info.transaction_status != driver.pq.TransactionStatus.IDLE:
                yield connection
                return
            with connection.transaction():
                yield connection
        except driver.Error as error:
            code = error.sqlstate or ""
            if code == EXHAUSTED:
                raise BudgetExhausted(f"{_first_line(error)}: nothing was released") from None
            if code == REFUSED or isinstance(error, driver.errors.InsufficientPrivilege):
                raise VaultError(f"vault {self.place}: {_first_line(error)}") from None
            if isinstance(error, driver.OperationalError | driver.InterfaceError) or code.startswith(("57", "08")):
                self.release()
                raise ConnectionLost(f"vault {self.place} does not answer ({_first_line(error)})") from None
            raise VaultError(f"vault {self.place} cannot be used ({_first_line(error)})") from None

    def _connect(self) -> psycopg.Connection[Any]:
        found: psycopg.Connection[Any] | None = self._own.find()
        if found is None or found.closed:
            found = self._driver.connect(self._address, autocommit=True, connect_timeout=CONNECT)
            self._own.keep(found)
        assert found is not None
        return found

    def check(self, chain: bytes, signature: bytes) -> bool | None:
        if self._key is not None and self._key.name == self._signer:
            return self._key.check(chain, signature)
        with self._transaction() as connection:
            return bool(_ask(connection, "SELECT sordino.is_signed(%s, %s)", chain, signature))

    def find_loss(self) -> str:
        return ""  # row numbers can also be missing after a rollback, so the chain and the receipts decide

    def release(self) -> None:
        if (found := self._own.find()) is not None:
            with suppress(self._driver.Error):
                found.close()
        self._own.keep(None)


class PostgresTransaction:
    """One transaction of a `PostgresStore`."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def datasets(self) -> list[str]:
        rows = self._connection.execute("SELECT DISTINCT dataset FROM sordino.entries ORDER BY dataset")
        return [name for (name,) in rows.fetchall()]

    def entries(self, dataset: str, since: int = 1) -> list[Entry]:
        query = f"SELECT {_COLUMNS} FROM sordino.entries WHERE dataset = %s AND number >= %s ORDER BY number"
        return [_read(row) for row in self._connection.execute(query.encode(), (dataset, since)).fetchall()]

    def append(self, draft: Draft) -> Entry:
        given = (draft.dataset, draft.kind, draft.run, draft.cost, draft.nonce, draft.content)
        row = self._connection.execute("SELECT * FROM sordino.append(%s, %s, %s, %s, %s, %s)", given).fetchone()
        assert row is not None
        number, person, at, chain, signature = row
        fields = (draft.kind, draft.run, person, at, draft.cost, draft.nonce, draft.content)
        return _read((draft.dataset, number, *fields, chain, signature))


def _read(row: tuple[Any, ...]) -> Entry:
    dataset, number, kind, run, person, at, cost, nonce, content, chain, signature = row
    words = (kind, run, person, at, cost, nonce, content)
    return Entry(dataset, number, *words, bytes(chain), bytes(signature))


def _ask(connection: psycopg.Connection[Any], query: LiteralString, *values: Any) -> Any:
    """Return the one value of the one row."""
    row = connection.execute(query, values).fetchone()
    assert row is not None
    return row[0]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _load_driver() -> Any:
    try:
        import psycopg
        from psycopg import conninfo

        assert conninfo is not None
    except ImportError:
        raise InvalidInput("a vault in PostgreSQL needs psycopg: pip install 'sordino[vault]'") from None
    return psycopg
