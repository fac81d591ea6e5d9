"""Rows of norm 1, and whitening by the statistics of examples that are public."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]
_SMALLEST = 1e-6
_NEGLIGIBLE = 1e-3
"""Directions with less variance than this share of what is added to every variance change next to nothing."""


def unit(rows: Tensor) -> Tensor:
    """Each row divided by its norm; rows of zeros stay."""
    lengths: Tensor = rows.norm(dim=1, keepdim=True)
    return rows / lengths.clamp(min=_SMALLEST)


@torch.no_grad()
def whitening(examples: Tensor, ridge: float) -> Map:
    """The map x -> (S + r I)^(-1/2) (x - m): mean m and covariance S of the examples, r = ridge * largest variance.

    Of fewer examples than dimensions only the directions that they span are computed: elsewhere it is r^(-1/2).
    """
    mean = examples.mean(0)
    centred = (examples - mean).double()
    count, dimensions = centred.shape
    if dimensions <= count:
        variances, directions = torch.linalg.eigh(centred.T @ centred / count)
        scales = (variances.clamp(min=0) + ridge * variances[-1]).rsqrt()
        white = (directions * scales @ directions.T).float()
        return lambda rows: (rows - mean) @ white
    variances, among = torch.linalg.eigh(centred @ centred.T / count)
    added = ridge * variances[-1]
    large = variances > _NEGLIGIBLE * added
    spanned = (centred.T @ among[:, large] / (count * variances[large]).sqrt()).float()
    plain = float(added.rsqrt())
    gains = ((variances[large] + added).rsqrt() - plain).float()

    def thin(rows: Tensor) -> Tensor:
        rows = rows - mean
        within: Tensor = (rows @ spanned * gains) @ spanned.T
        return plain * rows + within

    return thin
