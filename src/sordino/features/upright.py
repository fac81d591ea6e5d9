"""Handwriting made upright: each picture is sheared by its own moments, so that nothing else is read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

MOST = 0.6
"""The largest shear that is undone; what leans further is no upright character that fell over."""
_FLAT = 2.0
"""Pixels² added to the vertical variance, so that flat characters are left as they are."""


@torch.no_grad()
def upright(images: Tensor) -> Tensor:
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
    slant = ((ink * x * y).sum((1, 2)) / ((ink * y * y).sum((1, 2)) + _FLAT * mass)).clamp(-MOST, MOST)
    one, none = torch.ones(count), torch.zeros(count)
    rows = [[one, slant * height / width, 2 * centre_x / width], [none, one, 2 * centre_y / height]]
    maps = torch.stack([torch.stack(row, -1) for row in rows], 1)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
