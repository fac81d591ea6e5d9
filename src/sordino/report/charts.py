"""Charts as geometry: numbers in, fractions and path data out. The template draws them as inline SVG.

A plot fills the space that it is given, so every position is a share of its width or height. Text, dots and strokes
keep their size at any width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sordino.figures import round_up_digits

SCALE = 1000
"""The plot's inner coordinates run from 0 to this in both directions."""
Point = tuple[float, float]
SHAPES = ("M-4 0A4 4 0 1 0 4 0A4 4 0 1 0-4 0Z", "M-4-4H4V4H-4Z", "M0-5.5L5.5 0L0 5.5L-5.5 0Z", "M0-5L5 4H-5Z")
"""Circle, square, diamond, triangle: not everybody can tell lines apart by colour alone."""
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
Format = Callable[[float], str]


def plain(value: float) -> str:
    """Write a number with about three digits: 0.25, 12.5, 1,200."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return power(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def power(value: float) -> str:
    """Write a number by its power of ten: 10⁻⁵, 3.2·10⁻⁶."""
    if value <= 0 or not math.isfinite(value):
        return "0" if value == 0 else f"{value:g}"
    mantissa, exponent = f"{float(round_up_digits(value, 2)):.1e}".split("e")  # a δ is never written too small
    ten = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    return ten if mantissa == "1.0" else f"{mantissa}·{ten}"


def percent(value: float) -> str:
    """Write a share in per cent, with a decimal where it matters."""
    return f"{value:.1%}".replace(".0%", "%")


def whole(value: float) -> str:
    """Write a count."""
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
        """Return where `value` lies: 0 at the low end, 1 at the high end, never outside."""
        low, high, value = (self._scale(number) for number in (self.low, self.high, value))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def _scale(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value

    @property
    def ticks(self) -> list[float]:
        """The fixed ticks, or about six round numbers inside the range."""
        if self.fixed:
            return list(self.fixed)
        return _find_powers(self.low, self.high) if self.log else _find_rounds(self.low, self.high)

    @classmethod
    def over(
        cls, label: str, values: Iterable[float], *, log: bool = False, zero: bool = False, write: Format = plain
    ) -> Axis:
        """An axis that shows all `values`, from 0 if `zero`, with some room where the values would touch its ends."""
        numbers = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low, high = min(numbers), max(numbers)
        if log:
            low, high = 10.0 ** math.floor(math.log10(low) + 1e-9), 10.0 ** math.ceil(math.log10(high) - 1e-9)
            return cls(label, low, high if high > low else low * 10, log=True, write=write)
        air = 0.08 * (high - low) or abs(high) * 0.5 or 1.0
        return cls(label, 0.0 if zero and low >= 0 else low - air, high + air, write=write)

    @classmethod
    def along(cls, label: str, values: Iterable[float], *, write: Format = whole) -> Axis:
        """Return an axis for time or steps: from the first to the last value, without room at the ends."""
        numbers = list(values) or [0.0]
        low, high = min(numbers), max(numbers)
        return cls(label, low, high if high > low else low + 1, write=write)


def _find_rounds(low: float, high: float) -> list[float]:
    rough = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * number, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _find_powers(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first <= 1:
        return [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    stride = max(1, math.ceil((last - first) / 6))
    return [10.0**exponent for exponent in range(last, first - 1, -stride)][::-1]


@dataclass(frozen=True)
class Series:
    """One line. `spread` holds (x, low, high) around its points; `planned` draws it faint: it has not happened yet."""

    name: str
    points: Sequence[Point]
    stepped: bool = False
    dotted: bool = False
    spread: Sequence[tuple[float, float, float]] = ()
    planned: bool = False
    filled: bool = False


@dataclass(frozen=True)
class Mark:
    """A horizontal line to compare with, such as a budget."""

    y: float
    label: str


@dataclass(frozen=True)
class Chart:
    """A titled plot; `description` says in words what it shows, for readers who cannot see it."""

    ident: str
    title: str
    description: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    note: str = ""
    highlight: Point | None = None
    wide: bool = False

    def path(self, series: Series) -> str:
        """Return the line in inner coordinates."""
        return _join(self._corners(series))

    def area(self, series: Series) -> str:
        """Return the surface below the line."""
        corners = self._corners(series)
        if not corners:
            return ""
        return f"{_join(corners)}V{SCALE}H{_shorten(corners[0][0])}Z"

    def band(self, series: Series) -> str:
        """Return the surface between the low and the high ends of the spread, where it is drawn as a band."""
        if series.dotted or not series.spread:
            return ""
        upper = [self._inner(x, high) for x, _, high in series.spread]
        lower = [self._inner(x, low) for x, low, _ in reversed(series.spread)]
        return f"{_join([*upper, *lower])}Z"

    def bars(self, series: Series) -> list[tuple[str, str, str]]:
        """(x, low, high) in per cent, where the spread is drawn as bars."""
        spread = series.spread if series.dotted else ()
        return [(_percent(self.x.at(x)), self._down(low), self._down(high)) for x, low, high in spread]

    def dots(self, series: Series) -> list[tuple[str, str]]:
        """Return the points in per cent, where they are drawn: a line of one point would be invisible."""
        if not series.dotted and len(series.points) > 1:
            return []
        return [(_percent(self.x.at(x)), self._down(y)) for x, y in series.points]

    def shape(self, number: int) -> str:
        """Return the outline of a series' points, around the origin."""
        return SHAPES[number % len(SHAPES)]

    def place(self, x: float, y: float) -> tuple[str, str]:
        """Return a point in per cent of width and height."""
        return _percent(self.x.at(x)), self._down(y)

    @property
    def x_ticks(self) -> list[tuple[str, str]]:
        return [(_percent(self.x.at(tick)), self.x.write(tick)) for tick in self.x.ticks]

    @property
    def y_ticks(self) -> list[tuple[str, str]]:
        return [(self._down(tick), self.y.write(tick)) for tick in self.y.ticks]

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script needs for read-outs: every x as a share and in words, every value in words."""
        values = [dict(series.points) for series in self.series]
        places = sorted({x for points in values for x in points})
        return {
            "x": self.x.label,
            "at": [round(self.x.at(x), 4) for x in places],
            "words": [self.x.write(x) for x in places],
            "names": [series.name for series in self.series],
            "values": [[self.y.write(points[x]) if x in points else None for x in places] for points in values],
        }

    def _corners(self, series: Series) -> list[Point]:
        corners: list[Point] = []
        for x, y in series.points:
            corner = self._inner(x, y)
            if series.stepped and corners:
                corners.append((corner[0], corners[-1][1]))
            corners.append(corner)
        return corners

    def _inner(self, x: float, y: float) -> Point:
        return SCALE * self.x.at(x), SCALE * (1 - self.y.at(y))

    def _down(self, y: float) -> str:
        return _percent(1 - self.y.at(y))


def _join(corners: Sequence[Point]) -> str:
    return "M" + "L".join(f"{_shorten(x)} {_shorten(y)}" for x, y in corners) if corners else ""


def _shorten(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _percent(share: float) -> str:
    return f"{_shorten(100 * share)}%"
