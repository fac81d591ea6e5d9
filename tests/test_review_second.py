"""What a second hostile review found: each of these printed an epsilon that did not hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import InvalidInput, Private, UnsupportedModel, recipes
from sordino.accounting.ledger import Ledger
from sordino.mechanisms.dynamic import StepDecay
from sordino.recipe import Recipe

X, Y = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def private(recipe: Recipe, model: nn.Module | None = None, **options: object) -> Private:
    torch.manual_seed(0)
    model = model or nn.Linear(3, 2)
    return Private(model, torch.optim.SGD(model.parameters(), 0.1), (X, Y), losses, recipe, **options)  # type: ignore[arg-type]


def dpsgd(**options: object) -> Recipe:
    return recipes.dpsgd(batch_size=20, steps=3, noise_multiplier=2.0, **options).for_records(60)  # type: ignore[arg-type]


def test_saved_verdicts_are_never_used_at_less_noise_than_was_paid() -> None:
    falling = StepDecay(0.25, 300)
    common = {"batch_size": 20, "steps": 9, "noise_multiplier": 2.0, "validation_schedule": falling}
    with pytest.raises(InvalidInput, match="line_search"):
        recipes.dpsur(line_search=True, **common)
    recipes.dpsur(**common)


def test_recipes_without_a_text_still_differ_by_their_numbers() -> None:
    def own(step: int, steps: int) -> float:
        return 1.0

    narrow, wide = dpsgd(clip=0.1, noise_schedule=own), dpsgd(clip=100.0, noise_schedule=own)
    with pytest.raises(InvalidInput):
        narrow.to_toml()
    assert narrow.fingerprint() == dpsgd(clip=0.1, noise_schedule=own).fingerprint()
    assert narrow.fingerprint() != wide.fingerprint()


@pytest.mark.parametrize("published_first", [True, False])
def test_published_accounting_shares_no_ledger(published_first: bool) -> None:
    published = recipes.dpsur(
        batch_size=20, steps=3, noise_multiplier=2.0, validation_size=20, accounting="published"
    ).for_records(60)
    first, second = (published, dpsgd()) if published_first else (dpsgd(), published)
    ledger = private(first).bench.ledger
    with pytest.raises(InvalidInput, match="published"):
        private(second, ledger=ledger)
    with pytest.raises(InvalidInput, match="published"):
        private(published, ledger=Ledger.in_memory(header={}))


class CentredWhenItEvaluates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x if self.training else x - x.mean(0))


def test_a_model_that_mixes_when_it_evaluates_is_refused_where_losses_are_summed() -> None:
    recipe = recipes.dpagd(
        batch_size=20, steps=3, noise_multiplier=2.0, choice_epsilon=0.1, validation_size=20
    ).for_records(60)
    with pytest.raises(UnsupportedModel):
        private(recipe, CentredWhenItEvaluates())
    private(recipe)
    private(dpsgd(), CentredWhenItEvaluates())  # evaluates nothing


def test_two_seeded_runs_on_one_ledger_draw_different_noise() -> None:
    ledger = Ledger.in_memory(header={})
    moved = []
    for _ in range(2):
        run = private(dpsgd(), ledger=ledger, seed=7)
        run.step()
        moved.append(next(iter(run.bench.objective.parameters())).detach().clone())
    assert not torch.equal(*moved)


def test_complex_parameters_are_refused_in_one_line() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.weight).abs()

    with pytest.raises(UnsupportedModel, match="complex"):
        private(dpsgd(), Complex())
