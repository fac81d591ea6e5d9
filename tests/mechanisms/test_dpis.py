"""DPIS is unbiased, bounded, accounted for by Eq. 13 as corrected, cheaper than DP-SGD; what breaks it is noticed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from sordino import Budget, Private, Recipe, recipes
from sordino import step as steps
from sordino.accounting import pricing
from sordino.accounting.budget import Unlimited
from sordino.accounting.events import GaussianDpEvent, PoissonSampledDpEvent
from sordino.accounting.filtered import Filter, Filtered
from sordino.errors import InvalidInput
from sordino.mechanisms import dpis as plan
from sordino.mechanisms.dpis import Epoch, Importance, Learnt, measure
from sordino.mechanisms.dpis import ImportanceWeights as Weights
from sordino.mechanisms.dynamic import SensitivityDecay
from sordino.mechanisms.jl import ProjectedNorms
from sordino.noise import Seeded
from sordino.parts import Draw, Flat, Foreign, Weighing
from tests.helpers import classification, mlp, private

RECORDS = 120
BUDGET = Budget(epsilon=4.0, delta=1e-3)


@cache
def recipe(records: int = RECORDS, budget: Budget = BUDGET, **changes: Any) -> Recipe:
    options: dict[str, Any] = {"batch_size": 12, "epochs": 3, "clip": 1.0, **changes}
    return recipes.dpis(**options).calibrate(budget, records=records)


def run(chosen: Recipe | None = None, **options: Any) -> Private:
    options.setdefault("dataset", classification(RECORDS))
    return private(chosen or recipe(), **options)


def noise_free(sampler: Importance, epoch: Epoch, bounds: Tensor) -> Learnt:
    return Learnt(epoch, noise=1.0, bounds=bounds.clone())


# -- unbiased -----------------------------------------------------------------------------------------------------


def draws(
    sampler: Importance, weighing: Weighing, gradients: Tensor, stale: Tensor, epoch: Epoch, trials: int = 4000
) -> Tensor:
    """What `trials` steps would release without noise, with bounds from `stale` norms, one row each."""
    norms, source, rows = gradients.norm(dim=1), Seeded(3), []
    for _ in range(trials):
        state = noise_free(sampler, epoch, sampler.bounds(stale, epoch.clip))
        draw = sampler.draw(len(gradients), source, state)
        weights = weighing.weights(norms[draw.indices], epoch.sensitivity, draw)
        rows.append(weights @ gradients[draw.indices] / epoch.batch_size)
    return torch.stack(rows).double()


def furthest(released: Tensor, expected: Tensor) -> float:
    """The largest distance from `expected` in standard errors, over the coordinates."""
    errors = released.std(dim=0) / math.sqrt(len(released))
    return float(((released.mean(dim=0) - expected) / errors).abs().max())


def population(seed: int = 0) -> tuple[Tensor, Epoch]:
    generator = torch.Generator().manual_seed(seed)
    directions = torch.nn.functional.normalize(torch.randn(RECORDS, 4, generator=generator) + 0.5, dim=1)
    gradients = directions * torch.rand(RECORDS, 1, generator=generator) ** 3 * 2
    total = gradients.norm(dim=1).clamp(max=1.0).sum().item()
    return gradients, Epoch.bounded(0, RECORDS + 3.0, total * 1.1, 1.0, 12)


def clipped_mean(gradients: Tensor, bound: Tensor, epoch: Epoch) -> Tensor:
    norms = gradients.norm(dim=1)
    return (gradients * (torch.minimum(norms, bound) / norms)[:, None]).double().sum(dim=0) / epoch.records


@pytest.mark.parametrize(("multiplier", "drift"), [(1.0, 1.0), (5.0, 1.0), (5.0, 0.3), (5.0, 3.0), (1.0, 2.0)])
def test_the_mean_over_draws_is_the_clipped_mean_gradient(multiplier: float, drift: float) -> None:
    """Norms that grew by up to k are not clipped further; k = 1 and grown norms are clipped to what was known."""
    gradients, epoch = population()
    sampler = Importance(multiplier)
    stale = gradients.norm(dim=1) / drift
    bounds = sampler.bounds(stale, epoch.clip)
    released = draws(sampler, Weights(), gradients, stale, epoch)
    assert furthest(released, clipped_mean(gradients, bounds, epoch)) < 4.5
    if drift <= multiplier:
        assert furthest(released, clipped_mean(gradients, torch.tensor(1.0), epoch)) < 4.5


@dataclass(frozen=True)
class NoRejection:
    """All drawn records are used: those whose norms fell count too much."""

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return clip / norms.clamp(min=draw.floor)


def test_a_biased_estimate_is_noticed() -> None:
    gradients, epoch = population()
    stale, expected = gradients.norm(dim=1), clipped_mean(gradients, torch.tensor(1.0), epoch)
    for wrong in (NoRejection(), Flat()):
        assert furthest(draws(Importance(5.0), wrong, gradients, stale, epoch, 800), expected) > 6


def test_the_step_itself_is_unbiased() -> None:
    """Through engine, weighing and sum: the total over the batch size, averaged, is the clipped mean gradient."""
    bench = run(recipe(60, clip=0.5), dataset=classification(60)).bench
    bench.recipe.sampler.prepare(bench, 0)
    bench.run.allowance = Unlimited()
    epoch, parameters = bench.states.sampler.epoch, bench.parameters()
    batch = bench.records.fetch(torch.arange(60), bench.device)
    whole = bench.engine.differentiate(bench.objective, parameters, batch)
    expected = torch.cat([s.flatten() for s in whole.weighted_sum((0.5 / whole.norms).clamp(max=1.0))]) / epoch.records
    rows = []
    for _ in range(300):
        attempt = steps.begin(bench, 0)
        part = attempt.draw
        found = bench.engine.differentiate(bench.objective, parameters, bench.records.fetch(part.indices, bench.device))
        steps.add(attempt, part, found)
        rows.append(torch.cat([t.flatten() for t in attempt.total]) / attempt.terms.divisor)
    assert furthest(torch.stack(rows).double(), expected.double()) < 4.5


# -- bounded ------------------------------------------------------------------------------------------------------

lengths = st.one_of(st.floats(0, 1e6), st.just(0.0), st.just(1e-30), st.just(math.nan), st.just(math.inf))


@given(
    st.lists(st.tuples(lengths, lengths), min_size=1, max_size=30),
    st.floats(1, 6),
    st.floats(1e-4, 1),
    st.floats(1e-3, 1e3),
    st.floats(-10, 1e5),
    st.floats(-10, 200),
    st.integers(1, 100),
)
def test_no_contribution_exceeds_its_bound_and_no_record_its_rate(
    norms: list[tuple[float, float]], k: float, floor: float, clip: float, total: float, records: float, batch: int
) -> None:
    stale, fresh = (torch.tensor(column) for column in zip(*norms, strict=True))
    sampler, epoch = Importance(k, floor), Epoch.bounded(0, records, total, clip, batch)
    state = noise_free(sampler, epoch, sampler.bounds(stale, clip))
    draw = sampler.draw(len(stale), Seeded(1), state)
    weights = Weights().weights(fresh[draw.indices], epoch.sensitivity, draw)
    used = fresh[draw.indices][weights > 0]
    assert (weights[weights > 0] * used <= epoch.sensitivity).all()
    assert torch.isfinite(weights).all()
    assert not weights[~torch.isfinite(fresh[draw.indices])].any()
    # A record is used where its coin lies below its bound, so that it is used no more often than b·C/K̃ < 1.
    rate = epoch.event(1.0).sampling_probability
    assert (state.bounds.double() / epoch.reach <= rate * (1 + 1e-6)).all()
    assert rate < 1
    assert epoch.total <= epoch.records * clip
    sampler.observe(draw, fresh[draw.indices], state)
    assert (state.bounds <= clip * (1 + 1e-6)).all()
    assert (state.bounds > 0).all()


def test_one_coin_is_the_papers_two() -> None:
    """P(drawn) = b·ĝ/K̃ and P(used | drawn) = ‖ḡ‖/ĝ (Sec. 3.4, steps 2 and 3), by counting."""
    epoch, sampler = Epoch.bounded(0, 1000.0, 100.0, 1.0, 20), Importance(3.0)
    stale, fresh = torch.full((20_000,), 0.2), torch.full((20_000,), 0.45)
    state = noise_free(sampler, epoch, sampler.bounds(stale, 1.0))
    draw = sampler.draw(20_000, Seeded(5), state)
    used = int((Weights().weights(fresh[draw.indices], epoch.sensitivity, draw) > 0).sum())
    assert len(draw) / 20_000 == pytest.approx(20 * 0.6 / 100, abs=0.01)
    assert used / len(draw) == pytest.approx(0.45 / 0.6, abs=0.04)


def test_memory_is_one_float_per_record() -> None:
    trained = run()
    trained.step()
    bench = trained.bench
    assert {key for key, value in vars(bench.states.sampler).items() if isinstance(value, Tensor)} == {"bounds"}
    assert (bench.states.sampler.bounds.dtype, bench.states.sampler.bounds.shape) == (torch.float32, (RECORDS,))


# -- accounted for ------------------------------------------------------------------------------------------------


def equation_13(order: int, b: float, C: float, K: float, N: float, sigma: float) -> float:
    rate, z = b * C / K, sigma * N * C / K
    terms = (
        math.comb(order, m) * (1 - rate) ** (order - m) * rate**m * math.exp((m * m - m) / (2 * z * z))
        for m in range(order + 1)
    )
    return math.log(math.fsum(terms)) / (order - 1)


@pytest.mark.parametrize("share", [0.1, 0.4, 1.0])
def test_a_step_costs_equation_13(share: float) -> None:
    epoch = Epoch.bounded(0, 5000.0, share * 5000 * 0.3, 0.3, 100)
    for order in (2, 5, 9):
        by_hand = equation_13(order, 100, 0.3, epoch.total, 5000, 0.9)
        assert Filter(order, 1.0).cost(epoch.event(0.9)) == pytest.approx(by_hand, rel=1e-9)


def test_the_worst_k_costs_exactly_what_dpsgd_costs() -> None:
    epoch = Epoch.bounded(0, 60_000.0, math.inf, 0.1, 512)
    assert epoch.event(0.81) == PoissonSampledDpEvent(512 / 60_000, GaussianDpEvent(0.81))
    assert epoch.sensitivity == pytest.approx(0.1)


def test_the_reference_noise() -> None:
    """The reference value: N=60,000, b=512, E=30, base σ=.81, κ=.2 → σ_G ≈ .498; the order was fixed for another κ."""
    dpsgd = recipes.dpsgd(batch_size=512, epochs=30, noise_multiplier=0.81).for_records(60_000)
    budget = Budget(dpsgd.price(1e-5, "rdp"), 1e-5)
    chosen = recipe(60_000, budget, batch_size=512, epochs=30, divider=0.0)
    assert chosen.noise_multiplier == pytest.approx(0.81, rel=0.015)
    sampler, rdp_filter = chosen.sampler, chosen.rdp_filter
    assert isinstance(sampler, Importance)
    epoch = replace(sampler.worst(1.0, 512), total=0.2 * 60_000)
    found = plan.find_noise(sampler, rdp_filter, rdp_filter.limit, epoch, 0, chosen.steps)
    assert found == pytest.approx(0.498, rel=0.01)
    # In the first phase the rest of the run is assumed to be the worst case: σ_G stays about where DP-SGD has it.
    saving = plan.find_noise(replace(sampler, divider=1.0), rdp_filter, rdp_filter.limit, epoch, 0, chosen.steps)
    assert saving == pytest.approx(0.81, rel=0.02)


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_ledger_holds_equations_13_18_and_19_as_corrected(adaptive: bool) -> None:
    """Once N, per epoch K (and K*) without amplification, per step one sampled Gaussian; all within the filter."""
    chosen = recipe(adaptive=adaptive)
    trained = run(chosen)
    assert len(list(trained.steps())) == 30
    events = trained.bench.ledger.events()
    inner = [(event.event, n) for event, n in events if isinstance(event, Filtered)]
    assert len(inner) == len(events)
    own = sum(n for event, n in inner if event == GaussianDpEvent(chosen.sampler.release_noise))
    assert own == 1 + 3 + (2 if adaptive else 0)  # C_1 is given, so K* is released from the second epoch on
    assert sum(n for event, n in inner if isinstance(event, PoissonSampledDpEvent)) == 30
    spent = sum(n * chosen.rdp_filter.cost(event) for event, n in inner)
    assert chosen.rdp_filter.limit * (0.999 if not adaptive else 0.95) < spent <= chosen.rdp_filter.limit
    guarantee = trained.guarantee()
    assert (guarantee.epsilon, guarantee.basis) == (pytest.approx(BUDGET.epsilon), "proven")
    with pytest.raises(InvalidInput, match="fixed in advance"):
        trained.guarantee(accountant="pld")


def test_all_norms_are_measured_and_k_is_released_every_few_epochs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    monkeypatch.setattr(plan, "measure", lambda bench: passes.append(1) or measure(bench))
    for refresh, measured in ((1, 4), (2, 2), (3, 2)):
        passes.clear()
        chosen = recipe(epochs=4, refresh=refresh)
        made = run(chosen)
        taken = sum(1 for _ in made.steps())
        assert taken == 40
        assert len(passes) == measured
        events = [event.event for event, count in made.bench.ledger.events() for _ in range(count)]
        assert sum(isinstance(event, GaussianDpEvent) for event in events) == 1 + measured
        assert made.guarantee().epsilon <= BUDGET.epsilon
        assert Recipe.from_toml(chosen.to_toml()) == chosen
    with pytest.raises(InvalidInput, match="refresh=0 must be a whole number"):
        recipes.dpis(refresh=0)


def test_noise_falls_where_the_norms_fall() -> None:
    chosen = recipe(1000, Budget(2.0, 1e-5), batch_size=50, epochs=10, divider=0.5)
    sampler, rdp_filter, sigma, left = chosen.sampler, chosen.rdp_filter, [], chosen.rdp_filter.limit
    for number in range(10):
        epoch = Epoch.bounded(number, 1000, 300, 1.0, 50)
        left -= rdp_filter.cost(GaussianDpEvent(sampler.release_noise)) * (2 if number == 0 else 1)
        sigma.append(plan.find_noise(sampler, rdp_filter, left, epoch, 20 * number, 200))
        left -= 20 * rdp_filter.cost(epoch.event(sigma[-1]))
    assert all(later <= earlier * (1 + 1e-5) for earlier, later in pairwise(sigma))
    assert sigma[4] > 0.85 * sigma[0]
    assert sigma[5] < 0.85 * sigma[0]
    assert sigma[9] == pytest.approx(sigma[5], rel=1e-3)
    assert 0 <= left < 1e-5


@pytest.mark.parametrize(("records", "more"), [(60_000, (1.0, 1.005)), (1000, (1.3, math.inf))])
def test_k_as_in_equation_19_costs_more_than_claimed_for_few_records(records: int, more: tuple[float, float]) -> None:
    """Eq. 11 divides by p_K, so that its sensitivity is C/p_K: the noise multiplier is σ_K·p_K, not σ_K."""
    rate, noise = 256 / 60_000, 0.02 * records
    gradients = (PoissonSampledDpEvent(rate, GaussianDpEvent(1.0)), round(20 / rate))
    claimed = [gradients, (PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), 20)]
    true = [gradients, (PoissonSampledDpEvent(rate, GaussianDpEvent(noise * rate)), 20)]
    ratio = pricing.epsilon(true, 1e-5, "rdp") / pricing.epsilon(claimed, 1e-5, "rdp")
    assert more[0] <= ratio < more[1]


def test_bounds_without_a_cap_cost_more_than_claimed() -> None:
    """q saturates at 1 where k·b·C > K̃; the record then weighs b·k·C/Ñ instead of K̃/Ñ (N=500, b=64, σ_G=.5)."""
    epoch = Epoch.bounded(0, 500, 128, 1.0, 64)
    claimed = pricing.epsilon([(epoch.event(0.5), 32)], 1e-5, "rdp")
    true = [(PoissonSampledDpEvent(1 / 5, GaussianDpEvent(0.5 * 500 / (5 * 64))), 32)]
    assert pricing.epsilon(true, 1e-5, "rdp") > 1.5 * claimed


# -- worth it -----------------------------------------------------------------------------------------------------


def test_the_sampling_variance_is_smaller_than_poissons_on_a_trained_model() -> None:
    """Eq. 9's first term, 1/(b N²) Σ ‖ḡ‖²/p, with the probabilities that are really used."""
    model, (x, y) = mlp(), classification(RECORDS)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    bench = run(model=model).bench
    bench.recipe.sampler.prepare(bench, 0)
    norms, epoch = measure(bench).clamp(max=1.0), bench.states.sampler.epoch
    ours = torch.minimum(norms.clamp(min=0.01), bench.states.sampler.bounds) / epoch.total
    poisson = torch.full_like(norms, 1 / RECORDS)
    first_term = [float((norms**2 / p).sum()) / (12 * RECORDS**2) for p in (ours, poisson)]
    assert first_term[0] < 0.8 * first_term[1]
    assert epoch.total < 0.8 * epoch.records  # and the noise is smaller, too
    assert bench.states.sampler.noise <= recipe().noise_multiplier


