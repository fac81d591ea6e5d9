"""DPSUR: the test's law and limits, what is charged, and the refinements beyond the paper."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy import stats
from scipy.special import ndtr
from torch import Tensor, nn

from sordino import Budget, InvalidInput, Private, Recipe, recipes
from sordino.accounting import pricing
from sordino.accounting.erasure import Erasure
from sordino.accounting.ledger import Receipt
from sordino.distributed import Team
from sordino.errors import UnsupportedModel
from sordino.noise import Seeded
from sordino.projection import Projected
from sordino.records import Records
from sordino.schedules import ExponentialDecay, GrowingMu
from sordino.selection.energy import bounded, difference, losses
from sordino.selection.line import shorten
from sordino.selection.noisy_test import NoisyTest
from sordino.selection.reuse import average_with_rejected
from sordino.selection.rollback import Rollback
from sordino.selection.selective import Selective
from tests.helpers import classification, cross_entropy, mlp, private

FALSE_ALARM = 1e-4


def dpsur(records: int = 64, **changes: Any) -> Recipe:
    options = {"batch_size": 16, "steps": 10, "noise_multiplier": 1.0, "validation_size": 16, **changes}
    return recipes.dpsur(**options).for_records(records)


class Telling(Seeded):
    """Counts the requests for noise by size."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        self.sizes: list[int] = []

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        self.sizes.append(size)
        return super().gaussian(receipt, size, std)


# -- the law of the test --------------------------------------------------------------------------------------


def objects(accepted: int, tries: int, probability: float) -> bool:
    return bool(stats.binomtest(accepted, tries, probability).pvalue < FALSE_ALARM)


@pytest.mark.parametrize("beta", [-1.0, 0.5])
@pytest.mark.parametrize("sigma", [0.8, 1.3])
def test_acceptance_frequencies_are_equations_11_and_12(beta: float, sigma: float) -> None:
    test, tries = NoisyTest(noise_multiplier=sigma, threshold=beta), 100_000
    low, high = test.acceptance(0, 1)
    assert (low, high) == pytest.approx((ndtr((beta - 1) / (2 * sigma)), ndtr((beta + 1) / (2 * sigma))))
    for energy, probability in ((-1.0, high), (1.0, low)):
        noise = Seeded(3).gaussian(receipt(), tries, sigma * 2 * test.clip).numpy()
        accepted = int(test.passes(test.noised(np.full(tries, energy), noise)).sum())
        assert not objects(accepted, tries, probability)
        halved = int(test.passes(test.noised(np.full(tries, energy), noise / 2)).sum())
        if probability != 0.5:  # a threshold at the clipped energy itself is passed half the time at any noise
            assert objects(halved, tries, probability), "half the noise must be noticed"


def receipt() -> Receipt:
    return private().bench.ledger.charge(GaussianDpEvent(1.0))


def always(sign: float) -> Any:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return sign * 1e6 * model(batch).abs().squeeze(1)

    return loss


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_running_selector_accepts_as_often(sign: float) -> None:
    """From a weight of 0 every move improves a loss of -|w|, and worsens one of |w|."""
    steps = 400
    recipe = dpsur(8, batch_size=8, validation_size=8, steps=steps, validation_noise=1.0)
    model = nn.Linear(1, 1, bias=False)
    run = private(recipe, model=model, dataset=torch.ones(8, 1), loss=always(sign), validate=False, engine="loop")
    accepted = 0
    for _ in range(steps):
        nn.init.zeros_(model.weight)
        run.step()
        accepted += int(model.weight.item() != 0)
    low, high = recipe.selection.test.acceptance(0, steps)
    assert not objects(accepted, steps, high if sign < 0 else low)
    assert objects(accepted, steps, low if sign < 0 else high)


def mean_loss(run: Private) -> float:
    with torch.no_grad():
        return float(cross_entropy(run.bench.objective.model, classification()).double().mean())


