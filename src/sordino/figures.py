"""Numbers as they are printed: ε and δ are never shown smaller than they are.

It loads nothing, so that the command line can show a number before it loads the accounting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal

_LONG = 1e12
"""A number this large is written as 1.24e+12."""


@dataclass(frozen=True)
class Estimate:
    """A number that was estimated, and its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def round_up(epsilon: float, digits: int = 2) -> str:
    """Write ε, never smaller than it is; an ε that protects nobody is not written in full."""
    if math.isinf(epsilon):
        return "infinite"
    if epsilon >= _LONG:
        return round_up_digits(epsilon, 3)
    return f"{math.ceil(epsilon * 10**digits - 1e-9) / 10**digits:.{digits}f}"


def round_up_digits(value: float, digits: int) -> str:
    """Round up to so many significant digits: neither ε nor δ is ever printed smaller than it is.

    It rounds the number as it would be written in full, so 1e-05 stays 1e-05.
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    up = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(repr(float(value))))
    return f"{float(up):.{digits}g}"


def to_plain(value: float) -> float | str:
    """Return a number for JSON, which knows no infinity."""
    return value if math.isfinite(value) else "infinity"


def write_count(number: int, noun: str) -> str:
    """Write a number and its noun.

    >>> write_count(1, "run"), write_count(2_000, "run")
    ('1 run', '2,000 runs')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
