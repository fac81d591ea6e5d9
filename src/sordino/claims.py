"""What may be claimed of a run: the price of its ledger, with the basis and the assumptions it rests on."""

from __future__ import annotations

from typing import get_args

from sordino.accounting import pricing
from sordino.accounting.guarantee import Guarantee
from sordino.accounting.pricing import Basis
from sordino.recipe import Recipe
from sordino.step import Bench

FIXED_IN_ADVANCE = "hyperparameters were fixed in advance, not tuned on these records"
"""Choosing among runs on private data costs too, and is not priced."""

ROUNDING_IS_SMALL = "rounding in float32 moves a sum by less than 0.005 % of the clipping bound"
"""Three times what was measured; the worst case over all orders of summation is larger: docs/proofs/rounding.md."""


def guarantee_of(bench: Bench, delta: float | None, accountant: str | None, more: tuple[str, ...] = ()) -> Guarantee:
    """The guarantee of everything in the bench's ledger; `more` are assumptions that only the caller knows of."""
    recipe, budget = bench.recipe, bench.recipe.budget
    delta = delta or (budget.delta if budget else 0.1 / (recipe.records or bench.records.count))
    accountant = accountant or (budget.accountant if budget else "pld")
    adjacency = budget.adjacency if budget else "add-or-remove-one"
    return Guarantee(
        epsilon=pricing.epsilon(bench.ledger.events(), delta, accountant=accountant, adjacency=adjacency),
        delta=delta,
        basis=weaker(recipe.basis, pricing.required_accountant(accountant).basis),
        unit="record",
        adjacency=adjacency,
        accountant=accountant,
        assumptions=(*assumptions_of(recipe, bench.source.assumption), *more),
    )


def weaker(first: Basis, second: Basis) -> Basis:
    """The basis of a claim that rests on both: proven only if both are (law 9)."""
    order = get_args(Basis)
    return max(first, second, key=order.index)


def assumptions_of(recipe: Recipe, source: str) -> list[str]:
    """What a guarantee by `recipe` rests on; `source` is what the source of randomness says of itself."""
    said = [
        source,
        FIXED_IN_ADVANCE,
        "Gaussian noise is sampled in floating point",
        ROUNDING_IS_SMALL,
    ]
    if not recipe.amplifies:
        said.append("batches came from a foreign loader, so no amplification by sampling is claimed")
        said.append(
            "the foreign loader puts a record into a batch at most once, "
            "and without one record each batch would differ by at most one other"
        )
    return [*said, *recipe.selection.assumptions]
