"""Features of handwriting: a network that learned to tell invented characters apart, and has seen no record.

Tang et al. (2023) learn features from random processes before they train privately. Here the process is a pen
(`sordino.lab.features.pen`): a network that can tell thousands of scribbles apart, in any hand, has the features that
digits need. Each picture is first made upright by its own moments, so nothing else is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.errors import InvalidInput
from sordino.lab.data.cache import allocate, cache_folder, remember_tensor
from sordino.lab.features.pen import draw, invent
from sordino.lab.features.pretraining import descend, halve_precision, keep_network
from sordino.lab.features.synthetic import scale_to_unit

VERSION = 1
"""Part of every cache key: raised when the same arguments would give other features."""
SIDE, WIDTH = 28, 2048
CHUNK = 500
VIEWS = ((0.0, 1.0), (0.15, 1.0), (-0.15, 1.0), (0.0, 0.9), (0.0, 1.1))
"""The turns (in radians) and zooms over which a picture's features are averaged."""
_BATCH, _RATE, _HIDDEN, _EXAMPLES = 256, 0.2, 512, 6000
_MOST_SHEAR = 0.6
"""The largest shear that is undone; a character that leans further was not upright before."""
_FLAT = 2.0
"""Pixels² added to the vertical variance, so that flat characters are left as they are."""


@dataclass(frozen=True)
class Handwriting:
    """How many `characters` the network learned to tell apart, and in how many `steps` of 256 drawings."""

    characters: int = 3000
    steps: int = 4000

    def __post_init__(self) -> None:
        if self.characters < 2 or self.steps < 1:
            raise InvalidInput(f"characters={self.characters} must be >= 2 and steps={self.steps} >= 1")


def describe_handwriting(
    images: Tensor, choice: Handwriting | None = None, *, folder: Path | None = None, quiet: bool = False
) -> Tensor:
    """Features [N, 2048] of norm 1 of pictures [N, 1, 28, 28], white on black, from a file in `folder` if known.

    Each picture is made upright and seen in five views; the network's last map, 128 channels on 4 x 4 cells, is
    averaged over them, centred by its mean over invented characters and brought to norm 1. The network is trained when
    it is first needed (about a quarter of an hour on one core) and kept in `folder`.
    Guarantees: a record's features depend on that record alone, so they are free of charge.
    """
    choice = choice or Handwriting()
    if images.dim() != 4 or images.shape[1:] != (1, SIDE, SIDE) or not len(images):
        raise InvalidInput(f"images have shape {tuple(images.shape)}, must be [N, 1, {SIDE}, {SIDE}]: scale them")
    images = images.detach().to(torch.float32).contiguous()
    place = folder or cache_folder() / "handwriting"

    def make(path: Path) -> None:
        network = load_network(choice, place, quiet=quiet)
        centre = _describe(_draw_others(choice, _EXAMPLES), network).mean(0)
        output = allocate(path, (len(images), WIDTH))
        for begin in range(0, len(images), CHUNK):
            output[begin : begin + CHUNK] = scale_to_unit(
                _describe(images[begin : begin + CHUNK], network) - centre
            ).numpy()
        output.flush()

    return remember_tensor(place, (VERSION, choice), (images,), make, title="handwriting features")


def load_network(choice: Handwriting, folder: Path, *, quiet: bool = False) -> nn.Sequential:
    """The network up to its last map, in eval mode: the one in `folder`, or a new one, which is then kept there."""
    doing = f"learning to tell {choice.characters:,} invented characters apart in {choice.steps:,} steps"
    return keep_network((VERSION, choice), folder, build_network, lambda: _learn(choice, quiet), doing)


