"""The vault: one budget per dataset, across runs, people and machines.

A dataset's budget is a name, ε and δ, the unit that is protected, an owner and a rule of composition. Runs reserve what
they may spend before they spend it, and return what they did not use. The vault is one SQLite file, or a PostgreSQL
database. Nothing in this package imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from sordino.vault.claims import BookedEvents, DatasetBudget, RunClaim, settle
from sordino.vault.composing import BudgetRule
from sordino.vault.history import Entry
from sordino.vault.state import DatasetState, Holding
from sordino.vault.vault import Vault

__all__ = [
    "BookedEvents",
    "BudgetRule",
    "DatasetBudget",
    "DatasetState",
    "Entry",
    "Holding",
    "RunClaim",
    "Vault",
    "open_budget",
    "open_vault",
    "settle",
]

PLACE = "SORDINO_VAULT"
"""The variable that names the vault: a file, or an address that begins with postgresql://."""
DEFAULT = Path(".sordino") / "vault.sqlite"
"""The default, in the user's home directory."""


def open_vault(place: str | Path | None = None, *, create: bool = False) -> Vault:
    """Open the vault at `place`, a file or ``postgresql://...``; by default what SORDINO_VAULT names, or your own file.

    `create` makes it if there is none.
    """
    where = str(place or os.environ.get(PLACE) or Path.home() / DEFAULT)
    if where.startswith(("postgresql://", "postgres://")):
        from sordino.vault.postgres import PostgresStore

        return Vault(PostgresStore(where, create=create))
    from sordino.vault.sqlite import SqliteStore

    return Vault(SqliteStore(Path(where), create=create))


def open_budget(name: str, place: str | Path | None = None) -> DatasetBudget:
    """Return the budget of the dataset `name`, for `Private(..., vault=...)`."""
    vault = open_vault(place)
    vault.state(name)  # refuses an unknown name
    vault.store.release()
    return DatasetBudget(vault, name)
