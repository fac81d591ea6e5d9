"""The space of a search: a name for every setting, and the public law that its value is drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.errors import InvalidInput
from sordino.names import read_toml

Uniforms = Callable[[int], NDArray[np.float64]]
"""Where random numbers come from: `sordino.noise.Source.uniform`."""
_SHOWN = 12
Value = float | int | str | bool


@dataclass(frozen=True)
class Between:
    """Any number between `low` and `high`, or any whole one; with `log` all decades are equally likely."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        finite = math.isfinite(self.low) and math.isfinite(self.high)
        if not (finite and self.low < self.high):
            raise InvalidInput(f"low={self.low} must be below high={self.high}, and both finite: or give choices")
        if self.log and not self.low > 0:
            raise InvalidInput(f"low={self.low} must be > 0 on a log scale: or leave out log")
        if self.whole and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise InvalidInput(f"low={self.low} and high={self.high} must be whole numbers, as whole=true says")

    def draw(self, chance: float) -> Value:
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        if self.log:
            low = max(low, 0.5) if self.whole else low
            value = math.exp(math.log(low) + chance * (math.log(high) - math.log(low)))
        else:
            value = low + chance * (high - low)
        return min(max(round(value), int(self.low)), int(self.high)) if self.whole else value

    def describe(self) -> str:
        how = " by decades" if self.log else ""
        return f"{self.low:g} to {self.high:g}{', whole' if self.whole else ''}{how}"


@dataclass(frozen=True)
class Among:
    """One of a few values, all equally likely."""

    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise InvalidInput("choices is empty: give at least one value")
        for value in self.values:
            if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and math.isnan(value)):
                raise InvalidInput(f"choice {value!r} must be a number, a text, true or false")

    def draw(self, chance: float) -> Value:
        return self.values[min(int(chance * len(self.values)), len(self.values) - 1)]

    def describe(self) -> str:
        shown = ", ".join(map(str, self.values[:_SHOWN]))
        return shown if len(self.values) <= _SHOWN else f"{shown}, ... ({len(self.values)} values)"


def uniform(low: float, high: float) -> Between:
    """Any number between `low` and `high`."""
    return Between(low, high)


def log_uniform(low: float, high: float) -> Between:
    """Any number between `low` and `high`, uniform on a log scale: for rates, bounds, variances."""
    return Between(low, high, log=True)


def integers(low: int, high: int) -> Between:
    """Any whole number from `low` to `high`."""
    return Between(low, high, whole=True)


def choices(*values: Value) -> Among:
    """One of these values."""
    return Among(values)


@dataclass(frozen=True)
class Space:
    """Every setting that is searched, with its law; settings are drawn independently of one another."""

    laws: Mapping[str, Between | Among]

    def __post_init__(self) -> None:
        if not self.laws:
            raise InvalidInput("the space is empty: give at least one setting, such as lr = { low = 0.01, high = 1 }")

    def draw(self, uniforms: Uniforms) -> dict[str, Value]:
        """Draw settings by chance alone."""
        return {name: law.draw(float(uniforms(1)[0])) for name, law in self.laws.items()}

    def describe(self) -> dict[str, str]:
        """Describe each setting in words."""
        return {name: law.describe() for name, law in self.laws.items()}

    def require_known(self, names: tuple[str, ...], what: str) -> None:
        """Refuse a setting that `what` does not have."""
        if unknown := next((name for name in self.laws if name not in names), None):
            raise InvalidInput(f"the space has setting {unknown!r}, which {what} does not have: use {', '.join(names)}")


def make_space(given: Space | Mapping[str, Any]) -> Space:
    """Make a space from laws by name, or from the plain data of a TOML file."""
    if isinstance(given, Space):
        return given
    return Space({str(name): _make_law(str(name), law) for name, law in given.items()})


def _make_law(name: str, plain: Any) -> Between | Among:
    """Make a law from a law, a list of choices, or a table with low and high."""
    if isinstance(plain, Between | Among):
        return plain
    try:
        if isinstance(plain, list | tuple):
            return Among(tuple(plain))
        if isinstance(plain, Mapping) and set(plain) == {"choices"} and isinstance(plain["choices"], list):
            return Among(tuple(plain["choices"]))
        numbers = isinstance(plain, Mapping) and {"low", "high"} <= set(plain) <= {"low", "high", "log", "whole"}
        if numbers and all(_is_number(plain[end]) for end in ("low", "high")):
            flags = {key: plain[key] for key in ("log", "whole") if key in plain}
            if all(isinstance(flag, bool) for flag in flags.values()):
                return Between(float(plain["low"]), float(plain["high"]), **flags)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from None
    raise InvalidInput(
        f"{name} = {str(plain)[:60]} is not a distribution: use {{ low = 0.01, high = 1.0, log = true }} or a list"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_space(path: Path) -> Space:
    """Read a space from a TOML file, one line for each setting; a table [space] may hold them."""
    tables = read_toml(path, "space")
    inner = tables.get("space")
    return make_space(inner if isinstance(inner, dict) and set(tables) == {"space"} else tables)
