"""Reference models on random halves of the records, for LiRA and RMIA."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from sordino.audit.membership.reference import References
from sordino.audit.membership.signals import Examples, signals

Train = Callable[[Examples, int], nn.Module]
"""Trains a model on these examples; the number is a seed of its own for each."""


def halves(records: int, models: int, seed: int = 0) -> Tensor:
    """Which model trains on which record: every record is in half of the models, up to one, at random."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(models, records, generator=generator).argsort(0)
    return order < models // 2


def references(
    train: Train,
    examples: Examples,
    models: int,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[References, list[nn.Module]]:
    """Train `models` models on random halves of `examples`, and ask each about all of them."""
    inputs, labels = examples
    inside = halves(len(labels), models, seed)
    trained: list[nn.Module] = []
    confidences = np.empty(inside.shape)
    for number, chosen in enumerate(inside):
        trained.append(train((inputs[chosen], labels[chosen]), seed * 1000 + number))
        confidences[number] = signals(trained[-1], examples).confidences.numpy()
        if progress is not None:
            progress(number + 1, models)
    return References(confidences, inside.numpy()), trained
