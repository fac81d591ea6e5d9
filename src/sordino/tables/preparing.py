"""Before training on a table: draft a schema, and release what a schema leaves open, charged to the run's ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tomli_w
import torch
from torch.utils.data import TensorDataset

from sordino.accounting import Budget, Ledger
from sordino.accounting.events import DpEvent, Events
from sordino.accounting.pricing import epsilon, require_accountant
from sordino.books import LEDGER
from sordino.errors import BudgetExhausted, CheckpointError, InvalidInput, LostInNoise
from sordino.noise import Secure, Seeded
from sordino.recipe import Recipe
from sordino.run import announce_together, weaken
from sordino.tables.dataset import Data
from sordino.tables.reading import Sheet
from sordino.tables.release import ReleasePlan, count_bins, count_different, infer_column, release, tell_spent
from sordino.tables.schema import Column, Number, Schema, Skip, describe_header
from sordino.tables.table import Table
from sordino.vault.claims import DatasetBudget

_DRAFT = """\
# What the columns mean. Everything in this file must be public: correct it, do not copy extremes from the records.
# The kinds were guessed from the records. A number without low and high has its range released with noise,
# at a share of epsilon; a category may list its values = ["a", "b"]; kind = "skip" leaves a column out.
# Add classes = ["no", "yes"] on top, or have the names released with noise too.

"""


@dataclass(frozen=True)
class Reserving(Budget):
    """A budget with a reserved part, which calibration does not use.

    Everything is priced together with the `reserved` events, so all of it stays within ε by one composition.
    """

    reserved: tuple[tuple[DpEvent, int], ...] = ()

    @classmethod
    def beside(cls, budget: Budget, reserved: Events) -> Reserving:
        """Return the same budget, which must pay for these events too."""
        return cls(budget.epsilon, budget.delta, budget.accountant, budget.adjacency, tuple(reserved))

    def price(self, events: Events) -> float:
        return epsilon([*self.reserved, *events], self.delta, self.accountant, self.adjacency)

    def calibrate(self, recipe: Recipe, records: int) -> Recipe:
        """Return `recipe` with the noise that this budget pays for beside the reserved part."""
        calibrated = recipe.calibrate(self, records=records)
        plain = Budget(self.epsilon, self.delta, self.accountant, self.adjacency)
        if calibrated.rdp_filter is not None or not self.allows(calibrated.plan()):
            raise InvalidInput(
                f"recipe={recipe.name!r} cannot leave a part of its budget to the release of ranges and classes: "
                "give --schema, or --bounds and --classes, or use another recipe"
            )
        return replace(calibrated, budget=plain)


def draft_schema(table: Table, target: str, path: Path) -> None:
    """Write a schema to start from: only kinds, guessed for the holder of the records, and none of their numbers."""
    header = describe_header(Schema(), list(table.columns), target, None)
    kinds = {name: column or _guess(table.columns[name]) for name, column in header.columns.items()}
    drafted = Schema(kinds).to_table()
    for column in drafted["columns"].values():
        column.pop("buckets", None)  # the default, which a reader might take for a count
    text = _DRAFT + tomli_w.dumps(drafted)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InvalidInput(f"{path} exists already: choose another file for the draft") from None
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}") from None


def _guess(cells: Sequence[str]) -> Column:
    found = infer_column(count_bins(cells), count_different(cells), 1e-9, len(cells), None)
    # Only the kind: a range or a number of buckets could reveal a single record.
    return found if isinstance(found, Skip) else type(found)()


def invent_records(schema: Schema, records: int) -> Data:
    """Make random records of about the real ones' shape, to try model and recipe before any record is read."""
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


def complete_schema(
    sheet: Sheet,
    schema: Schema,
    plan: ReleasePlan,
    recipe: Recipe,
    directory: Path,
    seed: int | None,
    budget: DatasetBudget | None = None,
) -> Schema:
    """Complete `schema` with everything that the plan releases, paid from the ledger of the run in `directory`.

    A run that was killed meanwhile is prepared again. Its earlier releases stay in the ledger, and both together must
    be within the budget. These releases and those of the training must be within the dataset's `budget`.
    """
    assert recipe.budget is not None
    header = {
        "recipe": recipe.fingerprint(),
        "unit": "record",
        "adjacency": recipe.budget.adjacency,
        "basis": weaken(recipe.basis, require_accountant(recipe.budget.accountant).basis),
    }
    path = directory / LEDGER
    with Ledger.open(path) if path.exists() else Ledger.create(path, header=header) as ledger:
        _require_affordable(ledger, recipe, plan, directory)
        announce_together(ledger, recipe, plan.events())
        if budget is not None:
            budget.claim(basis=recipe.basis, repeatable=seed is not None).cover(ledger)
        source = Secure() if seed is None else Seeded(seed, ledger.incarnation)
        try:
            complete = release(sheet.train, sheet.target, schema, plan, ledger, source)
            if all(isinstance(column, Skip) for column in complete.columns.values()):
                raise LostInNoise(
                    "no column could be told from the noise: give --schema or --bounds, or a larger epsilon"
                )
        except LostInNoise as lost:
            raise tell_spent(lost, ledger, recipe.budget) from None
    return complete


def _require_affordable(ledger: Ledger, recipe: Recipe, plan: ReleasePlan, directory: Path) -> None:
    """Refuse a preparation that the budget cannot pay for, after what earlier ones released."""
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
