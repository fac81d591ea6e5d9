"""The model of a run: one of the papers' architectures, a small default, or a function in a user's own file."""

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

from sordino.cli import sizing
from sordino.cli.config import ModelChoice
from sordino.errors import InvalidInput
from sordino.lab.networks import ARCHITECTURES, parameter_count
from sordino.recipe import Recipe

ROOMY = 12.0
"""A cautious guess from three invented tables, one run each: a hidden layer gained 2 to 3 % on two of them, at ratios
of 8 and 60, and lost 2 % on the third, at 8."""
MOST_FEATURES = 256
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


def mlp(features: int, classes: int, hidden: int = 32) -> nn.Sequential:
    """One hidden layer on flattened inputs, with tanh: bounded activations keep gradients small."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, classes))


def small_cnn(channels: int, classes: int, width: int = 16) -> nn.Sequential:
    """Two strided convolutions and one dense layer for images of any size; tanh keeps gradients small.

    About 5,000 parameters and 512 for each class: few, because the noise on a gradient grows with their number.
    """
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 5, stride=2, padding=2), nn.Tanh()),
        *(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.Tanh()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, classes)),
    )


def default(source: str, input_shape: Sequence[int], classes: int, recipe: Recipe) -> str:
    """The architecture for records that came without one, from public numbers alone.

    A table gets a hidden layer where that leaves the records well above the noise, else a linear model.
    """
    if source in BENCHMARKS:
        return BENCHMARKS[source]
    if Path(source).is_dir() and len(input_shape) == 3:
        return "small-cnn"
    if Path(source).suffix.lower() not in (".csv", ".tsv"):
        return "mlp"
    features = math.prod(input_shape)
    parameters = parameter_count(mlp(features, classes))
    roomy = features <= MOST_FEATURES and sizing.signal_to_noise(recipe, parameters) >= ROOMY
    return "mlp" if roomy else "linear"


def choose(choice: ModelChoice, default: str, input_shape: Sequence[int], classes: int) -> ModelChoice:
    """The choice with what the data decides filled in: the number of features and of classes."""
    name = choice.name or default
    if ":" in name:
        return ModelChoice(name, choice.options)
    taken = inspect.signature(_builder(name)).parameters
    known = {"features": math.prod(input_shape), "channels": input_shape[0], "classes": classes}
    if unknown := sorted(set(choice.options) - set(taken)):
        raise InvalidInput(f"model {name} has no option {unknown[0]!r}: it has {', '.join(taken)}")
    return ModelChoice(name, {**{key: value for key, value in known.items() if key in taken}, **choice.options})


def build(choice: ModelChoice, seed: int | None) -> nn.Module:
    """The model, initialised from `seed` if there is one; the caller's random state is left alone."""
    assert choice.name is not None
    own = ":" in choice.name
    foreseen = (TypeError,) if own else _UNBUILT  # what else goes wrong in a user's function, the user wants to see
    with torch.random.fork_rng():
        torch.manual_seed(seed) if seed is not None else torch.seed()
        try:
            if not own:
                _require_small(choice)
            model = _builder(choice.name)(**choice.options)
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
        parameters = parameter_count(_builder(choice.name)(**choice.options))
    if parameters > MOST_PARAMETERS:
        raise InvalidInput(
            f"model={choice.name} would have {parameters:,} parameters, must have <= {MOST_PARAMETERS:,}: "
            "make it smaller, or give file.py:function"
        )


def _builder(name: str) -> Callable[..., Any]:
    if ":" in name:
        return imported(name)
    builders: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "small-cnn": small_cnn, **ARCHITECTURES}
    found = builders.get(name.replace("_", "-"))
    if found is None:
        names = ", ".join(sorted(builders))
        raise InvalidInput(f"model={name!r} is not known: choose one of {names}, or give file.py:function")
    return found


def imported(name: str) -> Callable[..., Any]:
    """The function that ``file.py:function`` or ``package.module:function`` names."""
    where, _, function = name.rpartition(":")
    module = _module(where) if where else None
    found = getattr(module, function, None)
    if not callable(found):
        raise InvalidInput(f"{name!r} names no function: give file.py:function or package.module:function")
    return found  # type: ignore[no-any-return]  # callable() is all that can be known about a user's function


def _module(where: str) -> Any:
    path = Path(where)
    try:
        if path.suffix != ".py":
            return importlib.import_module(where)
        if not path.is_file():
            raise InvalidInput(f"{path} does not exist: give file.py:function")
        return _file(path)
    except (ImportError, SyntaxError) as error:
        raise InvalidInput(f"cannot import {where}: {error}") from error


def _file(path: Path) -> Any:
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
