"""Public examples without any data: pictures of occluding shapes, and whitening by the statistics of such examples."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

SMALLEST = 2.0
"""Radius of the smallest shapes, in pixels; the largest is a quarter of the picture."""
Map = Callable[[Tensor], Tensor]
_SMALLEST = 1e-6
_RIDGE = 1e-5
"""The share of the largest variance that is added to all of them before a tilt."""
_NEGLIGIBLE = 1e-3
"""Directions whose variance is below this share of what is added to all of them hardly change."""


def draw_dead_leaves(count: int, side: int, channels: int, seed: int, shapes: int = 60) -> Tensor:
    """Pictures [count, channels, side, side] in 0..1: discs and boxes that hide one another (Lee et al. 2001).

    Radii follow the power law r^-3, which gives the scale invariance and the edges of natural images; colours of one
    shape share their brightness. The pictures are a function of the arguments alone.
    """
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.rand(count, channels, 1, 1, generator=generator).repeat(1, 1, side, side)
    for _ in range(shapes):
        drawn = torch.rand(count, 7 + channels, generator=generator)
        cover = cover_pixels(drawn[:, :6], side)[:, None]
        colours = drawn[:, 7:] if channels == 1 else 0.6 * drawn[:, 6:7] + 0.4 * drawn[:, 7:]
        pictures = pictures * (1 - cover) + cover * colours[:, :, None, None]
    return pictures


def draw_centred_leaves(count: int, side: int, channels: int, seed: int) -> Tensor:
    """Dead leaves seen through a rounded window with holes, on black: like objects that were cut out and centred."""
    pictures, holes = draw_dead_leaves(count, side, channels, seed, 25), draw_dead_leaves(count, side, 1, seed + 1, 8)
    reach = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed + 2)) * 0.7 + 0.35
    line = torch.linspace(-1, 1, side)
    across, down = (line / reach[:, axis, None] for axis in (0, 1))
    window = across[:, None, :].abs() ** 3 + down[:, :, None].abs() ** 3 < 1
    return pictures * window[:, None] * (holes > 0.3)


def cover_pixels(drawn: Tensor, side: int) -> Tensor:
    """How much of each pixel [count, side, side] a shape covers; `drawn` are six uniform numbers per shape."""
    ratio = side / 4 / SMALLEST
    return cover_ellipses(drawn, SMALLEST / (1 - drawn[:, 0] * (1 - ratio**-2)).sqrt(), side)


def cover_ellipses(drawn: Tensor, radius: Tensor, side: int) -> Tensor:
    """Return the same for ellipses and boxes of given `radius`; the first of the numbers `drawn` is not used."""
    line, turn = torch.arange(side).float(), drawn[:, 3, None, None] * math.pi
    right = line[None, None, :] - drawn[:, 1, None, None] * side
    down = line[None, :, None] - drawn[:, 2, None, None] * side
    flat = 0.3 + 0.7 * drawn[:, 4]
    along = (right * turn.cos() + down * turn.sin()) / radius[:, None, None]
    beside = (down * turn.cos() - right * turn.sin()) / (radius * flat)[:, None, None]
    disc, box = (along**2 + beside**2).sqrt(), torch.maximum(along.abs(), beside.abs())
    distance = torch.where(drawn[:, 5, None, None] < 0.5, disc, box)
    return ((1 - distance) * radius[:, None, None]).clamp(0, 1)


def scale_to_unit(rows: Tensor) -> Tensor:
    """Each row divided by its norm; rows of zeros stay."""
    lengths: Tensor = rows.norm(dim=1, keepdim=True)
    return rows / lengths.clamp(min=_SMALLEST)


@torch.no_grad()
def fit_whitening(examples: Tensor, ridge: float) -> Map:
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

    def whiten_thin(rows: Tensor) -> Tensor:
        rows = rows - mean
        within: Tensor = (rows @ spanned * gains) @ spanned.T
        return plain * rows + within

    return whiten_thin


@torch.no_grad()
def fit_cells(examples: Tensor, kept: int, tilt: float = 1.0) -> Map:
    """The map from [N, cells, channels] to rows [N, cells * kept] of norm 1, in directions that the examples decide.

    Directions are products of one over channels, of which the `kept` of largest variance remain, and one over cells:
    the eigenvectors of two covariances, which need few examples. A coordinate of variance v is divided by
    (v + r * largest v)^(tilt / 2), r = 0.001 %: a tilt of 1 whitens, 0 leaves the variances.
    """
    mean = examples.mean(0)
    centred = examples - mean
    variances, channels = _find_directions(centred.flatten(0, 1))
    variances, channels = variances[-kept:], channels[:, -kept:]
    scaled = (centred @ channels) * (variances + _SMALLEST * variances[-1]).rsqrt()
    _, cells = _find_directions(scaled.transpose(1, 2).flatten(0, 1))

    def turn(rows: Tensor) -> Tensor:
        return (cells.T @ ((rows - mean) @ channels)).flatten(1)

    spread = turn(examples).square().mean(0)
    scales = (spread + _RIDGE * spread.max()) ** (-tilt / 2)
    return lambda rows: scale_to_unit(turn(rows) * scales)


def _find_directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of the rows' second moments, which grow, and their eigenvectors in columns."""
    variances, directions = torch.linalg.eigh((rows.T @ rows / len(rows)).double())
    return variances.clamp(min=0).float(), directions.float()
