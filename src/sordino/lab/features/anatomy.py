"""Features of things: a network that learned what invented objects are made of, and has seen no record.

Tang et al. (2023) learn features from random processes before they train privately. Here the process draws solid
objects (`sordino.lab.features.objects`), and everything about them is known: which object it is, where its parts are in
the picture, how large and round they are, what colours they have, which way it faces. A network that can tell all this
has the features that photographs of things need.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.errors import InvalidInput
from sordino.lab.data.cache import allocate, cache_folder, remember_tensor
from sordino.lab.features.objects import GROUPS, KINDS, Objects, draw, invent
from sordino.lab.features.pretraining import descend, halve_precision, keep_network
from sordino.lab.features.scenes import draw_scenes
from sordino.lab.features.synthetic import Map, fit_cells, scale_to_unit

VERSION = 1
"""Part of every cache key: raised when the same arguments would give other features."""
SIDE, CHANNELS, GRID = 32, (64, 128, 192, 384), 4
"""The pictures' side, the channels after each halving, and the cells on which the last two maps are pooled."""
ZOOMS = (1.0, 0.8)
"""The shares of a side that are viewed; a picture's features are the mean over these views and their mirror images."""
CHUNK = 250
_MARGIN = 40
"""The side of the drawn pictures; the network learns from a part of each, scaled to SIDE."""
_WIDE, _SHARE = 48, 0.4
"""The side of scenes, and their share of a batch."""
_BATCH, _RATE, _HIDDEN, _EXAMPLES = 128, 0.2, 512, 1500


@dataclass(frozen=True)
class Anatomy:
    """What the network learned from, and how much of its maps is kept.

    It saw so many `pictures` of so many `objects`, and parts of so many `scenes`, in `steps` of 128. So many channels
    of each of its last two maps are `kept`, and whitened as far as `tilt` says (`fit_cells`).
    """

    objects: int = 2000
    pictures: int = 120_000
    scenes: int = 3000
    steps: int = 9000
    kept: int = 192
    tilt: float = 0.75

    def __post_init__(self) -> None:
        if self.objects < 2 or self.pictures < self.objects:
            raise InvalidInput(f"objects={self.objects} must be >= 2, and pictures={self.pictures} no fewer")
        if self.scenes < 1 or self.steps < 1:
            raise InvalidInput(f"scenes={self.scenes} and steps={self.steps} must be >= 1")
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

    The network's last two maps are pooled on 4 x 4 cells and averaged over views; of each, the roots are centred and
    tilted by their statistics over invented pictures, and brought to norm 1. The network is trained when it is first
    needed (about an hour on one core) and kept in `folder`.
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


def load_network(choice: Anatomy, folder: Path, *, quiet: bool = False) -> Eye:
    """Return the network in eval mode: the one in `folder`, or a new one, which is then kept there."""
    learned = (choice.objects, choice.pictures, choice.scenes, choice.steps)
    doing = f"learning what {choice.objects:,} invented objects are made of in {choice.steps:,} steps"
    return keep_network((VERSION, *learned), folder, Eye, lambda: _learn(choice, quiet), doing)


class Eye(nn.Module):
    """From pictures to maps of sides 8 and 4: convolutions, two of them with a shortcut around a pair."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third, fourth = CHANNELS
        self.early = nn.Sequential(_layer(3, first, 4, 2), _layer(first, second), nn.MaxPool2d(2))
        self.middle = nn.Sequential(_layer(second, third), _Shortcut(third))
        self.late = nn.Sequential(nn.MaxPool2d(2), _layer(third, fourth), _Shortcut(fourth))
        for kernels in self.parameters():
            if kernels.dim() == 4:
                kernels.data = kernels.data.contiguous(memory_format=torch.channels_last)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Maps [N, 192, 8, 8] and [N, 384, 4, 4] of pictures in 0..1."""
        middle: Tensor = self.middle(self.early((4 * pictures - 2).to(memory_format=torch.channels_last)))
        return middle, self.late(middle)


class _Shortcut(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        last = [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)]
        self.around = nn.Sequential(_layer(channels, channels), *last)

    def forward(self, maps: Tensor) -> Tensor:
        seen: Tensor = F.relu(maps + self.around(maps))
        return seen


