"""Importance sampling by gradient norm (DPIS, Wei et al. 2022): long gradients are drawn more often and weigh less.

At the start of an epoch one pass measures every record's norm, and K̃ ≈ Σ min(‖g‖, C) is released once; Ñ, the number
of records, is released once per run (Eqs. 10-12). In every step each record tosses one coin u and is used if

    u · K̃/b < min(max(‖g‖, g_L), C),

that is with probability b·‖ḡ‖/K̃ (Eq. 15), and then enters the sum with length K̃/Ñ. So that not all gradients are
needed for this, a bound ĝ = k·max(‖g‖ when last seen, g_L) ≤ C screens the coins first: only records with u·K̃/b < ĝ are
drawn at all. One coin for both decisions is the paper's pair q_t, p_t exactly: given u·K̃/b < ĝ it is uniform below ĝ.

A record adds at most K̃/Ñ with probability at most b·C/K̃: the event is SGM(b·C/K̃, σ_G·Ñ·C/K̃) (Eq. 13).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Unpack

import torch
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from torch import Tensor

from sordino import names
from sordino.accounting import filtered as filters
from sordino.accounting.budget import Budget
from sordino.accounting.filtered import Filter, Filtering, find_least_noise
from sordino.combinations import Needs
from sordino.distributed.sharding import unshard
from sordino.errors import BudgetExhausted, InvalidInput
from sordino.mechanisms import Mechanism
from sordino.noise import Independent, Source, add_noise, widen
from sordino.parts import ROUNDING, Always, Constant, Draw, Exact, Sampler, State, Terms, drop_not_finite
from sordino.recipe import Common, Optimizer, Recipe

if TYPE_CHECKING:
    from sordino.step import Bench

XI = 1e-3
"""K̃ exceeds b·C by this share at least, so that a draw never takes a record for sure (Eq. 12)."""
LEAST_CLIP = 0.01
"""An adaptive clipping bound stays above this share of the first one."""
RELEASE_NOISE = 0.02
"""σ_N and σ_K over the number of records, as in the paper (Sec. 5.3)."""
RELEASE_SHARE = 0.1
"""Few records need more noise than that, so the releases of Ñ and K̃ take at most this share of the budget."""
EXPECTED = 0.5
"""K̃/(Ñ·C) of a typical epoch: a guess that decides the filter's order, and nothing else."""


@dataclass(frozen=True)
class Epoch:
    """What an epoch knows about the records: only released values, and so public."""

    number: int
    records: float
    total: float
    clip: float
    batch_size: float

    @property
    def reach(self) -> float:
        """K̃/b: a coin u stands for the norm u·K̃/b, and no norm reaches this far."""
        return self.total / self.batch_size

    @property
    def sensitivity(self) -> float:
        """K̃/Ñ: how far a used record moves the sum."""
        return self.total / self.records

    def multiplier(self, noise: float) -> float:
        """Noise of deviation σ_G·C over the sensitivity."""
        return noise * (self.records * self.clip / self.total)

    def event(self, noise: float) -> PoissonSampledDpEvent:
        """One step with σ_G = `noise` (Eq. 13)."""
        return PoissonSampledDpEvent(self.clip / self.reach, GaussianDpEvent(self.multiplier(noise)))

    @classmethod
    def bounded(cls, number: int, records: float, total: float, clip: float, batch_size: float) -> Epoch:
        """Keep noisy values where the mechanism is defined: Ñ > b and b·C < K̃ <= Ñ·C (Eq. 12)."""
        least = (1 + XI) * batch_size
        records = max(records, least)
        return cls(number, records, min(max(total, least * clip), records * clip), clip, batch_size)


@dataclass
class Learnt(State):
    """What importance sampling knows: the released epoch, the current σ_G and, in private, the bounds ĝ of all records.

    `seen` are the bounds that changed in this process since it last told the others.
    """

    epoch: Epoch | None = field(default=None, metadata={"public": Epoch})
    noise: float | None = None
    bounds: Tensor | None = None
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def _unproven(slot: str, proven: type, why: str) -> Needs:
    message = f"{slot}={{part!r}} has no proof with importance sampling ({why}): use {proven.__name__}()"
    return Needs(slot, message, (proven,), subclasses=True)


