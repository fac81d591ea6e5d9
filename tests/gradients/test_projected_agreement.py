"""Norms by projections and the sum are of one gradient, or nothing is released.

Forward mode differentiates through `torch.no_grad` and past backward hooks; backward mode does not. These models have
contributions of up to a thousand times the bound when norm and sum are believed to agree.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sordino import Private, UnsupportedModel, recipes
from sordino.gradients.engine import Objective
from sordino.gradients.projected import ProjectedEngine
from sordino.noise import Seeded
from tests.gradients.oracle import batch_of


class Line(nn.Module):
    def __init__(self, output: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.output = nn.Linear(4, 1), output

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.layer, x)


def without_grad(layer: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = layer(x)
    return layer(x) - 0.999 * hidden


def hooked(layer: nn.Linear, x: Tensor) -> Tensor:
    output = layer(x)
    if output.requires_grad:
        output.register_hook(lambda gradient: 1000 * gradient)
    return output


def by_other_coins(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x) * random.uniform(1, 1000)


def detached(layer: nn.Linear, x: Tensor) -> Tensor:
    output = layer(x)
    return output - 0.999 * output.detach()


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).squeeze(1)


def longest(output: Callable[[nn.Linear, Tensor], Tensor], way: str, records: int = 1) -> float:
    """The length of one clipped contribution, or of the sum of several."""
    torch.manual_seed(0)
    model = Line(output)
    engine = ProjectedEngine(200, Seeded(0), way)
    engine.renew()
    found = engine.differentiate(
        Objective(model, losses), list(model.parameters()), batch_of(torch.randn(records, 4), records)
    )
    return float(torch.cat([g.flatten() for g in found.weighted_sum((1 / found.norms).clamp(max=1))]).norm())


@pytest.mark.parametrize(
    ("output", "way"),
    [(without_grad, "jvp"), (hooked, "jvp"), (by_other_coins, "jvp"), (by_other_coins, "double_vjp")],
)
def test_another_gradient_is_refused(output: Callable[[nn.Linear, Tensor], Tensor], way: str) -> None:
    with pytest.raises(UnsupportedModel, match="not those of the summed gradients"):
        longest(output, way, records=4)
    assert longest(output, way) == 0  # a single record must not end a run: without it nothing would be refused


@pytest.mark.parametrize(("output", "way"), [(detached, "jvp"), (detached, "double_vjp"), (without_grad, "double_vjp")])
def test_the_same_gradient_passes(output: Callable[[nn.Linear, Tensor], Tensor], way: str) -> None:
    assert longest(output, way) < 1.2


def test_a_target_without_gradient_is_refused_before_anything_is_released() -> None:
    def temporal_difference(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        now, later = batch
        with torch.no_grad():
            target = 1 + 0.99 * model(later).squeeze(1)
        return (model(now).squeeze(1) - target).square()

    states = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(4, 1)
    before = model.weight.clone()
    recipe = recipes.jl(projections=20, batch_size=20, steps=2, noise_multiplier=5.0, clip=0.1).for_records(40)
    private = Private(model, torch.optim.SGD(model.parameters(), 1.0), (states, states), temporal_difference, recipe)
    with pytest.raises(UnsupportedModel, match="no_grad") as refusal:
        private.step()
    assert not any(letter.isdigit() for letter in str(refusal.value).replace("TF32", "")), "a sum without noise"
    assert torch.equal(model.weight, before)