def _layer(inputs: int, outputs: int, side: int = 3, stride: int = 1) -> nn.Sequential:
    padding = (side - 1) // 2
    convolution = nn.Conv2d(inputs, outputs, side, stride=stride, padding=padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


@dataclass(frozen=True)
class Glimpses:
    """Pictures [N, 3, H, W], the first M of objects, the others of scenes; `classes` [N] say of which.

    Of the objects, `parts` [M, KINDS + 1, H, W] are 1 where they are seen; `traits` [M, D] say what an object is made
    of and which way it faces: those that `count` are 1 there, the others 0.
    """

    pictures: Tensor
    classes: Tensor
    parts: Tensor
    traits: Tensor
    count: Tensor


class _Gallery:
    """Pictures of objects and scenes, drawn once and seen again and again: cropped, mirrored, in another light."""

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
        self.scenes = (255 * draw_scenes(choice.scenes, _WIDE, 3, 7)).round().byte()

    def take(self, count: int) -> Glimpses:
        """Return a batch of so many, two fifths of which are scenes."""
        random, others = self.generator, round(_SHARE * count)
        count -= others
        which = torch.randint(len(self.objects), (count,), generator=random)
        views, mirrored = _aim(count, random, 0.6, 1.0, 0.15)
        # Beyond the picture no part is known.
        parts = _see(self.parts[which, None] + 1.0, views, mode="nearest", padding_mode="zeros")
        known = F.one_hot(parts[:, 0].long(), KINDS + 2).permute(0, 3, 1, 2)[:, 1:].float()
        fronts = self.fronts[which] * torch.stack([mirrored, torch.ones(count), torch.ones(count)], 1)
        objects, scenes = self.objects[which], torch.randint(len(self.scenes), (others,), generator=random)
        glimpses, _ = _aim(others, random, 0.35, 0.75, 0.3)
        pictures = torch.cat([_see(self.pictures[which] / 255, views), _see(self.scenes[scenes] / 255, glimpses)])
        return Glimpses(
            pictures=_hide(_tint(pictures, random), random),
            classes=torch.cat([objects, len(self.traits) + scenes]),
            parts=known,
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


def _learn(choice: Anatomy, quiet: bool) -> Eye:
    """Train by the object, its traits, and the parts at each cell of both maps."""
    torch.manual_seed(0)
    gallery = _Gallery(choice)
    eye, wide = Eye().train(), CHANNELS[-1]
    traits = gallery.traits.shape[1] + 3
    hidden = nn.Sequential(nn.Linear(wide, _HIDDEN, bias=False), nn.BatchNorm1d(_HIDDEN), nn.ReLU())
    which, what = nn.Linear(_HIDDEN, choice.objects + choice.scenes), nn.Linear(_HIDDEN, traits)
    where = nn.ModuleList(nn.Conv2d(channels, KINDS + 1, 1) for channels in CHANNELS[-2:])

    def compute_loss() -> Tensor:
        batch = gallery.take(_BATCH)
        objects = slice(len(batch.traits))
        with halve_precision():
            maps = eye(batch.pictures)
            inside = hidden(maps[-1].mean((2, 3)))
            scores, guessed = which(inside).float(), what(inside[objects]).float()
            seen = [layer(each[objects]).float() for layer, each in zip(where, maps, strict=True)]
        loss: Tensor = F.cross_entropy(scores, batch.classes, label_smoothing=0.1)
        loss = loss + ((guessed - batch.traits).square() * batch.count).sum() / batch.count.sum()
        for each in seen:
            shares = F.adaptive_avg_pool2d(batch.parts, each.shape[-1])
            loss = loss - (shares * each.log_softmax(1)).sum(1).mean()
        return loss

    whole = nn.ModuleList([eye, hidden, which, what, where])
    title = "learning what invented objects are made of"
    descend(whole, compute_loss, steps=choice.steps, rate=_RATE, title=title, quiet=quiet)
    return eye


def _see(pictures: Tensor, views: Tensor, mode: str = "bilinear", padding_mode: str = "reflection") -> Tensor:
    grid = F.affine_grid(views, [len(pictures), 1, SIDE, SIDE], align_corners=False)
    seen: Tensor = F.grid_sample(pictures, grid, mode, padding_mode, align_corners=False)
    return seen


def _aim(count: int, generator: torch.Generator, least: float, most: float, turn: float) -> tuple[Tensor, Tensor]:
    """Maps [count, 2, 3] to parts of pictures; and -1 for those that are mirrored, 1 for the others.

    They are between `least` and `most` of a side, turned by up to `turn` radians and stretched by up to 15 %.
    """

    def either(*shape: int) -> Tensor:
        return 2 * torch.rand(count, *shape, generator=generator) - 1

    share = (most + least) / 2 + (most - least) / 2 * either()
    angle, stretch = turn * either(), (0.15 * either()).exp()
    mirrored, room = either().sign(), 1 - share
    across = torch.stack([share * stretch * angle.cos() * mirrored, -share * angle.sin(), room * either()], 1)
    down = torch.stack([share * angle.sin() * mirrored, share / stretch * angle.cos(), room * either()], 1)
    return torch.stack([across, down], 1), mirrored


def _tint(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Other hues, contrast and brightness, and noise; a tenth of the pictures become grey."""
    count = len(pictures)

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator)

    grey, one = torch.full((3, 3), 1 / 3), 3**-0.5
    axis = torch.tensor([[0.0, -one, one], [one, 0.0, -one], [-one, one, 0.0]])
    angle = 0.35 * normal(1, 1)
    turned = torch.eye(3) + angle.sin() * axis + (1 - angle.cos()) * (axis @ axis)
    saturation = (1 + 0.4 * normal(1, 1)).clamp(0, 2) * (torch.rand(count, 1, 1, generator=generator) > 0.1)
    mixed = (0.3 * normal(1, 1)).exp() * (grey + saturation * (turned - grey))
    mean = pictures.mean((1, 2, 3), keepdim=True)
    light = mean + 0.12 * normal(1, 1, 1) + 0.04 * normal(3, 1, 1)
    return torch.einsum("nij,njhw->nihw", mixed, pictures - mean) + light + 0.005 * normal(*pictures.shape[1:])


def _hide(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the pictures with a box of one colour before them, of up to 14 pixels a side."""
    count, side = len(pictures), pictures.shape[-1]

    def chance(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator)

    reach, place = 7 * chance(2, 1) * (chance(1, 1) < 0.5), side * chance(2, 1)
    down, across = ((torch.arange(side) - place).abs() < reach).unbind(1)
    return torch.where((down[:, :, None] & across[:, None, :])[:, None], chance(3, 1, 1), pictures)


def _draw_others(choice: Anatomy) -> Tensor:
    """Pictures of other objects than those that were learned, and as many scenes."""
    generator, middle = torch.Generator().manual_seed(2), slice((_MARGIN - SIDE) // 2, (_MARGIN + SIDE) // 2)
    objects = invent(_EXAMPLES, seed=choice.objects + 1)
    drawn = [draw(objects[part], generator, _MARGIN)[0] for part in torch.arange(_EXAMPLES).split(CHUNK)]
    return torch.cat([torch.cat(drawn)[:, :, middle, middle], draw_scenes(_EXAMPLES, SIDE, 3, 4)])


@torch.no_grad()
def _fit_description(choice: Anatomy, eye: Eye) -> Map:
    """Return the map from pictures to features, by the statistics of pictures that were not learned."""
    others = zip(*(_look(part, eye) for part in _draw_others(choice).split(CHUNK)), strict=True)
    maps = [fit_cells(torch.cat(each), choice.kept, choice.tilt) for each in others]

    @torch.no_grad()
    def describe(images: Tensor) -> Tensor:
        return scale_to_unit(torch.cat([fit(each) for fit, each in zip(maps, _look(images, eye), strict=True)], 1))

    return describe


def _look(images: Tensor, eye: Eye) -> list[Tensor]:
    """Roots of both maps [N, cells, channels], pooled on the grid and averaged over zooms and mirror images."""
    frames = (torch.tensor([[zoom, 0.0, 0.0], [0.0, zoom, 0.0]]).expand(len(images), 2, 3) for zoom in ZOOMS)
    seen = [_see(images, frame) for frame in frames]
    with halve_precision():
        views = [eye(view) for whole in seen for view in (whole, whole.flip(3))]
    pooled = [[F.adaptive_avg_pool2d(each.float(), GRID) for each in maps] for maps in views]
    return [torch.stack(each).mean(0).sqrt().flatten(2).transpose(1, 2) for each in zip(*pooled, strict=True)]
