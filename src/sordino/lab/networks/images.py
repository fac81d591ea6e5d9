"""Networks for images: pixels of MNIST, Fashion-MNIST, CIFAR-10 and the 8x8 digits, or their scattering features.

Inputs are [batch, channels, height, width]; of scattering features (`sordino.lab.features`) 81 channels of 7x7 for
grey 28x28, and 243 of 8x8 for colour 32x32. No network has batch normalisation: it would let one record act on the
gradients of all others.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from sordino.errors import InvalidInput
from sordino.lab.networks.activations import Activation, build_activation

POOL = 0
_SIDE = {81: 7, 243: 8}
"""Height and width of the feature maps by number of channels."""


class SlidingMax(nn.Module):
    """``nn.MaxPool2d(2, stride=1)`` by max(a, b) = b + relu(a - b): torch's own kernel takes twice as long on a CPU."""

    def forward(self, images: Tensor) -> Tensor:
        """[..., height, width] to [..., height - 1, width - 1]."""
        upper, lower = images[..., :-1, :], images[..., 1:, :]
        rows = upper + (lower - upper).relu()
        left, right = rows[..., :-1], rows[..., 1:]
        return left + (right - left).relu()


def mnist_cnn(activation: Activation = "tanh", padding: int = 2, classes: int = 10) -> nn.Sequential:
    """The two-layer CNN of DPIS, noise screening and DPSUR (padding 2); 26,010 parameters for 28x28.

    ``mnist_cnn("relu", padding=3)`` is the variant of Dynamic DP-SGD and DP-SGD-JL.
    """
    act = partial(build_activation, activation)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=padding), act(), SlidingMax()),
        *(nn.Conv2d(16, 32, kernel_size=4, stride=2), act(), SlidingMax()),
        *(nn.Flatten(), nn.Linear(512, 32), act(), nn.Linear(32, classes)),
    )


def cifar_cnn(activation: Activation = "tanh", classes: int = 10) -> nn.Sequential:
    """Tramer and Boneh's CIFAR network, also of noise screening and DPSUR; 550,570 parameters for 32x32."""
    act = partial(build_activation, activation)
    blocks = _stack_convolutions(3, [32, 32, POOL, 64, 64, POOL, 128, 128, POOL], activation)
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2048, 128), act(), nn.Linear(128, classes))


def jl_cifar(activation: Activation = "relu", classes: int = 10) -> nn.Sequential:
    """The CIFAR network of DP-SGD-JL; 623,146 parameters for 32x32."""
    blocks = _stack_convolutions(3, [32, 32, POOL, 64, 64, POOL, 128, 128, POOL, 256], activation)
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4096, classes))


def vgg13(activation: Activation = "relu", classes: int = 10) -> nn.Sequential:
    """VGG13 at 32x32 as timed by DP-SGD-JL, Table 5; 32,394,562 parameters.

    That count is the ImageNet network (dense 4096, 4096, 1000) with one more dense layer onto the ten classes.
    """
    plan = [step for width in (64, 128, 256, 512, 512) for step in (width, width, POOL)]
    return nn.Sequential(
        *_stack_convolutions(3, plan, activation),
        nn.Flatten(),
        *_stack_dense([512, 4096, 4096, 1000, classes], activation),
    )


def alexnet(activation: Activation = "relu", channels: int = 3, classes: int = 10) -> nn.Sequential:
    """AlexNet in one tower at 28x28 or 32x32, as timed by DP-SGD-JL, Table 4; 21,622,154 parameters.

    The paper's 21,598,922 is the same network on one grey channel: ``alexnet(channels=1)``.
    """
    act = partial(build_activation, activation)

    def pool() -> nn.Module:
        return nn.MaxPool2d(2, ceil_mode=True)

    return nn.Sequential(
        *(nn.Conv2d(channels, 96, kernel_size=11, stride=4, padding=5), act(), pool()),
        *(nn.Conv2d(96, 256, kernel_size=5, padding=2), act(), pool()),
        *_stack_convolutions(256, [384, 384, 256], activation),
        *(pool(), nn.Flatten()),
        *_stack_dense([256, 4096, 4096, classes], activation),
    )


def linear(features: int = 64, classes: int = 10, bias: bool = True) -> nn.Sequential:
    """Multinomial logistic regression on flattened inputs; the default fits the 8x8 digits (650 parameters).

    On features of norm 1 a bias makes every record's gradient sqrt(2) times as long. Half of the clipped gradient's
    square then belongs to the bias, so without one the same noise costs less.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes, bias=bias))


def digits_mlp(activation: Activation = "tanh", hidden: int = 32, classes: int = 10) -> nn.Sequential:
    """One hidden layer on the 8x8 digits; 2,410 parameters."""
    return nn.Sequential(nn.Flatten(), *_stack_dense([64, hidden, classes], activation))


def digits_cnn(activation: Activation = "tanh", classes: int = 10) -> nn.Sequential:
    """Two convolutions on the 8x8 digits; 6,090 parameters."""
    return nn.Sequential(
        *_stack_convolutions(1, [16, POOL, 32, POOL], activation), nn.Flatten(), nn.Linear(128, classes)
    )


def scatter_linear(channels: int = 81, norm: nn.Module | None = None, classes: int = 10) -> nn.Sequential:
    """One linear layer on the features (Tramer and Boneh 2021); 39,700 parameters for 81 channels, 155,530 for 243.

    `norm` is the normalisation that the papers put first: a module from `sordino.lab.features` without trained weights,
    or None when the stored features are already normalised.
    """
    features = channels * _side_of(channels) ** 2
    return nn.Sequential(*_begin_with(norm), nn.Flatten(), nn.Linear(features, classes))


def scatter_cnn(
    channels: int = 81, activation: Activation = "tanh", norm: nn.Module | None = None, classes: int = 10
) -> nn.Sequential:
    """Tramer and Boneh's CNN on the features, also of DPIS and DPSUR; 33,066 parameters, 187,210 for 243 channels."""
    act = partial(build_activation, activation)
    if _side_of(channels) == 7:
        return nn.Sequential(
            *_begin_with(norm),
            *(nn.Conv2d(channels, 16, kernel_size=3, stride=2, padding=1), act()),
            *(nn.Conv2d(16, 32, kernel_size=3, padding=1), act()),
            *(nn.Flatten(), nn.Linear(512, 32), act(), nn.Linear(32, classes)),
        )
    return nn.Sequential(
        *_begin_with(norm),
        *(nn.Conv2d(channels, 64, kernel_size=3, padding=1), act(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, kernel_size=3, padding=1), act()),
        *(nn.Flatten(), nn.Linear(1024, classes)),
    )


def _stack_convolutions(channels: int, plan: list[int], activation: Activation) -> list[nn.Module]:
    """3x3 convolutions that keep the size, each with its activation; `POOL` in the plan halves the size."""
    layers: list[nn.Module] = []
    for width in plan:
        if width == POOL:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1), build_activation(activation)]
            channels = width
    return layers


def _stack_dense(widths: list[int], activation: Activation) -> list[nn.Module]:
    """Linear layers with activations between them and none at the end."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), build_activation(activation)]
    return layers[:-1]


def _side_of(channels: int) -> int:
    if channels not in _SIDE:
        raise InvalidInput(
            f"channels={channels} must be 81 (grey 28x28) or 243 (colour 32x32): scattering makes no other"
        )
    return _SIDE[channels]


def _begin_with(norm: nn.Module | None) -> tuple[nn.Module, ...]:
    return () if norm is None else (norm,)