@dataclass(frozen=True)
class ImportanceWeights:
    """Importance weights with rejection: ``C / max(|g|, floor)`` above the record's threshold, else 0 (DPIS, Eq. 15).

    A record is used with a probability in proportion to the length of its gradient, so all used gradients are made
    equally long. The floor, which the paper lacks, keeps the weights finite: otherwise the rounding of a tiny norm
    could become a contribution above the bound.

    Guarantees: contributions no longer than C, whatever the norms. Needs the thresholds of `Importance`.
    """

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        if draw.thresholds is None or not draw.floor > 0:
            raise InvalidInput(
                "weighing=ImportanceWeights() needs draws with thresholds: use sampler=Importance(), or Flat()"
            )
        lengths = norms.clamp(min=draw.floor)
        exact = widen(lengths)
        used = (exact > draw.thresholds.to(exact.device)).to(norms.device)
        return drop_not_finite(torch.where(used, clip * (1 - ROUNDING) / lengths, torch.zeros_like(norms)), norms)


@dataclass(frozen=True)
class Importance(Sampler):
    """Each record is used with a probability in proportion to its clipped gradient norm.

    `multiplier` is k, by how much a norm may grow unseen before it is clipped to its bound; `floor` is g_L/C, below
    which all gradients count alike; `divider` is a_E, the share of epochs that save for a later K̃ as bad as Ñ·C
    (Sec. 4.2). `external` is C*/C_1 and turns the adaptive clipping bound on, C_e = `quantile`·K̃*/Ñ (Eqs. 16-17).
    `release_noise` is σ_N = σ_K: noise over sensitivity of Ñ, K̃ and K̃*. `calibrate` sets it and the public number of
    `records`. With `refresh`=k, all norms are measured, and K̃ is released, only every k-th epoch: an "epoch" here is
    then k passes over the data.

    Guarantees: given Ñ, K̃ and C, one step is SGM(b·C/K̃, σ_G·Ñ·C/K̃), however far K̃ is from today's norms. Bounds
    depend on a record's own past coins; these only change at which length it is clipped, so they average out.
    Edge cases: a gradient that is not finite counts as 0; a draw may be empty.
    """

    multiplier: float = 5.0
    floor: float = 0.01
    divider: float = 0.8
    external: float | None = None
    quantile: float = 1.0
    release_noise: float | None = None
    records: int | None = None
    refresh: int = field(default=1, metadata=names.UNWRITTEN)
    chooses_noise: ClassVar[bool] = True
    needs: ClassVar[tuple[Needs, ...]] = (
        _unproven("norms", Exact, "estimated norms would make contributions longer than their bound"),
        _unproven("weighing", ImportanceWeights, "only its weights undo the sampling"),
        _unproven("noise", Independent, "the filter prices steps one by one"),
        _unproven("selection", Always, "its test is priced for Poisson draws only"),
        _unproven("clip_schedule", Constant, "K is released for one bound per epoch; use external=4"),
        _unproven("noise_schedule", Constant, "the noise follows from K"),
    )

    def __post_init__(self) -> None:
        _require(self.multiplier >= 1, f"multiplier={self.multiplier} must be >= 1: norms would be clipped at once")
        _require(0 < self.floor <= 1, f"floor={self.floor} must lie in (0, 1]: a share of the clipping bound; try 0.01")
        _require(0 <= self.divider <= 1, f"divider={self.divider} must lie in [0, 1]: a share of the epochs; try 0.8")
        _require(
            isinstance(self.refresh, int) and self.refresh >= 1,
            f"refresh={self.refresh} must be a whole number >= 1: so many epochs share one pass over all norms",
        )
        _require(self.quantile > 0, f"quantile={self.quantile} must be > 0: the mean norm is multiplied by it")
        _require(
            self.external is None or self.external >= 1,
            f"external={self.external} must be >= 1: the outer bound over the first clipping bound; try 4",
        )
        _require(
            self.release_noise is None or self.release_noise > 0,
            f"release_noise={self.release_noise} must be > 0: leave it out for 2 % of the records",
        )

    def start(self) -> Learnt:
        return Learnt()

    def calibrate(self, recipe: Recipe, budget: Budget) -> Recipe:
        """Fix the filter, the noise of K̃ and Ñ, and the σ_G that the worst case would need."""
        return _calibrate(self, recipe, budget)

    @property
    def moves_clip(self) -> bool:
        return self.external is not None

    @property
    def releases_per_epoch(self) -> int:
        return 1 if self.external is None else 2

    def steps_per_epoch(self, batch_size: int) -> int:
        """Steps from one measurement of all norms to the next, by the public number of records, never the true one."""
        assert self.records is not None
        return max(1, round(self.refresh * self.records / batch_size))

    def worst(self, clip: float, batch_size: float) -> Epoch:
        """Return the epoch in which every gradient is long: K̃ = Ñ·C, which is DP-SGD."""
        _require(self.records is not None, "sampler=Importance() is not calibrated: call recipe.calibrate(budget, ...)")
        assert self.records is not None
        return Epoch.bounded(0, self.records, math.inf, clip, batch_size)

    def prepare(self, bench: Bench, step: int) -> None:
        """Open an epoch at its first step; after a resumption measure the norms again, which releases nothing."""
        if bench.recipe.rdp_filter is None:
            raise InvalidInput(
                "importance sampling chooses its noise as it goes: give it a budget by recipe.calibrate(...)"
            )
        state: Learnt = bench.states.sampler
        number = step // self.steps_per_epoch(bench.recipe.batch_size)
        self._hear(bench)
        if state.epoch is None or state.epoch.number != number:
            self._open(bench, number)
        elif state.bounds is None:
            state.bounds = self.bounds(measure(bench), state.epoch.clip)
        if state.noise is None:
            state.noise = bench.team.lead(lambda: self._noise(bench, step))

    def _hear(self, bench: Bench) -> None:
        """Learn which norms the other processes saw in the last step, so that all draw by the same bounds."""
        state: Learnt = bench.states.sampler
        seen, state.seen = state.seen, []
        if bench.team.size > 1:
            for indices, bounds in itertools.chain(*bench.team.gather(seen)):
                assert state.bounds is not None
                state.bounds[indices] = bounds

    def _open(self, bench: Bench, number: int) -> None:
        recipe, state = bench.recipe, bench.states.sampler
        before: Epoch | None = state.epoch
        records = before.records if before else self._release(bench, bench.records.count, 1.0)
        norms = measure(bench)
        clip = recipe.clip
        if before and self.external is not None:
            outer = self.external * recipe.clip
            mean = self._release(bench, _clipped_sum(norms, outer), outer) / before.records
            clip = min(max(self.quantile * mean, LEAST_CLIP * recipe.clip), outer)
        total = self._release(bench, _clipped_sum(norms, clip), clip)
        epoch, bounds = Epoch.bounded(number, records, total, clip, recipe.batch_size), self.bounds(norms, clip)
        state.noise = state.bounds = None  # an interrupt from here on: measure and choose again
        state.epoch = epoch
        state.bounds = bounds

    def _release(self, bench: Bench, value: float, sensitivity: float) -> float:
        """Pay, then return `value` with Gaussian noise (Eqs. 10, 11 with p_K = 1, 16)."""
        assert self.release_noise is not None
        receipt = bench.charge(GaussianDpEvent(self.release_noise))
        exact = torch.tensor(value, dtype=torch.float64)
        return add_noise(bench.source, receipt, exact, self.release_noise * sensitivity).item()

    def _noise(self, bench: Bench, step: int) -> float:
        """Choose σ_G from here on: the smallest that the rest pays for if later epochs are as assumed (Sec. 4.2)."""
        allowance, epoch, recipe = bench.run.allowance, bench.states.sampler.epoch, bench.recipe
        assert isinstance(allowance, Filtering)
        assert isinstance(recipe.rdp_filter, Filter)
        assert epoch is not None
        assert recipe.steps is not None
        return find_noise(self, recipe.rdp_filter, allowance.left, epoch, step, recipe.steps)

    def terms(self, terms: Terms, state: Learnt) -> Terms:
        noise = terms.noise_multiplier if state.noise is None else state.noise
        epoch = state.epoch or self.worst(terms.clip, terms.divisor)
        multiplier = epoch.multiplier(noise)
        return replace(terms, clip=epoch.sensitivity, noise_multiplier=multiplier, event=epoch.event(noise))

    def draw(self, records: int, source: Source, state: Learnt) -> Draw:
        epoch, bounds = state.epoch, state.bounds
        assert epoch is not None
        assert bounds is not None
        tossed = source.toss(records, epoch.clip / epoch.reach)  # no bound exceeds C: nobody else can be drawn
        indices, heights = torch.from_numpy(tossed.indices), torch.from_numpy(tossed.coins) * epoch.reach
        drawn = heights < bounds[indices]
        return Draw(indices[drawn], heights[drawn], self.floor * epoch.clip)

    def observe(self, draw: Draw, norms: Tensor, state: Learnt) -> None:
        """Remember the fresh norms of all drawn records, used or not (Alg. 1, line 24)."""
        assert state.epoch is not None
        assert state.bounds is not None
        bounds = self.bounds(norms.detach().cpu(), state.epoch.clip)
        state.bounds[draw.indices] = bounds
        state.seen.append((draw.indices, bounds))

    def bounds(self, norms: Tensor, clip: float) -> Tensor:
        """ĝ = k·max(‖g‖, g_L), never above C.

        The paper has no cap on ĝ, so a record whose bound is above K̃/b would be drawn for sure and weigh too much. A
        cap at C < K̃/b prevents that and changes nothing else: gradients are clipped to C in any case.
        """
        lengths = _finite(norms).clamp(min=self.floor * clip)
        return (self.multiplier * lengths).clamp(max=clip).float()


