"""Ledgers of version 0.1 (format 1): verified by their own chain, then turned into today's format.

A reader turns them in memory and changes nothing. A writer turns the file itself, in one transaction, and with that
drops the time of every charge, which format 1 kept. The old fingerprint stays, as a declaration.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sordino.accounting import store
from sordino.accounting.chain import OPENING, ORIGIN, Chain
from sordino.errors import LedgerForged, LedgerRolledBack

FORMAT = "1"

# Word for word as version 0.1 wrote them: SQLite keeps the text.
_TABLES = (
    "CREATE TABLE header(key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE kinds(kind INTEGER PRIMARY KEY, event TEXT NOT NULL UNIQUE)",
    """CREATE TABLE charges(
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    kind INTEGER NOT NULL REFERENCES kinds(kind),
    note TEXT NOT NULL,
    time TEXT NOT NULL,
    chain BLOB NOT NULL
)""",
    "CREATE TABLE openings(incarnation INTEGER PRIMARY KEY AUTOINCREMENT, time TEXT NOT NULL)",
)
_STATEMENTS = _TABLES + tuple(
    f"CREATE TRIGGER no_{action}_{table} BEFORE {action} ON {table}\n"
    "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
    for table in ("header", "kinds", "charges", "openings")
    for action in ("UPDATE", "DELETE")
)


@dataclass(frozen=True)
class Old:
    """What a ledger of format 1 holds, without the times of its charges."""

    header: Mapping[str, str]
    openings: tuple[str, ...]
    charges: tuple[tuple[str, str], ...]
    fingerprint: str


def read(connection: sqlite3.Connection, path: Path | None) -> Old:
    """Read everything in a ledger of format 1 and check that nothing was changed; call it in a transaction."""
    store.check_schema(connection, path, _STATEMENTS)
    header = store.read_header(connection, path)
    chain = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).digest()
    charges = []
    for sequence, event, note, time, stored in connection.execute(
        "SELECT sequence, event, note, time, chain FROM charges LEFT JOIN kinds USING (kind) ORDER BY sequence"
    ):
        if not all(isinstance(word, str) for word in (event, note, time)):
            raise LedgerForged(f"ledger {path} was changed at row {sequence}: restore it from a copy")
        chain = hashlib.sha256(chain + json.dumps([sequence, event, note, time]).encode()).digest()
        charges.append((event, note))
        if sequence != len(charges) or chain != stored:
            raise LedgerForged(f"ledger {path} was changed at row {len(charges)}: restore it from a copy")
    issued = connection.execute("SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name = 'charges'").fetchone()
    if issued[0] != len(charges):
        raise LedgerRolledBack(f"ledger {path} lost rows {len(charges) + 1} to {issued[0]}: restore it from a copy")
    openings = tuple(str(time)[:16] for (time,) in connection.execute("SELECT time FROM openings ORDER BY incarnation"))
    return Old(header, openings, tuple(charges), chain.hex())


def modernise(connection: sqlite3.Connection, path: Path) -> None:
    """Turn a file of version 0.1 into today's format, completely or not at all."""
    with store.transaction(connection, path):
        old = read(connection, path)
        for table in ("header", "kinds", "charges", "openings"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("DELETE FROM sqlite_sequence")
        convert(connection, path, old)


def convert(connection: sqlite3.Connection, path: Path | None, old: Old) -> None:
    """Write the content of a ledger of version 0.1 in today's format; call it in a transaction."""
    header = {**old.header, "created": old.header.get("created", "")[:16] + "Z", "format": store.FORMAT}
    store.initialise(connection, header)
    chain = Chain(connection, path, header)
    chain.declare(ORIGIN, f"converted from format {FORMAT}, where its fingerprint was {old.fingerprint}")
    for time in old.openings:
        chain.declare(OPENING, f"{time}Z")
    for event, note in old.charges:
        chain.charge(event, note)
