"""How gradient norms are obtained, and what one answer then costs on a known set of records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dp_accounting import DpEvent, GaussianDpEvent

from sordino.gradients import Engine, find_engine
from sordino.noise import Source

if TYPE_CHECKING:
    from sordino.accounting.budget import Budget
    from sordino.recipe import Recipe


class Norms(Protocol):
    """Exact or estimated norms."""

    def event(self, noise_multiplier: float) -> DpEvent:
        """The event of one noised sum of gradients that were weighed by these norms."""
        ...

    def engine(self, name: str, source: Source) -> Engine:
        """The engine that computes such norms; `name` is the user's choice among those that can."""
        ...

    def prepare(self, engine: Engine) -> None:
        """Called once before every draw, for engines that need fresh randomness."""
        return

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe whose other parts have no proof with such norms."""
        return

    def calibrated(self, recipe: Recipe, budget: Budget) -> Recipe | None:
        """The recipe with its noise found by these norms themselves; None where the ordinary search will do."""
        return None


@dataclass(frozen=True)
class Exact(Norms):
    """Norms without error: clipping bounds every contribution, so one answer is a plain Gaussian mechanism."""

    def event(self, noise_multiplier: float) -> DpEvent:
        return GaussianDpEvent(noise_multiplier)

    def engine(self, name: str, source: Source) -> Engine:
        return find_engine(name)
