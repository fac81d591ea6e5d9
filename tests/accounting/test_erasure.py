"""The erasure event against reference points, quadrature, random loss functions and its two parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate
from scipy.special import ndtr

from sordino import recipes
from sordino.accounting import Budget, pricing, steps_for
from sordino.accounting.erasure import (
    AnnealedErasure,
    Erasure,
    addition_curve,
    annealed_acceptance,
    removal_curve,
    surplus_curve,
)
from sordino.accounting.events import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, from_json, to_json
from sordino.accounting.grids import Array
from sordino.errors import InvalidInput
from sordino.mechanisms.rejecting import together

DELTA = 1e-5
GRID = 1e-6  # what sums over cells of z may differ from integrals
EPSILONS = np.array([-2.0, -0.5, -0.02, 0.0, 0.003, 0.05, 0.4, 1.5])


def dpsur(
    sigma: float, test: float, beta: float = -1.0, rate: float = 1024 / 60_000, draw: float = 256 / 60_000
) -> Erasure:
    return Erasure(rate, sigma, draw, float(ndtr((beta - 1) / (2 * test))), float(ndtr((beta + 1) / (2 * test))))


def naive(sigma: float, test: float, steps: int) -> list[tuple[DpEvent, int]]:
    return [
        (PoissonSampledDpEvent(1024 / 60_000, GaussianDpEvent(sigma)), steps),
        (PoissonSampledDpEvent(256 / 60_000, GaussianDpEvent(test)), steps),
    ]


# DPSUR at the MNIST settings: noise of training and of the test, attempts, erasure and naive charges.
REFERENCE = [
    (2.0, 1.3, 1_152, 0.977, 1.31),
    (2.0, 1.3, 1_599, 1.164, 1.57),
    (2.0, 1.3, 2_608, 1.517, 2.05),
    (1.35, 0.9, 3_170, 2.814, 4.01),
    (1.35, 0.9, 5_006, 3.621, 5.18),
    (1.35, 0.9, 11_895, 5.92, 8.59),
]


@pytest.mark.parametrize(("sigma", "test", "attempts", "erased", "both"), REFERENCE)
def test_reference_points(sigma: float, test: float, attempts: int, erased: float, both: float) -> None:
    price = pricing.epsilon([(dpsur(sigma, test), attempts)], DELTA)
    assert price == pytest.approx(erased, rel=1e-3)
    full = pricing.epsilon(naive(sigma, test, attempts), DELTA)
    assert full == pytest.approx(both, rel=4e-3)
    assert price < full


def quadrature(event: Erasure, epsilon: float, remove: bool) -> float:
    """The formulas of docs/proofs/erasure.md on a fine grid of z: no closed form is shared with the code."""
    z = np.linspace(-12, 12, 400_001)
    phi = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    sigma, q, e = event.noise_multiplier, event.rate, math.exp(epsilon)
    ratio = 1 - q + q * np.exp(z / sigma - 1 / (2 * sigma**2))
    ends = (event.lowest, event.highest)

    def mixed(u: float, x: float) -> float:
        return (1 - event.test_rate) * u + event.test_rate * x

    def integral(lines: list[Array]) -> float:
        return float(integrate.trapezoid(phi * np.maximum(np.maximum.reduce(lines), 0), z))

    low, high = ends
    if remove:
        shown = integral([ratio * mixed(u, high) - e * u for u in ends])
        hidden = 1 - e + integral([e * u - ratio * mixed(u, low) for u in ends])
    else:
        shown = integral([u - e * ratio * mixed(u, low) for u in ends])
        hidden = 1 - e + integral([e * ratio * mixed(u, high) - u for u in ends])
    return max(shown, hidden, 0.0, 1 - e)


@pytest.mark.parametrize(
    "event",
    [
        dpsur(2.0, 1.3),
        dpsur(1.0, 0.5, beta=0.5, rate=0.3, draw=0.2),
        dpsur(0.8, 4.0, beta=-16, rate=1.0, draw=1.0),
        Erasure(0.1, 1.0, 0.4, 0.0, 1.0),
    ],
)
def test_closed_forms_equal_quadrature(event: Erasure) -> None:
    remove, add, surplus = (
        removal_curve(EPSILONS, event),
        addition_curve(EPSILONS, event),
        surplus_curve(EPSILONS, event),
    )
    for k, epsilon in enumerate(EPSILONS):
        assert remove[k] == pytest.approx(quadrature(event, epsilon, True), abs=1e-8)
        assert add[k] == pytest.approx(quadrature(event, epsilon, False), abs=1e-8)
    assert surplus == pytest.approx(remove + np.expm1(EPSILONS), abs=1e-12)


def random_attempt(rng: np.random.Generator) -> tuple[Erasure, Array, Array, Array, Array]:
    """Two laws over w and "nothing": random rates, noises and random acceptance functions between lo and hi."""
    sigma, q, test_rate = rng.uniform(0.5, 4), rng.choice([0.02, 0.3, 1.0]), rng.choice([0.01, 0.3, 1.0])
    test, beta = rng.uniform(0.3, 3), rng.uniform(-3, 2)
    low, high = float(ndtr((beta - 1) / (2 * test))), float(ndtr((beta + 1) / (2 * test)))
    z = np.linspace(-9, 9, 6_001) + rng.choice([0.0, 1 / sigma])
    shape = rng.integers(3)
    if shape == 0:  # thresholds on w, the shape of the worst case
        without, extra = (np.where(rng.choice([-1, 1]) * (z - rng.normal()) > 0, high, low) for _ in range(2))
    elif shape == 1:  # arbitrary
        without, extra = (rng.uniform(low, high, len(z)) for _ in range(2))
    else:  # smooth losses, clipped and noised as the test does
        energies = [np.clip(rng.normal() * z + rng.normal() * z**2 + rng.normal(), -1, 1) for _ in range(2)]
        without, extra = (ndtr((beta - energy) / (2 * test)) for energy in energies)
    cells = np.exp(-(z**2) / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    ratio = 1 - q + q * np.exp(z / sigma - 1 / (2 * sigma**2))
    with_record = (1 - test_rate) * without + test_rate * extra
    return Erasure(q, sigma, test_rate, low, high), cells, ratio, without, with_record


def divergences(attempt: tuple[Erasure, Array, Array, Array, Array], epsilon: float) -> tuple[float, float]:
    _, cells, ratio, without, with_record = attempt
    p, q = cells * ratio * with_record, cells * without
    p0, q0 = 1 - p.sum(), 1 - q.sum()
    e = math.exp(epsilon)
    remove = np.maximum(p - e * q, 0).sum() + max(p0 - e * q0, 0)
    add = np.maximum(q - e * p, 0).sum() + max(q0 - e * p0, 0)
    return float(remove), float(add)


def compare(instances: int, shrink: float = 0.0) -> int:
    """How many of the instances exceed their event's curve somewhere; `shrink` narrows the event's interval."""
    rng, exceeded = np.random.default_rng(7), 0
    for _ in range(instances):
        attempt = random_attempt(rng)
        event = attempt[0]
        middle = shrink * (event.highest - event.lowest) / 2
        narrowed = Erasure(
            event.rate, event.noise_multiplier, event.test_rate, event.lowest + middle, event.highest - middle
        )
        remove, add = removal_curve(EPSILONS, narrowed), addition_curve(EPSILONS, narrowed)
        found = np.array([divergences(attempt, epsilon) for epsilon in EPSILONS])
        exceeded += bool(np.any(found[:, 0] > remove + GRID) or np.any(found[:, 1] > add + GRID))
    return exceeded


def test_no_random_loss_function_exceeds_the_curve() -> None:
    assert compare(50) == 0


@pytest.mark.slow
def test_no_thousand_random_loss_functions_exceed_the_curve() -> None:
    assert compare(1_000) == 0


def test_the_comparison_objects_to_an_interval_that_is_too_narrow() -> None:
    assert compare(50, shrink=0.5) > 5


def test_a_certain_acceptance_is_the_plain_mechanism() -> None:
    plain = PoissonSampledDpEvent(0.02, GaussianDpEvent(1.1))
    accepted = Erasure(0.02, 1.1, 0.01, 1.0, 1.0)
    assert pricing.epsilon([(accepted, 300)], DELTA) == pytest.approx(pricing.epsilon([(plain, 300)], DELTA), rel=1e-6)


def test_a_verdict_costs_less_than_the_noisy_value_behind_it() -> None:
    verdict = Erasure(1.0, math.inf, 0.01, float(ndtr(-1 / 1.3)), 0.5)
    value = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.3))
    assert 0 < pricing.epsilon([(verdict, 500)], DELTA) < pricing.epsilon([(value, 500)], DELTA)


def test_erasure_costs_no_more_than_proposal_and_verdict() -> None:
    for sigma, test, attempts, _, _ in REFERENCE[::3]:
        erased = dpsur(sigma, test)
        verdict = Erasure(1.0, math.inf, erased.test_rate, erased.lowest, erased.highest)
        parts = [(naive(sigma, test, attempts)[0][0], attempts), (verdict, attempts)]
        assert pricing.epsilon([(erased, attempts)], DELTA) <= pricing.epsilon(parts, DELTA) * (1 + 1e-6)


def test_wider_intervals_cost_more_and_forced_attempts_too() -> None:
    narrow, wide = Erasure(0.1, 1.0, 0.1, 0.3, 0.5), Erasure(0.1, 1.0, 0.1, 0.2, 0.6)
    forced = Erasure(0.1, 1.0, 0.1, 0.3, 0.5, forced=True)
    plain = Erasure(0.1, 1.0, 0.1, 1.0, 1.0)
    assert np.all(removal_curve(EPSILONS, narrow) <= removal_curve(EPSILONS, wide))
    expected = np.maximum(removal_curve(EPSILONS, narrow), removal_curve(EPSILONS, plain))
    assert removal_curve(EPSILONS, forced) == pytest.approx(expected)


def test_a_record_that_alone_can_be_rejected_has_infinite_loss() -> None:
    event = Erasure(0.1, 1.0, 0.1, 0.4, 1.0)  # without the record it is accepted for sure, with it not always
    assert pricing.epsilon([(event, 1)], DELTA) > 20


@pytest.mark.parametrize("steepness", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("energy", [-1.0, 0.2, 1.0])
def test_annealed_acceptance_equals_quadrature(steepness: float, energy: float) -> None:
    x = np.linspace(-30, 30, 400_001)
    density = np.exp(-((x - energy) ** 2) / (2 * 2.6**2)) / (2.6 * math.sqrt(2 * math.pi))
    expected = integrate.trapezoid(density * np.exp(-steepness * np.maximum(x, 0)), x)
    assert annealed_acceptance(steepness, energy, 1.3) == pytest.approx(expected, abs=1e-7)


def test_annealing_is_dominated_at_every_temperature() -> None:
    annealed = AnnealedErasure(0.1, 1.0, 0.2, 0.9)
    remove, add = removal_curve(EPSILONS, annealed), addition_curve(EPSILONS, annealed)
    for steepness in (0.023, 0.3, 1.7, 40.0, 150.0, 1e4):
        low, high = (annealed_acceptance(steepness, energy, 0.9) for energy in (1.0, -1.0))
        single = Erasure(0.1, 1.0, 0.2, low, high)
        assert np.all(removal_curve(EPSILONS, single) <= remove + 1e-12)
        assert np.all(addition_curve(EPSILONS, single) <= add + 1e-12)


def test_annealing_costs_less_than_both_mechanisms_in_full() -> None:
    annealed = AnnealedErasure(1024 / 60_000, 2.0, 256 / 60_000, 1.3)
    assert pricing.epsilon([(annealed, 1_152)], DELTA) < pricing.epsilon(naive(2.0, 1.3, 1_152), DELTA)


def test_events_can_be_recorded_and_read_back() -> None:
    for event in (dpsur(2.0, 1.3), Erasure(1.0, math.inf, 0.1, 0.2, 0.5), AnnealedErasure(0.1, 1.0, 0.2, 0.9)):
        assert from_json(to_json(event)) == event


@pytest.mark.parametrize(
    "fields",
    [
        (0, 1, 0.1, 0.2, 0.5),
        (0.1, 0, 0.1, 0.2, 0.5),
        (0.1, 1, 2, 0.2, 0.5),
        (0.1, 1, 0.1, 0.6, 0.5),
        (0.1, 1, 0.1, 0, 0),
    ],
)
def test_impossible_events_are_refused(fields: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInput):
        Erasure(*fields)


@pytest.mark.parametrize(("accountant", "adjacency"), [("rdp", "add-or-remove-one"), ("pld", "replace-one")])
def test_what_has_no_proof_is_refused(accountant: str, adjacency: str) -> None:
    with pytest.raises(InvalidInput, match="use"):
        pricing.epsilon([(dpsur(2.0, 1.3), 10)], DELTA, accountant=accountant, adjacency=adjacency)


# docs/papers.md: noise of training and test at eps 1..4, and the accepted updates T that the paper charges for.
PUBLISHED = {
    "fmnist": (60_000, 2048, 256, [(4.0, 1.3, 651), (2.15, 1.3, 681), (2.15, 0.8, 1081), (2.15, 0.8, 1972)]),
    "imdb": (25_000, 1024, 256, [(2.0, 1.3, 84), (1.8, 1.2, 265), (1.35, 1.0, 258), (1.23, 0.9, 331)]),
}


def accepted(records: int, batch: int, test: int, sigma: float, test_sigma: float, epsilon: int) -> int:
    recipe = recipes.dpsur(
        batch_size=batch,
        noise_multiplier=sigma,
        validation_size=test,
        validation_noise=test_sigma,
        accounting="published",
    )
    budget = Budget(epsilon=epsilon, delta=DELTA, accountant="rdp")
    steps = recipe.calibrate(budget, records=records).steps
    assert steps is not None
    return steps


def test_published_charges_are_both_mechanisms_for_an_accepted_update() -> None:
    recipe = recipes.dpsur(batch_size=1024, noise_multiplier=2.0, steps=280, accounting="published").for_records(60_000)
    assert recipe.plan() == [(together(*(event for event, _ in naive(2.0, 1.3, 1))), 280)]
    assert recipe.basis == "published"


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_charges_give_the_whole_table(name: str) -> None:
    records, batch, test, rows = PUBLISHED[name]
    for epsilon, (sigma, test_sigma, updates) in enumerate(rows, start=1):
        assert accepted(records, batch, test, sigma, test_sigma, epsilon) == pytest.approx(updates, rel=0.01, abs=1)


# MNIST and CIFAR-10 also pay for two Gaussians of noise 8 on all records, for the statistics of the features.
WITH_STATISTICS = {
    "mnist": (60_000, 1024, [(2.0, 1.3, 280), (1.5, 1.0, 861), (1.35, 0.9, 1474), (1.35, 0.8, 2285)]),
    "cifar10": (50_000, 8192, [(11.0, 1.3, 118), (9.0, 1.3, 514), (5.67, 1.1, 461), (5.67, 1.1, 796)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_STATISTICS)
def test_with_released_statistics_the_rest_of_the_table_follows(name: str) -> None:
    records, batch, rows = WITH_STATISTICS[name]
    for epsilon, (sigma, test_sigma, updates) in enumerate(rows, start=1):
        recipe = recipes.dpsur(
            batch_size=batch, noise_multiplier=sigma, validation_noise=test_sigma, steps=1, accounting="published"
        ).for_records(records)
        budget = Budget(epsilon=epsilon, delta=DELTA, accountant="rdp")
        steps = steps_for(budget, recipe.terms(0).event, spent=[(GaussianDpEvent(8.0), 2)])
        assert steps == pytest.approx(updates, rel=0.01, abs=1)
