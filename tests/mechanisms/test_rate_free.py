"""Steps without a learning rate: the formula against a plain loop, and that it reads released gradients alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sordino import Budget, recipes
from sordino.optimizers import FIRST, DistanceOverGradients


def walk_plainly(start: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    x, squares, reach = start.clone(), 0.0, FIRST * (1 + float(start.norm()))
    for gradient in gradients:
        squares += float(gradient.square().sum())
        reach = max(reach, float((x - start).norm()))
        x = x - reach / squares**0.5 * gradient
    return x


def test_it_is_the_formula_over_all_parameters_together() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64)) for size in (3, 5))
    start = torch.cat([first.detach(), second.detach()])
    gradients = [torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(20)]
    optimizer = DistanceOverGradients([first, second])
    for gradient in gradients:
        first.grad, second.grad = gradient[:3].clone(), gradient[3:].clone()
        optimizer.step()
    moved = torch.cat([first.detach(), second.detach()])
    torch.testing.assert_close(moved, walk_plainly(start, gradients))
    assert not torch.allclose(moved, walk_plainly(start, gradients[::-1]))


def test_it_finds_a_minimum_wherever_that_is() -> None:
    for far in (0.1, 100.0):
        x = nn.Parameter(torch.zeros(4))
        optimizer = DistanceOverGradients([x])
        for _ in range(400):
            optimizer.zero_grad()
            ((x - far).square().sum() / 2).backward()
            optimizer.step()
        assert float((x.detach() - far).abs().max()) < 0.1 * far


def test_it_goes_on_from_a_saved_state() -> None:
    def make() -> tuple[nn.Parameter, DistanceOverGradients]:
        x = nn.Parameter(torch.ones(3))
        return x, DistanceOverGradients([x])

    x, optimizer = make()
    y, other = make()
    for number in range(6):
        if number == 3:
            y.data.copy_(x.data)
            other.load_state_dict(optimizer.state_dict())
        for parameter, each in ((x, optimizer), *(((y, other),) if number >= 3 else ())):
            parameter.grad = torch.full((3,), float(number + 1))
            each.step()
    torch.testing.assert_close(x, y)


def test_without_gradients_nothing_moves() -> None:
    x = nn.Parameter(torch.ones(3))
    optimizer = DistanceOverGradients([x])
    optimizer.step()
    x.grad = torch.zeros(3)
    optimizer.step()
    assert x.tolist() == [1, 1, 1]


def test_it_costs_what_dpsgd_costs() -> None:
    budget = Budget(3, 1e-5)
    plans = [
        make(batch_size=100, steps=20).calibrate(budget, records=1000).plan()
        for make in (recipes.rate_free, recipes.dpsgd)
    ]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("name", ["dog"])
def test_its_recipe_is_written_and_read_back(name: str) -> None:
    recipe = recipes.rate_free(batch_size=100, steps=20)
    assert type(recipe).from_toml(recipe.to_toml()) == recipe
    assert recipe.optimizer.kind == name
