"""The secret state of a search on disk, so that a killed search can continue: sealed, and removed at its end.

How many trials there are, which are done and which is best so far must survive a kill, and must stay secret: anyone who
reads them learns what the guarantee assumes to be unknown. They are in one file in the run's folder, encrypted with
AES-GCM and readable only by its owner. The key is another file, of 32 bytes. It is in memory if the system has a file
system for that (`XDG_RUNTIME_DIR`, /dev/shm), so that it is on no disk and in no backup; otherwise it is beside the
state. At the end both are removed, the key first, and without the key the state is noise. After a restart of the
machine, a search whose key was in memory cannot continue, and what it spent stays spent (ADR 29). The folder's path is
sealed too: a copy, in which the trials could be repeated, cannot continue.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sordino.accounting.ledger import Ledger
from sordino.books import LEDGER
from sordino.errors import BudgetExhausted, InvalidInput

STATE, KEY = "search.sealed", "search.key"
LEAST = 2**20
"""At least this many bytes are sealed, and then a power of two: the exact size would tell the number of trials."""
_NONCE, _LENGTH = 12, 8


class Seal:
    """The sealed state of the search in `folder`."""

    def __init__(self, folder: Path, keys: Path | None = None) -> None:
        self.path = folder / STATE
        self._home = str(folder.resolve()).encode()
        name = hashlib.sha256(self._home).hexdigest()[:16]
        self.key_path = folder / KEY if keys is None else keys / f"sordino-{name}.key"

    def __bool__(self) -> bool:
        return self.path.exists()

    def write(self, content: bytes) -> None:
        """Seal `content` in place of the sealed content before: after a crash the file holds one or the other."""
        nonce, content = secrets.token_bytes(_NONCE), len(self._home).to_bytes(_LENGTH, "big") + self._home + content
        size = max(LEAST, 1 << (len(content) + _LENGTH - 1).bit_length())
        padded = len(content).to_bytes(_LENGTH, "big") + content
        sealed = nonce + AESGCM(self._find_key(make=True)).encrypt(nonce, padded.ljust(size, b"\0"), None)
        _write_secretly(self.path, sealed)

    def read(self) -> bytes:
        """Read what was sealed last."""
        sealed = self.path.read_bytes()
        try:
            padded = AESGCM(self._find_key(make=False)).decrypt(sealed[:_NONCE], sealed[_NONCE:], None)
        except InvalidTag:
            raise _lost(self.path, "its key is another one") from None
        home, content = _split(_split(padded)[0])
        if home != self._home:
            raise _lost(self.path, "it was begun in another folder, of which this is a copy")
        return content

    def destroy(self) -> None:
        """Remove key and state: any remains of the state on the disk are noise."""
        with suppress(OSError), self.key_path.open("r+b") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
        for path in (self.key_path, self.path, _beside(self.key_path), _beside(self.path)):
            path.unlink(missing_ok=True)

    def _find_key(self, *, make: bool) -> bytes:
        if make and not self.key_path.exists():
            _write_secretly(self.key_path, secrets.token_bytes(32))
        try:
            return self.key_path.read_bytes()
        except OSError:
            raise _lost(self.path, f"its key {self.key_path} is gone") from None


def find_memory() -> Path | None:
    """Find a folder that is kept in memory and not on a disk, if this system has one."""
    for name in (os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm"):
        if name and Path(name).is_dir() and os.access(name, os.W_OK):
            return Path(name)
    return None


def hide_times(folder: Path) -> None:
    """Give `folder` and every file in it the time at which its ledger was begun, to the minute.

    The time between the first file and the last would tell how long the search took, and so how many trials it made.
    (The file system's own record of the last change of any kind cannot be changed.)
    """
    with Ledger.read(folder / LEDGER) as ledger:
        begun = datetime.strptime(ledger.header["created"], "%Y-%m-%dT%H:%MZ").replace(tzinfo=UTC).timestamp()
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (begun, begun))


def _split(packed: bytes) -> tuple[bytes, bytes]:
    """Split a text after the length that it begins with, and return it and the rest."""
    end = _LENGTH + int.from_bytes(packed[:_LENGTH], "big")
    return packed[_LENGTH:end], packed[end:]


def _beside(path: Path) -> Path:
    """Return where a file is written before it takes its place; a kill leaves it there."""
    return path.with_name(path.name + ".partial")


def _write_secretly(path: Path, content: bytes) -> None:
    beside = _beside(path)
    try:
        beside.unlink(missing_ok=True)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}") from None


def _lost(path: Path, why: str) -> BudgetExhausted:
    return BudgetExhausted(
        f"the search in {path.parent} cannot go on, {why}: what it spent stays spent, and a new search costs its "
        "epsilon again"
    )
