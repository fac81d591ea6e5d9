"""The mean of the last iterates: less noise than the last of them, for free, because each was released already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Average:
    """The running mean of a model's parameters over the last `share` of `total` steps; nothing where share is 0."""

    def __init__(self, share: float, total: int) -> None:
        self.first = total - max(1, round(share * total)) if share > 0 else total
        self.count = 0
        self.mean: dict[str, Tensor] = {}

    def observe(self, model: nn.Module, step: int) -> None:
        """Take in the model after its step number `step` (from 0), if it is one of the last."""
        if step < self.first:
            return
        self.count += 1
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if name not in self.mean:
                self.mean[name] = torch.zeros_like(parameter, requires_grad=False)
            self.mean[name] += (parameter.detach() - self.mean[name]) / self.count

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """The model with its mean parameters, until the block ends; as it is where there is no mean yet."""
        held = {name: p for name, p in model.named_parameters() if name in self.mean}
        kept = {name: p.detach().clone() for name, p in held.items()}
        try:
            self._write(held, self.mean)
            yield
        finally:
            self._write(held, kept)

    @staticmethod
    def _write(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(values[name])

    def state(self) -> dict[str, Any]:
        """Plain state for a checkpoint."""
        return {"count": self.count, "mean": self.mean}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.count, self.mean = state["count"], dict(state["mean"])
