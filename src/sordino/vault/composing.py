"""How the runs on a dataset add up: the rule that decides whether another reservation fits, and what all runs cost.

``adaptive`` is the default: one Rényi filter over the whole dataset. Its order is fixed when the budget is created, and
the divergences of all events at that order add up to at most its limit. That holds however each run was chosen after
looking at the others, whenever it stopped and in whichever order their releases alternate. A part of δ is set aside for
releases that may fail, such as naming values that were not listed in advance: their probabilities add up to at most
that part.

``planned`` composes all events as one privacy loss distribution. That is tighter, but holds only if no run, and neither
its length nor its noise, was chosen because of what an earlier one on the same dataset showed. This cannot be checked:
the owner chooses the rule, and every total says so. docs/proofs/dataset-budget.md proves both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from sordino.accounting.budget import Budget
from sordino.accounting.events import (
    DpEvent,
    Events,
    GaussianDpEvent,
    NoOpDpEvent,
    from_json,
    require_adjacency,
    unroll,
)
from sordino.accounting.filtered import Filter, Filtered
from sordino.accounting.pricing import epsilon, rdp_curve
from sordino.accounting.unlisted import Unlisted
from sordino.errors import InvalidInput

Composition = Literal["adaptive", "planned"]
LOOKED = "nobody chose a run on this dataset, or when it ended, because of what an earlier one had released"
"""The assumption of a total by the planned rule."""
LEAST_ORDER = 2.0
"""Below this, the divergence of sampled events with little noise cannot be computed, and counts as infinite."""
FAILING = 0.25
"""The part of δ that is set aside for releases that may fail; it costs log(4/3)/(α-1) of ε."""
ROUNDING = 1e-9
"""Summing in another order changes less than this."""


@dataclass(frozen=True)
class BudgetRule:
    """The budget of a dataset and its rule of composition; `order` is None for the planned rule.

    `failing` is how much of the budget's δ is set aside for releases that may fail; it is 0 for the planned rule, which
    has one distribution for everything.
    """

    budget: Budget
    composition: Composition = "adaptive"
    order: float | None = None
    failing: float = 0.0

    @classmethod
    def choose(cls, budget: Budget, composition: str = "adaptive", order: float | None = None) -> BudgetRule:
        """Choose the rule for a new budget; its order is the one at which a Gaussian release needs the least noise."""
        if composition not in get_args(Composition):
            raise InvalidInput(f"composition={composition!r} is unknown: use 'adaptive' or 'planned'")
        if composition == "planned":
            if order is not None:
                raise InvalidInput(f"order={order:g} is for composition='adaptive': leave it out")
            return cls(budget, "planned")
        failing = FAILING * budget.delta
        if order is None:
            rest = replace(budget, delta=budget.delta - failing)
            suited = Filter.for_plan(rest, lambda noise: [(GaussianDpEvent(noise), 1)]).order
            order = max(suited, LEAST_ORDER)
        Filter(order, 1.0)  # refuses a number that is no order
        chosen = cls(budget, "adaptive", float(order), failing)
        assert chosen.filter is not None  # refuses an order at which nothing could be released
        return chosen

    @property
    def filter(self) -> Filter | None:
        """The filter that all divergences must pass, at the δ that is not set aside."""
        if self.order is None:
            return None
        return Filter.within(replace(self.budget, delta=self.budget.delta - self.failing), self.order)

    @property
    def limit(self) -> float | None:
        """How much Rényi divergence the dataset may spend in all; None if the rule does not count it."""
        return None if self.filter is None else self.filter.limit

    def cost(self, held: Mapping[str, int]) -> float:
        """Return what these events, by their text, add to the sum that the filter limits; 0 if there is no filter."""
        return 0.0 if self.order is None else math.fsum(n * self._cost(text) for text, n in held.items() if n)

    def _cost(self, text: str) -> float:
        assert self.order is not None
        return _divergence(text, self.order, self.budget.adjacency)

    def add_failures(self, held: Mapping[str, int]) -> float:
        """Bound the probability that any of these events fails."""
        return math.fsum(n * _find_failure(text, self.budget.adjacency) for text, n in held.items() if n)

    def allows(self, held: Mapping[str, int]) -> bool:
        """Whether all of this together stays within the budget."""
        if self.limit is not None:
            return self.cost(held) <= self.limit and self.allows_failures(held)
        return self.price(held) <= self.budget.epsilon

    def allows_failures(self, held: Mapping[str, int]) -> bool:
        """Whether the releases among these that may fail stay within what is set aside for them."""
        return self.order is None or self.add_failures(held) <= self.failing

    def measure(self, held: Mapping[str, int]) -> float:
        """Return the share of the whole that these events use: of the limit, of what is set aside, or of ε."""
        if self.limit is None:
            return self.price(held) / self.budget.epsilon
        failed = self.add_failures(held)
        return max(self.cost(held) / self.limit, failed / self.failing if failed else 0.0)

    def price(self, held: Mapping[str, int]) -> float:
        """Return the ε of all these events at the budget's δ, by this rule; 0 for no event.

        Under the filter it is the divergence plus what the conversion at its order adds, which is ε minus the limit.
        """
        if not any(held.values()):
            return 0.0
        if self.limit is None:
            return self.price_if_planned(held)
        return max(0.0, self.cost(held) + self.budget.epsilon - self.limit)

    def price_if_planned(self, held: Mapping[str, int]) -> float:
        """Return the same as one privacy loss distribution, which holds if no one looked; infinite if there is none.

        A run that chose its noise as it went has no such price, and is left out.
        """
        events: Events = [(from_json(text), count) for text, count in held.items() if count]
        if any(isinstance(event, Filtered) for event, _ in events):
            return math.inf
        return epsilon(events, self.budget.delta, "pld", self.budget.adjacency)

    def price_alone(self, held: Mapping[str, int]) -> float:
        """Return what a run's or a person's part would cost without the others: to compare parts, not as a promise.

        At one order fixed for the whole, even a small part pays for the conversion, so the smaller of both prices says
        more.
        """
        return min(self.price(held), self.price_if_planned(held))

    def require_priced(self, held: Mapping[str, int]) -> None:
        """Refuse events that this rule has no price for."""
        for text in held:
            event = from_json(text)
            if self.order is None and isinstance(event, Filtered):
                raise InvalidInput(
                    "a run that chooses its noise as it goes has no place in a planned composition: "
                    "create the dataset's budget with composition='adaptive'"
                )
            if self.order is not None and not _has_divergence(event, self.budget.adjacency):
                raise InvalidInput(
                    f"a release of kind {type(event).__name__} has no Renyi price, which adaptive budgets add up: "
                    "use another recipe, or a dataset's budget with composition='planned'"
                )
        if not math.isfinite(self.cost(held)):
            raise InvalidInput(f"order={self.order:g} of the dataset's budget has no finite price for this: add noise")


def whole_filter(order: float, limit: float, adjacency: str) -> Filtered:
    """Return one event for everything that a filter lets pass, for runs that choose their noise as they go."""
    return Filtered(NoOpDpEvent(), order, limit, adjacency)


def is_whole_filter(event: DpEvent) -> bool:
    """Whether this is what `whole_filter` makes."""
    return isinstance(event, Filtered) and isinstance(event.event, NoOpDpEvent)


def _has_divergence(event: DpEvent, adjacency: str) -> bool:
    """Whether an event has a curve of Rényi divergences, apart from its chance to fail."""
    if isinstance(event, Filtered):
        return True
    try:
        for part, _ in unroll(event):
            if not isinstance(part, Unlisted):
                rdp_curve(part, require_adjacency(adjacency), [LEAST_ORDER])
    except InvalidInput:
        return False
    return True


@lru_cache(maxsize=4096)
def _divergence(text: str, order: float, adjacency: str) -> float:
    """Return the Rényi divergence of one event at `order`.

    An event that passed another filter costs its own divergence; a whole filter costs its limit, if its order is no
    smaller than ours, because the divergence grows with the order.
    """
    event = from_json(text)
    if isinstance(event, Filtered):
        if event.adjacency != adjacency:
            raise InvalidInput(f"the run's filter is for {event.adjacency}, the dataset's budget for {adjacency}")
        if is_whole_filter(event):
            if event.order < order:
                raise InvalidInput(
                    f"the run's filter has Renyi order {event.order:g}, the dataset's budget {order:g}: "
                    "its order must be at least that of the dataset"
                )
            return event.limit
        event = event.event
    counter = Filter(order, 1.0, adjacency)
    return math.fsum(n * counter.cost(part) for part, n in unroll(event) if not isinstance(part, Unlisted))


@lru_cache(maxsize=4096)
def _find_failure(text: str, adjacency: str) -> float:
    """Find the probability that one event fails; under replace-one, one record leaves and another joins."""
    event = from_json(text)
    inner = event.event if isinstance(event, Filtered) else event
    times = 1 if adjacency == "add-or-remove-one" else 2
    return times * math.fsum(n * part.delta for part, n in unroll(inner) if isinstance(part, Unlisted))
