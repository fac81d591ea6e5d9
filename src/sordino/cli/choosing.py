"""Makes one complete configuration from what the user typed, a configuration file and the defaults, in this order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sordino import mechanisms
from sordino.accounting import Budget
from sordino.cli import lookup, own_recipes
from sordino.cli.config import Config, ModelChoice, name_classes, read_config
from sordino.cli.describing import require_kind
from sordino.cli.finetune import FinetuneFlags
from sordino.cli.options import choose_delta
from sordino.cli.own_recipes import OwnRecipe
from sordino.cli.terminal import caution, show_reading
from sordino.cli.train import Flags
from sordino.errors import InvalidInput
from sordino.lab.importing import call_recipe
from sordino.recipe import Recipe
from sordino.tables.dataset import Data
from sordino.tables.defaults import BENCHMARK, OPTIMIZERS, Defaults, choose_defaults
from sordino.tables.preparing import Reserving
from sordino.tables.reading import HELD_OUT_SHARE, DataChoice, Sheet, is_table, require_count
from sordino.tables.release import SHARE, ReleasePlan, plan_release
from sordino.tables.schema import Number, Schema, describe_header, read_schema

Bounds = tuple[float, float]
_PRICE = ("epsilon", "delta", "accountant", "adjacency", "batch_size", "epochs", "steps")
_SPELLED = ("header", "separator", "encoding", "decimal")
_BUDGET = ("epsilon", "delta", "accountant", "adjacency")


RUNNING = ("seed", "engine", "microbatch", "save_every", "dataset_budget", "augment", "mirror")
"""Options that belong to the configuration's table `run`."""


@dataclass(frozen=True, eq=False)
class Chosen:
    """A configuration, the records that it names, and the releases that encoding them needs."""

    config: Config
    records: Data | Sheet
    plan: ReleasePlan | None = None


def choose(flags: Flags) -> Chosen:
    """Read the records, and decide everything that is public about the run."""
    base = read_config(flags.config) if flags.config else Config()
    if flags.config is not None:
        named = base if flags.model is None else replace(base, model=ModelChoice())
        lookup.require_trusted(named, flags.trust_code, flags.config)
    data = choose_data(base.data, flags)
    records = load(data)
    count = require_count(data, records)
    data = replace(data, records=count)
    defaults = BENCHMARK if lookup.is_benchmark(data.source) else choose_defaults(records)
    if base.own is not None:
        base = replace(base, recipe=_call_own(base.own, count, defaults))
    config = Config(
        data=data,
        model=ModelChoice(flags.model) if flags.model else base.model,
        run=replace(base.run, **flags.given(*RUNNING)),
    )
    plan = None
    if isinstance(records, Sheet):
        records = records.take_parts(base.schema) if base.schema is not None else records
        records, schema = records.expand(_choose_schema(flags, base.schema, data, records))
        records.check(schema)
        share = SHARE if data.prepare is None else data.prepare
        shared = config.run.dataset_budget is not None
        plan = plan_release(schema, count, find_budget(base.recipe, flags, count), share, shared=shared)
        data = replace(data, prepare=share if plan else None, classes=None, bounds=None)  # the schema says everything
        config = replace(config, schema=schema, data=data)
    code = base.recipe_code if flags.recipe is None else flags.recipe if ":" in flags.recipe else None
    shaped = _shape_recipe(base.recipe, flags, count, defaults)
    recipe = calibrate(shaped, flags, count, plan)
    own = None if code is None else own_recipes.note(own_recipes.locate(code), recipe)
    return Chosen(replace(config, recipe=recipe, own=own), records, plan)


def _call_own(own: OwnRecipe, records: int, defaults: Defaults) -> Recipe:
    """Call the configuration's code for a recipe; its numbers are chosen again, except those that the file names."""
    if "noise_multiplier" in own.settings or "budget" in own.settings:
        return own_recipes.rebuild(own)
    return call_recipe(own.code, **_choose_size(own.settings, records, defaults))


def _choose_size(settings: dict[str, Any], records: int, defaults: Defaults) -> dict[str, Any]:
    usual = {"batch_size": defaults.batch_size(records), "epochs": defaults.epochs(records)}
    return {name: settings.get(name, value) for name, value in usual.items()}


def read_sheet(flags: Flags) -> Sheet:
    """Read the whole table that the user named."""
    choice = replace(choose_data(DataChoice(), flags), held_out=0.0)
    if not is_table(choice.source):
        raise InvalidInput(f"data={choice.source} is not a table: a schema describes columns, of a .csv or .tsv file")
    records = load(choice)
    assert isinstance(records, Sheet)
    return records


def load(choice: DataChoice) -> Data | Sheet:
    """Read the records, with a progress bar for a table."""
    with show_reading() as told:
        return lookup.load_records(choice, told)


def find_budget(recipe: Recipe | None, flags: Flags | FinetuneFlags, records: int) -> Budget | None:
    """Return what may be spent in all, or None if nobody said."""
    stated = recipe.budget if recipe is not None else None
    if stated is None and flags.epsilon is None:
        return None
    stated = stated or Budget(epsilon=1.0, delta=choose_delta(None, records))
    return replace(stated, **flags.given(*_BUDGET))