def build_network() -> nn.Sequential:
    """From a picture to 128 channels on 4 x 4 cells, flat."""

    def layer(inputs: int, outputs: int, side: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, side, padding=side // 2, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    first, second = [*layer(1, 32, 5), nn.MaxPool2d(2)], [*layer(32, 64, 3), nn.MaxPool2d(2)]
    third = [*layer(64, 128, 3), *layer(128, 128, 3), nn.MaxPool2d(2, ceil_mode=True)]
    return nn.Sequential(*first, *second, *third, nn.Flatten())


def _learn(choice: Handwriting, quiet: bool) -> nn.Sequential:
    """Train by the character that a drawing is of."""
    torch.manual_seed(0)
    network = build_network().train()
    last = [nn.Linear(WIDTH, _HIDDEN, bias=False), nn.BatchNorm1d(_HIDDEN), nn.ReLU()]
    whole = nn.Sequential(network, *last, nn.Linear(_HIDDEN, choice.characters))
    characters, generator = invent(choice.characters, seed=0), torch.Generator().manual_seed(1)

    def compute_loss() -> Tensor:
        classes = torch.randint(choice.characters, (_BATCH,), generator=generator)
        pictures = make_upright(draw(characters[classes], generator)).to(memory_format=torch.channels_last)
        with halve_precision():
            scores = whole(pictures)
        return F.cross_entropy(scores.float(), classes, label_smoothing=0.1)

    title = "learning to tell invented characters apart"
    descend(whole, compute_loss, steps=choice.steps, rate=_RATE, title=title, quiet=quiet)
    return network


def _draw_others(choice: Handwriting, count: int) -> Tensor:
    """Drawings of other characters than those that were learned."""
    generator = torch.Generator().manual_seed(2)
    characters = invent(count, seed=choice.characters + 1)
    return torch.cat([draw(characters[part], generator) for part in torch.arange(count).split(CHUNK)])


@torch.no_grad()
def _describe(images: Tensor, network: nn.Module) -> Tensor:
    """Return the network's answer to each picture, averaged over its views."""
    return torch.cat([_see_views(make_upright(part), network) for part in images.split(CHUNK)])


def _see_views(pictures: Tensor, network: nn.Module) -> Tensor:
    views = (turn_and_zoom(pictures, turn, zoom).to(memory_format=torch.channels_last) for turn, zoom in VIEWS)
    return torch.stack([network(each) for each in views]).mean(0)


def turn_and_zoom(pictures: Tensor, turn: float, zoom: float) -> Tensor:
    """Square pictures turned by `turn` radians about their centre, of which the share `zoom` of each side is seen."""
    cosine, sine = zoom * math.cos(turn), zoom * math.sin(turn)
    moved = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]]).expand(len(pictures), 2, 3)
    return F.grid_sample(pictures, F.affine_grid(moved, list(pictures.shape), align_corners=False), align_corners=False)


@torch.no_grad()
def make_upright(images: Tensor) -> Tensor:
    """Pictures [N, 1, H, W] on black, sheared along their rows until x and y do not covary, and centred by their mass.

    With moments m_xy and m_yy about the centre of mass, row y moves by -s·y, s = m_xy / (m_yy + 2), |s| <= 0.6.
    Edge cases: a blank picture stays blank.
    """
    count, _, height, width = images.shape
    down = (torch.arange(height) - (height - 1) / 2)[:, None].expand(height, width)
    across = (torch.arange(width) - (width - 1) / 2).expand(height, width)
    ink = images[:, 0]
    mass = ink.sum((1, 2)).clamp(min=1e-6)
    centre_x, centre_y = ((ink * line).sum((1, 2)) / mass for line in (across, down))
    x, y = across - centre_x[:, None, None], down - centre_y[:, None, None]
    slant = ((ink * x * y).sum((1, 2)) / ((ink * y * y).sum((1, 2)) + _FLAT * mass)).clamp(-_MOST_SHEAR, _MOST_SHEAR)
    one, none = torch.ones(count), torch.zeros(count)
    rows = [[one, slant * height / width, 2 * centre_x / width], [none, one, 2 * centre_y / height]]
    maps = torch.stack([torch.stack(row, -1) for row in rows], 1)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