# -- attacked -----------------------------------------------------------------------------------------------------

TRIALS, SIGMA = 8000, 1.0
SMALLEST = Epoch.bounded(0, 8.0, 0.0, 1.0, 4)
"""K̃ at its lower bound, N = 8, b = 4, C = 1: the canary is used almost surely and adds 1/2 to noise of deviation 1."""


def releases(canary: float, stale: float, sampler: Importance, weighing: Weighing, seed: int) -> np.ndarray:
    """Noisy sums over seven records without gradient and the canary, in one dimension."""
    fresh, known, source = torch.tensor([canary] + [0.0] * 7), torch.tensor([stale] + [0.0] * 7), Seeded(seed)
    state, sums = noise_free(sampler, SMALLEST, sampler.bounds(known, 1.0)), []
    for _ in range(TRIALS):
        draw = sampler.draw(8, source, state)
        weights = weighing.weights(fresh[draw.indices], SMALLEST.sensitivity, draw)
        sums.append(float(weights @ fresh[draw.indices]))
    return np.array(sums) + SIGMA * np.random.default_rng(seed).standard_normal(TRIALS)


def audited(canary: float, stale: float, sampler: Importance, weighing: Weighing) -> float:
    """ε from below at 99.9 %: the best of four thresholds, ln((power − δ) / false alarms) by Clopper-Pearson."""
    absent = releases(0.0, stale, sampler, weighing, 1)
    present = releases(canary, stale, sampler, weighing, 2)
    best, error = 0.0, 0.0005 / 4
    for threshold in (1.0, 2.0, 3.0, 5.0):
        hits, alarms = int((present > threshold).sum()), int((absent > threshold).sum())
        power = stats.beta.ppf(error, hits, TRIALS - hits + 1) if hits else 0.0
        alarm = stats.beta.ppf(1 - error, alarms + 1, TRIALS - alarms)
        best = max(best, math.log(max(power - 1e-5, 1e-12) / alarm))
    return best


