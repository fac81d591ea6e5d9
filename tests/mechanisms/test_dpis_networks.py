"""DPIS on the papers' networks, whose norms equal a plain loop, and on very few and very many records."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sordino import Budget, recipes
from sordino.lab import networks
from sordino.mechanisms.dpis import measure
from tests.helpers import batch_of, classification, cross_entropy, loop_oracle, oracle_norms, private

RECORDS = 48


def frozen_bilstm() -> nn.Module:
    """The IMDb network on word vectors that are given and stay."""
    return networks.build("imdb-bilstm", embedding=torch.randn(50, 100))


def words() -> Tensor:
    return torch.randint(1, 50, (RECORDS, 9))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "mnist-cnn": (lambda: networks.build("mnist-cnn"), lambda: torch.randn(RECORDS, 1, 28, 28), 10),
    "cifar-cnn": (lambda: networks.build("cifar-cnn"), lambda: torch.randn(RECORDS, 3, 32, 32), 10),
    "scatter-cnn": (lambda: networks.build("scatter-cnn"), lambda: torch.randn(RECORDS, 81, 7, 7), 10),
    "imdb-bilstm": (frozen_bilstm, words, 2),
}


@pytest.mark.parametrize("adam", [False, True], ids=["momentum", "adam"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "cifar-cnn" else ()) for name in NETWORKS]
)
def test_the_papers_networks(name: str, adam: bool) -> None:
    torch.manual_seed(0)
    make, inputs, classes = NETWORKS[name]
    model, x, y = make(), inputs(), torch.randint(0, classes, (RECORDS,))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, 1e-3) if adam else torch.optim.SGD(trained, 0.01, momentum=0.9)
    recipe = recipes.dpis(batch_size=12, epochs=2, clip=0.5, adaptive=adam)
    run = private(
        recipe.calibrate(Budget(8.0, 1e-3), records=RECORDS), model=model, dataset=(x, y), optimizer=optimizer
    )
    expected = oracle_norms(loop_oracle(run.bench.objective, run.bench.parameters(), batch_of(x, y)))
    torch.testing.assert_close(measure(run.bench).double(), expected, rtol=1e-3, atol=1e-5)
    before = [p.detach().clone() for p in trained]
    assert len(list(run.steps())) == 8
    assert all(not torch.equal(old, new) for old, new in zip(before, trained, strict=True))
    assert run.guarantee(1e-3).epsilon <= 8.0


@pytest.mark.parametrize("records", [100, 1_000_000])
def test_few_and_many_records_can_be_trained_on(records: int) -> None:
    recipe = recipes.dpis(batch_size=max(10, records // 500), epochs=5, clip=1.0)
    recipe = recipe.calibrate(Budget(3.0, 0.1 / records), records=records)
    run = private(recipe, dataset=classification(records), loss=cross_entropy, microbatch=50_000)
    for _ in range(3):
        run.step()
    bounds = run.bench.states.sampler.bounds
    assert bounds.shape == (records,)
    assert bounds.element_size() == 4
    released = run.bench.states.save()
    assert released["records"] == pytest.approx(records, abs=5 * recipe.sampler.release_noise)
