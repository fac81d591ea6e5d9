"""Small ledgers with plans, without a model: what a run looks like to the vault."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sordino.accounting import plans
from sordino.accounting.events import GaussianDpEvent, PoissonSampledDpEvent
from sordino.accounting.ledger import Ledger
from sordino.vault import DatasetBudget, RunClaim, Vault, open_vault

SMALL = PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0))
LARGE = GaussianDpEvent(4.0)
HEADER = {"unit": "record", "adjacency": "add-or-remove-one"}


def make_vault(folder: Path, name: str = "vault.sqlite") -> Vault:
    return open_vault(folder / name, create=True)


def begin(path: Path | None, steps: int = 10, event: object = SMALL) -> Ledger:
    """A new ledger that plans so many events."""
    ledger = Ledger.in_memory(header=HEADER) if path is None else Ledger.create(path, header=HEADER)
    plans.declare(ledger, plans.Plan(((event, steps),)))  # type: ignore[arg-type]
    return ledger


def claim(vault: Vault, ledger: Ledger, name: str = "patients") -> RunClaim:
    """Its claim on the dataset's budget, reserved."""
    found = DatasetBudget(vault, name).claim()
    found.cover(ledger, partly=True)
    return found


def draw(claim: RunClaim, ledger: Ledger, steps: int, event: object = SMALL) -> None:
    """Draw as a run does: asked first, then charged."""
    for _ in range(steps):
        claim.require(ledger, event)  # type: ignore[arg-type]
        ledger.charge(event)  # type: ignore[arg-type]
        claim.note(ledger, event)  # type: ignore[arg-type]


def union(ledgers: Iterable[Ledger]) -> dict[str, int]:
    """All events of all ledgers."""
    from sordino.accounting.events import add_up, count_alike

    found: dict[str, int] = {}
    for ledger in ledgers:
        found = add_up(found, count_alike(ledger.events()))
    return found
