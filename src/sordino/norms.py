"""How gradient norms are obtained, and what one answer then costs on a known set of records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dp_accounting import DpEvent, GaussianDpEvent

from sordino.gradients import Engine, engine_named
from sordino.noise import Source


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


@dataclass(frozen=True)
class Exact(Norms):
    """Norms without error: clipping bounds every contribution, so one answer is a plain Gaussian mechanism."""

    def event(self, noise_multiplier: float) -> DpEvent:
        return GaussianDpEvent(noise_multiplier)

    def engine(self, name: str, source: Source) -> Engine:
        return engine_named(name)
