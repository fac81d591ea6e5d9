"""The records and the model that a configuration names: the laboratory's, or a user's own."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sordino.cli.config import ModelChoice
from sordino.cli.describing import describe_records
from sordino.errors import InvalidInput
from sordino.lab import data as benchmarks
from sordino.lab.networks import ARCHITECTURES
from sordino.recipe import Recipe
from sordino.tables import reading
from sordino.tables.dataset import Data
from sordino.tables.defaults import choose_model, mlp, small_cnn
from sordino.tables.delimited import Told
from sordino.tables.reading import DataChoice, Sheet

MOST_PARAMETERS = 1_000_000_000
"""Of an architecture by name: a configuration can ask for any width, and memory is taken before anybody looks."""
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
"""What an architecture raises when its options make no network."""
BENCHMARKS = {"mnist": "mnist-cnn", "fashion-mnist": "mnist-cnn", "cifar10": "cifar-cnn"}


def is_benchmark(source: str) -> bool:
    """Whether the name is that of a dataset that Sordino knows."""
    return source.replace("_", "-") in benchmarks.LOADERS


def list_assumptions(source: str) -> tuple[str, ...]:
    """What a guarantee about these records takes for public."""
    return () if is_benchmark(source) else reading.list_assumptions(source)


def load_records(choice: DataChoice, told: Told = lambda done, size: None) -> Data | Sheet:
    """The records that `choice` describes; those of a table are still text, because its schema may be open."""
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
    """The choice, or a default, with what the data decides filled in: the number of features and of classes."""
    name = choice.name or BENCHMARKS.get(source) or choose_model(source, input_shape, classes, recipe)
    if ":" in name:
        return ModelChoice(name, choice.options)
    taken = inspect.signature(_find_builder(name)).parameters
    known = {"features": math.prod(input_shape), "channels": input_shape[0], "classes": classes}
    if unknown := sorted(set(choice.options) - set(taken)):
        raise InvalidInput(f"model {name} has no option {unknown[0]!r}: it has {', '.join(taken)}")
    return ModelChoice(name, {**{key: value for key, value in known.items() if key in taken}, **choice.options})


def build_model(choice: ModelChoice, seed: int | None) -> nn.Module:
    """The model, initialised from `seed` if there is one; the caller's random state is left alone."""
    assert choice.name is not None
    own = ":" in choice.name
    foreseen = (TypeError,) if own else _UNBUILT  # what else goes wrong in a user's function, the user wants to see
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


def require_trusted(choice: ModelChoice, trusted: bool, where: Path) -> None:
    """Refuse to run code because a file names it: only the user can say that it may run."""
    if choice.name is not None and ":" in choice.name and not trusted:
        raise InvalidInput(
            f"{where} has the model {choice.name[:100]!r}, which is code that would be run: "
            "look at it, and give --trust-code if it may"
        )


def _require_small(choice: ModelChoice) -> None:
    """Build it without memory first."""
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


def import_function(name: str) -> Callable[..., Any]:
    """The function that ``file.py:function`` or ``package.module:function`` names."""
    where, _, function = name.rpartition(":")
    module = _import_module(where) if where else None
    found = getattr(module, function, None)
    if not callable(found):
        raise InvalidInput(f"{name!r} names no function: give file.py:function or package.module:function")
    return found  # type: ignore[no-any-return]  # callable() is all that can be known about a user's function


def _import_module(where: str) -> Any:
    path = Path(where)
    try:
        if path.suffix != ".py":
            return importlib.import_module(where)
        if not path.is_file():
            raise InvalidInput(f"{path} does not exist: give file.py:function")
        return _run_file(path)
    except (ImportError, SyntaxError) as error:
        raise InvalidInput(f"cannot import {where}: {error}") from error


def _run_file(path: Path) -> Any:
    """Run a Python file as a module; it may import its neighbours, as `python file.py` would let it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    neighbours = str(path.resolve().parent)
    sys.path.insert(0, neighbours)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(neighbours)
    return module
