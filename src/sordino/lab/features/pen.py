"""Synthetic handwriting: characters that nobody ever wrote, drawn again and again by a shaky hand. No data is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

STROKES, PIECES, POINTS = 3, 3, 40
"""A character has up to three strokes of up to three pieces; a stroke is drawn as forty points."""
BOX = 20 / 28
"""The share of the picture's side that a character fills, as in MNIST."""
_ABSENT = 1e-4


@dataclass(frozen=True)
class Characters:
    """How a pen moves: of every character [count, strokes, pieces] the pieces' lengths, turns, and corners before them.

    A stroke starts at `start` in the direction `heading`; `used` is 1 for the strokes that there are.
    """

    used: Tensor
    start: Tensor
    heading: Tensor
    length: Tensor
    turn: Tensor
    corner: Tensor

    def __len__(self) -> int:
        return len(self.used)

    def __getitem__(self, which: Tensor) -> Characters:
        return Characters(*(getattr(self, each.name)[which] for each in fields(self)))


def invent(count: int, seed: int) -> Characters:
    """Random characters: half have one stroke; a third of the pieces are straight, the others are arcs."""
    generator = torch.Generator().manual_seed(seed)

    def chance(*shape: int) -> Tensor:
        return torch.rand(count, STROKES, *shape, generator=generator)

    def among(limit: int, shares: list[float], size: int) -> Tensor:
        """Ones for a number of the `limit` places that is drawn with these shares, zeros for the rest."""
        chosen = torch.multinomial(torch.tensor(shares), size, replacement=True, generator=generator)
        return (torch.arange(limit) <= chosen[:, None]).float()

    def signed(least: float, most: float, zero: float) -> Tensor:
        """Zero with probability `zero`, else of either sign and of a size between `least` and `most`."""
        drawn = 2 * chance(PIECES) - 1
        return torch.where(chance(PIECES) < zero, 0.0, drawn.sign() * (least + drawn.abs() * (most - least)))

    pieces = among(PIECES, [0.35, 0.4, 0.25], count * STROKES).reshape(count, STROKES, PIECES)
    corner = signed(0.8, 2.5, zero=0.5)
    corner[..., 0] = 0
    return Characters(
        used=among(STROKES, [0.5, 0.35, 0.15], count),
        start=1.2 * chance(2),
        heading=2 * math.pi * chance(),
        length=(0.25 + 0.9 * chance(PIECES)) * pieces + _ABSENT,
        turn=signed(0.8, 5.5, zero=0.35),
        corner=corner,
    )


def draw(characters: Characters, generator: torch.Generator, side: int = 28) -> Tensor:
    """One picture [count, 1, side, side] in 0..1 of each character, every time in another hand.

    Size, centre of mass and width of the pen are brought to what MNIST did to its digits; slant, turn and proportions
    are not, because people differ in them.
    """
    points, weights = _trace(_shake(characters, generator))
    points = _slant(points, generator)
    pen = (0.55 + 0.7 * torch.rand(len(characters), generator=generator)) * side / 28
    points, weights = _place(points, weights, BOX * side - 2 * pen, side)
    points = points + 0.3 * torch.randn(len(characters), 1, 2, generator=generator)
    pressure = 1.6 + 0.8 * torch.rand(len(characters), 1, 1, generator=generator)
    return ((_ink_points(points, weights, pen, side) * pressure - 0.15) * 1.6).clamp(0, 1)[:, None]


def _shake(planned: Characters, generator: torch.Generator) -> Characters:
    """Draw the same characters, with every movement a little off."""

    def off(tensor: Tensor, size: float) -> Tensor:
        return size * torch.randn(tensor.shape, generator=generator)

    return Characters(
        used=planned.used,
        start=planned.start + off(planned.start, 0.05),
        heading=planned.heading + off(planned.heading, 0.12),
        length=planned.length * off(planned.length, 0.15).exp(),
        turn=planned.turn * (1 + off(planned.turn, 0.15)) + off(planned.turn, 0.12),
        corner=planned.corner * (1 + off(planned.corner, 0.12)),
    )


def _trace(moves: Characters) -> tuple[Tensor, Tensor]:
    """Points [count, strokes * POINTS, 2] along the strokes, and the length of line that each stands for."""
    total = moves.length.sum(-1, keepdim=True)
    along = (torch.arange(POINTS) + 0.5) / POINTS * total
    begin = moves.length.cumsum(-1) - moves.length
    done = ((along[..., None] - begin[..., None, :]) / moves.length[..., None, :]).clamp(0, 1)
    turned = (done * moves.turn[..., None, :] + (done > 0) * moves.corner[..., None, :]).sum(-1)
    heading = moves.heading[..., None] + turned
    steps = torch.stack([heading.cos(), heading.sin()], -1) * (total / POINTS)[..., None]
    points = moves.start[:, :, None] + steps.cumsum(2)
    weights = (moves.used[..., None] * total / POINTS).expand(-1, -1, POINTS)
    return points.flatten(1, 2), weights.flatten(1)


def _slant(points: Tensor, generator: torch.Generator) -> Tensor:
    """Turned, slanted and stretched, every character by its own amount."""
    count = len(points)
    turn = 0.14 * torch.randn(count, generator=generator)
    slant = 0.35 * (2 * torch.rand(count, generator=generator) - 1)
    stretch = (0.13 * torch.randn(count, generator=generator)).exp()
    across = torch.stack([stretch * turn.cos(), slant - turn.sin()], -1)
    down = torch.stack([turn.sin(), turn.cos()], -1)
    return points @ torch.stack([across, down], -1)


def _place(points: Tensor, weights: Tensor, size: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The longer side of each character brought to `size` pixels, and its centre of mass to the picture's centre."""
    outside = torch.where(weights[..., None] > 0, 0.0, torch.inf)
    extent = (points - outside).amax(1) - (points + outside).amin(1)
    scale = size / extent.amax(1).clamp(min=0.05)
    points, weights = points * scale[:, None, None], weights * scale[:, None]
    centre = (points * weights[..., None]).sum(1) / weights.sum(1)[:, None]
    return points - centre[:, None] + side / 2, weights


def _ink_points(points: Tensor, weights: Tensor, pen: Tensor, side: int) -> Tensor:
    """Pictures [count, side, side]: each point a round blot of standard deviation `pen`, row and column apart."""
    line = torch.arange(side) + 0.5
    spread = 2 * pen[:, None, None] ** 2
    across, down = ((-((line - points[..., axis, None]) ** 2) / spread).exp() for axis in (0, 1))
    blots = (down * weights[..., None]).transpose(1, 2) @ across
    return blots / (pen * math.sqrt(2 * math.pi))[:, None, None]
