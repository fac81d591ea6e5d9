"""One training step by each method: non-private SGD, Sordino, Opacus in every mode that runs, and plain vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dp_accounting import GaussianDpEvent
from torch import nn

from benchmarks.nets import Case, Data, losses
from sordino.accounting.ledger import Receipt
from sordino.gradients import BookKeeping, Engine, Objective, Vmapped
from sordino.gradients.engine import Batch
from sordino.noise import Secure, perturb

Step = Callable[[], None]
OPACUS = ("hooks", "functorch", "ew", "ghost")
METHODS = ("SGD", "Sordino", *(f"Opacus {mode}" for mode in OPACUS), "vmap")


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