def choose_data(base: DataChoice, flags: Flags) -> DataChoice:
    """Choose the records that the user named, and how they are read and scaled."""
    choice = replace(base, **flags.given("target", "scale", "held_out", "prepare", "image_size", "grey", *_SPELLED))
    if flags.features is not None:
        choice = replace(choice, features=require_kind(flags.features))
    if flags.missing:
        choice = replace(choice, missing=tuple(flags.missing))
    if flags.data is not None:
        named = lookup.is_benchmark(flags.data)
        choice = replace(choice, source=flags.data if named else str(Path(flags.data).resolve()))
    if flags.classes is not None:
        given = flags.classes.strip()
        choice = replace(choice, classes=name_classes(int(given) if given.isdecimal() else given.split(",")))
    if flags.bounds:
        choice = replace(choice, bounds=parse_common_bounds(flags.bounds) or choice.bounds)
    if lookup.is_benchmark(choice.source):
        ignored = flags.given(
            "target", "schema", "scale", "bounds", "held_out", "classes", "prepare", "image_size", "grey"
        )
        if ignored:
            option = min(ignored).replace("_", "-")
            caution(f"--{option} is for files: {choice.source} comes scaled, with held-out records of its own")
    else:
        held_out = HELD_OUT_SHARE if choice.held_out is None else choice.held_out
        choice = replace(choice, held_out=held_out)
    if Path(choice.source).suffix == ".npz" and choice.scale is None and choice.bounds is None:
        caution(
            "inputs are used as they are: if they are far above or below 1, give --scale or --bounds, public numbers"
        )
    return choice


def _choose_schema(flags: Flags, base: Schema | None, choice: DataChoice, sheet: Sheet) -> Schema:
    """Choose everything that is public about the columns; the rest needs a release."""
    given = read_schema(flags.schema) if flags.schema is not None else base or Schema()
    numbers = {name: Number(*bounds) for name, bounds in parse_column_bounds(flags.bounds or ()).items()}
    given = given.with_columns(numbers)
    if choice.classes is not None:
        given = replace(given, classes=choice.classes)
    if unknown := next((name for name in given.columns if name not in sheet.train.columns), None):
        raise InvalidInput(f"the schema has a column {unknown!r}, the data has not: {sheet.train.suggest(unknown)}")
    return describe_header(given, list(sheet.train.columns), sheet.target, choice.bounds)


def parse_common_bounds(texts: Iterable[str]) -> Bounds | None:
    """Read the bounds of all numbers from ``LO,HI``; the last option counts."""
    common = [_parse_pair(text) for text in texts if "=" not in text]
    return common[-1] if common else None


def parse_column_bounds(texts: Iterable[str]) -> dict[str, Bounds]:
    """Read the bounds of single columns from ``NAME=LO:HI``."""
    pairs = (text.rpartition("=") for text in texts if "=" in text)
    return {name.strip(): _parse_pair(bounds, f"{name.strip()}=") for name, _, bounds in pairs}


def _parse_pair(text: str, whose: str = "") -> Bounds:
    try:
        low, high = (float(part) for part in text.replace(":", ",").split(","))
    except ValueError:
        raise InvalidInput(f"bounds={text!r} must be two numbers, such as 0,255, or a column's: age=0:120") from None
    if not (low < high and math.isfinite(high - low)):
        raise InvalidInput(f"bounds={whose}{low:g}:{high:g} must be finite, the smaller first: such as {whose}0:120")
    return low, high


def _shape_recipe(base: Recipe | None, flags: Flags, records: int, defaults: Defaults) -> Recipe:
    """Make the recipe, without its noise."""
    if base is None:
        base = _build_default(flags.recipe or "dpsgd", records, defaults)
    elif flags.recipe is not None:
        raise InvalidInput(f"recipe={flags.recipe!r} and the configuration's [recipe] are both given: use one of them")
    changes = flags.given("batch_size", "epochs", "steps", "clip", "noise_multiplier")
    if flags.epochs is not None and flags.steps is not None:
        raise InvalidInput(f"epochs={flags.epochs} and steps={flags.steps} are both given: use one of them")
    if flags.epochs is not None:
        changes["steps"] = None
    if flags.given(*_PRICE) and flags.noise_multiplier is None:
        changes["noise_multiplier"] = None  # the user asks for something other than what the file was calibrated for
    optimizer = OPTIMIZERS.get(flags.optimizer or "", base.optimizer)
    if flags.optimizer is not None:
        optimizer = replace(optimizer, kind=flags.optimizer)  # refuses an unknown one
    chosen = replace(optimizer, **flags.given("lr", "momentum"))
    return replace(base, **changes, optimizer=base.optimizer.adopt(chosen))


def _build_default(name: str, records: int, defaults: Defaults) -> Recipe:
    size = _choose_size({}, records, defaults)
    if ":" in name:
        return call_recipe(name, **size)  # the recipe's own choice of optimizer
    recipe = mechanisms.find(name).recipe(**size)
    optimizer = defaults.optimizer if recipe.optimizer.kind == "sgd" else OPTIMIZERS[recipe.optimizer.kind]
    return replace(recipe, optimizer=recipe.optimizer.adopt(optimizer))


def calibrate(recipe: Recipe, flags: Flags | FinetuneFlags, records: int, plan: ReleasePlan | None) -> Recipe:
    """Return the recipe with the noise that the user's budget pays for, in addition to the releases of `plan`."""
    budget = find_budget(recipe, flags, records)
    if budget is None:
        if lonely := flags.given("delta", "accountant", "adjacency"):
            raise InvalidInput(f"{min(lonely)} belongs to a budget: give --epsilon too")
        if recipe.noise_multiplier is None:
            raise InvalidInput("epsilon is missing: use --epsilon 3, or --noise-multiplier for a run without a budget")
        return recipe.for_records(records)
    if plan is None:
        return recipe.calibrate(budget, records=records)
    return Reserving.beside(budget, plan.events()).calibrate(recipe, records)
