"""The price of choosing among runs: the best of K trials on the same records, where K is random and secret.

A trial is a training *and* its score. K follows the truncated negative binomial law (η, γ) on 1, 2, 3, ..., whose
generating function f has

    f'(x) = η(1−γ)(1−(1−γ)x)^(−η−1) / (γ^(−η) − 1),   for η = 0:  (1−γ) / ((1−(1−γ)x)·log(1/γ)),   E[K] = f'(1).

With δ(ε) the profile of one trial in one direction of adjacency and δ*(ε) that of the other, best-of-K has in the first

    δ_best(ε̂ + R) ≤ E[K]·δ(ε̂),    R = (η+1)·min over ε ≥ 0 of log(e^ε + (1−γ)/γ·δ*(ε))        (docs/proofs/selection.md)

at every ε̂: the profile of one trial, shifted by R and lifted by E[K]. The profiles come from the privacy loss
distribution of the trial's events. The Rényi price is that of Papernot & Steinke 2022, Theorem 2; if it is smaller, it
is the one that is printed.

The bound has conditions that no event can show: K is drawn before the first trial and stays secret, nothing about a
losing trial leaves, settings are drawn at random and not because of scores, and no trial costs more than `event`.
`sordino.searching` enforces them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import signal
from scipy.optimize import brentq

from sordino.accounting.budget import Budget
from sordino.accounting.calibration import Calibrated, noise_for
from sordino.accounting.events import (
    Adjacency,
    ComposedDpEvent,
    DpEvent,
    Events,
    GaussianDpEvent,
    NoOpDpEvent,
    SelfComposedDpEvent,
    from_json,
    tally,
    to_json,
    unroll,
)
from sordino.accounting.extremes import has_other_bounds, price_alone
from sordino.accounting.filter_limit import FilterLimit, find_filter_profile
from sordino.accounting.grids import DEVIATIONS, INTERVAL, Array, LossGrid, connect_the_dots, gaussian_curve
from sordino.accounting.pld import compose_sides, pld
from sordino.accounting.rdp import ORDERS, merge_answers, rdp_curve, require_noise
from sordino.errors import InvalidInput

LOGARITHMIC, GEOMETRIC = 0.0, 1.0
"""The laws of η = 0 and η = 1."""
MOST_ETA, LEAST_GAMMA = 100.0, 1e-12
MOST_TRIALS = 1e6
POINTS = 20_001
"""The points of the closed form at which the shift is searched."""
CLOSE = 1e-9
LEAST_NOISE = 1e-2
"""With less noise the closed form cannot resolve the loss; a grid then says that it is infinite."""
FURTHEST = 600.0
"""A loss beyond this is counted as infinite: e^600 is the last power that doubles hold with room to spare."""


@dataclass(frozen=True)
class Selection(DpEvent):
    """The best of K runs, each of which costs at most `event`; K is truncated negative binomial (η, γ) and secret.

    `slack` is how far the profile of a trial may lie above that of `event`, at every ε.
    """

    event: DpEvent
    eta: float = LOGARITHMIC
    gamma: float = 0.01
    slack: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= MOST_ETA:
            raise InvalidInput(
                f"eta={self.eta} must be in [0, {MOST_ETA:g}]: 0 is the logarithmic law, 1 the geometric one"
            )
        if not LEAST_GAMMA <= self.gamma < 1:
            raise InvalidInput(
                f"gamma={self.gamma} must be in [{LEAST_GAMMA:g}, 1): smaller ones mean more trials; try 0.01"
            )
        if not 0 <= self.slack <= 1:
            raise InvalidInput(f"slack={self.slack} must be in [0, 1]: it is a difference of δ; 0 is usual")

    @property
    def trials(self) -> float:
        """E[K]: how many trials there are on average."""
        return count_expected(self.eta, self.gamma)

    @property
    def odds(self) -> float:
        """(1−γ)/γ."""
        return (1 - self.gamma) / self.gamma


@dataclass(frozen=True)
class PaidBySearch(NoOpDpEvent):
    """A step of the run that won a search; the search's event, charged before the first trial, pays for it.

    It costs nothing. It is recorded when the search has ended, so that a ledger shows every release. The noise is that
    of its recipe at the first step.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        if not self.noise_multiplier > 0:
            raise InvalidInput(f"noise_multiplier={self.noise_multiplier} must be > 0: without noise, no privacy")


