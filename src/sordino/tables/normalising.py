"""Normalising features: within each record, which is free, or by statistics over records, which are released."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from dp_accounting.dp_event import DpEvent, GaussianDpEvent
from torch import Tensor, nn

from sordino.accounting.ledger import Receipt
from sordino.errors import InvalidInput
from sordino.noise import Gaussians, add_noise


class Charging(Protocol):
    """Something that is charged before a release is made, such as a ledger."""

    def charge(self, event: DpEvent, note: str = "") -> Receipt: ...


def group_norm(channels: int, groups: int = 27) -> nn.GroupNorm:
    """Normalise groups without trained weights: each record by its own mean and deviation, so it costs nothing."""
    if groups < 1 or channels % groups:
        raise InvalidInput(f"groups={groups} must divide channels={channels}: 27 divides both 81 and 243")
    return nn.GroupNorm(groups, channels, affine=False)


class ChannelNorm(nn.Module):
    """(x - mean) / std per channel of [N, channels, ...], by released statistics; `events` are their price."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, events: tuple[GaussianDpEvent, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.events = events

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return (x - self.mean.reshape(shape)) / self.std.reshape(shape)


def private_normalisation(
    features: Tensor,
    *,
    records: int,
    clip: float,
    square_clip: float,
    noise_multiplier: float,
    ledger: Charging,
    source: Gaussians,
) -> ChannelNorm:
    """Release mean and deviation per channel of [N, channels, ...] by two Gaussians (Tramer and Boneh 2021, sec. 2).

    Record i gives m_i and s_i, its means over space of the values and of their squares, clipped to norms `clip` and
    `square_clip`. With s = `noise_multiplier` and n = `records`,

        mean = (sum_i m_i + N(0, (s * clip)^2)) / n,
        std^2 = (sum_i s_i + N(0, (s * square_clip)^2)) / n - mean^2, at least s * square_clip / n.

    Guarantees: adding or removing a record moves each sum by at most its bound, so the releases are two Gaussian events
    of multiplier s, charged before the noise is drawn. The authors' code takes the median norm of the private records
    as its bound, which no event pays for; here the bounds and the divisor are public numbers.
    Edge cases: a record that is not finite contributes nothing; a variance below the noise is set to the noise.
    """
    for name, value in (("clip", clip), ("square_clip", square_clip), ("noise_multiplier", noise_multiplier)):
        if not (math.isfinite(value) and value > 0):
            raise InvalidInput(f"{name}={value} must be finite and > 0: take a public number, 1.0 to start with")
    if records < 1 or features.dim() < 2:
        raise InvalidInput(
            f"records={records} must be >= 1 and features [N, channels, ...], got {tuple(features.shape)}"
        )
    values, squares = _clipped_sums(features, clip, square_clip)
    event = GaussianDpEvent(noise_multiplier)
    released = []
    for what, total, bound in (("mean", values, clip), ("square", squares, square_clip)):
        receipt = ledger.charge(event, f"{what} of the features per channel")
        released.append(add_noise(source, receipt, total, noise_multiplier * bound) / records)
    mean, square = released
    variance = (square - mean**2).clamp(min=noise_multiplier * square_clip / records)
    return ChannelNorm(mean.float(), variance.sqrt().float(), (event, event))


def _clipped_sums(features: Tensor, clip: float, square_clip: float) -> tuple[Tensor, Tensor]:
    """Sums over records of the clipped per-channel means of values and squares, in float64, chunk by chunk."""
    channels = features.shape[1]
    sums = torch.zeros(2, channels, dtype=torch.float64)
    for chunk in features.split(1024):
        flat = chunk.double().reshape(len(chunk), channels, -1)
        sums[0] += _clip_rows(flat.mean(dim=2), clip).sum(dim=0)
        sums[1] += _clip_rows(flat.square().mean(dim=2), square_clip).sum(dim=0)
    return sums[0], sums[1]


def _clip_rows(rows: Tensor, bound: float) -> Tensor:
    """Shorten each row to norm `bound` if it is longer; a row that is not finite becomes zero."""
    norms = rows.norm(dim=1, keepdim=True)
    shortened = rows * (bound / norms).clamp(max=1.0)
    return torch.where(norms.isfinite(), shortened, 0.0)
