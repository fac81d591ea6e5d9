"""Points on the line from the model before a proposal through the proposal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sordino.selection.rollback import Rollback


@torch.no_grad()
def move_to(parameters: list[nn.Parameter], start: list[Tensor], movement: list[Tensor], length: float) -> None:
    """Put the model at ``start + length * movement``."""
    for parameter, origin, direction in zip(parameters, start, movement, strict=True):
        parameter.copy_(origin + length * direction)


def shorten(before: Rollback, parameters: list[nn.Parameter]) -> None:
    """Halve the step that stands in the model."""
    start, movement = before.movement(parameters)
    move_to(parameters, start, movement, 0.5)
