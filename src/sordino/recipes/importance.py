"""DPIS: importance sampling by gradient norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from sordino.errors import InvalidInput
from sordino.propose import Optimizer
from sordino.recipe import Recipe
from sordino.recipes.common import Common
from sordino.sampling.importance import Importance
from sordino.weighing import Importance as Weights


def dpis(
    *,
    clip: float = 0.1,
    lr: float | None = None,
    momentum: float = 0.9,
    optimizer: str = "sgd",
    multiplier: float = 5.0,
    floor: float = 0.01,
    divider: float = 0.8,
    adaptive: bool = False,
    external: float = 4.0,
    quantile: float = 1.0,
    release_noise: float | None = None,
    **common: Unpack[Common],
) -> Recipe:
    """Draw records in proportion to their gradient norms, weigh them so that all are equally long (DPIS, Alg. 1).

    The noise follows the mean norm: where that falls during training, so does σ_G, which is chosen anew for every epoch
    within a budget that a filter guards. An epoch costs (1 + `multiplier`) epochs of gradients at most. `adaptive` lets
    the clipping bound follow `quantile` times the mean norm, at most `external`·`clip`. `lr` is 0.5 for SGD and 0.001
    for Adam unless given.

    >>> from sordino import Budget, recipes
    >>> recipe = recipes.dpis(batch_size=256, epochs=5).calibrate(Budget(epsilon=3, delta=1e-5), records=60_000)
    >>> recipe.budget.accountant, recipe.sampler.release_noise
    ('rdp-filter', 1200.0)
    """
    rate = lr if lr is not None else {"sgd": 0.5}.get(optimizer, 1e-3)
    proposer = Optimizer(optimizer, lr=rate, momentum=momentum if optimizer == "sgd" else 0.0)
    sampler = Importance(multiplier, floor, divider, external if adaptive else None, quantile, release_noise)
    recipe = Recipe(name="dpis", clip=clip, weighing=Weights(), optimizer=proposer, **common)
    if recipe.sampler is not None:
        raise InvalidInput(f"sampler={recipe.sampler!r} cannot be given: DPIS is a way to sample; use recipes.dpsgd")
    return replace(recipe, sampler=sampler)