def claim() -> float:
    return pricing.epsilon([(SMALLEST.event(SIGMA), 1)], 1e-5)


@pytest.mark.parametrize(
    ("canary", "stale"),
    [
        pytest.param(100.0, 100.0, marks=pytest.mark.slow),
        pytest.param(1e-3, 1e-3, marks=pytest.mark.slow),
        (100.0, 1e-3),
    ],
)
def test_a_canary_is_not_found_beyond_the_claim(canary: float, stale: float) -> None:
    """With the longest gradient, with a tiny one, and with one that grew unseen."""
    found = audited(canary, stale, Importance(), Weights())
    assert found <= claim()
    if stale == 100:
        assert found > 0.3 * claim(), "the audit has no power"


@dataclass(frozen=True)
class Uncapped(Importance):
    """The paper's listing: the bound k·C exceeds K̃/b, so that q saturates at 1 and p = 1/k."""

    def bounds(self, norms: Tensor, clip: float) -> Tensor:
        return self.multiplier * norms.clamp(min=self.floor * clip, max=clip)

    def draw(self, records: int, source: Seeded, state: Learnt) -> Draw:
        drawn = torch.from_numpy(source.uniform(records)) < state.bounds / SMALLEST.reach
        indices = drawn.nonzero().squeeze(1)
        return Draw(indices, torch.from_numpy(source.uniform(len(indices))) * state.bounds[indices], self.floor)


