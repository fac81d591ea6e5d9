"""Networks for pixels: MNIST, Fashion-MNIST, CIFAR-10 and the 8x8 digits. Inputs are [batch, channels, height, width].

No network has batch normalisation: it would let one record act on the gradients of all others.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from sordino.models.activations import Activation, nonlinearity

POOL = 0


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
    act = partial(nonlinearity, activation)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=padding), act(), SlidingMax()),
        *(nn.Conv2d(16, 32, kernel_size=4, stride=2), act(), SlidingMax()),
        *(nn.Flatten(), nn.Linear(512, 32), act(), nn.Linear(32, classes)),
    )


def cifar_cnn(activation: Activation = "tanh", classes: int = 10) -> nn.Sequential:
    """Tramer and Boneh's CIFAR network, also of noise screening and DPSUR; 550,570 parameters for 32x32."""
    act = partial(nonlinearity, activation)
    blocks = _convolutions(3, [32, 32, POOL, 64, 64, POOL, 128, 128, POOL], activation)
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2048, 128), act(), nn.Linear(128, classes))


def jl_cifar(activation: Activation = "relu", classes: int = 10) -> nn.Sequential:
    """The CIFAR network of DP-SGD-JL; 623,146 parameters for 32x32."""
    blocks = _convolutions(3, [32, 32, POOL, 64, 64, POOL, 128, 128, POOL, 256], activation)
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4096, classes))


def vgg13(activation: Activation = "relu", classes: int = 10) -> nn.Sequential:
    """VGG13 at 32x32 as timed by DP-SGD-JL, Table 5; 32,394,562 parameters.

    That count is the ImageNet network (dense 4096, 4096, 1000) with one more dense layer onto the ten classes.
    """
    plan = [step for width in (64, 128, 256, 512, 512) for step in (width, width, POOL)]
    return nn.Sequential(
        *_convolutions(3, plan, activation), nn.Flatten(), *_dense([512, 4096, 4096, 1000, classes], activation)
    )


def alexnet(activation: Activation = "relu", channels: int = 3, classes: int = 10) -> nn.Sequential:
    """AlexNet in one tower at 28x28 or 32x32, as timed by DP-SGD-JL, Table 4; 21,622,154 parameters.

    The paper's 21,598,922 is the same network on one grey channel: ``alexnet(channels=1)``.
    """
    act = partial(nonlinearity, activation)

    def pool() -> nn.Module:
        return nn.MaxPool2d(2, ceil_mode=True)

    return nn.Sequential(
        *(nn.Conv2d(channels, 96, kernel_size=11, stride=4, padding=5), act(), pool()),
        *(nn.Conv2d(96, 256, kernel_size=5, padding=2), act(), pool()),
        *_convolutions(256, [384, 384, 256], activation),
        *(pool(), nn.Flatten()),
        *_dense([256, 4096, 4096, classes], activation),
    )


def linear(features: int = 64, classes: int = 10) -> nn.Sequential:
    """Multinomial logistic regression on flattened inputs; the default fits the 8x8 digits (650 parameters)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))


def digits_mlp(activation: Activation = "tanh", hidden: int = 32, classes: int = 10) -> nn.Sequential:
    """One hidden layer on the 8x8 digits; 2,410 parameters."""
    return nn.Sequential(nn.Flatten(), *_dense([64, hidden, classes], activation))


def digits_cnn(activation: Activation = "tanh", classes: int = 10) -> nn.Sequential:
    """Two convolutions on the 8x8 digits; 6,090 parameters."""
    return nn.Sequential(*_convolutions(1, [16, POOL, 32, POOL], activation), nn.Flatten(), nn.Linear(128, classes))


def _convolutions(channels: int, plan: list[int], activation: Activation) -> list[nn.Module]:
    """3x3 convolutions that keep the size, each with its activation; `POOL` in the plan halves the size."""
    layers: list[nn.Module] = []
    for width in plan:
        if width == POOL:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nonlinearity(activation)]
            channels = width
    return layers


def _dense(widths: list[int], activation: Activation) -> list[nn.Module]:
    """Linear layers with activations between them and none at the end."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nonlinearity(activation)]
    return layers[:-1]
