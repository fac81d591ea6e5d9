"""A budget: how much may be spent, how much of a plan it pays for, and who refuses the release beyond it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sordino.accounting.events import (
    DpEvent,
    Events,
    count_alike,
    require_adjacency,
    spell_out,
    to_json,
)
from sordino.accounting.pricing import epsilon, require_accountant
from sordino.errors import BudgetExhausted, InvalidInput


@dataclass(frozen=True)
class Budget:
    """At most `epsilon` at `delta`, as `accountant` prices it under `adjacency`."""

    epsilon: float
    delta: float
    accountant: str = "pld"
    adjacency: str = "add-or-remove-one"

    def __post_init__(self) -> None:
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise InvalidInput(
                f"epsilon={self.epsilon} must be > 0 and finite: 1 to 8 is usual, smaller is more private"
            )
        if not 0 < self.delta < 1:
            raise InvalidInput(f"delta={self.delta} must be in (0, 1): choose it well below 1 / number of records")
        require_accountant(self.accountant)
        require_adjacency(self.adjacency)

    def price(self, events: Events) -> float:
        """Return the ε of `events` at this budget's δ."""
        return epsilon(events, self.delta, self.accountant, self.adjacency)

    def allows(self, events: Events) -> bool:
        """Whether all of `events` together stay within the budget."""
        return self.price(events) <= self.epsilon


def affordable(budget: Budget, spent: Events, upcoming: Sequence[DpEvent | tuple[DpEvent, int]]) -> int:
    """Return how many of the `upcoming` events, in order, still fit together with what was `spent`.

    A run (event, count) stands for `count` events. The price grows with every event, so the largest prefix is found by
    bisection: one pricing if everything fits, otherwise about log2 of the number of events.
    """
    runs = [run if isinstance(run, tuple) else (run, 1) for run in upcoming]
    total = sum(count for _, count in runs)
    if total and budget.allows([*spent, *runs]):
        return total
    fits, fails = 0, total
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if budget.allows([*spent, *_take(runs, middle)]):
            fits = middle
        else:
            fails = middle
    return fits


def _take(runs: Events, length: int) -> list[tuple[DpEvent, int]]:
    """Return the first `length` events."""
    taken: list[tuple[DpEvent, int]] = []
    for event, count in runs:
        some = min(count, length)
        if some > 0:
            taken.append((event, some))
        length -= some
    return taken


# -- before each release ----------------------------------------------------------------------------------------------


class Allowance(Protocol):
    """Refuses a release before it is made (law 5)."""

    def require(self, event: DpEvent) -> None:
        """Return if `event` may be charged now, else raise `BudgetExhausted`."""
        ...

    def covers(self, events: Sequence[DpEvent]) -> int:
        """Return how many of `events`, in order, are sure to pass `require` later; asking changes nothing."""
        ...


class Unlimited:
    """No budget was set: everything is charged and nothing is refused."""

    def require(self, event: DpEvent) -> None:
        return None

    def covers(self, events: Sequence[DpEvent]) -> int:
        return len(events)


class Prepaid:
    """A budget over a plan that is known in advance.

    The longest affordable beginning of the plan is priced once; its events then pass without being priced again.
    An event outside the plan is priced together with everything spent so far.
    """

    def __init__(self, budget: Budget, spent: Events, plan: Events) -> None:
        self._budget = budget
        self._spent = count_alike(spent)
        self._prepaid = self._prepay(plan)

    @property
    def left(self) -> list[tuple[DpEvent, int]]:
        """Return the part of the plan that is still to come and can be paid for."""
        return list(spell_out(self._prepaid))

    def covers(self, events: Sequence[DpEvent]) -> int:
        left = dict(self._prepaid)
        for number, text in enumerate(map(to_json, events)):
            if left.get(text, 0) < 1:
                return number
            left[text] -= 1
        return len(events)

    def _prepay(self, plan: Events) -> dict[str, int]:
        return count_alike(_take(plan, affordable(self._budget, spell_out(self._spent), plan)))

    def require(self, event: DpEvent) -> None:
        text = to_json(event)
        if self._prepaid.get(text, 0) > 0:
            self._prepaid[text] -= 1
            self._spent[text] = self._spent.get(text, 0) + 1
        elif affordable(self._budget, spell_out(self._spent), [(event, 1)]) == 1:
            self._spent[text] = self._spent.get(text, 0) + 1
            self._prepaid = self._prepay(spell_out(self._prepaid))
        else:
            raise BudgetExhausted(
                f"the next release would exceed epsilon={self._budget.epsilon:g} at delta={self._budget.delta:g}: "
                f"{sum(self._spent.values())} events are spent; training ends here with the model as it is"
            )