@dataclass(frozen=True)
class UncappedWeights:
    """b/(Ñ·q·p) with q = 1, p = 1/5."""

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return torch.where(norms.clamp(max=1.0) > draw.thresholds, 4 / 8 * 5 / norms.clamp(min=1.0), 0.0).float()


@dataclass(frozen=True)
class StaleWeights:
    """Undo the odds of the draw, b·ĝ/K̃ with ĝ = k·g_L, without a second look at the norm."""

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return clip / 0.05 / norms.clamp(min=1.0)


def test_broken_variants_are_found() -> None:
    assert audited(100.0, 100.0, Uncapped(), UncappedWeights()) > claim()
    assert audited(100.0, 1e-3, Importance(), StaleWeights()) > claim()


# -- attacked over two steps of one pass ----------------------------------------------------------------------------

AXIS = np.linspace(-5.0, 6.0, 281)


def weigh_two_steps(sampler: Importance, epoch: Epoch, norms: tuple[float, float, float], noise: float) -> np.ndarray:
    """Exact densities of two noised sums that one record may join, on a grid: its norm at the pass, and at both steps.

    Whether it was drawn decides by which bound it is drawn next: the rate of the second step depends on the coin of the
    first, which nobody sees.
    """
    known, *now = norms
    old, fresh = (float(sampler.bounds(torch.tensor([norm]), epoch.clip)) for norm in (known, now[0]))
    still = [stats.norm.pdf(AXIS, 0.0, noise), stats.norm.pdf(AXIS, epoch.sensitivity, noise)]

    def rate(bound: float, norm: float) -> float:
        return min(1.0, min(bound, max(norm, sampler.floor * epoch.clip)) / epoch.reach)

    def second(bound: float) -> np.ndarray:
        used = rate(bound, now[1])
        return (1 - used) * still[0] + used * still[1]

    drawn, used = min(1.0, old / epoch.reach), rate(old, now[0])
    after_draw = used * still[1] + (drawn - used) * still[0]
    return np.outer(after_draw, second(fresh)) + np.outer((1 - drawn) * still[0], second(old))


