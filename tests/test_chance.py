"""Masks of dropout and random views must not follow a seed that all know: one record more would move them all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sordino import Private, recipes
from sordino.chance import SecretChance

RECORDS, WIDTH = 4, 64
NOISELESS = 1e-7


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) @ self.weight


class Views(Dataset[Tensor]):
    """Each record is seen in a random view, by all three generators."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(WIDTH) * (torch.rand(()) + random.random() + float(np.random.rand()))  # noqa: NPY002


def train(data: Any, loop: Callable[[Private], None], seed: int | None = None, **options: Any) -> tuple[Tensor, Any]:
    """The weights after two steps from public seeds, and where the three generators stand then."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    model = Dropped() if isinstance(data, Tensor) else nn.Linear(WIDTH, 1, bias=False)
    recipe = recipes.dpsgd(batch_size=RECORDS, steps=2, noise_multiplier=NOISELESS, clip=100.0, **options)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        losses: Tensor = model(x).reshape(len(x)) + 0.0
        return losses

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = Private(model, optimizer, data, loss, recipe.for_records(RECORDS), seed=seed, validate=False)
    loop(private)
    private.close()
    of_numpy: Any = np.random.get_state()  # noqa: NPY002
    stand = torch.get_rng_state().tolist(), of_numpy[1].tolist(), random.getstate()
    return next(model.parameters()).detach().clone(), stand


def by_steps(private: Private) -> None:
    for _ in private.steps():
        pass


def by_loader(private: Private) -> None:
    bench = private.bench
    for batch in private.loader(microbatch=3):
        bench.optimizer.zero_grad()
        private.backward(bench.objective.loss(bench.objective.model, batch))
        bench.optimizer.step()


@pytest.mark.parametrize("loop", [by_steps, by_loader])
@pytest.mark.parametrize("data", [torch.ones(RECORDS, WIDTH), Views()])
def test_what_a_loss_and_a_dataset_draw_is_secret(data: Any, loop: Callable[[Private], None]) -> None:
    """And the caller's generators are as they were."""
    first, stand = train(data, loop)
    again, same = train(data, loop)
    assert (first - again).abs().max() > 1000 * NOISELESS
    assert stand == same
    torch.manual_seed(0)
    _ = Dropped() if isinstance(data, Tensor) else nn.Linear(WIDTH, 1, bias=False)
    assert stand[0] == torch.get_rng_state().tolist()


def test_an_experiment_with_a_seed_repeats_its_masks() -> None:
    data = torch.ones(RECORDS, WIDTH)
    assert torch.equal(train(data, by_steps, seed=1)[0], train(data, by_steps, seed=1)[0])


def test_a_loop_that_is_left_gives_the_generators_back() -> None:
    def leave(private: Private) -> None:
        batches: Any = private.loader()
        next(batches)
        torch.rand(3)
        batches.close()

    _, stand = train(torch.ones(RECORDS, WIDTH), leave)
    torch.manual_seed(0)
    assert stand[0] == torch.get_rng_state().tolist()


def test_a_block_within_a_block_goes_on() -> None:
    chance, device = SecretChance(), torch.device("cpu")
    before = torch.get_rng_state()
    chance.enter(device)
    chance.enter(device)
    inside = torch.rand(3)
    chance.leave()
    assert not torch.equal(torch.get_rng_state(), before)
    assert inside.numel() == 3
    chance.leave()
    chance.leave()
    assert torch.equal(torch.get_rng_state(), before)
