"""How to train on a user's own records by default, from their kind and public number alone, and if they are enough.

They are enough for an ε if what they can say in a run is large compared with the run's noise.

Over T steps at an expected draw of B records, the released sums add up to at most T·B·C in the direction that the
records agree on, and to noise of length σ·C·√(T·P) for a model of P parameters. With `AGREEMENT`, the share of C that
records of learnable data agree on, a public guess, the ratio is

    signal / noise = AGREEMENT · B · √T / (σ · √P).

It grows with B, so with the number of records, and with 1/σ. `AGREEMENT` was set by simulated runs of linear models on
tables of scikit-learn (breast cancer, diabetes, digits, wine; six each). Of the gain over guessing at a large ε, about
three quarters are left at a ratio of 1, half at 0.5, and little at 0.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from sordino.recipe import Optimizer, Recipe
from sordino.tables.dataset import Data
from sordino.tables.reading import Sheet, is_table

OPTIMIZERS = {
    "sgd": Optimizer("sgd", lr=0.25, momentum=0.9),
    "adam": Optimizer("adam", lr=0.01),
    "adamw": Optimizer("adamw", lr=0.01),
    "dog": Optimizer("dog", lr=1.0),
}
"""Good for small models and some hundred steps; found on digits, which are public."""
AGREEMENT = 0.2
ROOMY = 12.0
"""A cautious guess from three invented tables, one run each.

A hidden layer gained 2 to 3 % on two of them, at ratios of 8 and 60, and lost 2 % on the third, at 8.
"""
MOST_FEATURES = 256
_MOST_EPSILON = 50.0


@dataclass(frozen=True)
class Defaults:
    """Expected size of a draw as a share of the records, within limits; and how long and how fast to learn.

    `epochs` are cut to `most_steps`: a million records need few epochs.
    """

    share: float
    fewest: int
    most: int
    most_epochs: float
    optimizer: Optimizer
    most_steps: int = 400

    def batch_size(self, records: int) -> int:
        wanted = max(self.fewest, int(self.share * records))
        return max(1, min(wanted, self.most, records))

    def epochs(self, records: int) -> float:
        return min(self.most_epochs, self.most_steps * self.batch_size(records) / records)


BENCHMARK = Defaults(share=0.25, fewest=1, most=256, most_epochs=20.0, optimizer=OPTIMIZERS["sgd"], most_steps=10**9)
TABLE = Defaults(share=0.25, fewest=1, most=16_384, most_epochs=25.0, optimizer=OPTIMIZERS["sgd"])
IMAGES = Defaults(
    share=0.125, fewest=64, most=4_096, most_epochs=20.0, optimizer=Optimizer("sgd", lr=0.1, momentum=0.9)
)


def choose_defaults(records: Data | Sheet) -> Defaults:
    """Choose defaults for a user's own records: large draws, because noise is added once per draw whatever its size.

    They were chosen by held-out accuracy on public tables (breast cancer, diabetes, digits of scikit-learn; part of
    IMDb).
    """
    if isinstance(records, Sheet):
        return TABLE
    return IMAGES if records.train_set[0][0].dim() == 3 else BENCHMARK


def mlp(features: int, classes: int, hidden: int = 32) -> nn.Sequential:
    """One hidden layer on flattened inputs, with tanh: bounded activations keep gradients small."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, classes))


def small_cnn(channels: int, classes: int, width: int = 16) -> nn.Sequential:
    """Two strided convolutions and one dense layer for images of any size; tanh keeps gradients small.

    About 5,000 parameters and 512 for each class: few, because the noise on a gradient grows with their number.
    """
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 5, stride=2, padding=2), nn.Tanh()),
        *(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.Tanh()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, classes)),
    )


def choose_model(source: str, input_shape: Sequence[int], classes: int, recipe: Recipe) -> str:
    """Choose a model by name for records of a file if the user names none, from public numbers alone.

    A table gets a hidden layer if its records still outweigh the noise by far, else a linear model.
    """
    if Path(source).is_dir() and len(input_shape) == 3:
        return "small-cnn"
    if not is_table(source):
        return "mlp"
    features = math.prod(input_shape)
    parameters = count_parameters(mlp(features, classes))
    roomy = features <= MOST_FEATURES and estimate_signal_to_noise(recipe, parameters) >= ROOMY
    return "mlp" if roomy else "linear"


def count_parameters(model: nn.Module) -> int:
    """Count the trained numbers."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def estimate_signal_to_noise(recipe: Recipe, parameters: int) -> float:
    """Estimate the ratio above, from public numbers alone."""
    assert recipe.noise_multiplier is not None
    assert recipe.steps is not None
    reach = recipe.batch_size * math.sqrt(recipe.steps) / recipe.noise_multiplier
    return AGREEMENT * reach / math.sqrt(parameters)


def judge_size(recipe: Recipe, parameters: int) -> str | None:
    """Return one sentence, with a way out, if noise will drown the records; None if there are enough."""
    ratio = estimate_signal_to_noise(recipe, parameters)
    if ratio >= 1 or recipe.budget is None or recipe.records is None:
        return None
    enough = math.ceil(recipe.records / ratio)
    return (
        f"{recipe.records:,} records are too few for epsilon {recipe.budget.epsilon:g} with {parameters:,} parameters: "
        f"the noise will be about {1 / ratio:.1f} times what they can say; it takes about {_round_up(enough):,} records"
        f"{_suggest_epsilon(recipe, ratio)}, or a smaller model"
    )


def _suggest_epsilon(recipe: Recipe, ratio: float) -> str:
    """Suggest an ε at which these records would be enough."""
    assert recipe.noise_multiplier is not None
    assert recipe.budget is not None
    budget = recipe.budget
    quieter = replace(recipe, noise_multiplier=recipe.noise_multiplier * ratio)
    enough = quieter.price(budget.delta, budget.accountant, budget.adjacency)
    return f" or epsilon {math.ceil(enough * 10) / 10:g}" if enough <= _MOST_EPSILON else ""


def _round_up(count: int) -> int:
    """Round up to two digits: it is only an estimate."""
    unit = int(10 ** max(0, len(str(count)) - 2))
    return math.ceil(count / unit) * unit