def distinguish(one: np.ndarray, other: np.ndarray, epsilon: float) -> float:
    cell = (AXIS[1] - AXIS[0]) ** 2
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum() * cell)


GROWN = [(0.002, 5.0, 5.0), (0.1, 0.15, 5.0), (5.0, 1e-4, 5.0), (0.3, 5.0, 0.01), (0.002, 0.02, 0.3), (9.0, 9.0, 9.0)]


def exceed(sampler: Importance, norms: tuple[float, float, float], noise: float = 0.6) -> float:
    """By how much the two steps are told apart better than two sampled Gaussians that are charged."""
    epoch = Epoch.bounded(0, 40.0, 12.0, 1.0, 4)
    alone = np.outer(*[stats.norm.pdf(AXIS, 0.0, noise)] * 2)  # C = 1: the noise of the sum has deviation σ_G·C
    step = epoch.event(noise)
    charged = (1 - step.sampling_probability) * stats.norm.pdf(AXIS, 0.0, noise) + (
        step.sampling_probability * stats.norm.pdf(AXIS, epoch.sensitivity, noise)
    )
    assert step.event.noise_multiplier == pytest.approx(noise / epoch.sensitivity)
    paid, found = np.outer(charged, charged), weigh_two_steps(sampler, epoch, norms, noise)
    assert found.sum() == pytest.approx(paid.sum(), rel=1e-9)
    levels = (0.0, 0.05, 0.2, 0.5, 1.0)
    removed = [distinguish(found, alone, e) - distinguish(paid, alone, e) for e in levels]
    added = [distinguish(alone, found, e) - distinguish(alone, paid, e) for e in levels]
    return max(removed + added)


