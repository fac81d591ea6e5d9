"""Per-example norms from a loss vector whose graph the user built, for loops that call ``private.backward(losses)``.

Norms come from batched backward passes over rows of the identity, chunk by chunk; the weighted sum is then one ordinary
backward pass with the weights as output gradients. No gradient outlives its chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sordino.gradients.engine import accumulation_dtype
from sordino.gradients.looped import detached_from, filled
from sordino.gradients.vmapped import materialising_microbatch


@dataclass(frozen=True)
class Backpropagated:
    """A loss vector with its graph, and the norms of its rows."""

    losses: Tensor
    parameters: list[nn.Parameter]
    norms: Tensor

    @staticmethod
    def of(losses: Tensor, parameters: list[nn.Parameter]) -> Backpropagated:
        if not losses.requires_grad:
            raise detached_from(parameters)
        identity = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)
        chunks = identity.split(materialising_microbatch(parameters))
        return Backpropagated(losses, parameters, torch.cat([_norms(losses, parameters, rows) for rows in chunks]))

    def weighted_sum(self, weights: Tensor) -> list[Tensor]:
        rows = weights.to(self.losses.dtype)
        gradients = torch.autograd.grad(
            self.losses, self.parameters, grad_outputs=rows, allow_unused=True, retain_graph=True
        )
        return [g.to(accumulation_dtype(g)) for g in filled(gradients, self.parameters)]


def _norms(losses: Tensor, parameters: list[nn.Parameter], rows: Tensor) -> Tensor:
    gradients: Sequence[Tensor | None]
    try:
        gradients = torch.autograd.grad(
            losses, parameters, grad_outputs=rows, is_grads_batched=True, allow_unused=True, retain_graph=True
        )
    except RuntimeError:  # an operation whose backward pass has no batching rule, such as a GRU's
        return torch.cat([_row_norm(losses, parameters, row) for row in rows])
    return _length([g for g in gradients if g is not None], len(rows), rows)


def _row_norm(losses: Tensor, parameters: list[nn.Parameter], row: Tensor) -> Tensor:
    gradients: Sequence[Tensor | None] = torch.autograd.grad(
        losses, parameters, grad_outputs=row, allow_unused=True, retain_graph=True
    )
    return _length([g.unsqueeze(0) for g in gradients if g is not None], 1, row)


def _length(gradients: list[Tensor], size: int, like: Tensor) -> Tensor:
    total = torch.zeros(size, dtype=accumulation_dtype(like), device=like.device)
    for g in gradients:
        total += g.to(total.dtype).flatten(1).square().sum(1)
    return total.sqrt()
