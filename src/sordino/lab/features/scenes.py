"""Invented scenes: leaves with texture and light, and an object in the middle. No data is read.

Dead leaves have the edges of photographs, but no surfaces, no light and no subject. The statistics of scenes are closer
to those of photographs, and whitening by them fits photographs better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sordino.lab.features.synthetic import cover_ellipses, cover_pixels

LEAVES, PARTS, DETAILS = 30, 3, 4
"""Leaves of the background, parts of the object, and small shapes on it."""
_CHUNK = 500
_TEXTURE = 0.24
"""The largest standard deviation of a texture."""


def draw_scenes(count: int, side: int, channels: int, seed: int) -> Tensor:
    """Pictures [count, channels, side, side] in 0..1, a function of the arguments alone.

    Every surface has a colour, a texture of power spectrum f^-2a (a uniform in 0.5..1.7, stretched and turned at
    random) and a gradient of light. The background is a surface under up to 30 leaves; the object is three ellipses
    or boxes about the centre, with details. Pictures are blurred a little and lit at random.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = [min(_CHUNK, count - begin) for begin in range(0, count, _CHUNK)]
    return torch.cat([Painter(size, side, channels, generator).draw() for size in sizes])


@dataclass(frozen=True)
class Painter:
    """Draws `count` pictures at once."""

    count: int
    side: int
    channels: int
    generator: torch.Generator

    def draw(self) -> Tensor:
        scene = self.surface()
        crowd = self.uniform(1, 1, 1)
        for leaf in range(LEAVES):
            drawn = (self.uniform(1, 1, 1) < crowd) * cover_pixels(self.uniform(6), self.side)[:, None]
            scene = torch.lerp(scene, self.colour() if leaf % 3 else self.surface(), drawn)
        surfaces = self.surface(), self.surface()
        for part in range(PARTS):
            scene = torch.lerp(scene, surfaces[part % 2], self._cover_part())
        for _ in range(DETAILS):
            drawn = self.uniform(6)
            drawn[:, 1:3] = 0.5 + 0.15 * self.normal(2)
            scene = torch.lerp(scene, self.colour(), cover_pixels(drawn, self.side)[:, None])
        return self.light(self.blur(scene))

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(self.count, *shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.count, *shape, generator=self.generator)

    def colour(self) -> Tensor:
        mixed: Tensor = 0.6 * self.uniform(1) + 0.4 * self.uniform(self.channels)
        return mixed[:, :, None, None].expand(-1, -1, self.side, self.side)

    def surface(self, colour: Tensor | None = None) -> Tensor:
        """Return a colour, drawn unless it is given, with texture and a gradient of light."""
        strength = self.draw_strength()
        line, turn = torch.linspace(-0.5, 0.5, self.side), 2 * math.pi * self.uniform(1, 1, 1)
        slope = line * turn.cos() + line[:, None] * turn.sin()
        plain = self.colour() if colour is None else colour
        return plain + strength * self.draw_texture() + 0.5 * self.uniform(1, 1, 1) * slope

    def draw_strength(self) -> Tensor:
        """Return the deviation [count, channels, 1, 1] of a texture, almost the same in all channels."""
        return _TEXTURE * self.uniform(1, 1, 1) * (1 + 0.3 * self.normal(self.channels, 1, 1))

    def draw_texture(self) -> Tensor:
        """Noise [count, 1, side, side] of mean 0 and variance 1 whose amplitudes fall with the frequency."""
        fall, turn = 0.5 + 1.2 * self.uniform(1, 1, 1), math.pi * self.uniform(1, 1, 1)
        stretch = (0.5 * self.normal(1, 1, 1)).exp()
        down, across = torch.fft.fftfreq(self.side)[:, None], torch.fft.rfftfreq(self.side)
        along = (across * turn.cos() + down * turn.sin()) * stretch
        beside = (down * turn.cos() - across * turn.sin()) / stretch
        amplitudes = (along**2 + beside**2).sqrt().clamp(min=0.5 / self.side) ** -fall
        white = torch.fft.rfft2(self.normal(1, self.side, self.side))
        noise = torch.fft.irfft2(white * amplitudes, s=(self.side, self.side))
        noise = noise - noise.mean((2, 3), keepdim=True)
        result: Tensor = noise / noise.std((2, 3), keepdim=True).clamp(min=1e-4)
        return result

    def _cover_part(self) -> Tensor:
        """Return a large ellipse or box about the centre."""
        drawn = self.uniform(6)
        drawn[:, 1:3] = 0.5 + 0.18 * self.normal(2)
        return cover_ellipses(drawn, self.side * (0.08 + 0.25 * self.uniform()), self.side)[:, None]

    def blur(self, scene: Tensor) -> Tensor:
        width = 0.35 + 0.5 * self.uniform(1)
        line = torch.exp(-(torch.arange(-2.0, 3.0) ** 2) / (2 * width**2))
        line = line / line.sum(1, keepdim=True)
        kernels = (line[:, :, None] * line[:, None, :]).repeat_interleave(self.channels, 0)[:, None]
        planes = F.pad(scene.reshape(1, -1, self.side, self.side), (2, 2, 2, 2), mode="replicate")
        return F.conv2d(planes, kernels, groups=planes.shape[1]).reshape(scene.shape)

    def light(self, scene: Tensor) -> Tensor:
        """Contrast, brightness and colour of the light."""
        contrast, brightness = 0.5 + self.uniform(1, 1, 1), 0.15 * self.normal(1, 1, 1)
        return ((scene - 0.5) * contrast + 0.5 + brightness + 0.03 * self.normal(self.channels, 1, 1)).clamp(0, 1)
