"""Invented objects: things of a few solid parts that nobody ever made, seen from anywhere. No data is read.

An object is like the things in photographs. It has connected parts, many of them twice because things that move are
symmetric, and its own colours. A network that can tell thousands of objects apart, from any side and in front of any
background, has learned to see shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from sordino.lab.features.scenes import Painter
from sordino.lab.features.synthetic import cover_pixels

GROUPS, KINDS = 7, 12
"""Body, head, snout, a third thing in the middle, two groups of limbs, and a pair of small things on the head.

The parts of a group are alike. Kinds are the first four groups, boxes or round; legs, wings and wheels; and the rest.
"""
_HEAD, _SNOUT, _SINGLES, _LIMBS = 1, 2, (1, 2, 3), (4, 5)
_OFTEN = [1.0, 0.85, 0.4, 0.5, 0.85, 0.4, 0.5]
"""How often an object has a group; a snout and small things only beside a head."""
_OWNER = [0, 1, 2, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6]
"""The group of every part; below, whether it is in front or at the back, and on which side."""
_FRONT = [1.0] * 4 + [1.0, 1.0, -1.0, -1.0] * 2 + [1.0] * 2
_SIDE = [0.0] * 4 + [1.0, -1.0, 1.0, -1.0] * 2 + [1.0, -1.0]
_CHUNK = 16
"""Pictures at a time: their rays stay in the processor's cache."""
_LEAVES = 6


@dataclass(frozen=True)
class Objects:
    """What objects are made of, by groups of parts; x is forward, y up, and z to the side.

    Of every group [count, GROUPS]: the `centre` and the `radius` (three numbers each), by how much it is turned in the
    plane of symmetry and out of it (`swing`, `spread`), how `round` it is along each axis (1 for an ellipsoid, less for
    a box), of which `kind` it is, whether it is there (`used`), whether it is repeated at the back (`twice`), its
    `colour` and its `stripes`: a wave vector, and how strong they are. `varied` [count] says how much colours differ
    between examples; `places` [count, 2, 3] are colours of the sky and of the ground where such objects are found.
    """

    centre: Tensor
    radius: Tensor
    swing: Tensor
    spread: Tensor
    round: Tensor
    kind: Tensor
    used: Tensor
    twice: Tensor
    colour: Tensor
    stripes: Tensor
    varied: Tensor
    places: Tensor

    def __len__(self) -> int:
        return len(self.used)

    def __getitem__(self, which: Tensor) -> Objects:
        return Objects(*(getattr(self, each.name)[which] for each in fields(self)))


def invent(count: int, seed: int) -> Objects:
    """Random objects, a function of the arguments alone."""
    return _Inventor(count, torch.Generator().manual_seed(seed)).invent()


