"""A Rényi filter: the price of a run whose later releases are chosen after its earlier ones are known.

If the noise or the rate of a release depends on earlier releases, the sum of the prices is itself random. Then the
usual accounting does not apply: a PLD of the events that happened, or the best Rényi order for them, is chosen with
knowledge of the outcome. But this holds: fix one order α and a limit B in advance, and refuse every release that would
raise Σ ρ_t(α) above B before it is made. Then everything released together is (α, B)-RDP, at any stopping time
(Feldman & Zrnic 2021, Thm. 4.3), which becomes (ε, δ) at that same α (Canonne, Kamath & Steinke 2020, Prop. 12).

The limit sets the price, not what was used of it: a sum that happens to be smaller proves nothing.
docs/proofs/filter.md says how much more this costs than a fixed plan, and which other filters were tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NoReturn

import numpy as np
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta, compute_epsilon

from sordino.accounting.events import Adjacency, DpEvent, Events, from_json, require_adjacency, to_json, unroll
from sordino.accounting.grids import Array
from sordino.accounting.pld import pld, sampled_pld
from sordino.accounting.rdp import ORDERS, rdp_curve, sampled_rdp_curve
from sordino.errors import BudgetExhausted, InvalidInput

if TYPE_CHECKING:
    from sordino.accounting.budget import Budget

NAME = "rdp-filter"
ROUNDING = 1e-9  # another order of summing changes less; a limit that is passed by less is priced as the sum
LEAST_NOISE, MOST_NOISE = 1e-2, 1e6
CANDIDATES = (*(half / 2 for half in range(3, 21)), *range(11, 21), *range(24, 65, 8), 96, 128, 192, 256, 512, 1024)


@dataclass(frozen=True)
class Filter:
    """At most `limit` of Rényi divergence at `order`, both fixed before anything is released.

    Guarantees: the releases that `allowance` lets pass are together (order, limit)-RDP, however each was chosen.
    """

    order: float
    limit: float
    adjacency: str = "add-or-remove-one"

    def __post_init__(self) -> None:
        if not (self.order > 1 and math.isfinite(self.order)):
            raise InvalidInput(f"order={self.order} must be > 1 and finite: about 5 suits epsilon=3, 20 suits 0.5")
        if not (self.limit > 0 and math.isfinite(self.limit)):
            raise InvalidInput(f"limit={self.limit} must be > 0 and finite: use Filter.within(budget, order)")
        require_adjacency(self.adjacency)

    @classmethod
    def within(cls, budget: Budget, order: float) -> Filter:
        """Return the filter at `order` whose guarantee is exactly the budget's."""
        limit = budget.epsilon - _conversion(order, budget.delta)
        if limit <= 0:
            raise InvalidInput(
                f"order={order:g} is too small for epsilon={budget.epsilon:g} at delta={budget.delta:g}: "
                "nothing could be released; use a larger order"
            )
        return cls(order, limit, budget.adjacency)

    @classmethod
    def for_plan(cls, budget: Budget, plan: Callable[[float], Events]) -> Filter:
        """Return the filter within `budget` at the order where `plan(noise)`, a public guess, needs the least noise."""
        orders = [order for order in CANDIDATES if budget.epsilon > _conversion(order, budget.delta)]
        limits = np.array([budget.epsilon - _conversion(order, budget.delta) for order in orders])
        adjacency = require_adjacency(budget.adjacency)

        def slack(noise: float) -> Array:
            spent = sum((count * rdp_curve(event, adjacency, orders) for event, count in plan(noise)), np.zeros(1))
            return limits - spent

        noise = find_least_noise(lambda noise: -float(slack(noise).max()), 0.0, tolerance=1e-3)
        return cls.within(budget, orders[int(slack(noise).argmax())])

    def event(self, event: DpEvent) -> Filtered:
        """Bind `event` to this filter, as it is recorded, so that no other accountant prices it."""
        return event if isinstance(event, Filtered) else Filtered(event, self.order, self.limit, self.adjacency)

    def cost(self, event: DpEvent) -> float:
        """Return the Rényi divergence of one `event` at this filter's order."""
        if isinstance(event, Filtered):
            if event.filter != self:
                raise InvalidInput(
                    f"{event!r} belongs to another filter than {self!r}: a run has one, fixed in advance"
                )
            event = event.event
        return _cost(to_json(event), self.order, require_adjacency(self.adjacency))

    def allowance(self, spent: Events = ()) -> Filtering:
        """Return what is left of this filter after the earlier releases."""
        return Filtering(self, spent)

    def epsilon(self, delta: float) -> float:
        """Return the ε at `delta` of everything that this filter lets pass."""
        return _epsilon(self.order, self.limit, delta)


@dataclass(frozen=True)
class Filtered(DpEvent):
    """An event that passed a filter. Its price is the filter's: one order, one limit."""

    event: DpEvent
    order: float
    limit: float
    adjacency: str = "add-or-remove-one"

    @property
    def filter(self) -> Filter:
        return Filter(self.order, self.limit, self.adjacency)