@pytest.mark.parametrize("norms", GROWN)
def test_rates_that_follow_a_records_own_coins_are_paid_for(norms: tuple[float, float, float]) -> None:
    """Old norms, and bounds that are renewed for whoever was drawn: two steps are never more than is charged."""
    for multiplier in (1.0, 5.0):
        assert exceed(Importance(multiplier), norms) < 1e-9


class Tripled(Importance):
    """Bounds up to three times C: a long gradient is used oftener than is charged."""

    def bounds(self, norms: Tensor, clip: float) -> Tensor:
        return (self.multiplier * norms.clamp(min=self.floor * clip)).clamp(max=3 * clip).float()


def test_bounds_that_grow_beyond_the_cap_are_found_by_the_same_sums() -> None:
    assert exceed(Tripled(5.0), (0.2, 5.0, 5.0)) > 1e-2
    assert exceed(Tripled(5.0), (9.0, 9.0, 9.0)) > 1e-2


# -- saved and resumed --------------------------------------------------------------------------------------------


def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    first = run(run=tmp_path / "run")
    for _ in range(14):
        first.step()
    first.save()
    released, left = first.bench.states.save(), first.bench.run.allowance.left
    first.close()

    second = run(seed=2)
    second.load(tmp_path / "run")
    assert second.bench.states.sampler == Learnt(
        Epoch(**released)
    )  # public numbers only: law 7 keeps norms off the disk
    assert second.bench.run.allowance.left == pytest.approx(left, rel=1e-9)
    second.step()
    assert {**released} == second.bench.states.save()  # still the same epoch, nothing released again
    fresh = second.bench.recipe.sampler.bounds(measure(second.bench), released["clip"])
    untouched = torch.isclose(second.bench.states.sampler.bounds, fresh, atol=0.5)
    assert untouched.float().mean() > 0.9  # measured anew, at the model of the checkpoint
    assert len(list(second.steps())) == 30 - 15
    assert second.guarantee().epsilon == pytest.approx(BUDGET.epsilon)


