"""A budget of which a part is spoken for: what is calibrated with it leaves that part alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sordino.accounting import Budget
from sordino.accounting.events import DpEvent
from sordino.accounting.pricing import Events, epsilon
from sordino.errors import InvalidInput
from sordino.recipe import Recipe


@dataclass(frozen=True)
class Reserving(Budget):
    """Prices everything together with the `reserved` events, so that all of it stays within ε by one composition."""

    reserved: tuple[tuple[DpEvent, int], ...] = ()

    @classmethod
    def beside(cls, budget: Budget, reserved: Events) -> Reserving:
        """The same budget, with these events to be paid from it too."""
        return cls(budget.epsilon, budget.delta, budget.accountant, budget.adjacency, tuple(reserved))

    def price(self, events: Events) -> float:
        return epsilon([*self.reserved, *events], self.delta, self.accountant, self.adjacency)

    def calibrate(self, recipe: Recipe, records: int) -> Recipe:
        """`recipe` with the noise that this budget pays for beside what is reserved."""
        calibrated = recipe.calibrate(self, records=records)
        plain = Budget(self.epsilon, self.delta, self.accountant, self.adjacency)
        if calibrated.rdp_filter is not None or not self.allows(calibrated.plan()):
            raise InvalidInput(
                f"recipe={recipe.name!r} cannot leave a part of its budget to the release of ranges and classes: "
                "give --schema, or --bounds and --classes, or use another recipe"
            )
        return replace(calibrated, budget=plain)
