"""The fourth hostile review: attacks that succeeded until they were repaired, and some that must go on failing."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sordino import InvalidInput, Private, recipes
from sordino.accounting.ledger import Receipt
from sordino.chance import SecretChance
from sordino.federated.rounds import Quantile
from sordino.gradients.engine import Batch, Objective
from sordino.gradients.projected import ProjectedEngine
from sordino.gradients.rules import pulled
from sordino.mechanisms.noisy_test import NoisyTest, difference
from sordino.mechanisms.rejecting import Rollback
from sordino.noise import Secure, Seeded, Settling


class Spy(Secure, Settling):
    """Sees the exact values before their noise."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def settle(self, receipt: Receipt, value: Tensor, released: Tensor) -> Tensor:
        self.values.append(value.clone())
        return released


def full_draw(model: nn.Module, data: tuple[Tensor, ...], loss: Any, **options: Any) -> tuple[Private, Spy]:
    """One step on all records with the bound 1, of which the spy sees the sum."""
    spy, records = Spy(), len(data[0])
    recipe = recipes.dpsgd(batch_size=records, steps=1, noise_multiplier=1.0, clip=1.0).for_records(records)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Private(model, optimizer, data, loss, recipe, source=spy, validate=False, **options), spy


# -- a gradient that is computed twice and differs ---------------------------------------------------------------------


class Lottery(torch.autograd.Function):
    """Its way back draws a random number: half of the gradients are twice as long, the others are zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        rows = gradient.shape[0] if gradient.dim() > 1 else 1
        return gradient * (torch.rand(rows, 1) < 0.5) * 2


class Gambling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Lottery.apply(self.layer(100 * x))
        return output


def squared(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    losses: Tensor = model(batch[0]).square().sum(1)
    return losses


def test_a_gradient_that_differs_the_second_time_is_no_longer_than_the_one_that_was_measured() -> None:
    """In a loop of the user's, too large a batch to be kept: a record counted up to thousands of times its bound."""
    torch.manual_seed(0)
    model, data = Gambling(), (torch.randn(600, 3),)
    private, spy = full_draw(model, data, squared, engine="loop")
    for batch in private.loader():
        private.backward(squared(model, batch))
        private.bench.optimizer.step()
    assert 0 < float(spy.values[0].norm()) <= 600


