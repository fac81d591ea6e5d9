"""Per-example gradients by one backward pass per example: slow, and right for anything that torch can differentiate."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sordino.errors import UnsupportedModel
from sordino.gradients.engine import Batch, Objective
from sordino.gradients.vmapped import Materialised, materialising_microbatch


def filled(gradients: tuple[Tensor | None, ...], parameters: list[nn.Parameter]) -> list[Tensor]:
    """A parameter that the loss does not use has a zero gradient."""
    return [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]


def detached_from(parameters: list[nn.Parameter]) -> UnsupportedModel:
    """The error for a loss that no parameter has a part in."""
    return UnsupportedModel(
        f"the loss does not depend on any of the {len(parameters)} trainable parameters: "
        "check that the forward pass uses them and is not under torch.no_grad()"
    )


class Looped:
    """A plain loop over single examples."""

    name = "loop"

    def differentiate(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> Materialised:
        rows = list(self._rows(objective, parameters, batch))
        return Materialised.of([torch.stack(column) for column in zip(*rows, strict=True)])

    def _rows(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> Iterator[list[Tensor]]:
        with torch.enable_grad():
            for single in batch.singles():
                loss = objective.losses(single, 1).squeeze()
                if not loss.requires_grad:
                    raise detached_from(parameters)
                yield filled(torch.autograd.grad(loss, parameters, allow_unused=True), parameters)

    def microbatch(self, parameters: list[nn.Parameter]) -> int:
        return materialising_microbatch(parameters)
