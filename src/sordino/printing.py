"""Numbers as people and machines read them."""

from __future__ import annotations

import math


def rounded_up(epsilon: float, digits: int = 2) -> str:
    """ε is never printed smaller than it is."""
    if math.isinf(epsilon):
        return "infinite"
    return f"{math.ceil(epsilon * 10**digits - 1e-9) / 10**digits:.{digits}f}"


def plain_number(value: float) -> float | str:
    """A number for JSON, which knows no infinity."""
    return value if math.isfinite(value) else "infinity"
