"""A clipping bound that finds itself: the quantile of update norms, tracked privately (Andrew et al. 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sordino.errors import InvalidInput
from sordino.parts import Constant, Terms

if TYPE_CHECKING:
    from sordino.recipe import Recipe

SENSITIVITY = 0.5
"""A client votes −1/2 or +1/2, and 0 when it is missing: half the sensitivity of 0 or 1 (Andrew et al. 2021)."""


@dataclass(frozen=True)
class Quantile:
    """After every round C ← C · exp(−rate · (fraction − target)), fraction = noised share of updates within C.

    Each drawn client votes whether its update was within the bound; the sum of votes is released with Gaussian noise of
    deviation `count_noise`, unless given a twentieth of the expected number of clients (Andrew et al. 2021, Alg. 1), or
    twice the noise multiplier where that is more, which keeps the updates' noise within 4 per cent of the recipe's.

    Guarantees: costs nothing beyond the recipe's price. Votes and updates answer about the same draw, so both are one
    Gaussian of the recipe's noise multiplier z (law 3), which leaves z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2) for the updates
    (their Thm. 1): the votes are paid for with slightly more noise on the model.
    Edge cases: the fraction is relative to the public expected number of clients, so that those who are missing pull
    it towards 1/2; it is cut to [0, 1] before it is used.
    """

    target: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise InvalidInput(f"target={self.target} must lie in (0, 1): it is the share of updates left unclipped")
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise InvalidInput(f"rate={self.rate} must be > 0 and finite: 0.2 is the usual value")
        if self.count_noise is not None and not (self.count_noise > 0 and math.isfinite(self.count_noise)):
            raise InvalidInput(f"count_noise={self.count_noise} must be > 0 and finite: without noise the votes leak")

    def deviation(self, terms: Terms) -> float:
        """The deviation of the noise on the sum of votes, σ_b, where `terms` are the recipe's own."""
        if self.count_noise is not None:
            return self.count_noise
        return max(terms.divisor / 20, 2 * terms.noise_multiplier)

    def share(self, terms: Terms, clip: float) -> Terms:
        """`terms` at the bound `clip`, with what the votes leave of the noise multiplier; the event stays what it was.

        >>> from dp_accounting import GaussianDpEvent
        >>> terms = Terms(step=0, clip=1.0, noise_multiplier=1.0, divisor=100, event=GaussianDpEvent(1.0))
        >>> round(Quantile(count_noise=5).share(terms, clip=0.3).noise_multiplier, 4)
        1.005
        """
        precision = terms.noise_multiplier**-2 - (self.deviation(terms) / SENSITIVITY) ** -2
        if not precision > 0:
            raise InvalidInput(
                f"count_noise={self.count_noise} must be > noise_multiplier/2 = "
                f"{terms.noise_multiplier / 2:g}: the votes alone would spend the budget; give count_noise="
                f"{2 * terms.noise_multiplier:g}"
            )
        return replace(terms, clip=clip, noise_multiplier=precision**-0.5)

    def fraction(self, votes: float, divisor: float) -> float:
        """The share of updates within the bound, from the noised sum of votes."""
        return min(1.0, max(0.0, 0.5 + votes / divisor))

    def following(self, clip: float, fraction: float) -> float:
        """The bound of the next round: geometric steps find its scale quickly (Andrew et al. 2021, Alg. 1)."""
        return clip * math.exp(-self.rate * (fraction - self.target))

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe whose bound moves by itself, or whose noise is too much for the votes in any round."""
        if not isinstance(recipe.clip_schedule, Constant):
            raise InvalidInput(
                f"adaptive=Quantile() with clip_schedule={recipe.clip_schedule!r}: both would move the bound; drop one"
            )
        for step in range(recipe.steps or 0):
            self.share(recipe.terms(step), recipe.clip)
