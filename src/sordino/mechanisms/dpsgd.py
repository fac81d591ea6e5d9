"""DP-SGD, DP-Adam and automatic clipping: the baselines of every paper, made from plain parts."""

from __future__ import annotations

from typing import Unpack

from sordino.mechanisms import Mechanism
from sordino.parts import Automatic, Flat
from sordino.recipe import Common, Optimizer, Recipe


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
    """DP-SGD whose released gradients go to Adam: the same releases, and so the same price.

    >>> from sordino import recipes
    >>> recipes.dpadam(batch_size=64, epochs=1).optimizer.kind
    'adam'
    """
    return Recipe(name="dpadam", clip=clip, weighing=Flat(), optimizer=Optimizer("adam", lr=lr), **common)


def automatic(*, gamma: float = 0.01, lr: float = 0.05, momentum: float = 0.9, **common: Unpack[Common]) -> Recipe:
    """AUTO-S: normalise instead of clipping, so there is no bound to tune (Bu et al. 2023).

    >>> from sordino import recipes
    >>> recipes.automatic(batch_size=64, epochs=1).weighing
    Automatic(gamma=0.01)
    """
    optimizer = Optimizer("sgd", lr=lr, momentum=momentum)
    return Recipe(name="automatic", weighing=Automatic(gamma), optimizer=optimizer, **common)


ABADI = "Abadi et al., Deep Learning with Differential Privacy, CCS 2016"

MECHANISMS = (
    Mechanism(
        "dpsgd",
        title="DP-SGD",
        summary="gradients are clipped one by one, and Gaussian noise is added to their sum",
        paper=ABADI,
        recipe=dpsgd,
    ),
    Mechanism(
        "dpadam",
        title="DP-Adam",
        summary="DP-SGD whose noisy gradients go to Adam",
        paper=ABADI,
        recipe=dpadam,
    ),
    Mechanism(
        "automatic",
        title="AUTO-S",
        summary="gradients are normalised one by one instead of clipped, then noised",
        paper="Bu et al., Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger, 2023",
        recipe=automatic,
    ),
)