# -- its releases -----------------------------------------------------------------------------------------------------


def measure(bench: Bench) -> Tensor:
    """Return the norm of every record's gradient at the current model, in microbatches; no gradient is formed."""
    parameters = bench.parameters()
    size = bench.microbatch or bench.engine.microbatch(parameters)
    norms = torch.zeros(bench.records.count)
    everyone = Draw(torch.arange(len(norms)), choice=bench.number_draw())
    with unshard(bench.objective, parameters) as parameters:
        for part in bench.split(everyone[bench.team.own(len(everyone))], size):
            found = bench.engine.differentiate(bench.objective, parameters, bench.fetch(part))
            norms[part.indices] = found.norms.detach().float().cpu()
            bench.require_secret()
    return bench.team.sum([norms])[0]


def _finite(norms: Tensor) -> Tensor:
    return drop_not_finite(norms, norms)


def _clipped_sum(norms: Tensor, clip: float) -> float:
    return float(_finite(norms).double().clamp(max=clip).sum())


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidInput(message)


# -- its plan: which filter, how much noise for its own releases, and σ_G epoch by epoch (Sec. 4.2) -------------------


def _calibrate(sampler: Importance, recipe: Recipe, budget: Budget) -> Recipe:
    """Fix everything in `recipe` that must be fixed in advance: filter, noise of the releases, worst-case σ_G."""
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

    def choose_filter(*own: tuple[DpEvent, int]) -> Filter:
        """Return the recipe's own filter, as in the trials of a search, or one that suits a typical run."""
        return recipe.rdp_filter or Filter.for_plan(budget, lambda noise: plan(typical, noise, *own))

    try:
        release_noise = sampler.release_noise
        if release_noise is None:
            first = choose_filter()
            cheap = math.sqrt(releases * first.order / (2 * RELEASE_SHARE * first.limit))
            release_noise = max(RELEASE_NOISE * worst.records, cheap)
        own = (GaussianDpEvent(release_noise), releases)
        chosen = choose_filter(own)
        sigma = find_least_noise(lambda noise: _total(chosen, plan(worst, noise, own)), chosen.limit)
    except BudgetExhausted:
        raise InvalidInput(
            f"epsilon={budget.epsilon:g} cannot be met by any noise: the releases of K and N alone cost more; "
            "leave release_noise open or train for fewer epochs"
        ) from None
    sampler = replace(sampler, release_noise=release_noise)
    priced = replace(budget, accountant=filters.NAME)
    return replace(recipe, noise_multiplier=sigma, sampler=sampler, rdp_filter=chosen, budget=priced)


