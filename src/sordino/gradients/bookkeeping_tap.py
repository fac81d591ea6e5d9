"""A node of the autograd graph that hands the gradient of a use to whoever listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Tap(torch.autograd.Function):
    """Gives an output that depends on nothing trainable a gradient, so that in-place operations may follow."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.receive = receive
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.receive(gradients[0])
        return None, None, None
