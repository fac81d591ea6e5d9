"""What every recipe has in common."""

from __future__ import annotations

from typing import TypedDict

from sordino.sampling import Sampler


class Common(TypedDict, total=False):
    """What every constructor takes besides its own arguments; see `Recipe` for the defaults."""

    batch_size: int
    epochs: float
    steps: int
    noise_multiplier: float
    sampler: Sampler
