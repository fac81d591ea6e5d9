"""Whether there are enough records for an ε: what they can say in a run against the noise on it.

Over T steps at an expected draw of B records, the released sums add up to at most T·B·C in the direction that the
records agree on, and to noise of length σ·C·√(T·P) for a model of P parameters. With `AGREEMENT`, the share of C that
records of learnable data agree on, a public guess, the ratio is

    signal / noise = AGREEMENT · B · √T / (σ · √P).

It grows with B, that is with the number of records, and with 1/σ. `AGREEMENT` is set by simulated runs of
linear models on tables of scikit-learn (breast cancer, diabetes, digits, wine; six each): about three quarters of what
training gains over guessing at a large ε is left at a ratio of 1, half at 0.5, little at 0.2.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sordino.recipe import Recipe

AGREEMENT = 0.2
_MOST_EPSILON = 50.0


def signal_to_noise(recipe: Recipe, parameters: int) -> float:
    """The ratio above, from public numbers alone."""
    assert recipe.noise_multiplier is not None
    assert recipe.steps is not None
    reach = recipe.batch_size * math.sqrt(recipe.steps) / recipe.noise_multiplier
    return AGREEMENT * reach / math.sqrt(parameters)


def verdict(recipe: Recipe, parameters: int) -> str | None:
    """One sentence where the noise will drown the records, with the way out; None where there are enough."""
    ratio = signal_to_noise(recipe, parameters)
    if ratio >= 1 or recipe.budget is None or recipe.records is None:
        return None
    enough = math.ceil(recipe.records / ratio)
    return (
        f"{recipe.records:,} records are too few for epsilon {recipe.budget.epsilon:g} with {parameters:,} parameters: "
        f"the noise will be about {1 / ratio:.1f} times what they can say; it takes about {_rounded(enough):,} records"
        f"{_epsilon(recipe, ratio)}, or a smaller model"
    )


def _epsilon(recipe: Recipe, ratio: float) -> str:
    """The ε at which these records would do."""
    assert recipe.noise_multiplier is not None
    assert recipe.budget is not None
    budget = recipe.budget
    quieter = replace(recipe, noise_multiplier=recipe.noise_multiplier * ratio)
    enough = quieter.price(budget.delta, budget.accountant, budget.adjacency)
    return f" or epsilon {math.ceil(enough * 10) / 10:g}" if enough <= _MOST_EPSILON else ""


def _rounded(count: int) -> int:
    """Up to two digits: it is an estimate."""
    unit = int(10 ** max(0, len(str(count)) - 2))
    return math.ceil(count / unit) * unit