NAMES = {"selection": Selection, "paid-by-search": PaidBySearch}


def count_expected(eta: float, gamma: float) -> float:
    """E[K] = f'(1) = η(1−γ)/(γ(1 − γ^η)), for η = 0 its limit (1−γ)/(γ·log(1/γ))."""
    decay = -math.expm1(eta * math.log(gamma))  # 1 − γ^η
    share = eta / decay if decay > 0 else 1 / -math.log(gamma)
    return (1 - gamma) / gamma * share


def find_gamma(eta: float, trials: float) -> float:
    """Find the γ at which `trials` are expected."""
    if not 1 < trials <= MOST_TRIALS:
        raise InvalidInput(
            f"expected trials={trials:g} must be > 1 and at most {MOST_TRIALS:g}: 10 to 50 are usual; one trial needs "
            "no selection"
        )

    def miss(log_gamma: float) -> float:
        return math.log(count_expected(eta, math.exp(log_gamma)) / trials)

    return math.exp(brentq(miss, math.log(LEAST_GAMMA), -1e-12, xtol=1e-14, rtol=1e-14))


def expect_trials(events: Events, trials: float, eta: float = LOGARITHMIC, slack: float = 0.0) -> Selection:
    """Return the event of choosing the best of so many runs on average, each with these `events`."""
    return Selection(join(events), float(eta), find_gamma(eta, trials), slack)


def join(events: Events) -> DpEvent:
    """Return a run as one event: a composition of its events, each as often as it happens."""
    parts = [part if count == 1 else SelfComposedDpEvent(part, count) for part, count in events if count > 0]
    return parts[0] if len(parts) == 1 else ComposedDpEvent(parts)


def calibrate_selection(
    budget: Budget,
    make: Callable[[float], Events],
    trials: float,
    *,
    eta: float = LOGARITHMIC,
    slack: float = 0.0,
    beside: Events = (),
    start: float = 1.0,
) -> Calibrated:
    """Find each trial's smallest noise such that the whole search, `beside` other releases, is within the budget."""

    def plan(noise: float) -> Events:
        return [*beside, (expect_trials(make(noise), trials, eta, slack), 1)]

    return noise_for(budget, plan, start=start)


# -- profiles ---------------------------------------------------------------------------------------------------------


class Profile(Protocol):
    """δ(ε) of one direction of adjacency, at any ε."""

    @property
    def infinity(self) -> float:
        """Return what is left of δ at the largest ε."""
        ...

    @property
    def points(self) -> Array:
        """Return losses between which the profile hardly bends, from the smallest that matters to the largest."""
        ...

    def delta(self, epsilons: Array) -> Array:
        """Return the divergence at every one of `epsilons`."""
        ...


@dataclass(frozen=True, eq=False)
class GridProfile:
    """The profile of losses on a grid: linear in e^ε between the grid's points."""

    grid: LossGrid
    above: Array
    discounted: Array

    @classmethod
    def of(cls, grid: LossGrid) -> GridProfile:
        """With P_k = Σ_{j≥k} p_j and S_k = Σ_{j≥k} p_j e^(ℓ_k − ℓ_j): δ(ε) = ∞-mass + P_k − e^(ε − ℓ_k)·S_k."""
        backwards = grid.probabilities[::-1]
        above = grid.infinity + np.cumsum(backwards)[::-1]
        discounted = signal.lfilter([1.0], [1.0, -math.exp(-grid.interval)], backwards)[::-1]
        return cls(grid, above, discounted)

    @property
    def infinity(self) -> float:
        return self.grid.infinity

    @property
    def points(self) -> Array:
        return self.grid.losses

    def delta(self, epsilons: Array) -> Array:
        grid = self.grid
        place = np.ceil(epsilons / grid.interval - 1e-9).astype(np.int64) - grid.lower
        inside = np.clip(place, 0, len(self.above) - 1)
        paid = np.exp(np.minimum(epsilons - (grid.lower + inside) * grid.interval, 0.0)) * self.discounted[inside]
        found: Array = np.where(place >= len(self.above), grid.infinity, self.above[inside] - paid)
        return np.clip(found, grid.infinity, 1.0)


