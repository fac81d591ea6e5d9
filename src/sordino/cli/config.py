"""The configuration of a run, as data: enough to build it again from this and the records alone.

::

    [data]
    source = "patients.csv"     # or "digits", "mnist", ...; a relative path starts at the file that names it
    target = "outcome"
    bounds = [0.0, 100.0]       # public
    held_out = 0.2

    [schema]                    # of a table (sordino.tables.schema); what it leaves open is released with noise
    classes = ["no", "yes"]
    [schema.columns.age]
    kind = "number"

    [model]
    name = "mlp"                # the other keys are its options
    hidden = 32

    [recipe]                    # as Recipe.to_toml writes it
    batch_size = 256
    epochs = 20.0
    [recipe.budget]
    epsilon = 3.0
    delta = 1e-5

    [run]
    engine = "auto"

Fine-tuning has one more table (`sordino.finetuning.choice`), and its model is a folder.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from sordino.books import write_durably
from sordino.cli.own_recipes import OwnRecipe, parse_own
from sordino.errors import InvalidInput
from sordino.finetuning.choice import TextChoice
from sordino.lab.data import LOADERS
from sordino.names import parse_toml, read_toml
from sordino.recipe import Recipe
from sordino.report.run_folder import Folder
from sordino.tables.reading import MOST_CLASSES, DataChoice
from sordino.tables.schema import Schema, parse_schema

FILE = "config.toml"
MOST_STEPS = 10_000_000
_NAMES = ("data", "schema", "model", "recipe", "learning", "run", "finetuning", "preset")
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "tuple[float, float]": (list,),
    "tuple[str, ...]": (list, int),
}
_Table = TypeVar("_Table")


@dataclass(frozen=True)
class ModelChoice:
    """An architecture by name or as ``file.py:function``, and its options."""

    name: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunChoice:
    """How to run it. Only `seed`, which makes a run repeatable, and views of images change what is learnt.

    `augment` is how many random views of an image are averaged; with `mirror` some are mirrored.
    """

    seed: int | None = None
    engine: str = "auto"
    microbatch: int | None = None
    save_every: int | None = None
    dataset_budget: str | None = None
    augment: int | None = None
    mirror: bool | None = None

    def __post_init__(self) -> None:
        if self.mirror is not None and self.augment is None:
            raise InvalidInput(
                "mirror is how views of an image are made: give --augment with their number, or leave it"
            )
        if self.save_every is not None and self.save_every < 1:
            raise InvalidInput(f"save-every={self.save_every} must be >= 1: it counts the steps between checkpoints")
        if self.seed is not None and not abs(self.seed) < 2**63:
            raise InvalidInput(f"seed={str(self.seed)[:30]} must lie within 64 bits")


@dataclass(frozen=True)
class LearningChoice:
    """How to learn a table if no network is asked for (`sordino.tables.training.Wishes`)."""

    epsilon: float
    delta: float
    task: str | None = None
    bounds: tuple[float, float] | None = None
    metrics_epsilon: float | None = None
    unit: str | None = None
    per_unit: int | None = None
    accountant: str = "pld"
    adjacency: str = "add-or-remove-one"


@dataclass(frozen=True)
class Config:
    """The tables of a configuration. For a table of records it has a schema, and a recipe or `learning`."""

    data: DataChoice = field(default_factory=DataChoice)
    schema: Schema | None = None
    model: ModelChoice = field(default_factory=ModelChoice)
    recipe: Recipe | None = None
    run: RunChoice = field(default_factory=RunChoice)
    learning: LearningChoice | None = None
    finetuning: TextChoice | None = None
    preset: dict[str, Any] | None = None
    """A case of the laboratory (`sordino.lab.experiments.Case`) that a run follows instead of a recipe."""
    own: OwnRecipe | None = None
    """The user's function that makes the recipe; if a file names it, `recipe` is None until it may be run."""

    @property
    def recipe_code(self) -> str | None:
        """Return the user's function that makes the recipe, if there is one."""
        return None if self.own is None else self.own.code

    def to_toml(self) -> str:
        """Return a TOML document that `read_config` turns into an equal configuration."""
        tables: dict[str, Any] = {"data": _list_given(self.data)}
        if self.schema is not None:
            tables["schema"] = self.schema.to_table()
        tables["model"] = {"name": self.model.name, **self.model.options} if self.model.name else {}
        if self.own is not None:
            tables["recipe"] = self.own.to_table()
        elif self.recipe is not None:
            tables["recipe"] = tomllib.loads(self.recipe.to_toml())
        if self.learning is not None:
            tables["learning"] = _list_given(self.learning)
        if self.preset is not None:
            tables["preset"] = {key: value for key, value in self.preset.items() if value is not None}
        tables["run"] = _list_given(self.run)
        if self.finetuning is not None:
            tables["finetuning"] = _list_given(self.finetuning)
        return tomli_w.dumps(tables)

    def write(self, directory: Path, name: str = FILE) -> None:
        """Keep it beside the run that follows it."""
        try:
            write_durably(directory / name, self.to_toml().encode())
        except OSError as error:
            raise InvalidInput(f"cannot write to run directory {directory}: {name}: {error.strerror}") from error