def test_without_noise_in_the_test_only_improvements_pass() -> None:
    test = {"validation_size": 64, "validation_noise": 1e-6, "validation_clip": 1e-9, "validation_share": None}
    recipe = dpsur(**test, threshold=-0.5, steps=40)
    run, kept = private(replace(recipe, noise_multiplier=3.0, clip=1.0), lr=1.0), 0
    for _ in range(40):
        before = mean_loss(run)
        run.step()
        after = mean_loss(run)
        assert after <= before
        kept += after < before
    assert 0 < kept < 40


class TwoStreams(Seeded):
    """Training and test draw from streams of their own, so that runs with and without a test can be compared."""

    def __init__(self, tested: bool) -> None:
        super().__init__(1)
        self._other, self._tested, self._calls = Seeded(2), tested, 0

    def uniform(self, size: int) -> NDArray[np.float64]:
        self._calls += 1
        return self._other.uniform(size) if self._tested and self._calls % 2 == 0 else super().uniform(size)

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        return self._other.gaussian(receipt, size, std) if size == 1 else super().gaussian(receipt, size, std)


def test_a_threshold_that_passes_everything_is_dpsgd() -> None:
    plain = recipes.dpsgd(clip=0.1, batch_size=16, steps=10, noise_multiplier=1.0).for_records(64)
    weights = []
    for recipe, tested in ((dpsur(threshold=1e3), True), (plain, False)):
        run = private(recipe, source=TwoStreams(tested))
        for _ in run.steps():
            pass
        weights.append(nn.utils.parameters_to_vector(run.bench.objective.model.parameters()))
    assert torch.equal(*weights)
    assert dpsur(threshold=1e3).price(1e-5) == pytest.approx(plain.price(1e-5), rel=1e-6), "a test without a choice"
    tested = PoissonSampledDpEvent(0.25, GaussianDpEvent(1.3))
    published = dpsur(threshold=1e3, accounting="published").price(1e-5)
    assert published == pytest.approx(pricing.epsilon([*plain.plan(), (tested, 10)], 1e-5))


def test_both_losses_are_of_the_same_fresh_draw() -> None:
    seen: list[list[int]] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            seen.append(batch.squeeze(1).int().tolist())
        return model(batch / 64).squeeze(1)

    data = torch.arange(64.0).unsqueeze(1)
    run = private(dpsur(), model=nn.Linear(1, 1), dataset=data, loss=loss, validate=False, engine="loop")
    for _ in run.steps():
        pass
    proposed, current = seen[::2], seen[1::2]
    assert proposed == current
    assert len({tuple(draw) for draw in proposed}) == 10


class Silent(Seeded):
    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        return torch.zeros(size, dtype=torch.float64)


@pytest.mark.parametrize(("bad", "expected"), [(0.0, 0.25), (math.nan, 0.125), (math.inf, 0.125)])
def test_the_energy_divides_by_a_public_number_and_survives_bad_records(bad: float, expected: float) -> None:
    """Four records whose loss rises by 1 each, all drawn, over a nominal size of 16."""
    data = torch.tensor([[0.0], [0.0], [bad], [bad]])

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model.weight.squeeze() + batch.squeeze(1)

    model = nn.Linear(1, 1, bias=False)
    recipe = dpsur(16, batch_size=16, validation_size=16, validation_clip=10.0, validation_share=1.0)
    bench = SimpleNamespace(
        **vars(
            private(dpsur(), model=model, dataset=torch.zeros(64, 1), loss=loss, validate=False, engine="loop").bench
        )
    )
    bench.records, bench.recipe, bench.source, bench.device = Records(data), recipe, Silent(1), torch.device("cpu")
    bench.team = Team()
    before = Rollback(bench)
    with torch.no_grad():
        model.weight += 1
    attempt = SimpleNamespace(bench=bench, terms=recipe.terms(0, {}), receipt=receipt())
    assert recipe.selection.test.energy(attempt, before) == pytest.approx(expected)


