"""Axes: where a number lies, which ticks to draw, and how to write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sordino.accounting.guarantee import round_up_digits

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
Format = Callable[[float], str]


def plain(value: float) -> str:
    """A number of about three digits: 0.25, 12.5, 1,200."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return power(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def power(value: float) -> str:
    """A number by its power of ten: 10⁻⁵, 3.2·10⁻⁶."""
    if value <= 0 or not math.isfinite(value):
        return "0" if value == 0 else f"{value:g}"
    mantissa, exponent = f"{float(round_up_digits(value, 2)):.1e}".split("e")  # a δ is never written too small
    ten = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    return ten if mantissa == "1.0" else f"{mantissa}·{ten}"


def percent(value: float) -> str:
    """A share, to a tenth of a per cent where that shows something."""
    return f"{value:.1%}".replace(".0%", "%")


def whole(value: float) -> str:
    """A count."""
    return f"{round(value):,}"


@dataclass(frozen=True)
class Axis:
    """A range of numbers with its label; `at` maps it to 0..1."""

    label: str
    low: float
    high: float
    log: bool = False
    write: Format = field(default=plain)
    fixed: tuple[float, ...] = ()

    def at(self, value: float) -> float:
        """Where `value` lies: 0 at the low end, 1 at the high end, never outside."""
        low, high, value = (self._scaled(number) for number in (self.low, self.high, value))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value

    @property
    def ticks(self) -> list[float]:
        """The fixed ones, or about six round numbers inside the range."""
        if self.fixed:
            return list(self.fixed)
        return _powers(self.low, self.high) if self.log else _rounds(self.low, self.high)

    @classmethod
    def over(
        cls, label: str, values: Iterable[float], *, log: bool = False, zero: bool = False, write: Format = plain
    ) -> Axis:
        """An axis that shows all `values`, from 0 if `zero`, with some air where the values would touch its ends."""
        numbers = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low, high = min(numbers), max(numbers)
        if log:
            low, high = 10.0 ** math.floor(math.log10(low) + 1e-9), 10.0 ** math.ceil(math.log10(high) - 1e-9)
            return cls(label, low, high if high > low else low * 10, log=True, write=write)
        air = 0.08 * (high - low) or abs(high) * 0.5 or 1.0
        return cls(label, 0.0 if zero and low >= 0 else low - air, high + air, write=write)

    @classmethod
    def along(cls, label: str, values: Iterable[float], *, write: Format = whole) -> Axis:
        """An axis for time or steps: from the first to the last value, without air."""
        numbers = list(values) or [0.0]
        low, high = min(numbers), max(numbers)
        return cls(label, low, high if high > low else low + 1, write=write)


def _rounds(low: float, high: float) -> list[float]:
    rough = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * number, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _powers(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first <= 1:
        return [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    stride = max(1, math.ceil((last - first) / 6))
    return [10.0**exponent for exponent in range(last, first - 1, -stride)][::-1]
