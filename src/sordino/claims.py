"""What may be claimed of a run: the price of its ledger, with the basis and the assumptions it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from sordino.accounting import plans, pricing
from sordino.accounting.allowance import Planned, Runs
from sordino.accounting.guarantee import CONDITION as CONDITION
from sordino.accounting.guarantee import UNPROTECTED as UNPROTECTED
from sordino.accounting.guarantee import Guarantee
from sordino.accounting.ledger import Ledger
from sordino.accounting.pricing import Basis
from sordino.parts import Foreign
from sordino.recipe import Recipe
from sordino.step import Bench

FIXED_IN_ADVANCE = "hyperparameters were fixed in advance, not tuned on these records"
"""Choosing among runs on private data costs too, and is not priced."""
HELD_OUT = "the held-out records"
MOST_STEPS = 1_000_000
"""A longer plan is not worked out from a recipe.toml, which can name any number."""
DUTIES = {
    "sampler": "draws records as its event says, whatever is in them",
    "norms": "never gives a norm that its event does not pay for",
    "weighing": "keeps weight x norm within the clipping bound for every record",
    "selection": "looks at records only as far as its event pays for",
    "clip_schedule": "reads no record",
    "noise_schedule": "reads no record",
    "source": "draws secret, independent noise of the size it is asked for",
}
"""What the proof takes for granted of each part of a recipe."""

ROUNDING_IS_SMALL = "rounding in float32 moves a sum by less than 0.005 % of the clipping bound"
"""Three times what was measured; the worst case over all orders of summation is larger: docs/proofs/rounding.md."""


def guarantee_of(
    bench: Bench, delta: float | None, accountant: str | None, more: tuple[str, ...] = (), in_advance: bool = False
) -> Guarantee:
    """The guarantee of everything in the bench's ledger; `more` are assumptions that only the caller knows of.

    It is that of the declared plans, or with `in_advance` of what was spent of them (`sordino.accounting.plans`).
    """
    recipe, budget = bench.recipe, bench.recipe.budget
    delta = delta or (budget.delta if budget else 0.1 / (recipe.records or bench.records.count))
    accountant = accountant or (budget.accountant if budget else "pld")
    adjacency = budget.adjacency if budget else "add-or-remove-one"
    ledger = bench.ledger
    bill = plans.bill(ledger.events(), plans.declared(ledger), stopped_in_advance=in_advance)
    said = (*assumptions_of(recipe, bench.source.assumption), *more, *bill.notes)
    return Guarantee(
        epsilon=bill.epsilon(delta, accountant, adjacency),
        delta=delta,
        basis=weaker(recipe.basis, pricing.required_accountant(accountant).basis),
        unit="record",
        adjacency=adjacency,
        accountant=accountant,
        assumptions=tuple(dict.fromkeys((*said, *ledger.declared("assumption")))),
        unprotected=tuple(ledger.declared(UNPROTECTED)),
        conditions=tuple(ledger.declared(CONDITION)),
    )


def announce_together(ledger: Ledger, recipe: Recipe, before: Runs) -> None:
    """Declare releases that come `before` training, such as statistics of the data, and the training as one plan.

    To be called before the first of them. Which of them are made may then depend on the others: all are priced. Where
    a kill interrupted them and they are made again, what was spent stays in the plan.
    """
    name = recipe.fingerprint()
    number, earlier = plans.own(ledger, name, resumed=True)
    start = len(ledger) if earlier is None else earlier.after
    if earlier is not None:
        before = [*ledger.events(), *before]
    training = Planned(recipe.budget, before, recipe.plan()).left if recipe.budget else recipe.plan()
    events = tuple(before) if recipe.rdp_filter else (*before, *training)
    count, again = sum(times for _, times in before), len(ledger) - start
    plans.declare(ledger, plans.Plan(events, start, name, count, recipe.budget, replaces=number, repeated=again))


def plan_of(recipe: Recipe | None, header: Mapping[str, str]) -> list[plans.Plan]:
    """The plan of a ledger that declares none, as those of version 0.1: that of the recipe it began with, if it is."""
    if recipe is None or header.get("recipe") != recipe.fingerprint():
        return []
    if recipe.noise_multiplier is None or recipe.sampler is None or not 1 <= (recipe.steps or 0) <= MOST_STEPS:
        return []
    return [plans.Plan(() if recipe.rdp_filter else tuple(recipe.plan()), 0, recipe.fingerprint())]


def conditions_of(recipe: Recipe, source: object) -> list[str]:
    """What has to be true of the parts that Sordino did not write: nobody has checked it."""
    parts = {**{slot: getattr(recipe, slot) for slot in DUTIES if slot != "source"}, "source": source}
    return [
        f"your {slot.replace('_', ' ')} {type(part).__name__} {DUTIES[slot]}"
        for slot, part in parts.items()
        if part is not None and type(part).__module__.split(".")[0] != "sordino"
    ]


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
    if isinstance(recipe.sampler, Foreign):
        said.extend(recipe.sampler.assumptions)
    return [*said, *recipe.selection.assumptions]
