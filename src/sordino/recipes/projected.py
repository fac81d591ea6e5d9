"""DP-SGD-JL and DP-Adam-JL: clip by norms that random projections estimate."""

from __future__ import annotations

from typing import Unpack

from sordino.projection import Projected
from sordino.propose import Optimizer
from sordino.recipe import Recipe
from sordino.recipes.common import Common
from sordino.weighing import Flat


def jl(
    *,
    optimizer: str = "sgd",
    projections: int | str = "auto",
    clip: float = 1.0,
    lr: float | None = None,
    momentum: float = 0.0,
    **common: Unpack[Common],
) -> Recipe:
    """Clip every gradient by its norm as estimated from `projections` random projections (DP-SGD-JL, Algs. 1 and 3).

    `projections="auto"` takes the fewest that need at most 5 % more noise than exact norms. `lr` is 0.25 for SGD and
    0.001 for Adam unless given, as in the paper. Unlike there, draws are Poisson and few projections cost what they
    reveal.

    >>> from sordino.recipes.projected import jl
    >>> jl(optimizer="adam", projections=24, batch_size=256, epochs=5).norms
    Projected(projections=24, factor=1.05)
    """
    rate = lr if lr is not None else {"sgd": 0.25}.get(optimizer, 1e-3)
    proposer = Optimizer(optimizer, lr=rate, momentum=momentum)
    norms = Projected(projections)
    return Recipe(name="jl", clip=clip, norms=norms, weighing=Flat(), optimizer=proposer, **common)