def test_work_lost_in_a_crash_stays_paid_for_and_the_rest_gets_noisier(tmp_path: Path) -> None:
    first = run(run=tmp_path / "run")
    for _ in range(10):
        first.step()
    first.save()
    first.step()  # opens the second epoch
    noise = first.bench.states.sampler.noise
    for _ in range(8):
        first.step()
    first.close()  # killed: nine steps and one release of K are in the ledger and nowhere else

    second = run(seed=2)
    second.load(tmp_path / "run")
    second.step()
    assert second.bench.states.sampler.noise > 1.05 * noise
    assert len(list(second.steps())) == 19
    chosen = second.bench.recipe.rdp_filter
    assert sum(n * chosen.cost(event) for event, n in second.bench.ledger.events()) <= chosen.limit * (1 + 1e-12)


# -- used and refused ---------------------------------------------------------------------------------------------


def trained_weights(**options: Any) -> Tensor:
    trained = run(**options)
    for _ in range(12):
        trained.step()
    return torch.cat([p.detach().flatten() for p in trained.bench.parameters()])


@pytest.mark.parametrize("options", [{"microbatch": 5}, {"engine": "loop"}, {"engine": "vmap"}])
def test_performance_knobs_change_no_numbers(options: dict[str, Any]) -> None:
    assert torch.allclose(trained_weights(), trained_weights(**options), atol=1e-4)


def test_a_loop_of_the_users_own_works() -> None:
    trained = run()
    count = 0
    for batch in trained.loader(microbatch=7):
        trained.backward(
            torch.nn.functional.cross_entropy(trained.bench.objective.model(batch[0]), batch[1], reduction="none")
        )
        trained.bench.optimizer.step()
        count += 1
    assert count >= 30
    assert trained.position == 30