def find_noise(sampler: Importance, rdp_filter: Filter, left: float, epoch: Epoch, step: int, steps: int) -> float:
    """Find the smallest σ_G for the rest of the run.

    In the first a_E·E epochs, it assumes that K̃ of all later epochs is the worst, Ñ·C, so that σ_G will not have to
    rise. In the others, it assumes the K̃ of this epoch. The cost of later releases of K̃ is set aside.
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


def _check_budget(recipe: Recipe, budget: Budget) -> None:
    if recipe.noise_multiplier is not None:
        raise InvalidInput(
            f"noise_multiplier={recipe.noise_multiplier:g} must be left open: the noise of each epoch follows from K"
        )
    if recipe.steps is None:
        raise InvalidInput("neither steps nor epochs is set: give the length of training")
    if budget.accountant not in ("pld", filters.NAME):
        raise InvalidInput(
            f"accountant={budget.accountant!r} cannot price noise that is chosen during the run: use {filters.NAME!r}"
        )
    if budget.adjacency != "add-or-remove-one":
        raise InvalidInput(
            f"adjacency={budget.adjacency!r} has no proof with importance sampling: use 'add-or-remove-one'"
        )
    if recipe.rdp_filter is not None and recipe.rdp_filter.epsilon(budget.delta) > budget.epsilon:
        raise InvalidInput(
            f"rdp_filter={recipe.rdp_filter!r} costs epsilon={recipe.rdp_filter.epsilon(budget.delta):.4g}, above the "
            f"budget of {budget.epsilon:g}: leave it out to have one chosen"
        )


def _total(rdp_filter: Filter, runs: list[tuple[DpEvent, int]]) -> float:
    return math.fsum(count * rdp_filter.cost(event) for event, count in runs if count)


# -- its recipe -------------------------------------------------------------------------------------------------------


def dpis(
    *,
    clip: float = 0.1,
    lr: float | None = None,
    momentum: float = 0.9,
    optimizer: str = "sgd",
    multiplier: float = 5.0,
    floor: float = 0.01,
    divider: float = 0.8,
    adaptive: bool = False,
    external: float = 4.0,
    quantile: float = 1.0,
    release_noise: float | None = None,
    refresh: int = 1,
    **common: Unpack[Common],
) -> Recipe:
    """Draw records in proportion to their gradient norms, weigh them so that all are equally long (DPIS, Alg. 1).

    The noise follows the mean norm: if that falls during training, so does σ_G, which is chosen again for every epoch
    within a budget that a filter guards. An epoch takes at most (1/`refresh` + `multiplier`) epochs of gradients: all
    norms are measured every `refresh`-th epoch, and in between only those of drawn records. `adaptive` lets the
    clipping bound follow `quantile` times the mean norm, at most `external`·`clip`. `lr` is 0.5 for SGD and 0.001 for
    Adam unless given.

    >>> from sordino import Budget, recipes
    >>> recipe = recipes.dpis(batch_size=256, epochs=5).calibrate(Budget(epsilon=3, delta=1e-5), records=60_000)
    >>> recipe.budget.accountant, recipe.sampler.release_noise
    ('rdp-filter', 1200.0)
    """
    rate = lr if lr is not None else {"sgd": 0.5}.get(optimizer, 1e-3)
    proposer = Optimizer(optimizer, lr=rate, momentum=momentum if optimizer == "sgd" else 0.0)
    outer = external if adaptive else None
    sampler = Importance(multiplier, floor, divider, outer, quantile, release_noise, refresh=refresh)
    recipe = Recipe(name="dpis", clip=clip, weighing=ImportanceWeights(), optimizer=proposer, **common)
    if recipe.sampler is not None:
        raise InvalidInput(f"sampler={recipe.sampler!r} cannot be given: DPIS is a way to sample; use recipes.dpsgd")
    return replace(recipe, sampler=sampler)


MECHANISMS = (
    Mechanism(
        "dpis",
        title="DPIS",
        summary="records with longer gradients are drawn more often and weigh less",
        paper="Wei, Bao, Xiao, Yang, DPIS: An Enhanced Mechanism for Differentially Private SGD with Importance "
        "Sampling, CCS 2022",
        recipe=dpis,
        parts={"Sampler": {"importance": Importance}, "Weighing": {"importance-weights": ImportanceWeights}},
    ),
)
