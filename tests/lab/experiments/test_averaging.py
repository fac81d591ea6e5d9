"""The mean of the last iterates is what it says, and a resumed one is the same."""

from __future__ import annotations

import torch
from torch import nn

from sordino.experiments.averaging import Average


def iterates(count: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(3, 2) for _ in range(count)]


def test_the_mean_of_the_last_share():
    models, average = iterates(10), Average(0.4, 10)
    for step, model in enumerate(models):
        average.observe(model, step)
    expected = torch.stack([model.weight for model in models[6:]]).mean(0)
    wrong = torch.stack([model.weight for model in models[5:]]).mean(0)
    assert torch.allclose(average.mean["weight"], expected, atol=1e-6)
    assert not torch.allclose(average.mean["weight"], wrong, atol=1e-3)
    assert average.count == 4


def test_a_resumed_mean_is_the_same():
    models, whole, first, second = iterates(10), Average(0.5, 10), Average(0.5, 10), Average(0.5, 10)
    for step, model in enumerate(models):
        whole.observe(model, step)
    for step in range(7):
        first.observe(models[step], step)
    second.restore(first.state())
    for step in range(7, 10):
        second.observe(models[step], step)
    assert torch.allclose(second.mean["bias"], whole.mean["bias"], atol=1e-6)


def test_it_is_installed_only_for_a_while_and_leaves_frozen_parameters_alone():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    average = Average(0.1, 1)
    average.observe(model, 0)
    first = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    with average.installed(model):
        assert torch.equal(model.weight, first)
    assert torch.equal(model.weight, first + 1)
    assert set(average.mean) == {"weight"}


def test_without_a_share_nothing_is_averaged():
    average = Average(0.0, 5)
    for step in range(5):
        average.observe(nn.Linear(3, 2), step)
    assert not average.mean