@dataclass(frozen=True)
class GaussianProfile:
    """The profile of Gaussian answers on all records, together one: in closed form, equal in both directions."""

    noise: float

    @property
    def infinity(self) -> float:
        return 0.0

    @property
    def points(self) -> Array:
        mu = 1 / self.noise
        reach: Array = mu * np.linspace(-DEVIATIONS, DEVIATIONS, POINTS)
        return mu * mu / 2 + reach

    def delta(self, epsilons: Array) -> Array:
        return gaussian_curve(epsilons, self.noise)


def find_profiles(event: DpEvent, adjacency: Adjacency) -> tuple[Profile, Profile]:
    """Find the profile of one `event`, or of the run it stands for, when a record is removed and when one is added."""
    return _find_profiles(to_json(event), adjacency)


@lru_cache(maxsize=32)
def _find_profiles(text: str, adjacency: Adjacency) -> tuple[Profile, Profile]:
    events = list(unroll(from_json(text)))
    if len(events) == 1 and isinstance(limit := events[0][0], FilterLimit) and events[0][1] == 1:
        return (find_filter_profile(limit, adjacency),) * 2
    if events and all(isinstance(event, GaussianDpEvent) for event, _ in events):
        together = merge_answers(ComposedDpEvent([SelfComposedDpEvent(event, count) for event, count in events]))
        assert isinstance(together, GaussianDpEvent)
        noise = require_noise(together) / (2 if adjacency == "replace-one" else 1)
        if LEAST_NOISE < noise < math.inf:
            return (GaussianProfile(noise),) * 2
    profiles = [GridProfile.of(side) for side in compose_sides(events, adjacency)]
    return profiles[0], profiles[-1]


def is_covered(events: Events, by: DpEvent, adjacency: Adjacency, slack: float = 0.0) -> bool:
    """Whether `events` cost no more than `by`, up to `slack`: at every ε, in both directions.

    Between two points a profile is at most its value at the first, and at least its value at the second. If both are
    grids, they are linear in e^ε between the points of both, so these points are enough. Below zero
    δ(−ε) = 1 − e^−ε + e^−ε·δ*(ε): what holds above zero in both directions holds there too.
    """
    if tally(events) == tally([(by, 1)]):
        return True
    mine, theirs = find_profiles(join(events), adjacency), find_profiles(by, adjacency)
    return all(_is_below(own, other, slack) for own, other in zip(mine, theirs, strict=True))


def _is_below(own: Profile, other: Profile, slack: float) -> bool:
    if isinstance(own, GaussianProfile) and isinstance(other, GaussianProfile):
        return own.noise >= other.noise
    points = np.concatenate([[0.0], own.points, other.points])
    points = np.unique(points[points >= 0])
    exact = isinstance(own, GridProfile) and isinstance(other, GridProfile)
    least = other.delta(points) if exact else np.append(other.delta(points[1:]), other.infinity)
    return bool((own.delta(points) <= least + slack).all())


# -- prices -----------------------------------------------------------------------------------------------------------


def find_shift(selection: Selection, opposite: Profile) -> float:
    """Find R = (η+1)·min over ε ≥ 0 of log(e^ε + (1−γ)/γ·δ*(ε)); any ε is sound, so points of the grid are enough."""
    epsilons = np.concatenate([[0.0], opposite.points[opposite.points > 0]])
    lifted = selection.odds * (opposite.delta(epsilons) + selection.slack)
    with np.errstate(divide="ignore"):
        return float((selection.eta + 1) * np.min(np.logaddexp(epsilons, np.log(lifted))))