NAMES = {"filtered": Filtered}


class Filtering:
    """The allowance of a run under a filter: refuses the release that would pass the limit (law 5)."""

    def __init__(self, rdp_filter: Filter, spent: Events = ()) -> None:
        self._filter = rdp_filter
        self._spent = math.fsum(count * rdp_filter.cost(event) for event, count in spent)

    @property
    def left(self) -> float:
        """How much Rényi divergence may still be spent; public, like everything it is computed from."""
        return max(0.0, self._filter.limit - self._spent)

    def require(self, event: DpEvent) -> None:
        cost = self._filter.cost(event)
        if not self._spent + cost <= self._filter.limit:
            raise BudgetExhausted(
                f"the next release costs {cost:.4g} at Renyi order {self._filter.order:g}, {self.left:.4g} of "
                f"{self._filter.limit:.4g} are left: training ends here with the model as it is"
            )
        self._spent += cost

    def covers(self, events: Sequence[DpEvent]) -> int:
        return 0  # the next event is chosen after looking at earlier releases


class FilterPricing:
    """ε and δ of what passed a filter: those of its limit, at its order. A proven upper bound."""

    name = NAME
    basis: Literal["proven"] = "proven"

    def epsilon(self, events: Events, delta: float, adjacency: Adjacency) -> float:
        order, spent = self._bound(events, adjacency)
        return _epsilon(order, spent, delta)

    def delta(self, events: Events, epsilon: float, adjacency: Adjacency) -> float:
        order, spent = self._bound(events, adjacency)
        return float(compute_delta([order], [spent], epsilon)[0]) if spent else 0.0

    def _bound(self, events: Events, adjacency: Adjacency) -> tuple[float, float]:
        """(α, B), or (α, ∞) where the events add up to more than any filter of theirs would have let pass."""
        parts = [part for event, count in events for part in unroll(event, count)]
        if not parts:
            return 2.0, 0.0
        first = next((event for event, _ in parts if isinstance(event, Filtered)), None)
        if first is None:
            raise InvalidInput(
                f"accountant={NAME!r} prices runs under a filter only: use 'pld' for a plan fixed in advance"
            )
        if first.adjacency != adjacency:
            raise InvalidInput(f"the filter limits {first.adjacency} adjacency, not {adjacency}: ask for that one")
        spent = math.fsum(count * first.filter.cost(event) for event, count in parts)
        return first.order, max(first.limit, spent) if spent <= first.limit * (1 + ROUNDING) else math.inf


def find_least_noise(
    cost: Callable[[float], float], limit: float, *, start: float = 1.0, tolerance: float = 1e-6
) -> float:
    """Find the smallest noise whose `cost` is at most `limit`; never below it, hardly above.

    The cost must fall as the noise grows.
    Raises `BudgetExhausted` if no noise is enough.
    """
    enough = start
    while not cost(enough) <= limit:
        enough *= 2
        if enough > MOST_NOISE:
            raise BudgetExhausted(f"no noise keeps the planned releases within {limit:.4g}: training ends here")
    short = enough / 2
    while short > LEAST_NOISE and cost(short) <= limit:
        short, enough = short / 2, short
    while enough / short > 1 + tolerance:
        middle = math.sqrt(short * enough)
        if cost(middle) <= limit:
            enough = middle
        else:
            short = middle
    return enough


def _conversion(order: float, delta: float) -> float:
    """ε − ρ at `order` (Canonne, Kamath & Steinke 2020, Prop. 12)."""
    return math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


def _epsilon(order: float, spent: float, delta: float) -> float:
    return float(compute_epsilon([order], [spent], delta)[0]) if spent else 0.0


@lru_cache(maxsize=4096)
def _cost(text: str, order: float, adjacency: Adjacency) -> float:
    return float(rdp_curve(from_json(text), adjacency, [order])[0])


def _refuse(event: Filtered) -> NoReturn:
    raise InvalidInput(
        f"this run chose its events as it went, so that Renyi order {event.order:g}, fixed in advance, alone may price "
        f"it: no PLD and no better order afterwards; use accountant={NAME!r}"
    )


@rdp_curve.register(Filtered)
def _(event: Filtered, _adjacency: Adjacency, _orders: Sequence[float] = ORDERS) -> NoReturn:
    _refuse(event)


@sampled_rdp_curve.register(Filtered)
def _(event: Filtered, _rate: float, _adjacency: Adjacency, _orders: Sequence[float] = ORDERS) -> NoReturn:
    _refuse(event)


@pld.register(Filtered)
def _(event: Filtered, _adjacency: Adjacency, _interval: float = 0.0) -> NoReturn:
    _refuse(event)


@sampled_pld.register(Filtered)
def _(event: Filtered, _rate: float, _adjacency: Adjacency, _interval: float = 0.0) -> NoReturn:
    _refuse(event)
