"""Training with nothing to tune: automatic clipping needs no bound, and distance over gradients needs no learning rate.

Both look only at released values, so the price is that of DP-SGD. Compare a search with this recipe: a search must gain
more than it costs.
"""

from __future__ import annotations

from typing import Unpack

from sordino.mechanisms import Mechanism
from sordino.parts import Automatic
from sordino.recipe import Common, Optimizer, Recipe


def rate_free(*, gamma: float = 0.01, **common: Unpack[Common]) -> Recipe:
    """AUTO-S whose steps are the distance from the start over the root of all squared gradients (Ivgi et al. 2023).

    >>> from sordino import recipes
    >>> recipes.rate_free(batch_size=64, epochs=1).optimizer.kind
    'dog'
    """
    return Recipe(name="rate_free", weighing=Automatic(gamma), optimizer=Optimizer("dog", lr=1.0), **common)


MECHANISMS = (
    Mechanism(
        "rate_free",
        title="Rate-free AUTO-S",
        summary="gradients are normalised one by one and noised, and steps find their own length: nothing is tuned",
        paper="Bu et al., Automatic Clipping, 2023; Ivgi, Hinder, Carmon, DoG is SGD's Best Friend: A Parameter-Free "
        "Dynamic Step Size Schedule, 2023",
        recipe=rate_free,
    ),
)