@pld.register(Selection)
def _(event: Selection, adjacency: Adjacency, interval: float = INTERVAL) -> PrivacyLossDistribution:
    remove, add = find_profiles(event.event, adjacency)
    first = _shift(event, remove, find_shift(event, add), interval)
    if remove is add:
        return PrivacyLossDistribution(first)
    return PrivacyLossDistribution(first, _shift(event, add, find_shift(event, remove), interval))


def bound_delta(event: Selection, profile: Profile, shift: float, epsilons: Array) -> Array:
    """min(1, E[K]·(δ(ε − R) + slack)), in the direction of `profile`."""
    lifted: Array = event.trials * (profile.delta(epsilons - shift) + event.slack)
    return np.minimum(lifted, 1.0)


def _shift(event: Selection, profile: Profile, shift: float, interval: float) -> DensePLDPmf:
    """Return the distribution whose profile is the bound.

    A profile is 1 at e^ε = 0 and convex in e^ε. So the true profile stays below the line from there to any point of the
    bound: all losses below the point where that line is lowest are rounded up to it.
    """

    def bound(epsilons: Array) -> Array:
        return bound_delta(event, profile, shift, epsilons)

    upper = max(shift + float(profile.points[-1]), interval)
    if event.trials * (profile.infinity + event.slack) >= 1 or upper > FURTHEST:
        return DensePLDPmf(interval, 0, np.zeros(1), 1.0, True)
    points: Array = np.arange(math.ceil(upper / interval) + 1, dtype=np.float64) * interval
    touching = float(points[int(np.argmax((1 - bound(points)) * np.exp(-points)))])
    return connect_the_dots(bound, touching, max(upper, touching), interval)


@price_alone.register(Selection)
def _(event: Selection, delta: float, adjacency: Adjacency) -> float:
    """ε̂ + R with E[K]·(δ(ε̂) + slack) at most `delta`; the larger one of both directions.

    ε̂ is found by bisection, and is one at which that holds: R is not below zero, and neither is the answer.
    """
    sides = find_profiles(event.event, adjacency)
    return max(0.0, *(_find_epsilon(event, *pair, delta) for pair in (sides, sides[::-1])))


def _find_epsilon(event: Selection, profile: Profile, opposite: Profile, delta: float) -> float:
    target, shift = delta / event.trials - event.slack, find_shift(event, opposite)
    low, high = float(profile.points[0]), float(profile.points[-1])
    if math.isinf(shift) or profile.delta(np.array([high]))[0] > target:
        return math.inf
    while high - low > CLOSE:
        middle: Array = np.linspace(low, high, 65)
        enough = int(np.argmax(profile.delta(middle) <= target))
        low, high = float(middle[max(enough - 1, 0)]), float(middle[enough])
    return high + shift


@has_other_bounds.register(Selection)
def _(_event: Selection) -> bool:
    return True


@rdp_curve.register(Selection)
def _(event: Selection, adjacency: Adjacency, orders: Sequence[float] = ORDERS) -> Array:
    """ε(α) + log E[K]/(α−1) + (1+η)·min over λ of ((1 − 1/λ)·ε(λ) + log(1/γ)/λ); it never falls with the order."""
    if event.slack > 0:
        raise InvalidInput(
            f"selection with slack={event.slack:g} has no RDP price: δ is not a Rényi divergence; use pld"
        )
    alpha = np.asarray(orders, dtype=np.float64)
    curve = rdp_curve(event.event, adjacency, orders)
    common = (1 + event.eta) * float(np.min((1 - 1 / alpha) * curve - math.log(event.gamma) / alpha))
    raised = curve + math.log(event.trials) / (alpha - 1) + common
    order = np.argsort(alpha)
    lowered: Array = np.empty(len(alpha))
    lowered[order] = np.minimum.accumulate(raised[order][::-1])[::-1]
    return lowered
