"""Finds the records and the model that a configuration names: the laboratory's, or a user's own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sordino.cli.config import Config, ModelChoice
from sordino.cli.describing import describe_records
from sordino.cli.own_recipes import rebuild
from sordino.errors import InvalidInput
from sordino.lab import data as benchmarks
from sordino.lab.importing import import_function
from sordino.lab.networks import ARCHITECTURES
from sordino.recipe import Recipe
from sordino.tables import reading
from sordino.tables.dataset import Data
from sordino.tables.defaults import choose_model, mlp, small_cnn
from sordino.tables.delimited import Told
from sordino.tables.reading import DataChoice, Sheet

MOST_PARAMETERS = 1_000_000_000
"""The most parameters of an architecture by name: a configuration can ask for any width."""
_UNBUILT = (
    TypeError,
    ValueError,
    RuntimeError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    AssertionError,
)
"""The errors that an architecture raises if its options make no network."""
BENCHMARKS = {"mnist": "mnist-cnn", "fashion-mnist": "mnist-cnn", "cifar10": "cifar-cnn"}


def is_benchmark(source: str) -> bool:
    """Whether the name is that of a dataset that Sordino knows."""
    return source.replace("_", "-") in benchmarks.LOADERS


def list_assumptions(source: str) -> tuple[str, ...]:
    """List what a guarantee about these records takes to be public."""
    return () if is_benchmark(source) else reading.list_assumptions(source)


def load_records(choice: DataChoice, told: Told = lambda done, size: None) -> Data | Sheet:
    """Load the records that `choice` describes; those of a table are still text, because its schema may be open."""
    known = is_benchmark(choice.source)
    records = benchmarks.load(choice.source) if known else reading.read_records(choice, benchmarks.LOADERS, told)
    if choice.features is None:
        return records
    if isinstance(records, Sheet):
        raise InvalidInput(f"features={choice.features} are for images, not for a table: leave out --features")
    return describe_records(records, choice.features, keep=known)


def choose_architecture(
    choice: ModelChoice, source: str, input_shape: Sequence[int], classes: int, recipe: Recipe
) -> ModelChoice:
    """Complete the choice, or a default, with what the data decides: the number of features and of classes."""
    name = choice.name or BENCHMARKS.get(source) or choose_model(source, input_shape, classes, recipe)
    if ":" in name:
        return ModelChoice(name, choice.options)
    taken = inspect.signature(_find_builder(name)).parameters
    known = {"features": math.prod(input_shape), "channels": input_shape[0], "classes": classes}
    if unknown := sorted(set(choice.options) - set(taken)):
        raise InvalidInput(f"model {name} has no option {unknown[0]!r}: it has {', '.join(taken)}")
    return ModelChoice(name, {**{key: value for key, value in known.items() if key in taken}, **choice.options})


def build_model(choice: ModelChoice, seed: int | None) -> nn.Module:
    """Build the model, initialised from `seed` if there is one; the caller's random state does not change."""
    assert choice.name is not None
    own = ":" in choice.name
    foreseen = (TypeError,) if own else _UNBUILT  # other errors in a user's function should reach the user
    with torch.random.fork_rng():
        torch.manual_seed(seed) if seed is not None else torch.seed()
        try:
            if not own:
                _require_small(choice)
            model = _find_builder(choice.name)(**choice.options)
        except InvalidInput:
            raise
        except foreseen as error:
            options = ", ".join(f"{key}={value!r}" for key, value in choice.options.items())[:200]
            reason = " ".join(str(error).split())[:200]
            raise InvalidInput(
                f"model={choice.name} cannot be built with {options or 'no options'}: {reason}"
            ) from error
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model={choice.name} returned {type(model).__name__}, must return a torch.nn.Module")
    return model


def require_trusted(found: Config, trusted: bool, where: Path) -> None:
    """Refuse to run code just because a file names it: only the user can allow that."""
    for what, name in (("model", found.model.name), ("recipe", found.recipe_code)):
        if name is not None and ":" in name and not trusted:
            raise InvalidInput(
                f"{where} has the {what} {name[:100]!r}, which is code that would be run: "
                "look at it, and give --trust-code if it may"
            )


def complete_recipe(found: Config) -> Config:
    """Add the recipe that the configuration's code makes, if there is any; call this only after `require_trusted`."""
    return found if found.own is None or found.recipe is not None else replace(found, recipe=rebuild(found.own))


def _require_small(choice: ModelChoice) -> None:
    """Refuse a model that is too large, by building it without memory first."""
    assert choice.name is not None
    with torch.device("meta"):
        model = _find_builder(choice.name)(**choice.options)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > MOST_PARAMETERS:
        raise InvalidInput(
            f"model={choice.name} would have {parameters:,} parameters, must have <= {MOST_PARAMETERS:,}: "
            "make it smaller, or give file.py:function"
        )


def _find_builder(name: str) -> Callable[..., Any]:
    if ":" in name:
        return import_function(name)
    builders: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "small-cnn": small_cnn, **ARCHITECTURES}
    found = builders.get(name.replace("_", "-"))
    if found is None:
        names = ", ".join(sorted(builders))
        raise InvalidInput(f"model={name!r} is not known: choose one of {names}, or give file.py:function")
    return found