def test_a_proposal_that_breaks_the_model_looks_as_bad_as_can_be() -> None:
    run = private(dpsur())
    before = Rollback(run.bench)
    with torch.no_grad():
        next(run.bench.objective.model.parameters()).fill_(math.nan)
    worse = difference(before, run.bench, run.bench.records, torch.arange(8))
    assert bounded(np.array([worse]), 0.001)[0] == 0.001


# -- each record's share of the test ------------------------------------------------------------------------------


def sums(record_clip: float) -> tuple[float, float]:
    """The sum of differences without and with the record that a wild proposal changes most."""
    run = private(dpsur(), model=mlp(seed=3))
    before = Rollback(run.bench)
    with torch.no_grad():
        next(run.bench.objective.model.parameters()).mul_(-30.0)
    everyone = torch.arange(64)
    alone = [difference(before, run.bench, run.bench.records, everyone[i : i + 1]) for i in range(64)]
    wildest = int(np.argmax(np.abs(alone)))
    others = everyone[everyone != wildest]
    one, all_ = (difference(before, run.bench, run.bench.records, drawn, record_clip) for drawn in (others, everyone))
    return one, all_


def test_one_record_moves_the_sum_by_its_clipped_share() -> None:
    without, with_record = sums(0.1)
    assert abs(with_record - without) == pytest.approx(0.1, rel=1e-3), "clipped, and attained"
    without, with_record = sums(math.inf)
    assert abs(with_record - without) > 1.0, "the paper's test does not bound what one record does"


