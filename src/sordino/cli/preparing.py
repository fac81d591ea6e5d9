"""Before training on a table: release what its schema leaves open, charged to the ledger of the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from sordino import checkpoint
from sordino.accounting import Ledger
from sordino.accounting.pricing import required_accountant
from sordino.claims import announce_together, weaker
from sordino.cli.config import Config
from sordino.data import Data, tabular_release
from sordino.data.tabular_release import Plan
from sordino.data.tabular_schema import Number, Schema, Skip
from sordino.data.tabular_sheet import Sheet
from sordino.errors import InvalidInput
from sordino.noise import Secure, Seeded

LEDGER = "ledger.sqlite"


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
    """The configuration with a complete schema. Ledger and recipe are on disk before anything is released (law 5)."""
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
    try:
        directory.mkdir(parents=True, exist_ok=True)
        checkpoint.write_durably(directory / "recipe.toml", recipe.to_toml().encode())
    except OSError as error:
        raise InvalidInput(f"cannot write to run directory {directory}: {error.strerror}") from error
    with Ledger.create(directory / LEDGER, header=header) as ledger:
        announce_together(ledger, recipe, plan.events())
        source = Secure() if config.run.seed is None else Seeded(config.run.seed, ledger.incarnation)
        complete = tabular_release.release(sheet.train, sheet.target, schema, plan, ledger, source)
    if all(isinstance(column, Skip) for column in complete.columns.values()):
        raise InvalidInput("no column could be told from the noise: give --schema or --bounds, or a larger epsilon")
    return replace(config, schema=complete)
