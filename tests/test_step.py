"""The released gradient: the clipped sum under it equals a plain loop, and the noise on it is what the ledger says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from sordino import Private, Recipe
from sordino.accounting.ledger import Receipt
from sordino.errors import UnsupportedModel
from sordino.gradients import Objective
from sordino.gradients.engine import list_modules
from sordino.noise import Seeded
from sordino.parts import Automatic, Draw, Flat
from sordino.step import add, begin, propose, take_over
from tests.helpers import (
    batch_of,
    calibrated,
    classification,
    cross_entropy,
    loop_oracle,
    mlp,
    oracle_norms,
    oracle_sum,
    private,
)

X, Y = classification()


class Silent(Seeded):
    """Draws zeros for noise, to see what lies under it."""

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        return torch.zeros(size, dtype=torch.float64)


def released(run: Private) -> Tensor:
    """The gradient that one step hands to the optimizer."""
    seen: list[Tensor] = []
    hook = run.bench.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: seen.append(
            torch.cat([p.grad.flatten() for p in run.bench.parameters() if p.grad is not None])
        )
    )
    run.step()
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("weighing", [Flat(), Automatic()])
@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("clip", [0.05, 0.5, 50.0])
def test_the_released_sum_equals_a_loop_over_single_examples(weighing: Flat, engine: str, clip: float) -> None:
    model = mlp()
    recipe = replace(calibrated(batch_size=64, clip=clip), weighing=weighing)
    run = private(recipe, model=model, source=Silent(1), engine=engine, microbatch=10)
    rows = loop_oracle(run.bench.objective, list(model.parameters()), batch_of(X, Y))
    norms = oracle_norms(rows)
    weights = (clip / norms).clamp(max=1) if weighing == Flat() else clip / (norms + 0.01)
    expected = torch.cat([g.flatten() for g in oracle_sum(rows, weights)]) / 64
    assert torch.allclose(released(run).double(), expected, rtol=1e-4, atol=1e-7)


def noise_on_nothing(recipe: Recipe) -> Tensor:
    """The released gradient of a large model whose true gradient is exactly zero."""
    model = nn.Linear(500, 200)
    data = torch.zeros(64, 500)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) * 0.0).sum(1)

    run = private(recipe, model=model, dataset=data, loss=loss, seed=11)
    return released(run).double()


def fits(values: Tensor, std: float) -> bool:
    return bool(stats.kstest(values.numpy() / std, "norm").pvalue > 0.001)


@pytest.mark.parametrize(("clip", "sigma"), [(1.0, 1.0), (0.1, 3.0)])
def test_the_noise_has_the_claimed_deviation_and_no_other(clip: float, sigma: float) -> None:
    noise = noise_on_nothing(calibrated(clip=clip, noise_multiplier=sigma))
    std = clip * sigma / 16
    assert fits(noise, std)
    assert not fits(noise, 0.95 * std)
    assert not fits(noise, 1.05 * std)


def test_noise_is_drawn_once_per_release_whatever_the_microbatch() -> None:
    class Counting(Silent):
        count = 0

        def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
            type(self).count += 1
            return super().gaussian(receipt, size, std)

    run = private(calibrated(steps=7), source=Counting(1), microbatch=1)
    list(run.steps())
    assert Counting.count == 7 == len(run.bench.ledger)


def test_a_draw_far_above_the_expected_size_is_processed_in_parts() -> None:
    run = private(calibrated(batch_size=2), source=Silent(1), microbatch=5)
    sizes: list[int] = []
    differentiate = run.bench.engine.differentiate

    class Watching:
        name = "watching"

        def differentiate(self, objective, parameters, batch):  # type: ignore[no-untyped-def]
            sizes.append(batch.size)
            return differentiate(objective, parameters, batch)

        def microbatch(self, parameters: list[nn.Parameter]) -> int:
            return 5

    run.bench.engine = Watching()
    attempt = begin(run.bench, 0, Draw(torch.arange(64)))
    for part in attempt.draw.split(5):
        batch = run.bench.records.fetch(part.indices, run.bench.device)
        add(attempt, part, run.bench.engine.differentiate(run.bench.objective, attempt.parameters, batch))
    propose(attempt)
    assert max(sizes) == 5
    assert sum(sizes) == 64


def test_gradients_left_over_by_the_user_do_not_reach_the_model() -> None:
    models = [mlp(), mlp()]
    runs = [private(model=m) for m in models]
    cross_entropy(models[1], (X, Y)).sum().backward()
    models[1][0].weight.requires_grad_(False)
    models[0][0].weight.requires_grad_(False)
    for run in runs:
        run.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_loss_that_puts_another_parameter_in_place_of_one_is_refused() -> None:
    """A frozen one made from the records would carry them out without noise; the optimizer does not even hold it."""
    model = mlp()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = cross_entropy(model, batch)
        for _ in range(3):  # so that the place in memory may be the first one again
            model.extra = nn.Parameter(batch[0].mean(0), requires_grad=False)
        return found

    model.extra = nn.Parameter(torch.zeros(6), requires_grad=False)
    run = private(calibrated(), model=model, loss=loss, validate=False)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UnsupportedModel, match="changed a parameter"):
        run.step()
    assert all(map(torch.equal, list(model.parameters())[1:], before[1:]))


def test_an_optimizer_that_drops_gradients_in_its_own_way_is_asked_to() -> None:
    class Counting(torch.optim.SGD):
        dropped = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.dropped += 1
            super().zero_grad(set_to_none)

    model = mlp()
    optimizer = Counting(model.parameters(), lr=0.1)
    private(model=model, optimizer=optimizer).step()
    assert optimizer.dropped == 2
    assert all(p.grad is None for p in model.parameters())


def test_terms_that_all_steps_share_are_those_of_every_step() -> None:
    recipe = calibrated(steps=20)
    assert recipe._same_terms is not None
    assert [recipe.terms(step) for step in range(20)] == [recipe._find_terms(step, None) for step in range(20)]
    for other in (
        replace(recipe, noise_schedule=lambda step, steps: 1.0 + step),
        replace(recipe, weighing=Automatic()),
    ):
        assert [other.terms(step) for step in range(20)] == [other._find_terms(step, None) for step in range(20)]


def test_parameters_and_buffers_are_found_in_the_order_of_torch() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.BatchNorm1d(3), nn.Sequential(nn.ReLU(), shared), nn.ModuleDict({"a": shared}))
    model.register_module("nothing", None)
    model.register_parameter("none", None)
    model.tied = shared.weight
    model.register_buffer("mask", torch.ones(2), persistent=False)
    objective = Objective(model, cross_entropy)
    parameters, buffers = objective.list_owned()
    assert list(map(id, parameters)) == list(map(id, objective.parameters()))
    assert list(map(id, buffers)) == list(map(id, objective.buffers()))
    assert list_modules(objective) == list(objective.modules())


def test_a_sum_is_written_into_only_where_its_memory_is_its_own() -> None:
    """Noise is added in place: to one sum never twice, and to nothing that somebody else looks at."""
    whole, taken = torch.arange(12.0).reshape(3, 4), set[int]()
    shared = torch.ones(1).expand(5)
    permuted = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    assert take_over(whole, torch.float32, taken) is whole
    for found in (whole, whole[1:], whole[:2], shared, permuted, whole.T, torch.ones(3, requires_grad=True)):
        own = take_over(found, torch.float32, taken)
        assert own.data_ptr() != found.data_ptr()
        assert own.is_contiguous()
        assert not own.requires_grad
        assert torch.equal(own, found)
    assert take_over(torch.ones(2), torch.float64, taken).dtype == torch.float64


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_what_two_parameters_release_shares_no_memory(engine: str) -> None:
    run = private(calibrated(batch_size=64), source=Silent(1), engine=engine)
    attempt = begin(run.bench, 0)
    add(attempt, attempt.draw, attempt.differentiate(attempt.parameters, run.bench.fetch(attempt.draw)))
    assert len({total.untyped_storage().data_ptr() for total in attempt.total}) == len(attempt.parameters)