def read_config(path: Path) -> Config:
    """Read the configuration in a file; an error names the mistake in one line."""
    return _parse(read_toml(path), path)


def read_run_config(directory: Path, name: str = FILE) -> Config | None:
    """Read the configuration in a run's folder, which may come from anybody; None if there is none."""
    text = Folder(directory).text(name)
    path = directory / name
    return None if text is None else _parse(parse_toml(text, f"configuration {path}"), path)


def _parse(tables: dict[str, Any], path: Path) -> Config:
    if unknown := sorted(set(tables) - set(_NAMES)):
        known = ", ".join(_NAMES)
        raise InvalidInput(f"configuration {path} has no table [{unknown[0]}]: it has {known}")
    if wrong := [name for name, table in tables.items() if not isinstance(table, dict)]:
        raise InvalidInput(f"configuration {path}: {wrong[0]} must be a table, [{wrong[0]}]")
    recipe = tables.get("recipe")
    own = parse_own(recipe, path) if recipe is not None and "code" in recipe else None
    return Config(
        data=_parse_data(tables.get("data", {}), path.parent),
        schema=parse_schema(tables["schema"]) if "schema" in tables else None,
        model=_parse_model(tables.get("model", {})),
        recipe=_parse_recipe(recipe) if recipe is not None and own is None else None,
        own=own,
        preset=tables.get("preset"),
        run=_fill(RunChoice, "run", tables.get("run", {})),
        finetuning=_fill(TextChoice, "finetuning", tables["finetuning"]) if "finetuning" in tables else None,
        learning=_parse_learning(tables["learning"]) if "learning" in tables else None,
    )


def _parse_learning(table: dict[str, Any]) -> LearningChoice:
    if missing := sorted({"epsilon", "delta"} - set(table)):
        raise InvalidInput(f"table [learning] has no {missing[0]}: it says what may be spent")
    choice = _fill(LearningChoice, "learning", table)
    return choice if choice.bounds is None else dataclasses.replace(choice, bounds=_pair(choice.bounds))


def _pair(bounds: Any) -> tuple[float, float]:
    if len(bounds) != 2 or not all(isinstance(bound, int | float) for bound in bounds):
        raise InvalidInput(f"bounds={list(bounds)} must be two numbers, such as [0.0, 255.0]")
    return bounds[0], bounds[1]


def _parse_data(table: dict[str, Any], directory: Path) -> DataChoice:
    choice = _fill(DataChoice, "data", table)
    if choice.bounds is not None:
        choice = dataclasses.replace(choice, bounds=_pair(choice.bounds))
    if choice.missing is not None:
        choice = dataclasses.replace(choice, missing=tuple(map(str, choice.missing)))
    if choice.classes is not None:
        choice = dataclasses.replace(choice, classes=name_classes(choice.classes))
    return dataclasses.replace(choice, source=_locate(choice.source, directory))


def name_classes(given: int | Iterable[Any]) -> tuple[str, ...]:
    """Return the classes' names, or 0, 1, 2, ... if only their number is given."""
    # one more than allowed is enough to refuse it: a file can ask for any number
    names = tuple(map(str, range(min(given, MOST_CLASSES + 1)) if isinstance(given, int) else given))
    if not 2 <= len(names) <= MOST_CLASSES or len(set(names)) != len(names):
        raise InvalidInput(f"classes={given!r} must be 2 to {MOST_CLASSES:,} different names, or how many there are")
    return names


def _locate(source: str, directory: Path) -> str:
    """Return a file's full path, so that the configuration means the same everywhere; a name stays a name."""
    here = directory / source
    try:
        is_path = source not in LOADERS and (Path(source).suffix or here.is_dir())
        here.exists()  # refuses names that no file can have
        return str(here.resolve()) if is_path else source
    except (OSError, ValueError) as error:
        raise InvalidInput(f"data={source[:100]!r} is not the name of a file:  {error.args[-1]}") from None


def _parse_model(table: dict[str, Any]) -> ModelChoice:
    name = table.get("name")
    if not (name is None or isinstance(name, str)):
        raise InvalidInput(f"[model] name={name!r} must be of type str")
    return ModelChoice(name, {key: value for key, value in table.items() if key != "name"})


def _parse_recipe(table: dict[str, Any]) -> Recipe:
    recipe = Recipe.from_toml(tomli_w.dumps(table))
    if (recipe.steps or 0) > MOST_STEPS:
        raise InvalidInput(f"steps={recipe.steps} must be <= {MOST_STEPS:,}: each of them is planned and priced")
    return recipe


def _fill(cls: type[_Table], name: str, table: dict[str, Any]) -> _Table:
    kinds = {f.name: str(f.type).removesuffix(" | None") for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # one of the dataclasses above
    for key, value in table.items():
        if key not in kinds:
            raise InvalidInput(f"table [{name}] has no key {key!r}: it has {', '.join(kinds)}")
        if not isinstance(value, _KINDS[kinds[key]]):
            raise InvalidInput(f"[{name}] {key}={value!r} must be of type {kinds[key]}")
    return cls(**table)


def _list_given(table: Any) -> dict[str, Any]:
    values = {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items() if v is not None}
