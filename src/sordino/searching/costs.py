"""What a search costs: what every trial may spend, so that all of them together stay within the budget.

A search is paid for in one of two ways. **Selection** makes a random, secret number of trials and releases only the
best (`sordino.accounting.selection`). **Composition** makes a fixed number of trials and pays for each, so all of them
may be seen, and later settings may follow from earlier scores. Selection is far cheaper for many trials, and for few it
was cheaper wherever we looked. `plan_search` takes the cheaper way of those allowed, and says which.

Every trial may spend what its *reference* costs: the plan of a recipe that all trials share, or one Gaussian release if
their plans differ; a part of it pays for the score. Trials that choose their noise as they go, like those of DPIS, have
no plan; their reference is the limit of one Rényi filter, within which each of them stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from scipy.optimize import brentq

from sordino.accounting import filtered, pricing
from sordino.accounting.budget import Budget
from sordino.accounting.calibration import MOST_NOISE, noise_for
from sordino.accounting.events import (
    DpEvent,
    Events,
    GaussianDpEvent,
    SelfComposedDpEvent,
    count_alike,
    require_adjacency,
    spell_out,
    to_json,
)
from sordino.accounting.filter_limit import FilterLimit
from sordino.accounting.filtered import Filter
from sordino.accounting.gaussian import gaussian_delta
from sordino.accounting.selection import (
    LOGARITHMIC,
    Selection,
    calibrate_selection,
    expect_trials,
    find_gamma,
    is_covered,
    join,
)
from sordino.errors import InvalidInput
from sordino.recipe import Recipe

Way = Literal["selection", "composition"]
SCORE_SHARE = 0.05
"""The share of the reference, in squares of 1/σ, for the score of a trial."""
SLACK = 1e-3
"""The share of δ for all comparisons of profiles together, if a reference is one Gaussian and a plan is not."""
WIDER = 1.1
CLOSE = 1.002
"""The noise of a trial is found up to this factor."""
LEAST_LIMIT, LIMIT_CLOSE = 1e-6, 1e-3
"""Of a filter; and to which share its limit is found."""


@dataclass(frozen=True)
class Cost:
    """What a search costs: the event that is charged, what each trial may spend of it, and which way it is paid.

    `score_noise` is the deviation of the noise on a sum of values in [0, 1]; None where scores are public.
    """

    budget: Budget
    way: Way
    event: DpEvent
    reference: DpEvent
    trials: float
    slack: float
    score_noise: float | None
    training_noise: float
    disjoint: bool = False
    beside: tuple[tuple[DpEvent, int], ...] = ()

    @property
    def epsilon(self) -> float:
        """The ε of the whole search, with the releases beside it."""
        return self.budget.price([*self.beside, (self.event, 1)])

    @property
    def alone(self) -> float:
        """What one trial would have cost if its settings had been known: no claim about the winner of a search."""
        return pricing.epsilon([*self.beside, (self.reference, 1)], self.budget.delta, "pld", self.budget.adjacency)

    @property
    def with_training(self) -> tuple[tuple[DpEvent, int], ...]:
        """What is spent on the same record in addition to training: the score, unless it is on other records."""
        return () if self.disjoint else self.score_event

    @property
    def score_event(self) -> tuple[tuple[DpEvent, int], ...]:
        return () if self.score_noise is None else ((GaussianDpEvent(self.score_noise), 1),)

    @property
    def filter(self) -> Filter | None:
        """The filter for a training that chooses its noise as it goes: the limit of a trial, less its score."""
        if not isinstance(self.reference, FilterLimit):
            return None
        whole = self.reference.filter
        taken = math.fsum(count * whole.cost(event) for event, count in self.with_training)
        return replace(whole, limit=(whole.limit - taken) * (1 - filtered.ROUNDING))

    def covers(self, events: Events) -> bool:
        """Whether a trial that makes these `events`, its score among them, costs no more than was charged for it."""
        if isinstance(self.reference, FilterLimit):
            return self.reference.covers(events)
        return is_covered(events, self.reference, require_adjacency(self.budget.adjacency), self.slack)

    def covers_trial(self, events: Events) -> bool:
        """Whether everything that a trial charged is covered; if its score is on other records, each by itself."""
        counts = count_alike(events)
        for event, count in self.score_event:
            counts[to_json(event)] = counts.get(to_json(event), 0) - count
        if any(count < 0 for count in counts.values()) or not any(counts.values()):
            return False  # the score is missing, or nothing but the score was charged
        return self.covers([*spell_out(counts), *self.with_training])

    def calibrate(self, make: Callable[[float], Events], start: float) -> float:
        """Find the smallest noise, to 0.2 %, at which `make(noise)` and the score are covered; try `start` first."""

        def fits(noise: float) -> bool:
            return self.covers([*make(noise), *self.with_training])

        low, high = start / CLOSE, start
        while not fits(high):
            low, high = high, high * 1.1
            if high > MOST_NOISE:
                raise InvalidInput(
                    "no noise makes this trial as cheap as was charged: it releases something else too, or its plan "
                    "is to be given as like="
                )
        while low > 1e-3 and fits(low):
            low, high = low / 1.3, low
        while high / low > CLOSE:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high


def plan_search(
    budget: Budget,
    *,
    trials: float,
    eta: float = LOGARITHMIC,
    like: Recipe | None = None,
    score: bool = True,
    ways: tuple[Way, ...] = ("selection", "composition"),
    beside: Events = (),
    slack: float | None = None,
    disjoint: bool = False,
) -> Cost:
    """Find the noise of every trial such that the whole search meets the `budget`, by the cheaper one of `ways`.

    `like` is a recipe whose plan all trials follow, calibrated or not. `beside` are releases that are made once, before
    the search. `score` says whether trials are scored on private records.
    """
    if not trials > 1:
        raise InvalidInput(f"expected trials={trials:g} must be > 1: one trial needs no search")
    find_gamma(eta, trials)
    if disjoint and budget.adjacency != "add-or-remove-one":
        raise InvalidInput(
            f"disjoint=True has no proof under {budget.adjacency} adjacency: an exchanged record may leave one part "
            "and enter the other; leave it out"
        )
    if budget.accountant == filtered.NAME:  # a trial's; the price of the search itself is known in advance
        budget = replace(budget, accountant="pld")
    if like is not None and chooses_noise(like, budget):
        return _plan_under_filter(budget, trials, eta, like, score, ways, beside, disjoint)
    if slack is None:  # a difference of δ has no price by Rényi divergences, nor by limit theorems
        slack = SLACK * budget.delta / math.ceil(trials) if budget.accountant == "pld" else 0.0
    allowed = slack
    way, noise = _choose_way(ways, budget, trials, eta, allowed, beside)
    if way == "composition":
        allowed = 0.0  # the event of a composition does not charge for it
    shared = disjoint or not score
    score_noise = (noise if disjoint else noise / math.sqrt(SCORE_SHARE)) if score else None
    training = noise if shared else noise / math.sqrt(1 - SCORE_SHARE)
    trial = _one_gaussian(noise)
    if like is not None:
        recipe, last = like, [] if shared or score_noise is None else _one_gaussian(score_noise)

        def follow(sigma: float) -> Events:
            return [*replace(recipe, noise_multiplier=sigma).plan(), *last]

        training = _pay(way, budget, trials, eta, allowed, follow, beside)
        trial = follow(training)
    event, reference = _join(way, trial, trials, eta, allowed)
    cost = Cost(budget, way, event, reference, trials, allowed, score_noise, training, disjoint, tuple(beside))
    while cost.disjoint and score_noise is not None and not cost.covers(_one_gaussian(score_noise)):
        score_noise *= WIDER
        cost = replace(cost, score_noise=score_noise)
    return cost


def _choose_way(
    ways: tuple[Way, ...], budget: Budget, trials: float, eta: float, slack: float, beside: Events
) -> tuple[Way, float]:
    """Choose the way that needs less noise if a trial is one Gaussian release; return it and that noise."""
    found: dict[Way, float] = {}
    if "selection" in ways:
        found["selection"] = _pay("selection", budget, trials, eta, slack, _one_gaussian, beside)
    least = math.sqrt(math.ceil(trials)) / find_precision(budget)  # a composition with nothing beside it
    if "composition" in ways and least < found.get("selection", math.inf):
        found["composition"] = _pay("composition", budget, trials, eta, slack, _one_gaussian, beside)
    way = min(found, key=lambda name: found[name])
    return way, found[way]


def _one_gaussian(noise: float) -> Events:
    return [(GaussianDpEvent(noise), 1)]


def _pay(
    way: Way, budget: Budget, trials: float, eta: float, slack: float, make: Callable[[float], Events], beside: Events
) -> float:
    """Return the noise of each trial."""
    start = 1 / find_precision(budget)
    if way == "selection":
        found = calibrate_selection(budget, make, trials, eta=eta, slack=slack, beside=beside, start=2 * start)
    else:
        count = math.ceil(trials)

        def plan(noise: float) -> Events:
            return [*beside, *((event, count * times) for event, times in make(noise))]

        found = noise_for(budget, plan, start=start * math.sqrt(count))
    return found.noise_multiplier


def _join(way: Way, trial: Events, trials: float, eta: float, slack: float) -> tuple[DpEvent, DpEvent]:
    """Return the event of the search, and the one that no trial may exceed."""
    if way == "selection":
        selection: Selection = expect_trials(trial, trials, eta, slack)
        return selection, selection.event
    return SelfComposedDpEvent(join(trial), math.ceil(trials)), join(trial)


# -- trials that choose their noise as they go ------------------------------------------------------------------------


def fit_filter(recipe: Recipe, rdp_filter: Filter, delta: float) -> Recipe | None:
    """Make `recipe` ready to train under this filter; None if it has a plan and needs no filter."""
    if recipe.sampler is None:
        return None
    budget = Budget(rdp_filter.epsilon(delta), delta, filtered.NAME, rdp_filter.adjacency)
    try:
        open_ended = replace(recipe, rdp_filter=rdp_filter, noise_multiplier=None, budget=budget)
    except InvalidInput:  # its parts have no proof under a filter, so it has a plan
        return None
    return recipe.sampler.calibrate(open_ended, budget)


def chooses_noise(recipe: Recipe, budget: Budget) -> bool:
    """Whether trials of `recipe` follow no plan, so that only a filter can price them."""
    try:
        return fit_filter(recipe, Filter(2.0, budget.epsilon, budget.adjacency), budget.delta) is not None
    except InvalidInput:  # it needs a filter, if not this one
        return True


def _plan_under_filter(
    budget: Budget,
    trials: float,
    eta: float,
    like: Recipe,
    score: bool,
    ways: tuple[Way, ...],
    beside: Events,
    disjoint: bool,
) -> Cost:
    """Price a search whose trials stay within a filter, at the order where `like` needs the least noise.

    Rényi prices are enough to choose order and way, and they are fast; the limit is then as large as the true price
    allows. The search for the order begins where one Gaussian release would need the least noise.
    """
    quick = replace(budget, accountant="rdp")

    def fill(order: float) -> Cost | None:
        costs = [_fill_filter(quick, way, order, trials, eta, score, beside, disjoint) for way in ways]
        return min((cost for cost in costs if cost is not None), key=lambda cost: cost.training_noise, default=None)

    def need_noise(cost: Cost) -> float:
        assert cost.filter is not None
        try:
            ready = fit_filter(like, cost.filter, budget.delta)
        except InvalidInput:  # it leaves too little to train with
            return math.inf
        return math.inf if ready is None or ready.noise_multiplier is None else ready.noise_multiplier

    found = [cost for order in filtered.CANDIDATES if (cost := fill(order)) is not None]
    noises = [cost.training_noise for cost in found]
    place = _descend(len(found), lambda where: need_noise(found[where]), noises.index(min(noises))) if found else None
    if place is None:
        if found and (rest := found[noises.index(min(noises))].filter) is not None:
            fit_filter(like, rest, budget.delta)  # it says why this is impossible
        raise InvalidInput(
            f"epsilon={budget.epsilon:g} leaves too little for each of {trials:g} expected trials of {like.name!r}: "
            "allow more, or fewer trials"
        )
    best = found[place]
    assert isinstance(best.reference, FilterLimit)
    whole = _fill_filter(budget, best.way, best.reference.order, trials, eta, score, beside, disjoint)
    assert whole is not None
    return whole


def _descend(count: int, height: Callable[[int], float], place: int) -> int | None:
    """Walk downhill from `place` until no neighbour is lower; None if all places seen are infinitely high."""
    find = cache(height)
    while True:
        lowest = min([place, *(where for where in (place - 1, place + 1) if 0 <= where < count)], key=find)
        if find(lowest) >= find(place):
            return place if math.isfinite(find(place)) else None
        place = lowest


def _fill_filter(
    budget: Budget, way: Way, order: float, trials: float, eta: float, score: bool, beside: Events, disjoint: bool
) -> Cost | None:
    """Return the search with the largest limit of a trial at `order` that the budget pays for, if it pays for any."""

    def spend(limit: float) -> tuple[DpEvent, DpEvent]:
        return _join(way, [(FilterLimit(order, limit, budget.adjacency), 1)], trials, eta, 0.0)

    def allows(limit: float) -> bool:
        return budget.allows([*beside, (spend(limit)[0], 1)])

    low, high = LEAST_LIMIT, budget.epsilon
    if not allows(low):
        return None
    while high > low * (1 + LIMIT_CLOSE):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if allows(middle) else (low, middle)
    event, reference = spend(low)
    score_noise = math.sqrt(order / (2 * low * (1 if disjoint else SCORE_SHARE))) if score else None
    cost = Cost(budget, way, event, reference, trials, 0.0, score_noise, 1.0, disjoint, tuple(beside))
    assert cost.filter is not None
    return replace(cost, training_noise=math.sqrt(order / (2 * cost.filter.limit)))


def find_precision(budget: Budget) -> float:
    """Find about the 1/σ of one Gaussian release that the budget pays for; at most 1000, which no search needs."""
    if gaussian_delta(1e3, budget.epsilon) < budget.delta:
        return 1e3
    return float(brentq(lambda mu: gaussian_delta(mu, budget.epsilon) - budget.delta, 1e-6, 1e3))
