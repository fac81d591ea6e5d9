"""Invented scenes: leaves with texture and light, and an object in the middle. No data is read.

Dead leaves have the edges of photographs, but no surfaces, no light, and nothing that the picture is of. The statistics
of scenes are closer to those of photographs, and so are features that are whitened by them.
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
"""Most of the standard deviation of a texture."""


def draw_scenes(count: int, side: int, channels: int, seed: int) -> Tensor:
    """Pictures [count, channels, side, side] in 0..1, a function of the arguments alone.

    Every surface has a colour, a texture of power spectrum f^-2a (a uniform in 0.5..1.7, stretched and turned at
    random) and a gradient of light. The background is a surface under up to 30 leaves; the object is three ellipses
    or boxes about the centre, with details. Pictures are blurred a little and lit at random.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = [min(_CHUNK, count - begin) for begin in range(0, count, _CHUNK)]
    return torch.cat([_Painter(size, side, channels, generator).draw() for size in sizes])


@dataclass(frozen=True)
class _Painter:
    """Draws `count` pictures at once."""

    count: int
    side: int
    channels: int
    generator: torch.Generator

    def draw(self) -> Tensor:
        scene = self._surface()
        crowd = self._uniform(1, 1, 1)
        for leaf in range(LEAVES):
            drawn = (self._uniform(1, 1, 1) < crowd) * cover_pixels(self._uniform(6), self.side)[:, None]
            scene = torch.lerp(scene, self._colour() if leaf % 3 else self._surface(), drawn)
        surfaces = self._surface(), self._surface()
        for part in range(PARTS):
            scene = torch.lerp(scene, surfaces[part % 2], self._cover_part())
        for _ in range(DETAILS):
            drawn = self._uniform(6)
            drawn[:, 1:3] = 0.5 + 0.15 * self._normal(2)
            scene = torch.lerp(scene, self._colour(), cover_pixels(drawn, self.side)[:, None])
        return self._light(self._blur(scene))

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(self.count, *shape, generator=self.generator)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(self.count, *shape, generator=self.generator)

    def _colour(self) -> Tensor:
        mixed: Tensor = 0.6 * self._uniform(1) + 0.4 * self._uniform(self.channels)
        return mixed[:, :, None, None].expand(-1, -1, self.side, self.side)

    def _surface(self) -> Tensor:
        strength = _TEXTURE * self._uniform(1, 1, 1) * (1 + 0.3 * self._normal(self.channels, 1, 1))
        line, turn = torch.linspace(-0.5, 0.5, self.side), 2 * math.pi * self._uniform(1, 1, 1)
        slope = line * turn.cos() + line[:, None] * turn.sin()
        return self._colour() + strength * self._texture() + 0.5 * self._uniform(1, 1, 1) * slope

    def _texture(self) -> Tensor:
        """Noise [count, 1, side, side] of mean 0 and variance 1 whose amplitudes fall with the frequency."""
        fall, turn = 0.5 + 1.2 * self._uniform(1, 1, 1), math.pi * self._uniform(1, 1, 1)
        stretch = (0.5 * self._normal(1, 1, 1)).exp()
        down, across = torch.fft.fftfreq(self.side)[:, None], torch.fft.rfftfreq(self.side)
        along = (across * turn.cos() + down * turn.sin()) * stretch
        beside = (down * turn.cos() - across * turn.sin()) / stretch
        amplitudes = (along**2 + beside**2).sqrt().clamp(min=0.5 / self.side) ** -fall
        white = torch.fft.rfft2(self._normal(1, self.side, self.side))
        noise = torch.fft.irfft2(white * amplitudes, s=(self.side, self.side))
        noise = noise - noise.mean((2, 3), keepdim=True)
        result: Tensor = noise / noise.std((2, 3), keepdim=True).clamp(min=1e-4)
        return result

    def _cover_part(self) -> Tensor:
        """A large ellipse or box about the centre."""
        drawn = self._uniform(6)
        drawn[:, 1:3] = 0.5 + 0.18 * self._normal(2)
        return cover_ellipses(drawn, self.side * (0.08 + 0.25 * self._uniform()), self.side)[:, None]

    def _blur(self, scene: Tensor) -> Tensor:
        width = 0.35 + 0.5 * self._uniform(1)
        line = torch.exp(-(torch.arange(-2.0, 3.0) ** 2) / (2 * width**2))
        line = line / line.sum(1, keepdim=True)
        kernels = (line[:, :, None] * line[:, None, :]).repeat_interleave(self.channels, 0)[:, None]
        planes = F.pad(scene.reshape(1, -1, self.side, self.side), (2, 2, 2, 2), mode="replicate")
        return F.conv2d(planes, kernels, groups=planes.shape[1]).reshape(scene.shape)

    def _light(self, scene: Tensor) -> Tensor:
        """Contrast, brightness and colour of the light."""
        contrast, brightness = 0.5 + self._uniform(1, 1, 1), 0.15 * self._normal(1, 1, 1)
        return ((scene - 0.5) * contrast + 0.5 + brightness + 0.03 * self._normal(self.channels, 1, 1)).clamp(0, 1)
