"""The hash chain through a ledger's rows: how a row is added, and how all of them are verified.

The chain begins with the SHA-256 of the header. Each row, a charge or a declaration, adds its own content:
``chain_k = SHA-256(chain_(k-1) + content_k)``. A declaration stands after the charge whose number it names.
Where the chain ends is read from the file each time, inside the transaction that goes on from there: a copy of it in
memory would be stale after an interrupt, and the next row would break the chain.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino.errors import LedgerError

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
    """The rows of one ledger; every method is to be called in a transaction."""

    def __init__(self, connection: sqlite3.Connection, path: Path | None, header: Mapping[str, str]) -> None:
        self._connection, self._path = connection, path
        self._root = hashlib.sha256(json.dumps(dict(header), sort_keys=True).encode()).digest()

    def head(self) -> Head:
        """Where the chain ends now."""
        charge = self._row("SELECT sequence, chain FROM charges ORDER BY sequence DESC LIMIT 1")
        declaration = self._row("SELECT number, after, chain FROM declarations ORDER BY number DESC LIMIT 1")
        events, chain = charge or (0, self._root)
        number, after, declared = declaration or (0, -1, b"")
        return Head(events, number, declared if after == events else chain)

    def charge(self, event: str, note: str) -> int:
        """Add a charge; returns its number."""
        head = self.head()
        sequence = head.events + 1
        chain = _link(head.chain, ["charge", sequence, event, note])
        self._connection.execute("INSERT OR IGNORE INTO kinds(event) VALUES (?)", (event,))
        self._connection.execute(
            "INSERT INTO charges(sequence, kind, note, chain, signature) SELECT ?, kind, ?, ?, ? FROM kinds "
            "WHERE event = ?",
            (sequence, note, chain, b"", event),
        )
        self._require(
            "SELECT sequence, event, note, chain, signature FROM charges JOIN kinds USING (kind) WHERE sequence = ?",
            (sequence, event, note, chain, b""),
        )
        return sequence

    def declare(self, kind: str, text: str) -> None:
        """Add a declaration."""
        head = self.head()
        number = head.declarations + 1
        row = (number, head.events, kind, text)
        row = (*row, _link(head.chain, ["declaration", *row]), b"")
        self._connection.execute("INSERT INTO declarations VALUES (?, ?, ?, ?, ?, ?)", row)
        self._require("SELECT * FROM declarations WHERE number = ?", row)

    def walk(self) -> Iterator[Head]:
        """Every place of the chain from the header on, each verified; an error where something was changed."""
        chain, events, declarations = self._root, 0, 0
        yield Head(events, declarations, chain)
        for after, number, first, second, stored, _ in self._connection.execute(_IN_ORDER):
            if number == 0:
                events += 1
                content = ["charge", events, first, second]
            else:
                declarations += 1
                content = ["declaration", declarations, events, first, second]
            unchanged = isinstance(first, str) and isinstance(second, str) and after == events
            chain = _link(chain, content) if unchanged else b""
            if chain != stored or number not in (0, declarations):
                raise LedgerError(f"ledger {self._path} was changed at row {events}: restore it from a copy")
            yield Head(events, declarations, chain)
        for table, held in (("charges", events), ("declarations", declarations)):
            query = "SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name = ?"
            issued = self._connection.execute(query, (table,)).fetchone()[0]
            if issued != held:
                raise LedgerError(
                    f"ledger {self._path} lost rows {held + 1} to {issued} of its {table}: restore it from a copy"
                )

    def _row(self, query: str) -> Any:
        return self._connection.execute(query).fetchone()

    def _require(self, query: str, row: tuple[Any, ...]) -> None:
        """What was written must be there: a trigger that somebody added can swallow it without an error."""
        if self._connection.execute(query, row[:1]).fetchall() != [row]:
            raise LedgerError(f"ledger {self._path} did not keep what was written: something in the file swallows rows")


def _link(chain: bytes, content: list[Any]) -> bytes:
    return hashlib.sha256(chain + json.dumps(content).encode()).digest()
