"""Charts as geometry: numbers in, fractions and path data out. The template draws them as inline SVG.

A plot is stretched to whatever place it has, so every position is a share of its width or height, and text, dots and
strokes keep their size at any width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sordino.report.scales import Axis

SCALE = 1000
"""The plot's inner coordinates run from 0 to this in both directions."""
Point = tuple[float, float]
SHAPES = ("M-4 0A4 4 0 1 0 4 0A4 4 0 1 0-4 0Z", "M-4-4H4V4H-4Z", "M0-5.5L5.5 0L0 5.5L-5.5 0Z", "M0-5L5 4H-5Z")
"""Circle, square, diamond, triangle: colours alone do not tell lines apart for everybody."""


@dataclass(frozen=True)
class Series:
    """One line. `spread` holds (x, low, high) around its points; `planned` draws it faint, as not yet happened."""

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
    """A titled plot; `description` says in words what it shows, for those who do not see it."""

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
        """The line in inner coordinates."""
        return _joined(self._corners(series))

    def area(self, series: Series) -> str:
        """The surface below the line."""
        corners = self._corners(series)
        if not corners:
            return ""
        return f"{_joined(corners)}V{SCALE}H{_short(corners[0][0])}Z"

    def band(self, series: Series) -> str:
        """The surface between the low and the high ends of the spread, where it is drawn as a band."""
        if series.dotted or not series.spread:
            return ""
        upper = [self._inner(x, high) for x, _, high in series.spread]
        lower = [self._inner(x, low) for x, low, _ in reversed(series.spread)]
        return f"{_joined([*upper, *lower])}Z"

    def bars(self, series: Series) -> list[tuple[str, str, str]]:
        """(x, low, high) in per cent, where the spread is drawn as bars."""
        spread = series.spread if series.dotted else ()
        return [(_percent(self.x.at(x)), self._down(low), self._down(high)) for x, low, high in spread]

    def dots(self, series: Series) -> list[tuple[str, str]]:
        """The points in per cent, where they are drawn: a line of one point would not be seen."""
        if not series.dotted and len(series.points) > 1:
            return []
        return [(_percent(self.x.at(x)), self._down(y)) for x, y in series.points]

    def shape(self, number: int) -> str:
        """The outline of a series' points, around the origin."""
        return SHAPES[number % len(SHAPES)]

    def place(self, x: float, y: float) -> tuple[str, str]:
        """A point in per cent of width and height."""
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


def _joined(corners: Sequence[Point]) -> str:
    return "M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in corners) if corners else ""


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _percent(share: float) -> str:
    return f"{_short(100 * share)}%"
