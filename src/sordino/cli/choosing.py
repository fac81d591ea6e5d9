"""What the user typed, on top of a configuration file, on top of the defaults, as one complete configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sordino import recipes
from sordino.accounting import Budget
from sordino.cli import architectures, describing, sources
from sordino.cli.common import caution, delta_for
from sordino.cli.config import Config, DataChoice, ModelChoice, class_names, read
from sordino.cli.defaults import BENCHMARK, OPTIMIZERS, Defaults, defaults_for
from sordino.cli.reserving import Reserving
from sordino.data import tabular_release
from sordino.data.dataset import Data
from sordino.data.tabular_release import Plan
from sordino.data.tabular_sheet import Sheet
from sordino.errors import InvalidInput
from sordino.recipe import Recipe

_PRICE = ("epsilon", "delta", "accountant", "adjacency", "batch_size", "epochs", "steps")
_BUDGET = ("epsilon", "delta", "accountant", "adjacency")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The options of `sordino train`; None where the user said nothing."""

    data: str | None = None
    target: str | None = None
    schema: Path | None = None
    draft_schema: Path | None = None
    epsilon: float | None = None
    delta: float | None = None
    prepare: float | None = None
    epochs: float | None = None
    steps: int | None = None
    batch_size: int | None = None
    clip: float | None = None
    lr: float | None = None
    momentum: float | None = None
    optimizer: str | None = None
    recipe: str | None = None
    noise_multiplier: float | None = None
    accountant: str | None = None
    adjacency: str | None = None
    model: str | None = None
    held_out: float | None = None
    scale: float | None = None
    bounds: list[str] | None = None
    classes: str | None = None
    image_size: int | None = None
    grey: bool | None = None
    config: Path | None = None
    run: Path | None = None
    save_every: int | None = None
    seed: int | None = None
    engine: str | None = None
    microbatch: int | None = None
    trust_code: bool = False
    non_private_twin: bool = False
    json: bool = False

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the named options that the user gave."""
        assert set(names) <= {f.name for f in fields(self)}
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, eq=False)
class Chosen:
    """A configuration, the records that it names, and what has to be released before they can be encoded."""

    config: Config
    records: Data | Sheet
    plan: Plan | None = None


def choose(flags: Flags) -> Chosen:
    """Read the records, and settle everything that is public about the run."""
    base = read(flags.config) if flags.config else Config()
    if flags.config is not None and flags.model is None:
        architectures.require_trusted(base.model, flags.trust_code, flags.config)
    data = _data(base.data, flags)
    records = sources.load(data)
    count = sources.require_count(data, records)
    data = replace(data, records=count)
    config = Config(
        data=data,
        model=ModelChoice(flags.model) if flags.model else base.model,
        run=replace(base.run, **flags.given("seed", "engine", "microbatch", "save_every")),
    )
    plan = None
    if isinstance(records, Sheet):
        schema = describing.schema_for(flags, base.schema, data, records)
        records.check(schema)
        plan = tabular_release.plan(schema, count, budget_of(base.recipe, flags, count), _share(data))
        data = replace(
            data, prepare=_share(data) if plan else None, classes=None, bounds=None
        )  # the schema says it all
        config = replace(config, schema=schema, data=data)
    defaults = BENCHMARK if sources.is_benchmark(data.source) else defaults_for(records)
    shaped = _shaped(base.recipe, flags, count, defaults)
    return Chosen(replace(config, recipe=_calibrated(shaped, flags, count, plan)), records, plan)


def read_sheet(flags: Flags) -> Sheet:
    """The table that the user named, all of it."""
    choice = replace(_data(DataChoice(), flags), held_out=0.0)
    if not sources.is_table(choice.source):
        raise InvalidInput(f"data={choice.source} is no table: a schema describes the columns of a .csv or .tsv file")
    records = sources.load(choice)
    assert isinstance(records, Sheet)
    return records


def budget_of(recipe: Recipe | None, flags: Flags, records: int) -> Budget | None:
    """What may be spent in all, or None where nobody said so."""
    stated = recipe.budget if recipe is not None else None
    if stated is None and flags.epsilon is None:
        return None
    stated = stated or Budget(epsilon=1.0, delta=delta_for(None, records))
    return replace(stated, **flags.given(*_BUDGET))


def _share(choice: DataChoice) -> float:
    return tabular_release.SHARE if choice.prepare is None else choice.prepare


def _data(base: DataChoice, flags: Flags) -> DataChoice:
    choice = replace(base, **flags.given("target", "scale", "held_out", "prepare", "image_size", "grey"))
    if flags.data is not None:
        named = sources.is_benchmark(flags.data)
        choice = replace(choice, source=flags.data if named else str(Path(flags.data).resolve()))
    if flags.classes is not None:
        given = flags.classes.strip()
        choice = replace(choice, classes=class_names(int(given) if given.isdecimal() else given.split(",")))
    if flags.bounds:
        choice = replace(choice, bounds=describing.common_bounds(flags.bounds) or choice.bounds)
    if sources.is_benchmark(choice.source):
        ignored = flags.given(
            "target", "schema", "scale", "bounds", "held_out", "classes", "prepare", "image_size", "grey"
        )
        if ignored:
            option = min(ignored).replace("_", "-")
            caution(f"--{option} is for files: {choice.source} comes scaled, with held-out records of its own")
    else:
        held_out = sources.HELD_OUT_SHARE if choice.held_out is None else choice.held_out
        choice = replace(choice, held_out=held_out)
    if Path(choice.source).suffix == ".npz" and choice.scale is None and choice.bounds is None:
        caution(
            "inputs are used as they are: if they are far from the size of 1, give --scale or --bounds, public numbers"
        )
    return choice


def _shaped(base: Recipe | None, flags: Flags, records: int, defaults: Defaults) -> Recipe:
    """The recipe before its noise is known."""
    if base is None:
        base = _default(flags.recipe or "dpsgd", records, defaults)
    elif flags.recipe is not None:
        raise InvalidInput(f"recipe={flags.recipe!r} and the configuration's [recipe] are both given: use one of them")
    changes = flags.given("batch_size", "epochs", "steps", "clip", "noise_multiplier")
    if flags.epochs is not None and flags.steps is not None:
        raise InvalidInput(f"epochs={flags.epochs} and steps={flags.steps} are both given: use one of them")
    if flags.epochs is not None:
        changes["steps"] = None
    if flags.given(*_PRICE) and flags.noise_multiplier is None:
        changes["noise_multiplier"] = None  # what the file was calibrated for is no longer what is asked for
    optimizer = OPTIMIZERS.get(flags.optimizer or "", base.optimizer)
    if flags.optimizer is not None:
        optimizer = replace(optimizer, kind=flags.optimizer)  # an unknown one is refused here
    return replace(base, **changes, optimizer=replace(optimizer, **flags.given("lr", "momentum")))


def _default(name: str, records: int, defaults: Defaults) -> Recipe:
    if name.replace("-", "_") not in recipes.__all__:
        raise InvalidInput(f"recipe={name!r} must be one of {', '.join(recipes.__all__)}")
    batch_size = defaults.batch_size(records)
    recipe: Recipe = getattr(recipes, name.replace("-", "_"))(batch_size=batch_size, epochs=defaults.epochs(records))
    optimizer = defaults.optimizer if recipe.optimizer.kind == "sgd" else OPTIMIZERS[recipe.optimizer.kind]
    return replace(recipe, optimizer=optimizer)


def _calibrated(recipe: Recipe, flags: Flags, records: int, plan: Plan | None) -> Recipe:
    budget = budget_of(recipe, flags, records)
    if budget is None:
        if lonely := flags.given("delta", "accountant", "adjacency"):
            raise InvalidInput(f"{min(lonely)} belongs to a budget: give --epsilon too")
        if recipe.noise_multiplier is None:
            raise InvalidInput("epsilon is missing: use --epsilon 3, or --noise-multiplier for a run without a budget")
        return recipe.for_records(records)
    if plan is None:
        return recipe.calibrate(budget, records=records)
    reserving = Reserving.beside(budget, plan.events())
    return reserving.calibrate(recipe, records)
