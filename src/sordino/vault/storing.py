"""Where a vault is kept: one protocol for every kind of store. A store keeps entries, and the vault interprets them."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sordino.errors import VaultError
from sordino.vault.history import Draft, Entry


class ConnectionLost(VaultError):
    """The store went away in the middle of a change: look up whether the change happened."""


class Own(threading.local):
    """The connection of this thread, in this process: neither another thread nor a forked process may use it."""

    def __init__(self) -> None:
        self._process, self._connection = 0, None

    def find(self) -> Any:
        """Return the connection, if there is one."""
        return self._connection if self._process == os.getpid() else None

    def keep(self, connection: Any) -> None:
        """Use this connection from now on; one that another process opened stays with that process, and open."""
        self._inherited = None if self._process == os.getpid() else self._connection
        self._process, self._connection = os.getpid(), connection


class Transaction(Protocol):
    """One look at the store, or one change of it, which happens as a whole or not at all."""

    def datasets(self) -> list[str]:
        """Return the names of the datasets that this person may see, sorted."""
        ...

    def entries(self, dataset: str, since: int = 1) -> list[Entry]:
        """Return the entries of a dataset from number `since` on, in order."""
        ...

    def append(self, draft: Draft) -> Entry:
        """Add an entry; on disk when the transaction ends. Only while writing."""
        ...


class Store(Protocol):
    """A place for entries that only ever grow."""

    place: str
    """The store's name for people; never with a password."""

    @property
    def person(self) -> str:
        """Who is at work; in PostgreSQL the role that logged in."""
        ...

    def reading(self) -> AbstractContextManager[Transaction]:
        """One state of the store."""
        ...

    def writing(self, dataset: str) -> AbstractContextManager[Transaction]:
        """Do the same while no one else changes this dataset; committed durably when the block ends."""
        ...

    def check(self, chain: bytes, signature: bytes) -> bool | None:
        """Whether the signature is right; None if that cannot be checked here."""
        ...

    def find_loss(self) -> str:
        """Say in a sentence what the store itself knows to be missing; empty if nothing is."""
        ...

    def release(self) -> None:
        """Let the connection go until it is needed again."""
        ...
