"""The hash chain through a ledger's rows, and the key that signs it: how a row is added, and how all are verified.

The chain begins with the SHA-256 of the header. Each row, a charge or a declaration, adds its own content:
``chain_k = SHA-256(chain_(k-1) + content_k)``. A declaration comes after the charge whose number it names. The end of
the chain is read from the file each time, inside the transaction that extends it: a copy in memory would be stale after
an interrupt, and the next row would break the chain.

Anyone who can write the file can also recompute the chain. With a key, every row is signed as well, with HMAC-SHA256
over its chain, and no one without the key can write a ledger that passes. Verifying needs the same key as signing: keep
it outside the run's folder. It comes from the environment, as text in hexadecimal or base64: ``SORDINO_LEDGER_KEY``, or
the name of a file that holds it, ``SORDINO_LEDGER_KEY_FILE``. Make one with ``openssl rand -hex 32``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino.errors import InvalidInput, LedgerForged, LedgerRolledBack

OPENING = "opening"
"""The kind of declaration that the ledger itself makes when a writer opens it."""
ORIGIN = "origin"
"""The kind that says what an older file was."""
UNUSED = "unused"
"""The kind with which a writer says, when it closes, for which of the last charges it gave no receipt."""
KEY, KEY_FILE = "SORDINO_LEDGER_KEY", "SORDINO_LEDGER_KEY_FILE"
FEWEST_BYTES = 16
_RANGE = re.compile(r"(\d{1,15})-(\d{1,15})")
_IN_ORDER = """
SELECT sequence AS after, 0 AS number, event, note, chain, signature FROM charges LEFT JOIN kinds USING (kind)
UNION ALL SELECT after, number, kind, text, chain, signature FROM declarations ORDER BY after, number
"""


@dataclass(frozen=True)
class Head:
    """Where a ledger stands: so many events, so many declarations, and the chain over all of them."""

    events: int
    declarations: int
    chain: bytes


class Chain:
    """The rows of one ledger; call every method inside a transaction."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path | None, header: Mapping[str, str], key: Key | None = None
    ) -> None:
        self._connection, self._path, self._key = connection, path, key
        self._root = hashlib.sha256(json.dumps(dict(header), sort_keys=True).encode()).digest()

    def head(self) -> Head:
        """Return where the chain ends now."""
        charge = self._row("SELECT sequence, chain FROM charges ORDER BY sequence DESC LIMIT 1")
        declaration = self._row("SELECT number, after, chain FROM declarations ORDER BY number DESC LIMIT 1")
        events, chain = charge or (0, self._root)
        number, after, declared = declaration or (0, -1, b"")
        return Head(events, number, declared if after == events else chain)

    def charge(self, event: str, note: str, following: Sequence[str] = ()) -> int:
        """Add a charge, and the charges of `following`, which have no note; returns the number of the first."""
        head = self.head()
        chain = head.chain
        rows: list[tuple[int, str, str, bytes, bytes]] = []
        for sequence, text in enumerate((event, *following), head.events + 1):
            words = "" if rows else note
            chain = _link(chain, ["charge", sequence, text, words])
            rows.append((sequence, text, words, chain, self._sign(chain)))
        kinds = [(text,) for text in dict.fromkeys((event, *following))]
        self._connection.executemany("INSERT OR IGNORE INTO kinds(event) VALUES (?)", kinds)
        self._connection.executemany(
            "INSERT INTO charges(sequence, kind, note, chain, signature) SELECT ?1, kind, ?3, ?4, ?5 FROM kinds "
            "WHERE event = ?2",
            rows,
        )
        self._require(
            "SELECT sequence, event, note, chain, signature FROM charges JOIN kinds USING (kind) WHERE sequence >= ? "
            "ORDER BY sequence",
            rows,
        )
        return head.events + 1

    def declare(self, kind: str, text: str) -> None:
        """Add a declaration."""
        head = self.head()
        number = head.declarations + 1
        row = (number, head.events, kind, text)
        chain = _link(head.chain, ["declaration", *row])
        whole = (*row, chain, self._sign(chain))
        self._connection.execute("INSERT INTO declarations VALUES (?, ?, ?, ?, ?, ?)", whole)
        self._require("SELECT * FROM declarations WHERE number >= ?", [whole])

    def find_unused(self) -> list[tuple[int, str]]:
        """Find the charges that the last writer gave back when it closed; none if anything came after."""
        head = self.head()
        query = "SELECT kind, text FROM declarations WHERE number = ? AND after = ?"
        row = self._connection.execute(query, (head.declarations, head.events)).fetchone()
        if row is None or row[0] != UNUSED or not (found := _RANGE.fullmatch(row[1])):
            return []
        first, last = map(int, found.groups())
        if not 1 <= first <= last == head.events:
            return []
        query = "SELECT sequence, event FROM charges JOIN kinds USING (kind) WHERE sequence >= ? ORDER BY sequence"
        return self._connection.execute(query, (first,)).fetchall()

    def walk(self) -> Iterator[Head]:
        """Yield every place of the chain from the header on, verified; raise an error where something was changed."""
        chain, events, declarations = self._root, 0, 0
        yield Head(events, declarations, chain)
        for after, number, first, second, stored, signature in self._connection.execute(_IN_ORDER):
            if number == 0:
                events += 1
                content = ["charge", events, first, second]
            else:
                declarations += 1
                content = ["declaration", declarations, events, first, second]
            unchanged = isinstance(first, str) and isinstance(second, str) and after == events
            chain = _link(chain, content) if unchanged else b""
            if chain != stored or number not in (0, declarations):
                raise LedgerForged(f"ledger {self._path} was changed at row {events}: restore it from a copy")
            if self._key is not None and not self._key.check(chain, signature):
                raise LedgerForged(
                    f"ledger {self._path} was changed at row {events}, which does not carry the signature of key "
                    f"{self._key.name}: restore it from a copy"
                )
            yield Head(events, declarations, chain)
        for table, held in (("charges", events), ("declarations", declarations)):
            query = "SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name = ?"
            issued = self._connection.execute(query, (table,)).fetchone()[0]
            if issued != held:
                raise LedgerRolledBack(
                    f"ledger {self._path} lost rows {held + 1} to {issued} of its {table}: restore it from a copy"
                )

    def passed(self, events: int, chain: bytes) -> bool:
        """Whether the chain once stood like this, after so many events."""
        if events == 0 and chain == self._root:
            return True
        query = "SELECT 1 FROM charges WHERE sequence = ? AND chain = ? UNION ALL SELECT 1 FROM declarations "
        query += "WHERE after = ? AND chain = ? LIMIT 1"
        return self._connection.execute(query, (events, chain) * 2).fetchone() is not None

    def _sign(self, chain: bytes) -> bytes:
        return b"" if self._key is None else self._key.sign(chain)

    def _row(self, query: str) -> Any:
        return self._connection.execute(query).fetchone()

    def _require(self, query: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Check that what was written is there: an added trigger can swallow it without an error."""
        if self._connection.execute(query, rows[0][:1]).fetchall() != rows:
            raise LedgerForged(
                f"ledger {self._path} did not keep what was written: something in the file swallows rows"
            )


def _link(chain: bytes, content: list[Any]) -> bytes:
    return hashlib.sha256(chain + json.dumps(content).encode()).digest()


# -- the key ----------------------------------------------------------------------------------------------------------


class Key:
    """A secret. Its name is public: a digest that tells keys apart and stands in the header of every signed ledger."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.name = self.sign(b"sordino ledger key")[:8].hex()

    @property
    def secret(self) -> bytes:
        """Return the secret itself: only for a database that signs on its owner's behalf."""
        return self._secret

    def sign(self, chain: bytes) -> bytes:
        """Sign the row with this chain."""
        return hmac.digest(self._secret, chain, hashlib.sha256)

    def check(self, chain: bytes, signature: object) -> bool:
        """Whether this is the signature of the row with this chain."""
        return isinstance(signature, bytes) and hmac.compare_digest(self.sign(chain), signature)

    def __repr__(self) -> str:
        return f"Key({self.name})"


def find_key() -> Key | None:
    """Return the key that the environment names, if any."""
    text, file = os.environ.get(KEY), os.environ.get(KEY_FILE)
    if text and file:
        raise InvalidInput(f"{KEY} and {KEY_FILE} are both set: unset one of them")
    if file:
        return read_key(Path(file))
    return _parse_key(text, KEY) if text else None


def read_key(file: Path) -> Key:
    """Read the key in this file."""
    try:
        with file.open("rb") as opened:
            text = opened.read(10_000).decode("ascii", "replace")
    except OSError as error:
        raise InvalidInput(f"cannot read the key in {file}: {error.strerror}") from None
    return _parse_key(text, str(file))


def _parse_key(text: str, place: str) -> Key:
    text = "".join(text.split())
    secret = b""
    for decode in (bytes.fromhex, lambda word: base64.b64decode(word, validate=True)):
        try:
            secret = decode(text)
            break
        except (ValueError, binascii.Error):
            continue
    if len(secret) < FEWEST_BYTES:  # no message contains the text itself: it is a secret
        raise InvalidInput(
            f"the key in {place} must be at least {FEWEST_BYTES} bytes in hexadecimal or base64: "
            "make one with `openssl rand -hex 32`"
        )
    return Key(secret)
