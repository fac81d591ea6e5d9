"""Imports a user's own functions by ``file.py:function``; naming one on the command line means that it may run."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sordino.errors import InvalidInput
from sordino.recipe import Recipe


def import_function(name: str) -> Callable[..., Any]:
    """Import the function that ``file.py:function`` or ``package.module:function`` names."""
    where, _, function = name.rpartition(":")
    module = _import_module(where) if where else None
    found = getattr(module, function, None)
    if not callable(found):
        near = get_close_matches(function, [each for each in dir(module) if callable(getattr(module, each))], n=1)
        meant = f"; did you mean {where}:{near[0]}?" if near else ""
        raise InvalidInput(f"{name!r} names no function: give file.py:function or package.module:function{meant}")
    return found  # type: ignore[no-any-return]  # callable() is all that can be known about a user's function


def call_recipe(code: str, **settings: Any) -> Recipe:
    """Call a user's function for the recipe that it makes from these settings, like those of `sordino.recipes`."""
    try:
        recipe = import_function(code)(**settings)
    except TypeError as error:
        given = ", ".join(settings)
        raise InvalidInput(
            f"recipe={code} cannot be called with {given}: {error}; let it take batch_size, epochs and **options"
        ) from error
    if not isinstance(recipe, Recipe):
        raise InvalidInput(f"recipe={code} returned {type(recipe).__name__}, must return a sordino.Recipe")
    return recipe


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