class Bent(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        output: Tensor = Lottery.apply(weight)
        return output


def test_a_weight_that_is_made_by_a_random_way_back_is_not_pulled_back_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients are not kept, norm and sum were of two ways back: a record counted up to thousands of times."""
    monkeypatch.setattr(pulled, "FORM_BYTES", 0)
    torch.manual_seed(0)
    model = nn.Linear(30, 1, bias=False)
    parametrize.register_parametrization(model, "weight", Bent())
    private, spy = full_draw(model, (100 * torch.randn(60, 30),), squared)
    list(private.steps())
    assert float(spy.values[0].norm()) <= 60


# -- estimated norms: one record neither ends a run nor swallows others ------------------------------------------------


def total_over_time(model: nn.Module, batch: Tensor) -> Tensor:
    losses: Tensor = model(batch).sum((1, 2))
    return losses


def sum_projected(model: nn.Module, records: Tensor, way: str) -> Tensor:
    """The sum of contributions of at most 1, by projections that are the same at every call."""
    engine = ProjectedEngine(100, Seeded(0), way)
    engine.renew()
    batch = Batch(records, len(records), lambda i: records[i : i + 1])
    found = engine.differentiate(Objective(model, total_over_time), list(model.parameters()), batch)
    (total,) = found.weighted_sum((1 / found.norms).clamp(max=1).nan_to_num(0))
    return total


@pytest.mark.parametrize("way", ["jvp", "double_vjp"])
@pytest.mark.parametrize("size", [1e6, 1e9])
def test_a_record_whose_terms_cancel_neither_ends_a_run_of_estimated_norms_nor_swallows_others(
    way: str, size: float
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    others = torch.zeros(256, 3, 4)
    others[:, 1] = torch.randn(4)
    hostile = torch.zeros(1, 3, 4)
    hostile[0, 0] = size * torch.randn(4)
    hostile[0, 2] = -hostile[0, 0]
    without = sum_projected(model, others, way)
    for place in (0, 100, 256):
        beside = torch.cat([others[:place], hostile, others[place:]])
        assert float((sum_projected(model, beside, way) - without).norm()) <= 1.3  # 1 / the shortest norm of 100


# -- two runs in two threads -------------------------------------------------------------------------------------------


def masked() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def test_no_step_draws_its_masks_while_another_thread_probes_a_model_with_seeds_that_everybody_knows() -> None:
    """The probe put the step's own state back afterwards, so that the step saw nothing and released its sum."""
    stepping, probing, drawn = threading.Event(), threading.Event(), threading.Event()
    public: set[int] = set()
    mine: list[int] = []

    def train(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        if len(taken) == 2 and not mine:  # the watch looks at the first two steps itself
            stepping.set()
            probing.wait(1)
        losses: Tensor = model(batch[0]).square().sum(1)
        if len(taken) == 2:
            mine.append(torch.initial_seed())
            drawn.set()
        return losses

    def probe(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        public.add(torch.initial_seed())
        probing.set()
        drawn.wait(5)
        losses: Tensor = model(batch[0]).square().sum(1)
        return losses

    def build(loss: Any) -> Private:
        recipe = recipes.dpsgd(batch_size=20, steps=3, noise_multiplier=1.0).for_records(20)
        model = masked()
        return Private(model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(20, 3),), loss, recipe)

    def probe_another() -> None:
        stepping.wait(20)
        build(probe).close()

    taken: list[Any] = []
    other = threading.Thread(target=probe_another)
    with build(train) as private:
        other.start()
        for step in private.steps():
            taken.append(step)  # noqa: PERF402 - the loss looks at it meanwhile
    other.join()
    assert len(taken) == 3
    assert public
    assert mine
    assert not public & set(mine)


def test_a_thread_that_ended_within_a_block_keeps_no_other_waiting() -> None:
    first = SecretChance()
    ended = threading.Thread(target=lambda: first.enter(torch.device("cpu")))
    ended.start()
    ended.join()
    second = SecretChance()
    second.enter(torch.device("cpu"))
    first.end()  # by the garbage collector, say: the block of this thread goes on
    waiting = threading.Thread(target=lambda: SecretChance().enter(torch.device("cpu")), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    second.end()
    waiting.join(10)
    assert not waiting.is_alive()


# -- DPSUR: last digits of long losses ---------------------------------------------------------------------------------


def test_the_last_digits_of_other_records_losses_are_far_below_the_bound_of_one_records_difference() -> None:
    """Losses of 10⁸ have last digits of 8, a record's bound is 0.1: one record moved the test by 4 of these."""

    def long(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        losses: Tensor = 1e8 * model(batch[0])[:, 0]
        return losses

    worst = 0.0
    for trial in range(16):
        torch.manual_seed(trial)
        model = nn.Sequential(nn.Linear(784, 100), nn.Tanh(), nn.Linear(100, 1))
        recipe = recipes.dpsur(batch_size=256, steps=1, noise_multiplier=1.0).for_records(300)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        private = Private(model, optimizer, (torch.randn(300, 784),), long, recipe, validate=False)
        test = private.bench.recipe.selection.test  # type: ignore[attr-defined]  # a Selective's
        before, everybody = Rollback(private.bench), torch.arange(260 + trial % 4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))

        def energy(indices: Tensor, test: NoisyTest = test, before: Any = before, bench: Any = private.bench) -> float:
            largest = test.largest_loss(bench)
            return difference(before, bench, bench.records, indices, test.record_clip, largest)

        worst = max(worst, abs(energy(everybody) - energy(everybody[1:])) / test.record_clip)
        private.close()
    assert worst <= 1.01


# -- what cannot be measured, and what a loss says --------------------------------------------------------------------


@pytest.mark.parametrize("clip", [1e-16, 1e-30])
def test_a_bound_that_float32_cannot_measure_is_refused(clip: float) -> None:
    """With a bound of 1e-30 one record moved the sum of the vmap engine by 30,001 of them."""
    with pytest.raises(InvalidInput, match="must be > 0, and at least 1e-15"):
        recipes.dpsgd(clip=clip)


def test_a_schedule_goes_no_further_down_than_float32_can_measure() -> None:
    recipe = recipes.dpsgd(batch_size=2, steps=2, noise_multiplier=2.0, clip=1.0, clip_schedule=Vanishing())
    terms = recipe.for_records(10).terms(1)
    assert terms.clip == 1e-15
    assert terms.noise_std == 2e-15


@dataclass(frozen=True)
class Vanishing:
    def __call__(self, step: int, steps: int) -> float:
        return 1.0 if step == 0 else 1e-40


def test_the_warnings_of_a_loss_name_the_size_of_no_draw(recwarn: pytest.WarningsRecorder) -> None:
    """As torch's do where a target has another shape than what the model gives."""

    def warning(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        warnings.warn(f"torch.Size([{len(batch[0])}])", stacklevel=2)
        losses: Tensor = model(batch[0]).square().sum(1)
        return losses

    recipe = recipes.dpsgd(batch_size=20, steps=3, noise_multiplier=1.0).for_records(40)
    model = nn.Linear(3, 2)
    with Private(model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(40, 3),), warning, recipe) as private:
        assert any("torch.Size" in str(each.message) for each in recwarn.list)  # the probe lets it speak
        recwarn.clear()
        list(private.steps())
    assert not [each for each in recwarn.list if "torch.Size" in str(each.message)]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_bound_that_follows_clients_stays_where_numbers_have_digits(share: float) -> None:
    """It went to infinity, or to numbers of one digit, whose rounding is as large as the bound."""
    clip, adaptive = 1.0, Quantile()
    for _ in range(10_000):
        clip = adaptive.follow(clip, share)
    assert 1e-15 <= clip <= 1e15
