"""The errors that Sordino raises: one line each, naming the thing, its value, its bound and the way out."""

from __future__ import annotations

import traceback
from pathlib import Path


class SordinoError(Exception):
    """Base class of every error that Sordino raises on purpose."""


class InvalidInput(SordinoError, ValueError):
    """The user gave something that cannot be used; nothing was spent."""


class UnsupportedModel(SordinoError, ValueError):
    """The model or the loss breaks an assumption of per-example privacy; nothing was spent."""


class BudgetExhausted(SordinoError):
    """The next release would exceed the budget, so it was refused before it ran."""


class LostInNoise(SordinoError):
    """What was released is not enough to continue with. It was spent; the folder with the ledger stays usable."""


class LedgerError(SordinoError):
    """The ledger cannot be opened, belongs to another run, or is being written by someone else."""


class LedgerForged(LedgerError):
    """The ledger was changed by something other than Sordino, or it was not signed with the key."""


class LedgerRolledBack(LedgerError):
    """Another file knows of more events than the ledger holds: what was spent is unknown."""


class LedgerForked(LedgerError):
    """Another file saw a different history from the ledger's: two copies of it have diverged."""


class VaultError(SordinoError):
    """The vault cannot be reached, or this person may not do that there; nothing was released."""


class VaultForged(VaultError):
    """The vault's history was changed by something other than Sordino, lost entries, or did not issue a receipt."""


class CheckpointError(SordinoError):
    """No readable checkpoint, or one that does not belong to this run."""


def locate_error(error: BaseException) -> str:
    """Describe a foreign error only by its type and place: its message may reveal labels, values and sizes (law 7)."""
    places = traceback.extract_tb(error.__traceback__)
    place = f"{Path(places[-1].filename).name}:{places[-1].lineno}" if places else "an unknown place"
    return f"{type(error).__name__} in {place}"
