"""Selective updates: DPSUR, noise screening and DPAGD."""

from __future__ import annotations

from typing import Unpack

from sordino.propose import Optimizer
from sordino.recipe import Recipe
from sordino.recipes.common import Common
from sordino.schedules import Constant, Schedule
from sordino.selection.noisy_test import NoisyTest
from sordino.selection.selective import Selective
from sordino.weighing import Flat


def dpsur(
    *,
    clip: float = 0.1,
    lr: float = 2.0,
    momentum: float = 0.9,
    optimizer: str = "sgd",
    validation_size: int = 256,
    validation_noise: float = 1.3,
    validation_clip: float = 0.001,
    threshold: float = -1.0,
    validation_schedule: Schedule | None = None,
    reuse: bool = False,
    line_search: bool = False,
    tests: int = 2,
    test_every: int = 1,
    accounting: str = "proven",
    **common: Unpack[Common],
) -> Recipe:
    """Keep an update if a noisy test on fresh records says that it helps (DPSUR, Alg. 2; defaults of its MNIST run).

    Every attempt is a step of the recipe and is charged. accounting="published" counts accepted updates alone, as the
    paper does; that is no guarantee. `reuse`, `line_search` and `test_every` go beyond the paper (see `Selective`).

    >>> from sordino import recipes
    >>> recipe = recipes.dpsur(batch_size=1024, noise_multiplier=2.0, steps=1152).for_records(60_000)
    >>> f"{recipe.price(1e-5):.2f}"
    '0.98'
    """
    test = NoisyTest(validation_size, validation_clip, validation_noise, threshold, validation_schedule or Constant())
    selection = Selective(
        test=test, reuse=reuse, line_search=line_search, tests=tests, test_every=test_every, accounting=accounting
    )
    return Recipe(
        name="dpsur",
        clip=clip,
        weighing=Flat(),
        selection=selection,
        optimizer=Optimizer(optimizer, lr=lr, momentum=momentum if optimizer == "sgd" else 0.0),
        basis="published" if accounting == "published" else "proven",
        **common,
    )
