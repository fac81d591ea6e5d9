"""Bounded activations: small activations give small gradients, so clipping removes less signal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sordino.errors import InvalidInput

Activation = str | tuple[float, float, float]
"""``"tanh"``, ``"relu"``, or the three numbers (scale, temperature, offset) of a tempered sigmoid."""


class TemperedSigmoid(nn.Module):
    """phi(x) = scale * sigmoid(temperature * x) - offset (Papernot et al. 2021).

    (2, 2, 1) is exactly tanh, (1, 1, 0) the plain sigmoid. The three numbers are public and not trained.
    """

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(self.temperature * x) - self.offset

    def extra_repr(self) -> str:
        return f"scale={self.scale}, temperature={self.temperature}, offset={self.offset}"


def build_activation(choice: Activation) -> nn.Module:
    """The module for `choice`; one per place, so that nothing is shared between layers."""
    if choice == "tanh":
        return nn.Tanh()
    if choice == "relu":
        return nn.ReLU()
    if not isinstance(choice, str) and len(choice) == 3:
        return TemperedSigmoid(*choice)
    raise InvalidInput(
        f"activation={choice!r} must be 'tanh', 'relu' or three numbers (scale, temperature, offset): "
        "(2, 2, 1) is tanh as a tempered sigmoid"
    )