@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.optim.Adam])
@pytest.mark.parametrize("multiplier", [1.0, 6.0])
def test_any_optimizer_and_multiplier(optimizer: Any, multiplier: float) -> None:
    model = mlp()
    trained = run(recipe(multiplier=multiplier), model=model, optimizer=optimizer(model.parameters()))
    assert len(list(trained.steps())) == 30


@pytest.mark.parametrize("records", [100, 1_000_000])
def test_few_and_many_records_can_be_calibrated(records: int) -> None:
    chosen = recipe(records, Budget(3.0, 0.1 / records), batch_size=max(10, records // 200), epochs=10)
    own = 11 * chosen.rdp_filter.cost(GaussianDpEvent(chosen.sampler.release_noise))
    assert own <= 0.12 * chosen.rdp_filter.limit
    assert chosen.sampler.release_noise >= 0.02 * records
    assert Recipe.from_toml(chosen.to_toml()) == chosen


def test_a_bad_record_changes_at_most_its_own_contribution() -> None:
    x, y = classification(RECORDS)
    x[3] = math.nan
    trained = run(dataset=(x, y), validate=False)
    for _ in range(5):
        trained.step()
    assert all(torch.isfinite(p).all() for p in trained.bench.parameters())
    assert math.isfinite(trained.bench.states.save()["total"])


def test_the_clipping_bound_follows_the_mean_norm() -> None:
    trained = run(recipe(budget=Budget(200.0, 1e-3), clip=0.05, adaptive=True))
    for _ in range(11):
        trained.step()
    clip, mean = trained.bench.states.save()["clip"], float(measure(trained.bench).clamp(max=0.2).mean())
    assert clip == pytest.approx(mean, rel=0.2)
    assert 0.05 < clip <= 4 * 0.05 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weighing": Flat()}, "weighing=.*undo the sampling"),
        ({"clip_schedule": SensitivityDecay(2.0)}, "clip_schedule=.*one bound per epoch"),
    ],
)
def test_parts_without_a_proof_are_refused(changes: dict[str, Any], reason: str) -> None:
    """When the recipe is made, before and after it is calibrated: nothing is ever charged for it."""
    for made in (recipes.dpis(batch_size=12, epochs=3), recipe()):
        with pytest.raises(InvalidInput, match=reason):
            replace(made, **changes)


def test_estimated_norms_are_refused_when_the_recipe_is_made() -> None:
    with pytest.raises(InvalidInput, match="proof"):
        replace(recipes.dpis(batch_size=12, epochs=3), norms=ProjectedNorms(24))


def test_a_run_without_a_filter_is_refused() -> None:
    bare = run(replace(recipe(), rdp_filter=None, budget=None))
    with pytest.raises(InvalidInput, match="give it a budget"):
        bare.step()


def test_foreign_loaders_workers_and_other_accountants_are_refused() -> None:
    with pytest.raises(InvalidInput, match="sampler=Foreign"):
        recipes.dpis(batch_size=12, epochs=3, sampler=Foreign())
    with pytest.raises(InvalidInput, match="sampler=Foreign"):
        next(run().loader([classification(4)]))
    with pytest.raises(InvalidInput, match="num_workers=2 needs Poisson"):
        next(run().loader(num_workers=2))
    with pytest.raises(InvalidInput, match="needs draws with thresholds"):
        Weights().weights(torch.ones(2), 1.0, Draw(torch.arange(2)))
    for changes, reason in (
        ({"budget": replace(BUDGET, accountant="gdp")}, "rdp-filter"),
        ({"budget": replace(BUDGET, adjacency="replace-one")}, "add-or-remove-one"),
        ({"noise_multiplier": 1.0}, "must be left open"),
        ({"release_noise": 0.1}, "alone cost more"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            recipe(**changes)


@pytest.mark.parametrize(
    "changes", [{"multiplier": 0.5}, {"floor": 0.0}, {"divider": 1.5}, {"quantile": 0.0}, {"external": 0.5}]
)
def test_settings_out_of_bounds_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="must"):
        Importance(**changes)
