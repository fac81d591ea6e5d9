"""A key that signs every row of a ledger, so that nobody without it can write one that passes.

HMAC-SHA256 over the row's chain. Who verifies needs the same key that signs: keep it where the run's folder is not. The
key comes from the environment, as text in hexadecimal or base64: ``SORDINO_LEDGER_KEY``, or the name of a file that
holds it, ``SORDINO_LEDGER_KEY_FILE``. Make one with ``openssl rand -hex 32``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from pathlib import Path

from sordino.errors import InvalidInput

TEXT, FILE = "SORDINO_LEDGER_KEY", "SORDINO_LEDGER_KEY_FILE"
FEWEST_BYTES = 16


class Key:
    """A secret; its name, a digest that tells keys apart, is public and stands in the header of what it signs."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.name = self.sign(b"sordino ledger key")[:8].hex()

    def sign(self, chain: bytes) -> bytes:
        """The signature of a row whose chain this is."""
        return hmac.digest(self._secret, chain, hashlib.sha256)

    def signed(self, chain: bytes, signature: object) -> bool:
        """Whether this is that signature."""
        return isinstance(signature, bytes) and hmac.compare_digest(self.sign(chain), signature)

    def __repr__(self) -> str:
        return f"Key({self.name})"


def find_key() -> Key | None:
    """The key that the environment names, if it does."""
    text, file = os.environ.get(TEXT), os.environ.get(FILE)
    if text and file:
        raise InvalidInput(f"{TEXT} and {FILE} are both set: unset one of them")
    if file:
        return read_key(Path(file))
    return _key(text, TEXT) if text else None


def read_key(file: Path) -> Key:
    """The key in this file."""
    try:
        with file.open("rb") as opened:
            text = opened.read(10_000).decode("ascii", "replace")
    except OSError as error:
        raise InvalidInput(f"cannot read the key in {file}: {error.strerror}") from None
    return _key(text, str(file))


def _key(text: str, place: str) -> Key:
    text = "".join(text.split())
    secret = b""
    for decode in (bytes.fromhex, lambda word: base64.b64decode(word, validate=True)):
        try:
            secret = decode(text)
            break
        except (ValueError, binascii.Error):
            continue
    if len(secret) < FEWEST_BYTES:  # the text itself is in no message: it is a secret
        raise InvalidInput(
            f"the key in {place} must be at least {FEWEST_BYTES} bytes in hexadecimal or base64: "
            "make one with `openssl rand -hex 32`"
        )
    return Key(secret)