@dataclass(frozen=True)
class _Inventor:
    count: int
    generator: torch.Generator

    def invent(self) -> Objects:
        centre, radius = torch.zeros(self.count, GROUPS, 3), torch.ones(self.count, GROUPS, 3)
        radius[:, 0] = self._between(0.3, 1.0, 3)
        radius[:, 0, 0].clamp_(min=0.5)
        for group in _SINGLES:
            parent = group - 1 if group == _SNOUT else 0
            centre[:, group], radius[:, group] = self._attach(group, centre[:, parent], radius[:, parent])
        kind = torch.full((self.count, GROUPS), KINDS - 1)
        for group in _LIMBS:
            kind[:, group], centre[:, group], radius[:, group] = self._grow_limbs(radius[:, 0])
        radius[:, -1] = radius[:, _HEAD] * self._between(0.15, 0.5, 3)
        up = math.pi * self._chance()
        ears = torch.stack([up.cos(), up.sin(), torch.full((self.count,), 0.5)], 1)
        centre[:, -1] = centre[:, _HEAD] + radius[:, _HEAD] * ears
        boxed = torch.where(self._chance(GROUPS, 3) < 0.5, 0.35, 0.9)
        rounds = torch.where(self._chance(GROUPS, 1) < 0.5, 1.0, boxed)
        kind[:, : _LIMBS[0]] = 2 * torch.arange(_LIMBS[0]) + (rounds[:, : _LIMBS[0], 0] == 1)
        used = self._chance(GROUPS) < torch.tensor(_OFTEN)
        used[:, [_SNOUT, -1]] &= used[:, [_HEAD]]
        waves = 4 * torch.randn(self.count, GROUPS, 3, generator=self.generator)
        return Objects(
            centre=centre,
            radius=radius,
            swing=0.5 * self._either(GROUPS),
            spread=0.6 * self._either(GROUPS) * torch.tensor([float(group in _LIMBS) for group in range(GROUPS)]),
            round=rounds,
            kind=kind,
            used=used,
            twice=self._chance(GROUPS) < 0.7,
            colour=self._paint(),
            stripes=torch.cat([waves, (0.3 * self._either(GROUPS, 1)).clamp(min=0)], 2),
            varied=0.05 + 0.45 * self._chance() ** 2,
            places=0.6 * self._chance(2, 1) + 0.4 * self._chance(2, 3),
        )

    def _chance(self, *shape: int) -> Tensor:
        return torch.rand(self.count, *shape, generator=self.generator)

    def _either(self, *shape: int) -> Tensor:
        return 2 * self._chance(*shape) - 1

    def _between(self, least: float, most: float, *shape: int) -> Tensor:
        """Numbers whose logarithms are uniform."""
        return least * (most / least) ** self._chance(*shape)

    def _attach(self, group: int, centre: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        """The centre and the radius of a part in the middle, on the surface of another; a head is never below."""
        angle = math.pi * (0.9 * self._chance() - 0.2 if group == _HEAD else self._either())
        out = torch.stack([angle.cos(), angle.sin(), torch.zeros(self.count)], 1)
        size = self._between(0.3, 0.8, 1) * radius * self._between(0.6, 1.6, 3)
        return centre + out * (radius + (0.8 * self._chance(1) - 0.1) * size), size

    def _grow_limbs(self, body: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the kind of limbs, where they are, and their radius: long legs, wide wings, or flat wheels."""
        kind = torch.bucketize(self._chance(1), torch.tensor([0.45, 0.7]))
        long, wide, thin = self._between(0.2, 0.7, 1), self._between(0.3, 1.0, 1), self._between(0.06, 0.2, 2)
        leg = torch.cat([thin[:, :1], long, thin[:, 1:]], 1)
        wing = torch.cat([self._between(0.1, 0.4, 1), 0.5 * thin[:, :1], wide], 1)
        disc = self._between(0.15, 0.4, 1)
        wheel = torch.cat([disc, disc, 0.6 * thin[:, :1]], 1)
        radius = torch.where(kind == 0, leg, torch.where(kind == 1, wing, wheel))
        place = torch.cat([self._chance(1), 1.2 * self._chance(1) - 1, torch.full((self.count, 1), 0.8)], 1)
        out = torch.cat([torch.zeros(self.count, 1), -0.8 * long * (kind == 0), 0.8 * wide * (kind == 1)], 1)
        return 2 * _LIMBS[0] + kind[:, 0], body * place + out, radius

    def _paint(self) -> Tensor:
        """Colours [count, GROUPS, 3]: many groups have the object's main colour, the others more or less their own."""
        main = 0.5 * self._chance(1, 1) + 0.5 * self._chance(1, 3)
        own = 0.55 * self._chance(GROUPS, 1) + 0.45 * self._chance(GROUPS, 3)
        return torch.lerp(main.expand(-1, GROUPS, -1), own, (1.2 * self._chance(GROUPS, 1) - 0.4).clamp(0, 1))


def draw(objects: Objects, generator: torch.Generator, side: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Draw pictures [count, 3, side, side] in 0..1, one of each object, seen from anywhere; and say what they show.

    That is the kind of part [count, side, side] at each pixel, from 1, or 0 for the background; and where the object's
    front points [count, 3]: to the right, up, and towards the viewer.
    """
    painter = Painter(len(objects), side, 3, generator)
    parts = _arrange(objects, painter)
    yaw = (2 * painter.uniform() - 1) * 1.1 + math.pi * (painter.uniform() < 0.5)
    view = _turn(0, 0.3 * painter.normal() + 0.15) @ _turn(1, yaw) @ _turn(2, 0.12 * painter.normal())
    local, origin = _place(parts, view, painter)
    line = (torch.arange(side) + 0.5) / side * 2 - 1
    plane = torch.stack([line.expand(side, side), -line[:, None].expand(side, side)]).flatten(1)
    shapes, used = parts.round.split(_CHUNK), parts.used.split(_CHUNK)
    some = zip(local.split(_CHUNK), origin.split(_CHUNK), shapes, used, strict=True)
    rays = [_cast(*each, plane) for each in some]
    met, place, normals, hit = (torch.cat(each) for each in zip(*rays, strict=True))
    group = torch.tensor(_OWNER)[met]
    surface = _shade(objects, group, place, normals, painter).transpose(1, 2).reshape(-1, 3, side, side)
    surface = surface + 0.5 * painter.draw_strength() * painter.draw_texture()
    scene = torch.lerp(_draw_places(objects, painter), surface, hit.reshape(-1, 1, side, side).float())
    kinds = torch.where(hit, objects.kind.gather(1, group) + 1, 0).reshape(-1, side, side)
    return painter.light(painter.blur(scene)), kinds, view[:, :, 0]


@dataclass(frozen=True)
class _Parts:
    """The parts of objects as they stand: their `centre` and `radius` [count, parts, 3], and how they are `turned`."""

    centre: Tensor
    radius: Tensor
    turned: Tensor
    round: Tensor
    used: Tensor


def _arrange(objects: Objects, painter: Painter) -> _Parts:
    """Return the parts of each object this time: a little other proportions, and another pose."""
    owner, front, side = torch.tensor(_OWNER), torch.tensor(_FRONT), torch.tensor(_SIDE)
    radius = objects.radius * (0.13 * painter.normal(GROUPS, 3)).exp()
    centre = (objects.centre + 0.05 * painter.normal(GROUPS, 3))[:, owner]
    swing = objects.swing[:, owner] * front + 0.25 * painter.normal(len(owner))
    spread = (objects.spread + 0.15 * painter.normal(GROUPS))[:, owner] * side
    turned = _turn(2, swing.flatten()) @ _turn(0, spread.flatten())
    return _Parts(
        centre=centre * torch.stack([front, torch.ones_like(front), side], 1),
        radius=radius[:, owner],
        turned=turned.reshape(*swing.shape, 3, 3),
        round=objects.round[:, owner],
        used=objects.used[:, owner] & (objects.twice[:, owner] | (front > 0)),
    )


def _place(parts: _Parts, view: Tensor, painter: Painter) -> tuple[Tensor, Tensor]:
    """The maps from points v of the picture to the parts' own coordinates: local [count, parts, 3, 3] v - origin.

    An object is brought to the middle and to a size that is drawn, by the boxes around its parts, and then moved a
    little.
    """
    seen = (view[:, None] @ parts.centre[..., None])[..., 0]
    reach = (view[:, None] @ parts.turned * parts.radius[:, :, None, :]).square().sum(3).sqrt()
    outside = torch.where(parts.used, 0.0, torch.inf)[..., None]
    most, least = (seen + reach - outside).amax(1), (seen - reach + outside).amin(1)
    size = (0.55 + 0.6 * painter.uniform()) / ((most - least)[:, :2].amax(1) / 2)
    shift = torch.cat([0.15 * painter.normal(2), torch.zeros(painter.count, 1)], 1)
    back = parts.turned.transpose(2, 3)
    local = (back @ view[:, None].transpose(2, 3)) / parts.radius[..., None]
    # A point v of the picture is the point (v - shift) / size + middle of the object as it is seen.
    moved = shift / size[:, None] - (most + least) / 2
    origin = (back @ parts.centre[..., None])[..., 0] / parts.radius + (local @ moved[:, None, :, None])[..., 0]
    return local / size[:, None, None, None], origin


def _shade(objects: Objects, group: Tensor, place: Tensor, normals: Tensor, painter: Painter) -> Tensor:
    """Colours [count, rays, 3] of what is met: stripes, and light from above or beside with a gloss."""
    varied = objects.varied[:, None, None]
    tint = varied * painter.normal(GROUPS, 3) * 0.6 + varied * painter.normal(1, 3)
    colour = _pick((objects.colour + tint).clamp(0.02, 0.98), group)
    waves = _pick(objects.stripes, group)
    ripple = ((waves[..., :3] * place).sum(2) + 6 * painter.uniform(1)).sin() * waves[..., 3]
    beside, above, before = painter.normal(1), painter.normal(1).abs() + 0.3, painter.normal(1).abs() + 0.3
    light = F.normalize(torch.cat([beside, above, before], 1), dim=1)
    lit = (normals @ light[..., None])[..., 0].clamp(min=0)
    ambient = 0.25 + 0.45 * painter.uniform(1)
    gloss = (0.6 * painter.uniform(1) - 0.2).clamp(min=0) * lit**12
    shine = ambient + (1.25 - ambient) * lit
    return (colour * (1 + ripple)[..., None]) * shine[..., None] + gloss[..., None]


def _turn(axis: int, angle: Tensor) -> Tensor:
    """Rotations [count, 3, 3] about one axis."""
    result = torch.eye(3).repeat(len(angle), 1, 1)
    one, two = (axis + 1) % 3, (axis + 2) % 3
    result[:, one, one] = result[:, two, two] = angle.cos()
    result[:, two, one], result[:, one, two] = angle.sin(), -angle.sin()
    return result


def _cast(local: Tensor, origin: Tensor, rounds: Tensor, used: Tensor, plane: Tensor) -> tuple[Tensor, ...]:
    """Return the part that each ray meets first, where on it, the normal there, and whether any.

    In its own coordinates q = local v - origin, a part is the box |q_k| <= 1 cut by the ellipsoid sum r_k q_k^2 <= 1.
    """
    start = local[..., :2] @ plane - origin[..., None]
    step = local[..., 2:]
    step = torch.where(step.abs() < 1e-4, 1e-4, step)
    inverse = 1 / step
    middle, half = -start * inverse, inverse.abs()
    near, far = (middle + half).amin(2), (middle - half).amax(2)
    weighed = rounds[..., None] * step
    a = (weighed * step).sum(2)
    b = (weighed * start).sum(2)
    c = (rounds[..., None] * start.square()).sum(2) - 1
    root = b.square() - a * c
    wide = root.clamp(min=0).sqrt()
    near, far = torch.minimum(near, (wide - b) / a), torch.maximum(far, (-wide - b) / a)
    hit = (root > 0) & (near > far) & used[..., None]
    depth, part = torch.where(hit, near, -1e9).max(1)
    frames = _pick(local.flatten(2), part).unflatten(2, (3, 3))
    points = frames @ torch.cat([plane.T.expand(len(depth), -1, -1), depth[..., None]], 2)[..., None]
    place = points[..., 0] - _pick(origin, part)
    weighed_place = _pick(rounds, part) * place
    flat = place.abs() >= place.abs().amax(2, keepdim=True)
    inside = (weighed_place * place).sum(2, keepdim=True) > place.square().amax(2, keepdim=True)
    normal = torch.where(inside, weighed_place, flat * place.sign())
    normal = F.normalize((frames.transpose(2, 3) @ normal[..., None])[..., 0], dim=2)
    return part, place, normal, hit.any(1)


def _pick(rows: Tensor, which: Tensor) -> Tensor:
    """rows[n, which[n, i]] for rows [N, K, D] and which [N, I]."""
    return rows.gather(1, which[..., None].expand(-1, -1, rows.shape[2]))


def _draw_places(objects: Objects, painter: Painter) -> Tensor:
    """Backgrounds: sky and ground with a horizon between them, or one surface, and leaves before half of them."""
    chance, side = painter.uniform, painter.side
    line = torch.linspace(0, 1, side)
    tilt = 0.1 * painter.normal(1, 1)
    height = torch.where(chance(1, 1) < 0.6, 0.15 + 0.75 * chance(1, 1), 2.0)
    below = ((line[:, None] + tilt * line - height) * (4 + 30 * chance(1, 1))).sigmoid()[:, None]
    sky, ground = (
        painter.surface(torch.lerp(painter.colour(), objects.places[:, k, :, None, None], chance(1, 1, 1)))
        for k in range(2)
    )
    scene = torch.lerp(sky, ground, below)
    crowd = (chance(1, 1, 1) - 0.5).clamp(min=0) * 2
    for _ in range(_LEAVES):
        covered = (chance(1, 1, 1) < crowd) * cover_pixels(chance(6), side)[:, None]
        scene = torch.lerp(scene, painter.colour(), covered)
    return scene
