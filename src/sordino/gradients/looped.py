"""Per-example gradients by one backward pass per example: slow, and right for anything that torch can differentiate.

`Looped` runs the loss on each example alone. `backpropagate` differentiates a loss vector whose graph the user built,
for loops that call ``private.backward(losses)``, by batched backward passes over rows of the identity, chunk by chunk;
no gradient outlives its chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import UnsupportedModel
from sordino.gradients.engine import Batch, Objective
from sordino.gradients.vmapped import InChunks, Materialising, choose_microbatch

Gradients = tuple[Tensor | None, ...]
"""One for each parameter, None where it has no part in a loss."""


class Looped(Materialising):
    """A plain loop over single examples."""

    name = "loop"

    def _compute(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> list[Tensor]:
        rows = list(self._rows(objective, parameters, batch))
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    def _rows(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> Iterator[list[Tensor]]:
        with torch.enable_grad():
            for single in batch.singles():
                loss = objective.losses(single, 1).squeeze()
                refuse_reentrant(loss)
                yield fill_unused(find_gradients(loss, parameters), parameters)


def backpropagate(losses: Tensor, parameters: list[nn.Parameter]) -> InChunks:
    """The rows of a loss vector with its graph, differentiated one by one; sums are of what was measured."""
    refuse_reentrant(losses)
    identity = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)

    def compute(chunk: range) -> list[Tensor]:
        if not losses.requires_grad:
            return [torch.zeros(len(chunk), *p.shape, dtype=p.dtype, device=p.device) for p in parameters]
        with torch.autocast(losses.device.type, enabled=False):
            return _gradients(losses, parameters, identity[chunk.start : chunk.stop])

    return InChunks(len(losses), choose_microbatch(parameters), compute)


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
        return [torch.stack(each) for each in zip(*(fill_unused(one, parameters) for one in singly), strict=True)]
    unused = (torch.zeros(len(rows), *p.shape, dtype=p.dtype, device=p.device) for p in parameters)
    return [zero if g is None else g for g, zero in zip(gradients, unused, strict=True)]


def refuse_reentrant(losses: Tensor) -> None:
    """Refuse checkpoints of the old kind: asked for the gradients of parameters, torch finds none behind them."""
    seen: set[Any] = set()
    ahead = [losses.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise UnsupportedModel(
                "the model has reentrant checkpoints, which hide the parameters they use: call "
                "torch.utils.checkpoint.checkpoint with use_reentrant=False, in transformers "
                "gradient_checkpointing_enable({'use_reentrant': False})"
            )
        seen.add(node)
        ahead += [function for function, _ in node.next_functions]


def fill_unused(gradients: Gradients, parameters: list[nn.Parameter]) -> list[Tensor]:
    """A parameter that the loss does not use has a zero gradient."""
    return [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]


def find_gradients(loss: Tensor, parameters: list[nn.Parameter], weights: Tensor | None = None) -> Gradients:
    """Autograd's, or none for a loss in which no parameter has a part, as that of a record that is masked out.

    To refuse such a loss would end the run where a draw holds that record (laws 6 and 7). The probe at the start
    refuses a model in which no loss depends on a parameter.
    """
    if not loss.requires_grad:
        return (None,) * len(parameters)
    return torch.autograd.grad(loss, parameters, weights, allow_unused=True)
