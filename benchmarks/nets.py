"""The networks and batches of the speed benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.lab import networks

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A network, a batch for it, and the ratio to ordinary training that we aim for."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[int], Data]
    batch: int
    target: float

    @property
    def lead(self) -> float:
        """How many times as fast as the best mode of Opacus we aim to be."""
        return 4.5 if "LSTM" in self.name else 1.3

    def ready(self) -> tuple[nn.Module, Data]:
        """The network and one batch, the same ones every time."""
        torch.manual_seed(0)
        return self.build(), self.draw(self.batch)


def images(channels: int, side: int) -> Callable[[int], Data]:
    """Random pixels in ten classes."""
    return lambda size: (torch.randn(size, channels, side, side), torch.randint(0, 10, (size,)))


def texts(words: int, length: int) -> Callable[[int], Data]:
    """Random tokens in two classes."""
    return lambda size: (torch.randint(0, words, (size, length)), torch.randint(0, 2, (size,)))


def losses(model: nn.Module, data: Data) -> Tensor:
    """Cross entropy, one loss per example."""
    return F.cross_entropy(model(data[0]), data[1], reduction="none")


def mnist_cnn() -> nn.Module:
    """The 26k-parameter network of the papers, of torch's own layers alone."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, stride=1)),
        *(nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)),
    )


def frozen_bilstm() -> nn.Module:
    """The IMDb network with vectors that are not trained."""
    return networks.imdb_bilstm(torch.randn(20_000, 100))


def stack(layers: int) -> Callable[[], nn.Module]:
    """A plain network of a given depth, for the growth of cost with depth."""
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(256, 256), nn.Tanh())]
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.Tanh(), *hidden, nn.Linear(256, 10))


CASES: Mapping[str, Case] = MappingProxyType(
    {
        case.name: case
        for case in (
            Case("MNIST CNN 26k, 256", mnist_cnn, images(1, 28), 256, 1.1),
            Case("MNIST CNN 26k, 2048", mnist_cnn, images(1, 28), 2048, 1.1),
            Case("CIFAR CNN 550k, 256", networks.cifar_cnn, images(3, 32), 256, 1.3),
            Case("BiLSTM32 frozen embedding, 256x80", frozen_bilstm, texts(20_000, 80), 256, 1.1),
            Case("BiLSTM64 trained embedding, 64x150", networks.jl_bilstm, texts(8_000, 150), 64, 1.1),
            Case("VGG13 32M at 32x32, 64", networks.vgg13, images(3, 32), 64, 1.3),
            Case("transformer 4x128, 128x64", networks.transformer, texts(10_000, 64), 128, 1.3),
            Case("embedding MLP 2M, 256x200", networks.embedding_mlp, texts(20_000, 200), 256, 1.3),
        )
    }
)
