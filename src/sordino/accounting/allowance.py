"""What the budget still pays for, decided before each release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from dp_accounting import DpEvent

from sordino.accounting.budget import Budget, affordable
from sordino.errors import BudgetExhausted

Runs = Sequence[tuple[DpEvent, int]]
"""Events in order, each with how often it occurs in a row."""


class Allowance(Protocol):
    """Refuses a release before it is made (law 5)."""

    def require(self, event: DpEvent) -> None:
        """Return if `event` may be charged now, else raise `BudgetExhausted`."""
        ...


class Unlimited:
    """No budget was set: everything is charged and nothing is refused."""

    def require(self, event: DpEvent) -> None:
        return None


class Planned:
    """A budget over a plan that is known in advance.

    The longest affordable beginning of the plan is priced once; its events then pass without being priced again.
    An event outside the plan is priced together with everything spent so far.
    """

    def __init__(self, budget: Budget, spent: Runs, plan: Runs) -> None:
        self._budget = budget
        self._spent: Counter[DpEvent] = Counter()
        for event, count in spent:
            self._spent[event] += count
        self._prepaid: Counter[DpEvent] = Counter()
        self._prepay(plan)

    def _prepay(self, plan: Runs) -> None:
        remaining = affordable(self._budget, list(self._spent.items()), plan)
        for event, count in plan:
            paid = min(count, remaining)
            self._prepaid[event] += paid
            remaining -= paid

    def require(self, event: DpEvent) -> None:
        if self._prepaid[event] > 0:
            self._prepaid[event] -= 1
        elif affordable(self._budget, list(self._spent.items()), [(event, 1)]) == 1:
            self._prepaid, plan = Counter(), list(self._prepaid.items())
            self._spent[event] += 1
            self._prepay(plan)
            return
        else:
            raise BudgetExhausted(
                f"the next release would exceed epsilon={self._budget.epsilon:g} at delta={self._budget.delta:g}: "
                f"{sum(self._spent.values())} events are spent; training ends here with the model as it is"
            )
        self._spent[event] += 1
