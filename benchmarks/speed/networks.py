"""Networks of plain torch that are in no library here."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mnist_cnn() -> nn.Module:
    """The 26k-parameter network of the papers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, stride=1)),
        *(nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)),
    )


def linear() -> nn.Module:
    """64 inputs, 10 classes: next to no arithmetic, so that what a step costs whatever the model shows."""
    return nn.Linear(64, 10)


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose kernels are brought to mean 0 and variance 1 / fan-in, with a trained gain for each."""

    def __init__(self, *args: int, **options: int) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Standardise, then convolve."""
        mean = self.weight.mean(dim=(1, 2, 3), keepdim=True)
        variance = self.weight.var(dim=(1, 2, 3), keepdim=True, unbiased=False)
        scale = self.gain * torch.rsqrt(variance * self.weight[0].numel() + 1e-4)
        return F.conv2d(x, (self.weight - mean) * scale, self.bias, self.stride, self.padding)


class WideBlock(nn.Module):
    """Normalise, activate and convolve twice, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(16, inputs), nn.GroupNorm(16, outputs)
        self.enter = StandardisedConv2d(inputs, outputs, 3, stride=stride, padding=1)
        self.leave = StandardisedConv2d(outputs, outputs, 3, padding=1)
        self.shortcut = StandardisedConv2d(inputs, outputs, 1, stride=stride) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        """The block's sum."""
        active = F.relu(self.first(x))
        kept = x if self.shortcut is None else self.shortcut(active)
        inner: Tensor = self.leave(F.relu(self.second(self.enter(active))))
        return inner + kept


def wide_resnet(depth: int = 16, width: int = 4, classes: int = 10) -> nn.Module:
    """WRN-16-4 with GroupNorm and weight standardisation, the network of De et al. (2022) for CIFAR-10."""
    blocks, channels = (depth - 4) // 6, 16
    body: list[nn.Module] = []
    for stage, wide in enumerate((16 * width, 32 * width, 64 * width)):
        for place in range(blocks):
            body.append(WideBlock(channels, wide, 2 if stage and not place else 1))
            channels = wide
    head = (nn.GroupNorm(16, channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(StandardisedConv2d(3, 16, 3, padding=1), *body, *head)


class BasicBlock(nn.Module):
    """Two convolutions with GroupNorm, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(32, outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(32, outputs)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The block's sum, activated."""
        return F.relu(self.inner(x) + self.shortcut(x))


def resnet18(classes: int = 10) -> nn.Module:
    """ResNet-18 with GroupNorm and the small stem that 32 x 32 pixels ask for."""
    plan = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2))
    blocks = [BasicBlock(*each) for each in (*plan, (512, 512, 1))]
    stem = (nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU())
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def stack(layers: int) -> Callable[[], nn.Module]:
    """A plain network of a given depth, for the growth of cost with depth."""

    def build() -> nn.Module:
        hidden = [part for _ in range(layers - 1) for part in (nn.Linear(256, 256), nn.Tanh())]
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.Tanh(), *hidden, nn.Linear(256, 10))

    return build


class TokenMLP(nn.Module):
    """The same layers for every token, then the mean: arithmetic in proportion to the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1_000, 256)
        self.body = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh())
        self.head = nn.Linear(256, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of two classes."""
        scores: Tensor = self.head(self.body(self.embedding(tokens)).mean(1))
        return scores
