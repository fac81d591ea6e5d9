"""An entry of the vault's history: one line about one dataset, linked to the one before, and signed if there is a key.

``chain_n = SHA-256(chain_(n-1) + text_n)``, where the text is everything else in the entry, one field on each line, and
``chain_0`` the digest of the dataset's name. PostgreSQL computes the same in the database, so people who may add
entries there can neither choose the chain nor sign.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sordino.errors import InvalidInput, VaultForged

CREATE, RAISE, GRANT, REVOKE, CLOSE = "create", "raise", "grant", "revoke", "close"
RESERVE, SETTLE, WRITE_OFF = "reserve", "settle", "write-off"
OWNERS = (RAISE, GRANT, REVOKE, CLOSE, WRITE_OFF)
"""What only the owner of a dataset may do."""
RECEIPT = "sordino-vault-receipt-1"
_NAME = re.compile(r"(?!-)[\w.@+-]+( [\w.@+-]+)*")
_MOST_LETTERS = 100
_FORM = re.compile(RECEIPT + r" (\S+) (\d{1,15}) ([0-9a-f]{64}) ([0-9a-f]{64}|-)")


@dataclass(frozen=True)
class Draft:
    """What a client wants to add; number, person, time, chain and signature are the store's."""

    dataset: str
    kind: str
    run: str
    cost: str
    nonce: str
    content: str

    @classmethod
    def write(cls, dataset: str, kind: str, content: Mapping[str, Any], *, run: str = "", cost: float = 0.0) -> Draft:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return cls(dataset, kind, run, repr(float(cost)), uuid.uuid4().hex, text)


@dataclass(frozen=True)
class Entry:
    """One line of a dataset's history."""

    dataset: str
    number: int
    kind: str
    run: str
    person: str
    at: str
    cost: str
    nonce: str
    content: str
    chain: bytes
    signature: bytes

    @property
    def said(self) -> dict[str, Any]:
        """Return the content as plain data."""
        try:
            said = json.loads(self.content)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise VaultForged(f"entry {self.number} of {self.dataset} cannot be read: restore the vault from a copy")
        return said

    def link(self, before: bytes) -> bytes:
        """Compute the chain of this entry, after one whose chain was `before`."""
        fields = (self.dataset, self.number, self.kind, self.run, self.person, self.at, self.cost, self.nonce)
        return hashlib.sha256(before + "\n".join(map(str, (*fields, self.content))).encode()).digest()

    @property
    def receipt(self) -> str:
        """The receipt that the entry's author keeps: number and chain, signed; it says nothing about the records."""
        return f"{RECEIPT} {self.dataset.replace(' ', '%20')} {self.number} {self.chain.hex()} " + (
            self.signature.hex() or "-"
        )


def root(dataset: str) -> bytes:
    """Return the beginning of a dataset's chain."""
    return hashlib.sha256(f"sordino-vault-1\n{dataset}".encode()).digest()


def parse_receipt(text: str) -> tuple[str, int, bytes, bytes]:
    """Read dataset, number, chain and signature from what `Entry.receipt` wrote."""
    said = _FORM.fullmatch(text.strip())
    if said is None:
        raise InvalidInput(f"receipt={text[:40]!r} is not a receipt: give the line `{RECEIPT} ...` of a reservation")
    signature = b"" if said[4] == "-" else bytes.fromhex(said[4])
    return said[1].replace("%20", " "), int(said[2]), bytes.fromhex(said[3]), signature


def require_name(name: str, what: str) -> str:
    """Return `name` if it is a valid name: a line of text that every store and page can hold, spelled in one way.

    Names that look alike would be two budgets for the same records: blanks are single and inside, letters composed.
    """
    if len(name) > _MOST_LETTERS or not _NAME.fullmatch(name) or unicodedata.normalize("NFKC", name) != name:
        raise InvalidInput(
            f"{what}={name[:40]!r} must be 1 to {_MOST_LETTERS} letters, digits or any of . _ @ + -, with single blanks"
        )
    return name


def now() -> str:
    """Return the time to the minute, for people; the entries' numbers give their order, whatever a clock says."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
