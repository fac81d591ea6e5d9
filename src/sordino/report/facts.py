"""The facts of a run, as plain data: everything in it is public (law 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sordino.accounting import Budget, Guarantee
from sordino.recipe import Recipe
from sordino.report.prices import Opinion, Points


@dataclass(frozen=True)
class Setting:
    """What was trained on what, by name."""

    data: str = "not recorded"
    model: str = "not recorded"
    records: int | None = None
    held_out: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class Proof:
    """What ties the report to its ledger. Times are cut to minutes: how long a step took hints at its draw's size."""

    run_id: str
    fingerprint: str
    recipe_fingerprint: str
    began: str
    last: str
    events: int


@dataclass(frozen=True)
class Facts:
    """A run, as far as its folder tells. Points are (x, y); `twin_accuracy` and `audit` are None where unknown."""

    name: str
    folder: str
    proof: Proof
    guarantee: Guarantee
    setting: Setting
    recipe: Recipe | None
    recipe_text: str
    saved_step: int | None
    curve: Points
    spending: Points
    noise: Points
    clip: Points
    accuracy: Points
    opinions: tuple[Opinion, ...] = ()
    final_accuracy: float | None = None
    twin_accuracy: float | None = None
    audit: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    trained_with: Mapping[str, str] = field(default_factory=dict)
    cautions: tuple[str, ...] = ()

    @property
    def budget(self) -> Budget | None:
        return self.recipe.budget if self.recipe else None

    @property
    def total_steps(self) -> int | None:
        return self.recipe.steps if self.recipe else None

    @property
    def finished(self) -> bool:
        """Whether the last step of the recipe is saved."""
        return self.total_steps is not None and (self.saved_step or 0) >= self.total_steps
