"""Features of things: a network that learned what invented objects are made of, and has seen no record.

Tang et al. (2023) learn features from random processes before they train privately. Here the process draws solid
objects (`sordino.lab.features.objects`), and everything about them is known: which object it is, where its parts are in
the picture, how large and round they are, what colours they have, which way it faces. A network that can tell has what
photographs of things need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.errors import InvalidInput
from sordino.lab.data.cache import allocate, cache_folder, remember_tensor
from sordino.lab.features.learning import Watch, descend, halve_precision, keep_network
from sordino.lab.features.objects import GROUPS, KINDS, Objects, draw, invent
from sordino.lab.features.scenes import draw_scenes
from sordino.lab.features.synthetic import Map, fit_cells, scale_to_unit

VERSION = 1
"""Part of every cache key: raised when the same arguments would give other features."""
SIDE, CHANNELS, GRID = 32, (64, 128, 192, 384), 4
"""The pictures' side, the channels after each halving, and the cells on which the last two maps are pooled."""
CHUNK = 250
_MARGIN = 40
"""The side of the pictures that are drawn; what is learned from is a part of them, scaled to SIDE."""
_BATCH, _RATE, _HIDDEN, _EXAMPLES = 128, 0.2, 512, 1500


@dataclass(frozen=True)
class Anatomy:
    """What the network learned from, and what is kept of its maps.

    It saw so many `pictures` of so many `objects`, in `steps` of 128. Of each of its last two maps so many channels
    are `kept`, and whitened as far as `tilt` says (`fit_cells`).
    """

    objects: int = 8000
    pictures: int = 160_000
    steps: int = 9000
    kept: int = 128
    tilt: float = 0.75

    def __post_init__(self) -> None:
        if self.objects < 2 or self.pictures < self.objects or self.steps < 1:
            raise InvalidInput(
                f"objects={self.objects} must be >= 2, pictures={self.pictures} at least as many, steps={self.steps} >= 1"
            )
        if not 1 <= self.kept <= CHANNELS[-2]:
            raise InvalidInput(f"kept={self.kept} must be in 1..{CHANNELS[-2]}, the channels there are")
        if not 0 <= self.tilt <= 1:
            raise InvalidInput(f"tilt={self.tilt} must be in 0..1: 1 whitens, 0 leaves the variances")

    @property
    def width(self) -> int:
        """How many features a record has."""
        return 2 * self.kept * GRID**2


def describe_anatomy(
    images: Tensor, choice: Anatomy | None = None, *, folder: Path | None = None, quiet: bool = False
) -> Tensor:
    """Features [N, choice.width] of norm 1 of pictures [N, 3, 32, 32] in 0..1, from a file in `folder` if known.

    The network's last two maps are pooled on 4 x 4 cells and averaged with those of the mirror image; each is centred
    and tilted by its statistics over invented pictures, and brought to norm 1. The network is trained when it is first
    needed and kept in `folder`.
    Guarantees: a record's features depend on that record alone, so they are free of charge.
    """
    choice = choice or Anatomy()
    if images.dim() != 4 or images.shape[1:] != (3, SIDE, SIDE) or not len(images):
        raise InvalidInput(f"images have shape {tuple(images.shape)}, must be [N, 3, {SIDE}, {SIDE}]: scale them")
    images = images.detach().to(torch.float32).contiguous()
    place = folder or cache_folder() / "anatomy"

    def make(path: Path) -> None:
        features = _fit_description(choice, load_network(choice, place, quiet=quiet))
        output = allocate(path, (len(images), choice.width))
        for begin in range(0, len(images), CHUNK):
            output[begin : begin + CHUNK] = features(images[begin : begin + CHUNK]).numpy()
        output.flush()

    return remember_tensor(place, (VERSION, choice), (images,), make, title="anatomy features")


def load_network(choice: Anatomy, folder: Path, *, quiet: bool = False, watch: Watch | None = None) -> Eye:
    """The network in eval mode: the one in `folder`, or a new one, which is then kept there."""
    learned = (choice.objects, choice.pictures, choice.steps)
    doing = f"learning what {choice.objects:,} invented objects are made of in {choice.steps:,} steps"
    return keep_network((VERSION, *learned), folder, Eye, lambda: _learn(choice, quiet, watch), doing)


class Eye(nn.Module):
    """From pictures to maps of sides 8 and 4: convolutions, two of them with a shortcut around a pair."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third, fourth = CHANNELS
        self.early = nn.Sequential(_layer(3, first, 4, 2), _layer(first, second), nn.MaxPool2d(2))
        self.middle = nn.Sequential(_layer(second, third), _Shortcut(third))
        self.late = nn.Sequential(nn.MaxPool2d(2), _layer(third, fourth), _Shortcut(fourth))
        self.to(memory_format=torch.channels_last)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Maps [N, 192, 8, 8] and [N, 384, 4, 4] of pictures in 0..1."""
        middle = self.middle(self.early((4 * pictures - 2).to(memory_format=torch.channels_last)))
        return middle, self.late(middle)


class _Shortcut(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        last = [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)]
        self.around = nn.Sequential(_layer(channels, channels), *last)

    def forward(self, maps: Tensor) -> Tensor:
        return F.relu(maps + self.around(maps))


