"""What an attacker computes from what he sees: candidates, of which the first half of the trials chooses one.

None needs to be good for the audit to be sound; each is there because some broken mechanism shows in it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sordino.audit.observing import Seen

Array = NDArray[np.float64]
Statistic = Callable[[Seen], Array]


def log_likelihood_ratio(noises: Array, rate: float) -> Statistic:
    """Σ_t ln(1 − q + q·e^((2x − 1)/(2σ_t²))): the best test there is for DP-SGD as claimed (Neyman and Pearson)."""

    def statistic(seen: Seen) -> Array:
        exponents = (2 * seen.released - 1) / (2 * noises**2)
        with np.errstate(divide="ignore"):
            stay = np.log1p(-rate) if rate < 1 else -np.inf
        return np.asarray((np.logaddexp(stay, np.log(rate) + exponents) * seen.kept).sum(axis=1))

    return statistic


def where_it_ended(seen: Seen) -> Array:
    """How far the model moved in all: shows what optimizers carry over from rejected proposals."""
    return np.asarray(seen.moved.sum(axis=1))


def largest(seen: Seen) -> Array:
    """The largest release: shows a record that now and then is hardly clipped."""
    return np.asarray(np.abs(seen.released).max(axis=1))


def spread(seen: Seen) -> Array:
    """The largest release less the smallest: shows noise that repeats itself."""
    return np.asarray(seen.released.max(axis=1) - seen.released.min(axis=1))


def accepted(seen: Seen) -> Array:
    """How many proposals were kept."""
    return np.asarray(seen.kept.sum(axis=1))


def candidates(noises: Array, rate: float) -> dict[str, Statistic]:
    """Every statistic by name."""
    return {
        "log-likelihood ratio": log_likelihood_ratio(noises, rate),
        "where it ended": where_it_ended,
        "largest release": largest,
        "spread of releases": spread,
        "proposals kept": accepted,
    }
