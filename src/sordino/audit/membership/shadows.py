"""Attacks by reference models, each trained on a random half of the same records: LiRA and RMIA.

`train_references` is the one way to train them. The attacks know the models by their confidence ln(p / (1 − p)) in
every example's class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from sordino.audit.membership.attacks import Examples, query
from sordino.audit.membership.scoring import Membership, score
from sordino.errors import InvalidInput

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
FEW = 16
"""With fewer models than this, the spread of one example is unknown, so all examples share one spread."""
Train = Callable[[Examples, int], nn.Module]
"""Trains a model on these examples; the number is a seed, different for each model."""


@dataclass(frozen=True)
class References:
    """`confidences[model, example]`, and for each whether that model trained on that example."""

    confidences: Array
    inside: Flags

    def __post_init__(self) -> None:
        if self.confidences.shape != self.inside.shape or self.confidences.ndim != 2:
            raise InvalidInput(
                f"confidences are {self.confidences.shape} and inside {self.inside.shape}, must be models × examples"
            )
        count = self.inside.sum(0)
        if (count == 0).any() or (count == len(self.inside)).any():
            raise InvalidInput("every example must be inside some reference model and outside some: train more")

    def normal(self, inside: bool) -> tuple[Array, Array]:
        """Mean and deviation per example over the models that trained on it, or that did not."""
        chosen = np.where(self.inside == inside, self.confidences, np.nan)
        means = np.nanmean(chosen, axis=0)
        if len(self.inside) < 2 * FEW:
            return means, np.full_like(means, np.sqrt(np.nanmean((chosen - means) ** 2)) + 1e-12)
        return means, np.nanstd(chosen, axis=0, ddof=1) + 1e-12

    def mean_probability(self, inside: bool) -> Array:
        """p of the true class, averaged over the models that trained on the example, or that did not."""
        return np.asarray(
            np.nanmean(np.where(self.inside == inside, _find_probability(self.confidences), np.nan), axis=0)
        )


def train_references(
    train: Train,
    examples: Examples,
    models: int,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[References, list[nn.Module]]:
    """Train `models` models on random halves of `examples`, and ask each about all of them."""
    inputs, labels = examples
    inside = draw_halves(len(labels), models, seed)
    trained: list[nn.Module] = []
    confidences = np.empty(inside.shape)
    for number, chosen in enumerate(inside):
        trained.append(train((inputs[chosen], labels[chosen]), seed * 1000 + number))
        confidences[number] = query(trained[-1], examples).confidences.numpy()
        if progress is not None:
            progress(number + 1, models)
    return References(confidences, inside.numpy()), trained


def draw_halves(records: int, models: int, seed: int = 0) -> Tensor:
    """Draw which model trains on which record: every record is in half of the models, up to one, at random."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(models, records, generator=generator).argsort(0)
    return order < models // 2


def lira(target: Array, members: Flags, references: References, *, online: bool = True) -> Membership:
    """The likelihood-ratio attack (Carlini et al. 2022, Alg. 1; offline their Eq. 5).

    `target` holds the target's confidence in each example, `members` which of them it trained on.
    """
    mean_out, spread_out = references.normal(False)
    if online:
        mean_in, spread_in = references.normal(True)
        scores = stats.norm.logpdf(target, mean_in, spread_in) - stats.norm.logpdf(target, mean_out, spread_out)
    else:
        scores = stats.norm.logcdf((target - mean_out) / spread_out)
    return score(f"LiRA, {_name_kind(online)}", scores[members], scores[~members])


def rmia(
    target: Array,
    members: Flags,
    references: References,
    population: tuple[Array, Array],
    *,
    online: bool = True,
    gamma: float = 2.0,
    offline_slope: float = 0.3,
) -> Membership:
    """Count how many others z the record x beats by γ in p(·|target)/p(·) (Zarifzadeh et al. 2024, robust attack).

    `population` holds confidences in examples that no model was trained on: the target's, and those of the references
    as a matrix. Offline p(x) is extrapolated from models without x: ((1 + a)·p_out + 1 − a)/2.
    """
    if online:
        expected = (references.mean_probability(True) + references.mean_probability(False)) / 2
    else:
        expected = ((1 + offline_slope) * references.mean_probability(False) + 1 - offline_slope) / 2
    ratio = _find_probability(target) / expected
    others = _find_probability(population[0]) / _find_probability(population[1]).mean(axis=0)
    scores = np.searchsorted(np.sort(others), ratio / gamma, side="right") / len(others)
    # Within equal shares of z the ratio itself decides, so that low false positive rates are not lost to ties.
    scores = scores + 1e-6 * stats.rankdata(ratio) / len(ratio)
    return score(f"RMIA, {_name_kind(online)}", scores[members], scores[~members])


def _find_probability(confidences: Array) -> Array:
    return np.asarray(np.clip(1 / (1 + np.exp(-np.clip(confidences, -500, 500))), 1e-12, 1.0))


def _name_kind(online: bool) -> str:
    return "online" if online else "offline"
