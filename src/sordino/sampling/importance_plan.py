"""How DPIS spends its budget: which filter, how much noise for its own releases, and σ_G epoch by epoch (Sec. 4.2)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from dp_accounting import DpEvent, GaussianDpEvent

from sordino.accounting import filtered as filters
from sordino.accounting.filtered import Filter, find_least_noise
from sordino.errors import BudgetExhausted, InvalidInput
from sordino.norms import Exact
from sordino.schedules import Constant
from sordino.selection import Always
from sordino.weighing import Importance as Weights

if TYPE_CHECKING:
    from sordino.accounting.budget import Budget
    from sordino.recipe import Recipe
    from sordino.sampling.importance import Epoch, Importance

RELEASE_NOISE = 0.02
"""σ_N and σ_K over the number of records, as in the paper (Sec. 5.3)."""
RELEASE_SHARE = 0.1
"""Few records need more noise than that: own releases take at most this share of the budget."""
EXPECTED = 0.5
"""K̃/(Ñ·C) of a typical epoch, a guess that decides at which order the filter stands, and nothing else."""


def calibrated(sampler: Importance, recipe: Recipe, budget: Budget) -> Recipe:
    """`recipe` with everything that must be fixed in advance: filter, noise of the releases, σ_G of the worst case."""
    _check_budget(recipe, budget)
    assert recipe.steps is not None
    sampler = replace(sampler, records=recipe.records)
    epochs = math.ceil(recipe.steps / sampler.steps_per_epoch(recipe.batch_size))
    releases = 1 + epochs * sampler.releases_per_epoch
    worst = sampler.worst(recipe.clip, recipe.batch_size)
    typical = worst.bounded(0, worst.records, EXPECTED * worst.total, worst.clip, worst.batch_size)

    def plan(epoch: Epoch, noise: float, *own: tuple[DpEvent, int]) -> list[tuple[DpEvent, int]]:
        assert recipe.steps is not None
        return [(epoch.event(noise), recipe.steps), *own]

    try:
        release_noise = sampler.release_noise
        if release_noise is None:
            first = Filter.for_plan(budget, lambda noise: plan(typical, noise))
            cheap = math.sqrt(releases * first.order / (2 * RELEASE_SHARE * first.limit))
            release_noise = max(RELEASE_NOISE * worst.records, cheap)
        own = (GaussianDpEvent(release_noise), releases)
        chosen = Filter.for_plan(budget, lambda noise: plan(typical, noise, own))
        sigma = find_least_noise(lambda noise: _total(chosen, plan(worst, noise, own)), chosen.limit)
    except BudgetExhausted:
        raise InvalidInput(
            f"epsilon={budget.epsilon:g} cannot be met by any noise: the releases of K and N alone cost more; "
            "leave release_noise open or train for fewer epochs"
        ) from None
    sampler = replace(sampler, release_noise=release_noise)
    priced = replace(budget, accountant=filters.NAME)
    return replace(recipe, noise_multiplier=sigma, sampler=sampler, rdp_filter=chosen, budget=priced)


def noise(sampler: Importance, rdp_filter: Filter, left: float, epoch: Epoch, step: int, steps: int) -> float:
    """The smallest σ_G for the rest of the run.

    In the first a_E·E epochs K̃ of all later ones is taken for the worst, Ñ·C, so that σ_G will not have to rise; in the
    others for that of this epoch. What the later releases of K̃ will cost is set aside.
    """
    per_epoch = sampler.steps_per_epoch(int(epoch.batch_size))
    epochs = math.ceil(steps / per_epoch)
    now = min(per_epoch - step % per_epoch, steps - step)
    saving = epoch.number < sampler.divider * epochs
    later = replace(epoch, total=epoch.records * epoch.clip) if saving else epoch
    assert sampler.release_noise is not None
    own = (GaussianDpEvent(sampler.release_noise), (epochs - 1 - epoch.number) * sampler.releases_per_epoch)

    def cost(sigma: float) -> float:
        return _total(rdp_filter, [(epoch.event(sigma), now), (later.event(sigma), steps - step - now), own])

    return find_least_noise(cost, left * (1 - filters.ROUNDING))


def check(recipe: Recipe) -> None:
    """Refuse parts whose combination with importance sampling has no proof, and a run without a filter."""
    for slot, part, proven, why in (
        ("norms", recipe.norms, Exact, "estimated norms would make contributions longer than their bound"),
        ("weighing", recipe.weighing, Weights, "only its weights undo the sampling"),
        ("selection", recipe.selection, Always, "its test is priced for Poisson draws only"),
        ("clip_schedule", recipe.clip_schedule, Constant, "K is released for one bound per epoch; use external=4"),
        ("noise_schedule", recipe.noise_schedule, Constant, "the noise follows from K"),
    ):
        if not isinstance(part, proven):
            raise InvalidInput(
                f"{slot}={part!r} has no proof with importance sampling ({why}): use {proven.__name__}()"
            )
    if recipe.rdp_filter is None:
        raise InvalidInput(
            "importance sampling chooses its noise as it goes: give it a budget by recipe.calibrate(...)"
        )


def _check_budget(recipe: Recipe, budget: Budget) -> None:
    check(replace(recipe, rdp_filter=Filter(2.0, 1.0)))
    if recipe.noise_multiplier is not None:
        raise InvalidInput(
            f"noise_multiplier={recipe.noise_multiplier:g} must be left open: the noise of each epoch follows from K"
        )
    if recipe.steps is None:
        raise InvalidInput("neither steps nor epochs is set: give the length of training")
    if budget.accountant not in ("pld", filters.NAME):
        raise InvalidInput(
            f"accountant={budget.accountant!r} cannot price noise that is chosen on the way: use {filters.NAME!r}"
        )
    if budget.adjacency != "add-or-remove-one":
        raise InvalidInput(
            f"adjacency={budget.adjacency!r} has no proof with importance sampling: use 'add-or-remove-one'"
        )


def _total(rdp_filter: Filter, runs: list[tuple[DpEvent, int]]) -> float:
    return math.fsum(count * rdp_filter.cost(event) for event, count in runs if count)