class Standardised(nn.Module):
    """Mixes the records of a batch, in eval mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x if self.training else x - x.mean(0))


def test_a_model_that_mixes_records_in_the_test_is_refused() -> None:
    private(dpsur(validation_share=None), model=Standardised())  # any value in the interval is priced there
    with pytest.raises(UnsupportedModel, match="mixes examples"):
        private(dpsur(), model=Standardised())


def test_half_precision_is_refused_before_anything_is_spent() -> None:
    with pytest.raises(InvalidInput, match="float32 or better"):
        private(dpsur(), model=mlp().bfloat16(), validate=False)


@pytest.mark.parametrize("share", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_share_is_refused(share: float) -> None:
    with pytest.raises(InvalidInput, match="share"):
        NoisyTest(share=share)


def test_a_share_is_that_of_the_clipping_bound() -> None:
    assert NoisyTest(size=64, clip=0.01, share=0.5).record_clip == pytest.approx(0.5 * 64 * 0.01)


def test_the_published_algorithm_has_no_share() -> None:
    assert dpsur(accounting="published").selection.test.share is None
    with pytest.raises(InvalidInput, match="validation_share"):
        Selective(test=NoisyTest(share=0.1), accounting="published")


def test_a_smaller_share_is_cheaper_and_the_interval_is_the_limit() -> None:
    prices = [dpsur(validation_share=share).price(1e-5) for share in (0.01, 0.1, 1.0, 2.0, None)]
    assert prices == sorted(prices)
    assert prices[0] < 0.9 * prices[-1]
    assert prices[-2] == pytest.approx(prices[-1])


def test_a_recipe_keeps_its_share_in_toml_and_old_recipes_have_none() -> None:
    recipe = dpsur()
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    old = "\n".join(line for line in recipe.to_toml().splitlines() if not line.startswith("share"))
    assert Recipe.from_toml(old).selection.test.share is None


# -- what is charged ------------------------------------------------------------------------------------------


def test_every_attempt_is_charged_the_erasure_event_whatever_happens_to_it() -> None:
    recipe = dpsur()
    low, high = recipe.selection.test.acceptance(0, 10)
    run = private(recipe)
    taken = sum(1 for _ in run.steps())
    assert taken == 10
    shift = 1.01 * 0.39 / (2 * 1.3)  # a record's share over the test's noise, and a margin for rounding
    [(event, count)] = run.bench.ledger.events()
    assert (replace(event, shift=math.inf), count) == (Erasure(0.25, 1.0, 0.25, low, high), 10)
    assert event.shift == pytest.approx(shift)
    assert run.guarantee().basis == "proven"


def test_the_budget_fixes_the_number_of_attempts() -> None:
    budget = Budget(epsilon=3, delta=1e-5)
    recipe = recipes.dpsur(batch_size=16, validation_size=16, noise_multiplier=2.0).calibrate(budget, records=64)
    assert recipe.price(1e-5) <= 3 < replace(recipe, steps=recipe.steps + 1).price(1e-5)
    assert sum(1 for _ in private(recipe).steps()) == recipe.steps


def test_published_counts_accepted_updates_and_cautions() -> None:
    recipe = dpsur(accounting="published", steps=6)
    run = private(recipe)
    attempts = sum(1 for _ in run.steps())
    pair = recipe.terms(0, {}).event
    spent = {event: count for event, count in run.bench.ledger.events() if event == pair}
    assert spent == {pair: 6}
    assert attempts > 6, "rejected attempts are repeated for free, which is what is wrong with it"
    said = str(run.guarantee())
    assert "CAUTION" in said
    assert "accepted updates alone are charged" in said


def test_a_published_selection_cannot_pass_for_proven() -> None:
    honest = dpsur()
    with pytest.raises(InvalidInput, match="must agree"):
        replace(honest, selection=Selective(accounting="published")).terms(0, {})


def test_estimated_norms_are_refused_with_a_reason() -> None:
    with pytest.raises(InvalidInput, match=r"use (exact norms|norms=Exact)"):
        replace(dpsur(), norms=Projected(24)).terms(0, {})


# -- beyond the paper -----------------------------------------------------------------------------------------


def test_reuse_averages_what_was_rejected_at_this_model() -> None:
    weight = nn.Parameter(torch.zeros(2))
    attempt: Any = SimpleNamespace(bench=SimpleNamespace(memory={}), parameters=[weight])
    for gradient, mean in (([2.0, 0.0], [2.0, 0.0]), ([0.0, 4.0], [1.0, 2.0]), ([1.0, 2.0], [1.0, 2.0])):
        weight.grad = torch.tensor(gradient)
        average_with_rejected(attempt)
        assert weight.grad.tolist() == mean


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [({"reuse": True}, 1), ({"line_search": True, "tests": 3}, 3), ({"reuse": True, "line_search": True}, 2)],
)
def test_what_is_not_erased_is_charged_in_full(changes: dict[str, Any], verdicts: int) -> None:
    recipe = dpsur(**changes)
    low, high = recipe.selection.test.acceptance(0, 10)
    full = [
        (PoissonSampledDpEvent(0.25, GaussianDpEvent(1.0)), 10),
        (Erasure(1.0, math.inf, 0.25, low, high, shift=recipe.selection.test.shift(0, 10)), 10 * verdicts),
    ]
    assert recipe.price(1e-5) == pytest.approx(pricing.epsilon(full, 1e-5))
    assert recipe.price(1e-5) > dpsur().price(1e-5)
    run = private(recipe)
    for _ in run.steps():
        pass
    assert run.guarantee(1e-5).epsilon == pytest.approx(recipe.price(1e-5))


def test_a_line_search_uses_no_more_verdicts_than_were_paid() -> None:
    source = Telling()
    run = private(dpsur(line_search=True, tests=2, threshold=-3.0, steps=20), source=source)
    for attempt, _ in enumerate(run.steps(), start=1):
        assert source.sizes.count(1) <= 2 * attempt
    assert source.sizes.count(1) > 20, "rejected steps are tried again, shorter"


def test_a_line_search_halves_the_step() -> None:
    run = private(dpsur())
    before, parameters = Rollback(run.bench), run.bench.parameters()
    with torch.no_grad():
        for p in parameters:
            p += 1
    shorten(before, parameters)
    _, movement = before.movement(parameters)
    assert all(torch.allclose(m, torch.full_like(m, 0.5), atol=1e-6) for m in movement)


def test_blocks_are_tested_and_rolled_back_together() -> None:
    recipe = dpsur(test_every=3, threshold=-1e3, steps=8, validation_noise=200.0)
    proposal = PoissonSampledDpEvent(0.25, GaussianDpEvent(1.0))
    events = [recipe.terms(step, {}).event for step in range(8)]
    assert [event == proposal for event in events] == [True, True, False, True, True, False, True, False]
    run = private(recipe)
    start = nn.utils.parameters_to_vector(run.bench.objective.model.parameters()).detach().clone()
    moved = []
    for _ in run.steps():
        now = nn.utils.parameters_to_vector(run.bench.objective.model.parameters()).detach()
        moved.append(not torch.equal(now, start))
    assert moved == [True, True, False, True, True, False, True, False]


def test_the_noise_of_the_test_may_follow_a_schedule() -> None:
    recipe = dpsur(validation_schedule=GrowingMu(4.0), steps=100, noise_multiplier=5.0, validation_noise=8.0)
    plan = recipe.plan()
    assert 1 < len(plan) <= 16
    assert sum(count for _, count in plan) == 100
    cheap, dear = (dpsur(steps=100, noise_multiplier=5.0, validation_noise=noise) for noise in (8.0, 2.0))
    assert cheap.price(1e-5) < recipe.price(1e-5) < dear.price(1e-5)


@pytest.mark.parametrize("engine", ["loop", "vmap", "auto"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_every_engine_and_optimizer_works_and_stays_in_budget(engine: str, optimizer: str) -> None:
    budget = Budget(epsilon=4, delta=1e-5)
    recipe = recipes.dpsur(optimizer=optimizer, lr=0.1, batch_size=16, validation_size=16, steps=4)
    recipe = recipe.calibrate(budget, records=64)
    model = mlp()
    run = private(recipe, model=model, optimizer=recipe.optimizer.build(model.parameters()), engine=engine)
    assert sum(1 for _ in run.steps()) == 4
    assert run.guarantee().epsilon <= 4


def test_a_schedule_of_the_training_noise_is_priced_step_by_step() -> None:
    recipe = replace(dpsur(steps=3), noise_schedule=ExponentialDecay(0.1))
    assert len(recipe.plan()) == 3
    run = private(recipe)
    for _ in run.steps():
        pass
    assert run.guarantee(1e-5).epsilon == pytest.approx(recipe.price(1e-5))


def test_recipes_survive_toml() -> None:
    for recipe in (dpsur(), dpsur(reuse=True), dpsur(validation_schedule=GrowingMu(2.0))):
        assert Recipe.from_toml(recipe.to_toml()) == recipe


@pytest.mark.parametrize(
    "changes",
    [
        {"validation_size": 0},
        {"validation_size": 65},
        {"validation_noise": 0.0},
        {"validation_clip": 0.0},
        {"threshold": math.nan},
        {"test_every": 0},
        {"reuse": True, "test_every": 2},
        {"accounting": "free"},
        {"accounting": "published", "reuse": True},
    ],
)
def test_impossible_choices_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        dpsur(**changes).terms(0, {})


def test_autocast_around_a_step_does_not_reach_the_losses_of_the_test() -> None:
    seen = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0])
        if not torch.is_grad_enabled():
            seen.append(logits.dtype)
        return nn.functional.cross_entropy(logits.float(), batch[1], reduction="none")

    run = private(recipes.dpsur(batch_size=16, validation_size=16, noise_multiplier=1.0, steps=1).for_records(64))
    run.bench.objective.loss = loss
    with torch.autocast("cpu", torch.bfloat16):
        losses(run.bench, run.bench.records, torch.arange(20))
    assert seen == [torch.float32]
