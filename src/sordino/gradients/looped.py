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
                require_graph(loss, parameters)
                refuse_reentrant(loss)
                yield fill_unused(torch.autograd.grad(loss, parameters, allow_unused=True), parameters)


def backpropagate(losses: Tensor, parameters: list[nn.Parameter]) -> InChunks:
    """The rows of a loss vector with its graph, differentiated one by one; sums are of the measured gradients."""
    require_graph(losses, parameters)
    refuse_reentrant(losses)
    identity = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)

    def compute(chunk: range) -> list[Tensor]:
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
    """Refuse checkpoints of the old kind: torch finds no gradients of parameters behind them."""
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


def fill_unused(gradients: tuple[Tensor | None, ...], parameters: list[nn.Parameter]) -> list[Tensor]:
    """A parameter that the loss does not use has a zero gradient."""
    return [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]


def require_graph(loss: Tensor, parameters: list[nn.Parameter]) -> None:
    """Refuse a loss that depends on no parameter."""
    if not loss.requires_grad:
        raise UnsupportedModel(
            f"the loss does not depend on any of the {len(parameters)} trainable parameters: "
            "check that the forward pass uses them and is not under torch.no_grad()"
        )
