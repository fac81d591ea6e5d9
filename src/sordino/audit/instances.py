"""Small worst cases: one record with an extreme gradient, there or not, and few others that the attacker knows.

Every record of an instance has a *lane*: a coordinate of the model that belongs to it. Records of different lanes do
not meet in gradients, and lanes have independent noise and coins. So one run of many lanes is one trial per lane. But
it cannot show what couples records, such as a divisor that counts the draw, or a proposal that is kept or not as a
whole. So an instance with a crowd has one lane and a run per trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sordino.accounting.budget import Budget
from sordino.errors import InvalidInput
from sordino.parts import Always, Poisson, Selector
from sordino.recipe import Recipe

LOUD = 100.0
"""The canary's gradient over the clipping bound."""
BUDGET = Budget(epsilon=8.0, delta=1e-5)
"""The budget of recipes that choose their noise within one and were given none."""


def linear_losses(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss whose gradient is the record itself, whatever the weights."""
    outputs: Tensor = model(batch)
    return outputs.squeeze(1)


def logistic_losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Logistic regression on records that all have the label 0: the gradient is half the record at the start."""
    outputs: Tensor = model(batch)
    return nn.functional.softplus(outputs.squeeze(1))


LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {"linear": linear_losses, "logistic": logistic_losses}


@dataclass(frozen=True)
class Instance:
    """A worst case: `lanes` of one canary each, `crowd` other records in every lane.

    `pull` is the gradient of one of the crowd and `canary` that of the canary, in clipping bounds along the lane; NaN
    stands for a broken record. A crowd that stands `aside` pulls along another coordinate. `rate` is the chance to join
    a draw; `steps` and `trials` are those of the audit unless given.
    """

    name: str
    lanes: int = 256
    crowd: int = 0
    pull: float = 0.0
    canary: float = LOUD
    rate: float = 1.0
    loss: str = "linear"
    aside: bool = False
    steps: int | None = None
    trials: int | None = None

    def __post_init__(self) -> None:
        if self.lanes > 1 and self.crowd:
            raise InvalidInput(f"crowd={self.crowd} must be 0 with lanes={self.lanes}: a crowd needs a lane of its own")
        if self.loss not in LOSSES:
            raise InvalidInput(f"loss={self.loss!r} must be one of {', '.join(LOSSES)}")

    @property
    def direction(self) -> float:
        """The sign of what the canary adds to its lane."""
        return -1.0 if self.canary < 0 else 1.0

    @property
    def coordinates(self) -> int:
        return self.lanes + self.aside

    @property
    def together(self) -> bool:
        """Whether lanes with and without canary are in the same run."""
        return self.lanes > 1

    def count_runs(self, trials: int) -> int:
        """How many runs hold `trials` trials with the canary and as many without it."""
        return -(-2 * trials // self.lanes) if self.together else 2 * trials

    def holds_canary(self, present: bool) -> Tensor:
        """Say for every lane whether it has its canary."""
        return torch.arange(self.lanes) % 2 == 0 if self.together else torch.tensor([present])

    def records(self, present: bool, clip: float) -> Tensor:
        """One row per record; the crowd comes first."""
        axes = torch.eye(self.coordinates)
        crowd = axes[-1:] if self.aside else axes[: self.lanes]
        canaries = axes[: self.lanes][self.holds_canary(present)]
        return torch.cat([crowd.repeat_interleave(self.crowd, 0) * self.pull, canaries * self.canary]) * clip

    def adapt(self, recipe: Recipe, steps: int) -> Recipe:
        """Adapt `recipe` to these records: all its parts, few steps, and a rate at which there is something to see."""
        count = len(self.records(True, 1.0))
        return shrink(recipe, count, max(1, round(self.rate * count)), steps, tested=count)


def shrink(recipe: Recipe, count: int, batch: int, steps: int, *, tested: int) -> Recipe:
    """Shrink `recipe`, with all its parts, to `count` records: `batch` in a draw, and at most `tested` in a test."""
    selection = _limit_tests(recipe.selection, tested)
    small = replace(recipe, batch_size=batch, steps=steps, epochs=None, records=None, selection=selection)
    if getattr(recipe.sampler, "chooses_noise", False):
        open_again = replace(small, noise_multiplier=None, budget=None, rdp_filter=None)
        return open_again.calibrate(replace(recipe.budget or BUDGET, accountant="pld"), records=count)
    return replace(small, budget=None).for_records(count)


def _limit_tests(selection: Selector, count: int) -> Selector:
    """Return the same selector with tests that draw at most `count` records."""
    changes: dict[str, Any] = {
        name: min(getattr(selection, name), count)
        for name in ("size", "private_size")
        if getattr(selection, name, None) is not None
    }
    test = getattr(selection, "test", None)
    if test is not None:
        changes["test"] = replace(test, size=min(test.size, count))
    return replace(selection, **changes) if changes else selection  # type: ignore[type-var]  # selectors are dataclasses


def choose_instances(recipe: Recipe, loss: str = "linear", rate: float = 0.5) -> tuple[Instance, ...]:
    """Choose the worst cases for a recipe; if its parts couple records, every trial needs separate runs."""
    joins_alone = type(recipe.sampler) in (Poisson, type(None)) or getattr(recipe.sampler, "apart", False)
    apart = type(recipe.selection) is Always and joins_alone
    lanes = 256 if apart else 1
    return (
        Instance("all records", lanes=lanes, loss=loss),
        Instance("sampled records", lanes=2 * lanes if apart else 1, rate=rate, crowd=0 if apart else 1, loss=loss),
        Instance("against a crowd", lanes=1, crowd=3, pull=2.0, canary=-LOUD, steps=1),
        Instance("not a number", lanes=1, crowd=6, pull=2.0, canary=math.nan, steps=1, trials=100),
    )
