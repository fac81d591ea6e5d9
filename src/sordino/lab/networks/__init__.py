"""The architectures of the papers, each a function with the paper's choices as defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from sordino.errors import InvalidInput
from sordino.lab.networks.activations import Activation, TemperedSigmoid
from sordino.lab.networks.images import (
    alexnet,
    cifar_cnn,
    digits_cnn,
    digits_mlp,
    jl_cifar,
    linear,
    mnist_cnn,
    scatter_cnn,
    scatter_linear,
    vgg13,
)
from sordino.lab.networks.sequences import embedding_mlp, imdb_bilstm, imdb_mlp, jl_bilstm, names_lstm, transformer

ARCHITECTURES: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        builder.__name__.replace("_", "-"): builder
        for builder in (
            *(alexnet, cifar_cnn, digits_cnn, digits_mlp, jl_cifar, linear, mnist_cnn, vgg13),
            *(scatter_cnn, scatter_linear),
            *(embedding_mlp, imdb_bilstm, imdb_mlp, jl_bilstm, names_lstm, transformer),
        )
    }
)
"""Every architecture by the name that recipes and the command line use, such as ``"mnist-cnn"``."""


def build(name: str, **options: Any) -> nn.Module:
    """The architecture called `name` (underscores and hyphens are the same), with its options."""
    builder = ARCHITECTURES.get(name.replace("_", "-"))
    if builder is None:
        raise InvalidInput(f"model={name!r} is not known: choose one of {', '.join(sorted(ARCHITECTURES))}")
    return builder(**options)


def parameter_count(model: nn.Module, *, trained: bool = False) -> int:
    """How many numbers the model has, or only those that are `trained`."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


__all__ = [
    "ARCHITECTURES",
    "Activation",
    "TemperedSigmoid",
    "alexnet",
    "build",
    "cifar_cnn",
    "digits_cnn",
    "digits_mlp",
    "embedding_mlp",
    "imdb_bilstm",
    "imdb_mlp",
    "jl_bilstm",
    "jl_cifar",
    "linear",
    "mnist_cnn",
    "names_lstm",
    "parameter_count",
    "scatter_cnn",
    "scatter_linear",
    "transformer",
    "vgg13",
]