def _layer(inputs: int, outputs: int, side: int = 3, stride: int = 1) -> nn.Sequential:
    padding = (side - 1) // 2
    convolution = nn.Conv2d(inputs, outputs, side, stride=stride, padding=padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


@dataclass(frozen=True)
class Batch:
    """Pictures, the `parts` [N, KINDS + 1, H, W] that are seen in them, 1 where they are, and which `objects` they are.

    `traits` [N, D] say what the object is made of and which way it faces; those that `count` are 1 there, others 0.
    """

    pictures: Tensor
    parts: Tensor
    objects: Tensor
    traits: Tensor
    count: Tensor


class _Gallery:
    """Pictures of objects, drawn once and seen again and again: in part, mirrored, in another light."""

    def __init__(self, choice: Anatomy) -> None:
        objects = invent(choice.objects, seed=0)
        self.generator = torch.Generator().manual_seed(1)
        self.objects = torch.arange(choice.pictures) % choice.objects
        self.traits, self.count = list_traits(objects)
        self.pictures = torch.empty(choice.pictures, 3, _MARGIN, _MARGIN, dtype=torch.uint8)
        self.parts = torch.empty(choice.pictures, _MARGIN, _MARGIN, dtype=torch.uint8)
        self.fronts = torch.empty(choice.pictures, 3)
        for some in torch.arange(choice.pictures).split(CHUNK):
            pictures, parts, fronts = draw(objects[self.objects[some]], self.generator, _MARGIN)
            self.pictures[some], self.parts[some] = (255 * pictures).round().byte(), parts.byte()
            self.fronts[some] = fronts

    def take(self, count: int) -> Batch:
        """A batch of so many."""
        which = torch.randint(len(self.objects), (count,), generator=self.generator)
        frame, mirrored = _aim(count, self.generator)
        grid = F.affine_grid(frame, [count, 1, SIDE, SIDE], align_corners=False)
        pictures = F.grid_sample(
            self.pictures[which].float() / 255, grid, padding_mode="reflection", align_corners=False
        )
        # Beyond the picture no part is known.
        parts = F.grid_sample(self.parts[which, None] + 1.0, grid, mode="nearest", align_corners=False)
        known = F.one_hot(parts[:, 0].long(), KINDS + 2).permute(0, 3, 1, 2)[:, 1:].float()
        fronts = self.fronts[which] * torch.stack([mirrored, torch.ones(count), torch.ones(count)], 1)
        objects = self.objects[which]
        return Batch(
            pictures=_hide(_tint(pictures, self.generator), self.generator),
            parts=known,
            objects=objects,
            traits=torch.cat([self.traits[objects], 2 * fronts], 1),
            count=torch.cat([self.count[objects], torch.ones(count, 3)], 1),
        )


def list_traits(objects: Objects) -> tuple[Tensor, Tensor]:
    """Numbers [count, D] that say what objects are made of, of mean 0 and variance 1, and which of them count.

    Those of a group count where the object has it.
    """
    there = objects.used.float()
    flags = [objects.swing, objects.spread.abs(), objects.twice.float()]
    kinds = [objects.centre, objects.radius.log(), objects.round, objects.colour, torch.stack(flags, 2)]
    values = torch.cat([torch.cat(kinds, 2).flatten(1), there], 1)
    count = torch.cat([there.repeat_interleave(values.shape[1] // GROUPS - 1, 1), torch.ones_like(there)], 1)
    mean = (values * count).sum(0) / count.sum(0).clamp(min=1)
    spread = (((values - mean) * count).square().sum(0) / count.sum(0).clamp(min=1)).sqrt()
    differ = spread > 1e-3
    return ((values - mean) / spread.clamp(min=1e-3)).clamp(-3, 3)[:, differ], count[:, differ]


def _learn(choice: Anatomy, quiet: bool, watch: Watch | None) -> Eye:
    """Train by the object, its traits, and the parts at each cell of both maps."""
    torch.manual_seed(0)
    gallery = _Gallery(choice)
    eye, wide = Eye().train(), CHANNELS[-1]
    traits = gallery.traits.shape[1] + 3
    hidden = nn.Sequential(nn.Linear(wide, _HIDDEN, bias=False), nn.BatchNorm1d(_HIDDEN), nn.ReLU())
    which, what = nn.Linear(_HIDDEN, choice.objects), nn.Linear(_HIDDEN, traits)
    where = nn.ModuleList(nn.Conv2d(channels, KINDS + 1, 1) for channels in CHANNELS[-2:])

    def compute_loss() -> Tensor:
        batch = gallery.take(_BATCH)
        with halve_precision():
            maps = eye(batch.pictures)
            inside = hidden(maps[-1].mean((2, 3)))
            scores, guessed = which(inside).float(), what(inside).float()
            seen = [layer(each).float() for layer, each in zip(where, maps, strict=True)]
        loss = F.cross_entropy(scores, batch.objects, label_smoothing=0.1)
        loss = loss + ((guessed - batch.traits).square() * batch.count).sum() / batch.count.sum()
        for each in seen:
            shares = F.adaptive_avg_pool2d(batch.parts, each.shape[-1])
            loss = loss - (shares * each.log_softmax(1)).sum(1).mean()
        return loss

    whole = nn.ModuleList([eye, hidden, which, what, where])
    title = "learning what invented objects are made of"
    seen = None if watch is None else lambda step: watch(step, eye)
    descend(whole, compute_loss, steps=choice.steps, rate=_RATE, title=title, quiet=quiet, watch=seen)
    return eye
