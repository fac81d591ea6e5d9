"""Before training on a table: release what its schema leaves open, charged to the ledger of the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from sordino import checkpoint
from sordino.accounting import Ledger
from sordino.accounting.pricing import required_accountant
from sordino.books import require_fresh
from sordino.claims import announce_together, weaker
from sordino.cli.config import Config
from sordino.cli.reserving import Reserving
from sordino.data import tabular_release
from sordino.data.dataset import Data
from sordino.data.tabular_release import Plan
from sordino.data.tabular_schema import Number, Schema, Skip
from sordino.data.tabular_sheet import Sheet
from sordino.errors import BudgetExhausted, CheckpointError, InvalidInput
from sordino.noise import Secure, Seeded
from sordino.recipe import Recipe

LEDGER = "ledger.sqlite"
PREPARATION = "preparation.toml"
"""The configuration of a run whose table is being prepared; `config.toml` takes its place when that is done."""


def stand_in(schema: Schema, records: int) -> Data:
    """Random records of the shape that the real ones will about have: to try model and recipe before any is read."""
    columns = {
        name: Number(-1.0, 1.0) if column is None or not column.complete else column
        for name, column in schema.columns.items()
    }
    shape = Schema(columns, schema.classes or ("0", "1"))
    assert shape.classes is not None
    source = torch.Generator().manual_seed(0)
    inputs = torch.rand(records, shape.width, generator=source) * 2 - 1
    classes = torch.randint(len(shape.classes), (records,), generator=source)
    return Data("stand-in", TensorDataset(inputs, classes), TensorDataset(inputs[:0], classes[:0]), shape.classes)


def prepare(config: Config, sheet: Sheet, plan: Plan, directory: Path) -> Config:
    """The configuration with a complete schema. All that a run needs is on disk before anything is released (law 5).

    Killed on the way, it is prepared again: what was released before stays in the ledger, and both together must be
    within the budget. The complete schema is written at once, because what is lost would have to be paid for again.
    """
    recipe, schema = config.recipe, config.schema
    assert recipe is not None
    assert recipe.budget is not None
    assert schema is not None
    basis = weaker(recipe.basis, required_accountant(recipe.budget.accountant).basis)
    header = {
        "recipe": recipe.fingerprint(),
        "unit": "record",
        "adjacency": recipe.budget.adjacency,
        "basis": basis,
    }
    if not (directory / LEDGER).exists():
        require_fresh(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        config.write(directory, PREPARATION)
        checkpoint.write_durably(directory / "recipe.toml", recipe.to_toml().encode())
    except OSError as error:
        raise InvalidInput(f"cannot write to run directory {directory}: {error.strerror}") from error
    path = directory / LEDGER
    with Ledger.open(path) if path.exists() else Ledger.create(path, header=header) as ledger:
        _require_affordable(ledger, recipe, plan, directory)
        announce_together(ledger, recipe, plan.events())
        source = Secure() if config.run.seed is None else Seeded(config.run.seed, ledger.incarnation)
        complete = tabular_release.release(sheet.train, sheet.target, schema, plan, ledger, source)
    if all(isinstance(column, Skip) for column in complete.columns.values()):
        raise InvalidInput("no column could be told from the noise: give --schema or --bounds, or a larger epsilon")
    settled = replace(config, schema=complete)
    settled.write(directory)
    (directory / PREPARATION).unlink(missing_ok=True)
    return settled


def _require_affordable(ledger: Ledger, recipe: Recipe, plan: Plan, directory: Path) -> None:
    """Refuse a preparation that the budget cannot pay beside what earlier ones released."""
    theirs, ours = ledger.header.get("recipe"), recipe.fingerprint()
    if theirs != ours:
        raise CheckpointError(f"{directory} follows recipe {theirs}, not {ours}: its configuration was changed")
    spent = ledger.events()
    assert recipe.budget is not None
    if spent and not Reserving.beside(recipe.budget, spent).allows(plan.events()):
        raise BudgetExhausted(
            f"{directory} spent {len(ledger)} releases on a preparation that did not end, and another one would exceed "
            f"epsilon={recipe.budget.epsilon:g}: start a new run with --schema; what was spent adds to what it costs"
        )
