"""The price of choosing among runs: an upper bound of what best-of-K really reveals, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from sordino.accounting import Budget, epsilon
from sordino.accounting.events import (
    Adjacency,
    ComposedDpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    from_json,
    to_json,
)
from sordino.accounting.gaussian import gaussian_delta
from sordino.accounting.grids import Array
from sordino.accounting.pricing import delta
from sordino.accounting.rdp import ORDERS, rdp_curve
from sordino.accounting.selection import (
    Selection,
    bound_delta,
    calibrate_selection,
    count_expected,
    expect_trials,
    find_gamma,
    find_profiles,
    find_shift,
    is_covered,
)
from sordino.errors import InvalidInput

DELTA = 1e-5
BINS: Array = np.linspace(-12.0, 12.0, 1201)
MIDDLES = (BINS[1:] + BINS[:-1]) / 2
ORDERINGS: dict[str, Array] = {
    "the released number": MIDDLES,
    "its negative": -MIDDLES,
    "its distance from zero": np.abs(MIDDLES),
    "a wave": np.cos(3 * MIDDLES) + 1e-6 * MIDDLES,
    "chance": np.random.default_rng(0).permutation(len(MIDDLES)).astype(np.float64),
}
ROUNDED = 1e-12
"""What the sums of the exact law lose."""
Cumulative = Callable[[Array], Array]


def find_mu(eps: float, at: float = DELTA) -> float:
    return float(brentq(lambda mu: gaussian_delta(mu, eps) - at, 1e-3, 30))


@cache
def gaussian(eps: float) -> GaussianDpEvent:
    return GaussianDpEvent(1 / find_mu(eps))


# -- what best-of-K really reveals ------------------------------------------------------------------------------------
# One trial releases the bin of N(mean, 1): a function of it, which costs no more. The chance that the best is in a bin
# is exact: f(mass up to and with it) − f(mass before it), with f the generating function of K.


def bin_masses(mean: float) -> Array:
    edges = np.concatenate([[-np.inf], BINS[1:-1], [np.inf]])
    upper, lower = edges[1:] - mean, edges[:-1] - mean
    masses: Array = np.where(lower > 0, ndtr(-lower) - ndtr(-upper), ndtr(upper) - ndtr(lower))
    return masses


def pick_best(masses: Array, score: Array, generate: Cumulative) -> Array:
    """The law of the best bin."""
    order = np.argsort(score, kind="stable")
    beyond = np.concatenate([np.cumsum(masses[order][::-1])[::-1], [0.0]])  # mass of this bin and of better ones
    best = np.empty_like(masses)
    best[order] = -np.diff(generate(np.clip(beyond, 0.0, 1.0))[::-1])[::-1]
    return np.abs(best)


def truncated(eta: float, gamma: float) -> Cumulative:
    """1 − f(1 − beyond), from the mass beyond, so that nothing is lost near 1."""

    def rest(beyond: Array) -> Array:
        left = gamma + (1 - gamma) * beyond
        logarithmic: Array = np.log(left / gamma) / np.log(1 / gamma)
        other: Array = (gamma**-eta - left**-eta) / (gamma**-eta - 1) if eta else logarithmic
        return other

    return rest


def fixed(count: int) -> Cumulative:
    return lambda beyond: -np.expm1(count * np.log1p(-np.minimum(beyond, 1 - 1e-16)))


def diverge(first: Array, second: Array, eps: float) -> float:
    return float(np.maximum(first - np.exp(eps) * second, 0).sum())


def law_of(eta: float, gamma: float, most: int) -> Array:
    """P[K = 1], P[K = 2], ..."""
    terms = np.empty(most)
    terms[0] = (1 - gamma) / np.log(1 / gamma) if eta == 0 else eta * (1 - gamma) / (gamma**-eta - 1)
    for k in range(1, most):
        terms[k] = terms[k - 1] * (1 - gamma) * ((k + eta) / (k + 1) if eta else k / (k + 1))
    return terms


# -- reference values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alone", "eta", "gamma", "trials", "total", "exact"),
    [
        (1.0, 0.0, 0.01, 21.5, 1.869, 1.188),
        (1.0, 1.0, 0.1, 10.0, 1.999, 1.143),
        (3.0, 0.0, 0.01, 21.5, 5.169, 3.485),
        (3.0, 0.5, 0.05, 12.2, 5.277, 3.401),
    ],
)
def test_reference_values(alone: float, eta: float, gamma: float, trials: float, total: float, exact: float) -> None:
    event = Selection(gaussian(alone), eta, gamma)
    assert event.trials == pytest.approx(trials, rel=0.005)
    assert epsilon([(event, 1)], DELTA) == pytest.approx(total, rel=0.01)
    masses = bin_masses(0.0), bin_masses(find_mu(alone))
    best = [pick_best(mass, MIDDLES, truncated(eta, gamma)) for mass in masses]
    true = max(brentq(lambda e, a=a, b=b: diverge(a, b, e) - DELTA, 0, 12) for a, b in (best, best[::-1]))
    assert true == pytest.approx(exact, rel=0.01)


def test_it_is_never_above_the_renyi_price_and_mostly_far_below() -> None:
    step = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
    event = expect_trials([(step, 100)], 20)
    ours, theirs = epsilon([(event, 1)], DELTA), epsilon([(event, 1)], DELTA, "rdp")
    assert ours < 0.7 * theirs
    alone, second = epsilon([(step, 100)], DELTA), epsilon([(step, 20 * 100)], DELTA)
    assert alone < ours < second


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_the_renyi_price_is_that_of_dp_accounting(eta: float) -> None:
    event = Selection(GaussianDpEvent(2.0), eta, 0.05)
    accountant = RdpAccountant(list(ORDERS))
    accountant.compose(dp_event.RepeatAndSelectDpEvent(GaussianDpEvent(2.0), event.trials, eta))
    np.testing.assert_allclose(rdp_curve(event, "add-or-remove-one"), accountant.rdp, rtol=1e-6)


def test_where_renyi_is_smaller_it_is_printed() -> None:
    """At a δ below what a grid resolves only Rényi has an answer."""
    event, tiny = Selection(PoissonSampledDpEvent(0.5, GaussianDpEvent(8.0)), 0.0, 0.01), 1e-16
    assert 0 < epsilon([(event, 1)], tiny) < np.inf
    assert epsilon([(event, 1)], tiny) == pytest.approx(epsilon([(event, 1)], tiny, "rdp"), rel=1e-9)


# -- the bound holds --------------------------------------------------------------------------------------------------


def test_the_bound_is_above_the_exact_divergence_of_200_random_searches() -> None:
    rng = np.random.default_rng(29)
    epsilons: Array = np.linspace(0.0, 12.0, 25)
    tightest = np.inf
    for number in range(200):
        mu = float(np.exp(rng.uniform(np.log(0.05), np.log(2.5))))
        eta = float(rng.choice([0.0, 1.0, rng.uniform(0.05, 5.0)]))
        gamma = float(np.exp(rng.uniform(np.log(1e-3), np.log(0.7))))
        event = Selection(GaussianDpEvent(1 / mu), eta, gamma)
        profile, opposite = find_profiles(event.event, "add-or-remove-one")
        claimed = bound_delta(event, profile, find_shift(event, opposite), epsilons)
        name = list(ORDERINGS)[number % len(ORDERINGS)]
        for score in (ORDERINGS[name], ORDERINGS["the released number"]):
            best = [pick_best(bin_masses(mean), score, truncated(eta, gamma)) for mean in (0.0, mu)]
            for first, second in (best, best[::-1]):
                true = np.maximum(first - np.exp(epsilons)[:, None] * second, 0).sum(1)
                assert (true <= claimed + ROUNDED * np.exp(epsilons)).all(), (mu, eta, gamma, name)
                tightest = min(tightest, float(np.min(claimed[true > 1e-9] / true[true > 1e-9], initial=np.inf)))
    assert tightest < 3  # it is no bound of everything by one


@pytest.mark.parametrize("seed", range(4))
def test_the_price_is_above_the_exact_divergence(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mu, eta, gamma = float(rng.uniform(0.1, 1.2)), float(rng.choice([0.0, 0.7, 1.0])), float(rng.uniform(0.005, 0.5))
    event = Selection(GaussianDpEvent(1 / mu), eta, gamma)
    for score in ORDERINGS.values():
        best = [pick_best(bin_masses(mean), score, truncated(eta, gamma)) for mean in (0.0, mu)]
        for eps in (0.3, 1.0, 3.0):
            true = max(diverge(best[0], best[1], eps), diverge(best[1], best[0], eps))
            assert true <= delta([(event, 1)], eps) + ROUNDED * np.exp(eps)


def test_the_law_of_k_is_the_one_whose_mean_is_charged() -> None:
    for eta, gamma in ((0.0, 0.05), (0.5, 0.1), (1.0, 0.1), (3.0, 0.3)):
        chances = law_of(eta, gamma, 3000)
        assert chances.sum() == pytest.approx(1, abs=1e-9)
        assert chances @ np.arange(1, 3001) == pytest.approx(count_expected(eta, gamma), rel=1e-6)
        assert find_gamma(eta, count_expected(eta, gamma)) == pytest.approx(gamma, rel=1e-9)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_it_costs_more_with_more_trials_less_noise_and_smaller_delta(eta: float) -> None:
    def price(trials: float, noise: float, at: float = DELTA) -> float:
        return epsilon([(expect_trials([(GaussianDpEvent(noise), 1)], trials, eta), 1)], at)

    by_trials = [price(trials, 4.0) for trials in (1.0001, 3, 10, 100)]
    assert by_trials == sorted(by_trials)
    assert by_trials[0] > epsilon([(GaussianDpEvent(4.0), 1)], DELTA)
    assert price(10, 2.0) > price(10, 4.0) > price(10, 8.0)
    assert price(10, 4.0, 1e-7) > price(10, 4.0) > price(10, 4.0, 1e-3)


def test_it_composes_with_other_releases() -> None:
    search, other = expect_trials([(GaussianDpEvent(6.0), 1)], 10), GaussianDpEvent(10.0)
    alone, both = epsilon([(search, 1)], DELTA), epsilon([(search, 1), (other, 1)], DELTA)
    assert alone < both < alone + epsilon([(other, 1)], DELTA)
    assert epsilon([(search, 2)], DELTA) < 2 * epsilon([(search, 1)], DELTA / 2) + 1e-9


def test_a_trial_without_noise_and_one_without_release() -> None:
    assert epsilon([(Selection(NonPrivateDpEvent()), 1)], DELTA) == np.inf
    assert epsilon([(Selection(GaussianDpEvent(0.0)), 1)], DELTA) == np.inf
    assert epsilon([(Selection(GaussianDpEvent(1e-4)), 1)], DELTA) > 1e6
    assert epsilon([(Selection(NoOpDpEvent()), 1)], DELTA) == pytest.approx(0, abs=2e-4)


# -- calibration, cover, text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1.0, 3.0, 8.0])
def test_calibration_meets_the_budget(eps: float) -> None:
    budget = Budget(eps, DELTA)
    found = calibrate_selection(budget, lambda noise: [(GaussianDpEvent(noise), 1)], 20)
    assert 0.998 * eps <= found.epsilon <= eps
    assert found.noise_multiplier > gaussian(eps).noise_multiplier


def test_calibration_leaves_room_for_what_is_beside_it() -> None:
    beside = [(GaussianDpEvent(10.0), 1)]

    def noise(others: list[tuple[GaussianDpEvent, int]]) -> float:
        make = lambda sigma: [(GaussianDpEvent(sigma), 1)]  # noqa: E731
        return calibrate_selection(Budget(3.0, DELTA), make, 10, beside=others).noise_multiplier

    assert noise(beside) > noise([])


def test_cover_compares_whole_profiles() -> None:
    adjacency: Adjacency = "add-or-remove-one"
    assert is_covered([(GaussianDpEvent(2.0), 1)], GaussianDpEvent(2.0), adjacency)
    assert is_covered([(GaussianDpEvent(4.0), 4)], GaussianDpEvent(1.99), adjacency)
    assert not is_covered([(GaussianDpEvent(4.0), 4)], GaussianDpEvent(2.01), adjacency, 1e-9)
    steps = [(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)), 100)]
    at_delta = gaussian(epsilon(steps, DELTA))  # the same ε at 1e-5, and still not the same profile
    assert not is_covered(steps, GaussianDpEvent(at_delta.noise_multiplier), adjacency, 1e-9)
    assert not is_covered([(NonPrivateDpEvent(), 1)], GaussianDpEvent(1.0), adjacency)


def test_a_profile_is_what_the_price_says() -> None:
    event = ComposedDpEvent([SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)), 100)])
    points: Array = np.array([-1.0, 0.0, 0.123456, 0.5, 1.0, 3.0])
    remove, add = find_profiles(event, "add-or-remove-one")
    for eps, one, other in zip(points, remove.delta(points), add.delta(points), strict=True):
        if eps >= 0:
            assert max(one, other) == pytest.approx(delta([(event, 1)], eps), rel=1e-6, abs=1e-12)
        assert other >= 1 - np.exp(eps) - 1e-9


def test_slack_is_paid_for_and_has_no_renyi_price() -> None:
    exact, loose = (Selection(GaussianDpEvent(4.0), 0.0, 0.05, slack) for slack in (0.0, 1e-7))
    assert epsilon([(loose, 1)], DELTA) > epsilon([(exact, 1)], DELTA)
    assert epsilon([(Selection(GaussianDpEvent(4.0), 0.0, 0.05, 2e-6), 1)], DELTA) == np.inf  # above δ/E[K]
    with pytest.raises(InvalidInput, match="no RDP price"):
        epsilon([(loose, 1)], DELTA, "rdp")


def test_it_is_written_and_read_back() -> None:
    event = Selection(SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)), 10), 0.5, 0.02, 1e-9)
    assert from_json(to_json(event)) == event


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"eta": -0.5}, "eta=-0.5"),
        ({"eta": float("nan")}, "eta=nan"),
        ({"gamma": 0.0}, "gamma=0.0"),
        ({"gamma": 1.0}, "gamma=1.0"),
        ({"slack": -1.0}, "slack=-1.0"),
    ],
)
def test_bad_numbers_are_refused(fields: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Selection(GaussianDpEvent(1.0), **fields)


@pytest.mark.parametrize("trials", [0, 1, -3, 1e9, float("nan")])
def test_a_number_of_trials_that_makes_no_sense_is_refused(trials: float) -> None:
    with pytest.raises(InvalidInput, match="expected trials"):
        find_gamma(0.0, trials)


def test_a_search_on_a_draw_has_no_price() -> None:
    with pytest.raises(InvalidInput, match="no sampled_pld price"):
        epsilon([(PoissonSampledDpEvent(0.1, Selection(GaussianDpEvent(1.0))), 1)], DELTA)


# -- what breaks it ---------------------------------------------------------------------------------------------------


class TestSabotage:
    """Each condition of the proof, left out, breaks the claim: the exact divergence is above it."""

    ETA, GAMMA, ALONE = 0.0, 0.01, 1.0

    @property
    def mu(self) -> float:
        return find_mu(self.ALONE)

    @property
    def claim(self) -> float:
        return epsilon([(Selection(gaussian(self.ALONE), self.ETA, self.GAMMA), 1)], DELTA)

    def revealed(self, first: list[Array], second: list[Array]) -> float:
        chances = law_of(self.ETA, self.GAMMA, len(first))
        pairs = list(zip(chances, first, second, strict=True))
        return float(sum(p * diverge(a, b, self.claim) for p, a, b in pairs))

    def test_k_as_charged_keeps_it(self) -> None:
        best = [pick_best(bin_masses(m), MIDDLES, truncated(self.ETA, self.GAMMA)) for m in (0.0, self.mu)]
        assert max(diverge(best[0], best[1], self.claim), diverge(best[1], best[0], self.claim)) < DELTA

    def test_k_fixed(self) -> None:
        """A search of a number that everybody knows: when all of so many are bad, that says much."""
        best = [pick_best(bin_masses(m), MIDDLES, fixed(100)) for m in (0.0, self.mu)]
        assert max(diverge(best[0], best[1], self.claim), diverge(best[1], best[0], self.claim)) > DELTA

    def test_k_revealed_early(self) -> None:
        """To know K is to know which of the fixed searches it was."""
        laws = [[pick_best(bin_masses(m), MIDDLES, fixed(k)) for k in range(1, 101)] for m in (0.0, self.mu)]
        assert max(self.revealed(*laws), self.revealed(*laws[::-1])) > DELTA

    def test_losers_logged(self) -> None:
        """All K releases are one Gaussian with √K times the effect."""
        chances = law_of(self.ETA, self.GAMMA, 400)
        told = sum(p * gaussian_delta(self.mu * k**0.5, self.claim) for k, p in enumerate(chances, 1))
        assert told > 100 * DELTA

    def test_score_without_noise(self) -> None:
        """A score that looks at the record itself can turn the order of the trials round."""
        best = pick_best(bin_masses(0.0), MIDDLES, truncated(self.ETA, self.GAMMA))
        other = pick_best(bin_masses(self.mu), -MIDDLES, truncated(self.ETA, self.GAMMA))
        assert max(diverge(best, other, self.claim), diverge(other, best, self.claim)) > 100 * DELTA


def test_a_simulated_search_stays_below_the_claim() -> None:
    """Counting what really happens: no event is likelier than the claim allows, at 99.9 % confidence."""
    rng = np.random.default_rng(7)
    mu, eta, gamma, runs = 0.8, 0.0, 0.05, 20_000
    cumulative = np.cumsum(law_of(eta, gamma, 2000))

    def search(mean: float) -> Array:
        counts = np.searchsorted(cumulative, rng.random(runs)) + 1
        largest: Array = mean + ndtri(rng.random(runs) ** (1 / counts))  # of so many normals
        return largest

    eps = epsilon([(Selection(GaussianDpEvent(1 / mu), eta, gamma), 1)], 1e-2)
    here, there = search(0.0), search(mu)
    margin = 3.3 * np.sqrt(0.25 / runs)
    for threshold in np.linspace(-1, 5, 25):
        for first, second in ((there > threshold, here > threshold), (here < threshold, there < threshold)):
            assert first.mean() - margin <= np.exp(eps) * (second.mean() + margin) + 1e-2
