"""How the runs on a dataset add up: the rule that decides whether another reservation fits, and what it all costs.

``adaptive`` is the default: one Rényi filter over the whole dataset. Its order is fixed when the budget is created, and
the divergences of all events at that order add up to at most its limit. That holds however each run was chosen after
looking at the others, whenever it stopped and in whichever order their releases alternate.

``planned`` composes all events as one privacy loss distribution. That is tighter, and holds only if nobody chose a run,
its length or its noise because of what an earlier one on the same dataset had shown. Nobody can check that: the owner
chooses it, and every total says so. docs/proofs/dataset-budget.md proves both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
    to_json,
)
from sordino.accounting.filtered import Filter, Filtered
from sordino.accounting.pricing import epsilon, rdp_curve
from sordino.errors import InvalidInput

Composition = Literal["adaptive", "planned"]
LOOKED = "nobody chose a run on this dataset, or when it ended, because of what an earlier one had released"
"""What a total by the planned rule rests on."""
LEAST_ORDER = 2.0
"""Below it the divergence of sampled events with little noise cannot be computed to the end, and counts as infinite."""
ROUNDING = 1e-9
"""Sums in another order differ by less."""


@dataclass(frozen=True)
class Rule:
    """The budget of a dataset and the composition that it is kept by; `order` is None where that is planned."""

    budget: Budget
    composition: Composition = "adaptive"
    order: float | None = None

    @classmethod
    def choose(cls, budget: Budget, composition: str = "adaptive", order: float | None = None) -> Rule:
        """The rule for a new budget; the order is the one at which a Gaussian release needs the least noise."""
        if composition not in get_args(Composition):
            raise InvalidInput(f"composition={composition!r} is unknown: use 'adaptive' or 'planned'")
        if composition == "planned":
            if order is not None:
                raise InvalidInput(f"order={order:g} is for composition='adaptive': leave it out")
            return cls(budget, "planned")
        if order is None:
            suited = Filter.for_plan(budget, lambda noise: [(GaussianDpEvent(noise), 1)]).order
            order = max(suited, LEAST_ORDER)
        Filter(order, 1.0)  # refuses what is no order
        Filter.within(budget, order)  # refuses an order at which nothing could be released
        return cls(budget, "adaptive", float(order))

    @property
    def filter(self) -> Filter | None:
        return None if self.order is None else Filter.within(self.budget, self.order)

    @property
    def limit(self) -> float | None:
        """How much Rényi divergence the dataset may give away in all; None where that is not what is counted."""
        return None if self.filter is None else self.filter.limit

    def cost(self, held: Mapping[str, int]) -> float:
        """What these events, by their text, add to the sum that the filter limits; 0 where there is no filter."""
        return 0.0 if self.order is None else math.fsum(n * self._cost(text) for text, n in held.items() if n)

    def _cost(self, text: str) -> float:
        assert self.order is not None
        return _divergence(text, self.order, self.budget.adjacency)

    def allows(self, held: Mapping[str, int]) -> bool:
        """Whether all of this together stays within the budget."""
        if self.limit is not None:
            return self.cost(held) <= self.limit
        return self.price(held) <= self.budget.epsilon

    def price(self, held: Mapping[str, int]) -> float:
        """The ε of all these events at the budget's δ, by this rule; of nothing 0.

        Under the filter it is the divergence and what the conversion at its order adds, which is ε less the limit.
        """
        if not any(held.values()):
            return 0.0
        if self.limit is None:
            return self.price_if_planned(held)
        return max(0.0, self.cost(held) + self.budget.epsilon - self.limit)

    def price_if_planned(self, held: Mapping[str, int]) -> float:
        """The same as one privacy loss distribution: what it would be had nobody looked; infinite where there is none.

        A run that chose its noise as it went has no such price, and is not among them.
        """
        events: Events = [(from_json(text), count) for text, count in held.items() if count]
        if any(isinstance(event, Filtered) for event, _ in events):
            return math.inf
        return epsilon(events, self.budget.delta, "pld", self.budget.adjacency)

    def price_alone(self, held: Mapping[str, int]) -> float:
        """What a part, a run's or a person's, would cost without the others: to compare parts, and no promise.

        At one order fixed for the whole even a small part has the price of the conversion, so that the smaller of both
        prices tells more.
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
                    f"a release of kind {type(event).__name__} has no Renyi price, which adaptive budgets add up: give "
                    "--schema and --classes so that nothing is released before training, or use composition='planned'"
                )
        if not math.isfinite(self.cost(held)):
            raise InvalidInput(f"order={self.order:g} of the dataset's budget has no finite price for this: add noise")


def whole_filter(order: float, limit: float, adjacency: str) -> Filtered:
    """One event that stands for all that a filter lets pass: what a run reserves that chooses its noise as it goes."""
    return Filtered(NoOpDpEvent(), order, limit, adjacency)


def is_whole_filter(event: DpEvent) -> bool:
    """Whether this is what `whole_filter` makes."""
    return isinstance(event, Filtered) and isinstance(event.event, NoOpDpEvent)


def _has_divergence(event: DpEvent, adjacency: str) -> bool:
    """Whether an event has a curve of Rényi divergences at all; one that may fail with a probability has none."""
    if isinstance(event, Filtered):
        return True
    try:
        rdp_curve(event, require_adjacency(adjacency), [LEAST_ORDER])
    except InvalidInput:
        return False
    return True


@lru_cache(maxsize=4096)
def _divergence(text: str, order: float, adjacency: str) -> float:
    """The Rényi divergence of one event at `order`.

    What passed another filter costs what it is; a whole filter its limit, where its order is no smaller than ours: the
    divergence grows with the order.
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
    return Filter(order, 1.0, adjacency).cost(from_json(to_json(event)))
