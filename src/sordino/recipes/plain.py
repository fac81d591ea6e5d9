"""DP-SGD, DP-Adam and automatic clipping: the baselines of every paper."""

from __future__ import annotations

from typing import Unpack

from sordino.propose import Optimizer
from sordino.recipe import Recipe
from sordino.recipes.common import Common
from sordino.weighing import Automatic, Flat


def dpsgd(*, clip: float = 1.0, lr: float = 0.5, momentum: float = 0.0, **common: Unpack[Common]) -> Recipe:
    """Clip every gradient to `clip`, add Gaussian noise to the sum (Abadi et al. 2016, Alg. 1).

    >>> from sordino import Budget, recipes
    >>> recipe = recipes.dpsgd(batch_size=256, epochs=5).calibrate(Budget(epsilon=3, delta=1e-5), records=60_000)
    >>> recipe.steps
    1172
    """
    optimizer = Optimizer("sgd", lr=lr, momentum=momentum)
    return Recipe(name="dpsgd", clip=clip, weighing=Flat(), optimizer=optimizer, **common)


def dpadam(*, clip: float = 1.0, lr: float = 1e-3, **common: Unpack[Common]) -> Recipe:
    """DP-SGD whose released gradients go to Adam: the same releases, hence the same price.

    >>> from sordino import recipes
    >>> recipes.dpadam(batch_size=64, epochs=1).optimizer.kind
    'adam'
    """
    return Recipe(name="dpadam", clip=clip, weighing=Flat(), optimizer=Optimizer("adam", lr=lr), **common)


def automatic(*, gamma: float = 0.01, lr: float = 0.05, momentum: float = 0.9, **common: Unpack[Common]) -> Recipe:
    """AUTO-S: normalise instead of clip, so that there is no bound to tune (Bu et al. 2023).

    >>> from sordino import recipes
    >>> recipes.automatic(batch_size=64, epochs=1).weighing
    Automatic(gamma=0.01)
    """
    optimizer = Optimizer("sgd", lr=lr, momentum=momentum)
    return Recipe(name="automatic", weighing=Automatic(gamma), optimizer=optimizer, **common)
