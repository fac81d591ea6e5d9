"""Networks on scattering features (`sordino.features`): 81 channels of 7x7 for grey 28x28, 243 of 8x8 for colour 32x32.

`norm` is the normalisation that the papers put first: a module from `sordino.features` without trained weights, or
None when the stored features are already normalised.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from sordino.errors import InvalidInput
from sordino.models.activations import Activation, nonlinearity

SIDE = {81: 7, 243: 8}
"""Height and width of the feature maps by number of channels."""


def scatter_linear(channels: int = 81, norm: nn.Module | None = None, classes: int = 10) -> nn.Sequential:
    """One linear layer on the features (Tramer and Boneh 2021); 39,700 parameters for 81 channels, 155,530 for 243."""
    features = channels * _side(channels) ** 2
    return nn.Sequential(*_first(norm), nn.Flatten(), nn.Linear(features, classes))


def scatter_cnn(
    channels: int = 81, activation: Activation = "tanh", norm: nn.Module | None = None, classes: int = 10
) -> nn.Sequential:
    """Tramer and Boneh's CNN on the features, also of DPIS and DPSUR; 33,066 parameters, 187,210 for 243 channels."""
    act = partial(nonlinearity, activation)
    if _side(channels) == 7:
        return nn.Sequential(
            *_first(norm),
            *(nn.Conv2d(channels, 16, kernel_size=3, stride=2, padding=1), act()),
            *(nn.Conv2d(16, 32, kernel_size=3, padding=1), act()),
            *(nn.Flatten(), nn.Linear(512, 32), act(), nn.Linear(32, classes)),
        )
    return nn.Sequential(
        *_first(norm),
        *(nn.Conv2d(channels, 64, kernel_size=3, padding=1), act(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, kernel_size=3, padding=1), act()),
        *(nn.Flatten(), nn.Linear(1024, classes)),
    )


def _side(channels: int) -> int:
    if channels not in SIDE:
        raise InvalidInput(
            f"channels={channels} must be 81 (grey 28x28) or 243 (colour 32x32): scattering makes no other"
        )
    return SIDE[channels]


def _first(norm: nn.Module | None) -> tuple[nn.Module, ...]:
    return () if norm is None else (norm,)
