"""Which optimizer turns a released gradient into a proposal, by name, for recipes that are read from a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sordino.errors import InvalidInput

_KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True)
class Optimizer:
    """A torch.optim optimizer by name. A hint for `sordino train`: `Private` takes any optimizer that you build."""

    kind: str = "sgd"
    lr: float = 0.5
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InvalidInput(f"optimizer={self.kind!r} must be one of {', '.join(_KINDS)}")
        if not self.lr > 0:
            raise InvalidInput(f"lr={self.lr} must be > 0")
        if self.momentum and self.kind != "sgd":
            raise InvalidInput(f"momentum={self.momentum} belongs to sgd, not to {self.kind}: leave it at 0")

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over these parameters."""
        options: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.kind == "sgd":
            options["momentum"] = self.momentum
        return _KINDS[self.kind](parameters, **options)
