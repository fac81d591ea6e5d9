"""The networks and batches of the speed benchmark, and one training step of each method on them.

The methods are non-private SGD, Sordino, Opacus in every mode that runs, and plain vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from dp_accounting import GaussianDpEvent
from torch import Tensor, nn

from sordino.accounting.ledger import Receipt
from sordino.gradients import BookKeeping, Engine, Objective, Vmapped
from sordino.gradients.engine import Batch
from sordino.lab import networks
from sordino.noise import Secure, perturb

Data = tuple[Tensor, Tensor]
Step = Callable[[], None]
OPACUS = ("hooks", "functorch", "ew", "ghost")
METHODS = ("SGD", "Sordino", *(f"Opacus {mode}" for mode in OPACUS), "vmap")


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


def step_of(method: str, case: Case) -> Step:
    """A callable that takes one step on the case's batch; raises whatever the method cannot do."""
    model, data = case.ready()
    if method == "SGD":
        return ordinary(model, data)
    if method.startswith("Opacus"):
        return opacus(model, data, method.removeprefix("Opacus "))
    return private(model, data, BookKeeping() if method == "Sordino" else Vmapped())


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """What the optimizer may change."""
    return [p for p in model.parameters() if p.requires_grad]


def batch_of(part: tuple[torch.Tensor, ...]) -> Batch:
    """Examples as an engine takes them."""
    return Batch(part, len(part[0]), lambda i: tuple(each[i : i + 1] for each in part))


def ordinary(model: nn.Module, data: Data) -> Step:
    """Forward, backward, update."""
    optimizer = torch.optim.SGD(trainable(model), lr=1e-3)

    def step() -> None:
        losses(model, data).mean().backward()
        optimizer.step()
        optimizer.zero_grad()  # as all methods do: a step's peak includes its gradients, and not those of the last one

    return step


def private(model: nn.Module, data: Data, engine: Engine, microbatch: int | None = None) -> Step:
    """Norms, flat clipping at 1, weighted sums, secure noise, update: what `sordino.step` does with a draw."""
    parameters = trainable(model)
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    objective, source = Objective(model, losses), Secure()
    size = len(data[0])
    receipts = iter(range(10**9))

    def step() -> None:
        total: list[torch.Tensor] = []
        width = microbatch or engine.microbatch(parameters)
        for part in zip(*(each.split(width) for each in data), strict=True):
            batch = batch_of(part)
            found = engine.differentiate(objective, parameters, batch)
            weights = (1 / found.norms.clamp_min(1e-12)).clamp_max(1)
            total = total or [torch.zeros(p.shape) for p in parameters]
            partial = iter(found.weighted_sum(weights))
            for mine in total:
                mine += next(partial)
            del found  # before the next one is made
        perturb(source, Receipt(next(receipts), GaussianDpEvent(1.0)), total, 1.0)
        for parameter, mine in zip(parameters, total, strict=True):
            parameter.grad = mine.div_(size)
        optimizer.step()
        optimizer.zero_grad()

    return step


def opacus(model: nn.Module, data: Data, mode: str) -> Step:
    """Opacus 1.6, the same clipping, noise from torch's generator, its replacement layers where it needs them."""
    from opacus.grad_sample import wrap_model
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    from opacus.validators import ModuleValidator

    fixed = ModuleValidator.fix(model)
    for mine, theirs in zip(model.parameters(), fixed.parameters(), strict=False):
        theirs.requires_grad_(mine.requires_grad)
    extra: dict[str, Any] = {"max_grad_norm": 1.0} if mode == "ghost" else {}
    wrapped = wrap_model(fixed, grad_sample_mode=mode, batch_first=True, loss_reduction="mean", **extra)
    plain = torch.optim.SGD(trainable(wrapped), lr=1e-3)
    kind = DPOptimizerFastGradientClipping if mode == "ghost" else DPOptimizer
    optimizer = kind(plain, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(data[0]))
    criterion: Any = nn.CrossEntropyLoss()
    if mode == "ghost":
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion, "mean")

    def step() -> None:
        optimizer.zero_grad()
        criterion(wrapped(data[0]), data[1]).backward()
        optimizer.step()
        optimizer.zero_grad()  # lets go of the gradients of all examples before the next method's turn

    return step
