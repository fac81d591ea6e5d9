"""Per-example gradients of a loss vector whose graph the user built, for loops that call ``private.backward(losses)``.

They come from batched backward passes over rows of the identity, chunk by chunk. No gradient outlives its chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sordino.gradients.looped import detached_from, filled
from sordino.gradients.vmapped import InChunks, materialising_microbatch


def backpropagated(losses: Tensor, parameters: list[nn.Parameter]) -> InChunks:
    """The rows of a loss vector with its graph, differentiated one by one; sums are of what was measured."""
    if not losses.requires_grad:
        raise detached_from(parameters)
    identity = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)

    def compute(chunk: range) -> list[Tensor]:
        with torch.autocast(losses.device.type, enabled=False):
            return _gradients(losses, parameters, identity[chunk.start : chunk.stop])

    return InChunks(len(losses), materialising_microbatch(parameters), compute)


def _gradients(losses: Tensor, parameters: list[nn.Parameter], rows: Tensor) -> list[Tensor]:
    """[rows, *shape] for each parameter."""
    gradients: Sequence[Tensor | None]
    try:
        gradients = torch.autograd.grad(
            losses, parameters, grad_outputs=rows, is_grads_batched=True, allow_unused=True, retain_graph=True
        )
    except RuntimeError:  # an operation whose backward pass has no batching rule, such as a GRU's
        singly = (
            torch.autograd.grad(losses, parameters, grad_outputs=row, allow_unused=True, retain_graph=True)
            for row in rows
        )
        return [torch.stack(each) for each in zip(*(filled(one, parameters) for one in singly), strict=True)]
    unused = (torch.zeros(len(rows), *p.shape, dtype=p.dtype, device=p.device) for p in parameters)
    return [zero if g is None else g for g, zero in zip(gradients, unused, strict=True)]
