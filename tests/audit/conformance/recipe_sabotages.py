"""Every recipe and the ways in which its own path can be wrong: one table, recipe by recipe.

A sabotage changes what `conformance.check` is given: the recipe, how the run is arranged, or the code itself through
`patch`, which the test undoes. Each is the way that real code has been wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sordino import Budget, Private, Recipe, mechanisms, recipes, step
from sordino.accounting import erasure, grids, jl_gaussian, random_allocation
from sordino.accounting.pld import PrivacyLossDistribution
from sordino.audit import conformance
from sordino.gradients import BookKeeping, Engine
from sordino.gradients import projected as projected_engine
from sordino.gradients.stretch import Stretch, Stretches
from sordino.mechanisms import noisy_test as noisy_tests
from sordino.mechanisms.adam_bc import AdamBC
from sordino.mechanisms.averaging import Averaged
from sordino.mechanisms.banded import Banded, Cyclic
from sordino.mechanisms.blockwise import Bounds, Followed, PerBlock, QuantileBlocks, clip_blocks
from sordino.mechanisms.dpagd import StepLength
from sordino.mechanisms.dpis import Epoch, Importance, ImportanceWeights, Learnt
from sordino.mechanisms.jl import ProjectedNorms
from sordino.mechanisms.kalman import Kalman
from sordino.mechanisms.low_pass import LowPass
from sordino.mechanisms.noisy_test import NoisyTest, difference, losses
from sordino.mechanisms.preconditioned import Probed
from sordino.mechanisms.rejecting import Rollback
from sordino.mechanisms.screening import Annealing
from sordino.mechanisms.shuffled import Shuffled
from sordino.noise import Source, perturb
from sordino.optimizers import DistanceOverGradients
from sordino.parts import Always, Draw, Flat, Poisson, Snapshot, Terms, drop_not_finite
from sordino.recipe import States
from sordino.step import Attempt, Bench
from tests.audit import sabotage

COMMON: dict[str, Any] = {"batch_size": 4, "steps": 4, "noise_multiplier": 1.0}
OPEN: dict[str, Any] = {"batch_size": 4, "steps": 4}
Patch = pytest.MonkeyPatch
Arrange = Callable[[Private], None]


@dataclass(frozen=True)
class Twist:
    """What is changed: parts of the recipe, the bound run, or the program itself; `options` go to the check."""

    parts: dict[str, Any] = field(default_factory=dict)
    arrange: Arrange | None = None
    patch: Callable[[Patch], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    recipe: Recipe | None = None


def parts(**changes: Any) -> Twist:
    return Twist(parts=changes)


def patched(target: Any, name: str, value: Any) -> Twist:
    return Twist(patch=lambda patch: patch.setattr(target, name, value))


# -- what any step can get wrong ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes(Always):
    """Changes the terms of an attempt by what was drawn, between the charge and the release."""

    change: Callable[[Attempt], Terms] = lambda attempt: attempt.terms

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        attempt.terms = self.change(attempt)
        return None


def by_draw(change: Callable[[Attempt], Terms]) -> Twist:
    return parts(selection=Changes(change))


@dataclass(frozen=True)
class Logs(Flat):
    """Says how long the gradients of the draw were."""

    say: Callable[[str], None] = logging.getLogger("training").info

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        self.say(f"mean gradient norm {float(norms.mean()):.3f}")
        return super().weights(norms, clip, draw)


def skipping_empty(patch: Patch) -> None:
    healthy = step.propose
    patch.setattr(step, "propose", lambda attempt: healthy(attempt) if len(attempt.draw) else None)


def halving_noise(patch: Patch) -> None:
    patch.setattr(Terms, "noise_std", property(lambda terms: terms.noise_multiplier * terms.clip / 2))


def following_the_loss(private: Private) -> None:
    """A learning rate that falls when the training loss does not."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(private.bench.optimizer, patience=0)
    bench = private.bench

    class OnTheTrainingLoss:
        def step(self) -> None:
            everyone = torch.arange(bench.records.count)
            scheduler.step(float(losses(bench, bench.records, everyone).sum()))

        def state_dict(self) -> dict[str, Any]:
            return {}

    bench.schedulers.append(OnTheTrainingLoss())  # type: ignore[arg-type]


def standardised(columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The transform of many tutorials: mean and deviation of all records."""
    inputs = torch.nan_to_num(columns[0])
    return (inputs - inputs.mean(0)) / inputs.std(0), columns[1]


def scaled_by_length(private: Private) -> None:
    """Divides by the number of records there are, not by the public one."""
    bench = private.bench
    bench.recipe = replace(bench.recipe, batch_size=max(1, bench.records.count // 2))


def more_than_it_says(sampler: Poisson, records: int, source: Source, state: Any) -> Draw:
    joined = source.uniform(records) < min(1.0, 1.5 * sampler.rate)
    return Draw(torch.from_numpy(joined.nonzero()[0]))


@dataclass(frozen=True)
class KeepsClean(Always):
    """The sum before its noise ends up in the optimizer's state."""

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        return _Clean(attempt)

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        assert isinstance(before, _Clean)
        before.keep()
        return True


class _Clean:
    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.sums: list[Tensor] = []
        attempt.bench.states.selection = self

    def keep(self) -> None:
        for parameter, total in zip(self.attempt.parameters, self.sums, strict=True):
            self.attempt.bench.optimizer.state[parameter]["exp_avg_sq"] = total.square().float()

    def restore(self) -> None:
        return


def squares_of_clean_gradients(patch: Patch) -> None:
    healthy = step.propose

    def propose(attempt: Attempt) -> None:
        attempt.bench.states.selection.sums = [total.clone() for total in attempt.total]
        healthy(attempt)

    patch.setattr(step, "propose", propose)


def rate_by_draw(private: Private) -> None:
    """A learning rate in proportion to the draw, as in linear scaling rules."""

    def scale(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * getattr(private.bench.states.selection, "drawn", 1)

    private.bench.optimizer.register_step_pre_hook(scale)


@dataclass(frozen=True)
class Counts(Always):
    """Remembers how many records were drawn."""

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        attempt.bench.states.selection.drawn = len(attempt.draw)
        return None


# -- weights --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Weights by a formula."""

    formula: Callable[[Tensor, float], Tensor]

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return self.formula(norms, clip)


def weighed(formula: Callable[[Tensor, float], Tensor]) -> Twist:
    return parts(weighing=Weights(formula))


# -- schedules ------------------------------------------------------------------------------------------------------


def ahead(recipe: Recipe, by: int = 1) -> Callable[[Patch], None]:
    """The noise of the step is that of the next one, the price its own."""
    healthy = Recipe.terms

    def terms(self: Recipe, at: int, states: States | None = None) -> Terms:
        own, later = healthy(self, at, states), healthy(self, at + by, states)
        return replace(own, noise_multiplier=later.noise_multiplier)

    return lambda patch: patch.setattr(Recipe, "terms", terms)


def terms_changed(change: Callable[[Terms, Recipe], Terms]) -> Twist:
    """The terms of every step after its price was fixed."""
    healthy = Recipe.terms

    def terms(self: Recipe, at: int, states: States | None = None) -> Terms:
        return change(healthy(self, at, states), self)

    return Twist(patch=lambda patch: patch.setattr(Recipe, "terms", terms))


@dataclass(frozen=True)
class ClippedAtFirst(Flat):
    """Clips at the first bound, while the noise follows the falling one."""

    first: float = 1.5

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return super().weights(norms, self.first, draw)


def length_by_records(private: Private) -> None:
    """The schedule is as long as the records there are say: its noise falls later with one record more."""
    healthy, bench = Recipe.terms, private.bench

    class Counting(Recipe):
        def terms(self, at: int, states: States | None = None) -> Terms:
            counted = healthy(replace(self, steps=bench.records.count - 7), at, states)
            return replace(healthy(self, at, states), noise_multiplier=counted.noise_multiplier)

    bench.recipe = Counting(**{name: getattr(bench.recipe, name) for name in bench.recipe.__dataclass_fields__})


# -- JL -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewerThanPriced(ProjectedNorms):
    """One projection where twenty-four are charged."""

    def engine(self, name: str, source: Source) -> Engine:
        return projected_engine.ProjectedEngine(1, source, name)


@dataclass(frozen=True)
class Stale(ProjectedNorms):
    """The projections of the first draw serve all others."""

    def prepare(self, engine: Engine) -> None:
        assert isinstance(engine, projected_engine.ProjectedEngine)
        if engine._directions is None:
            engine.renew()


def without_infinite_stretch(patch: Patch) -> None:
    healthy = jl_gaussian._levels

    def levels(event: jl_gaussian.ProjectedGaussian) -> Any:
        shifts, weights, _ = healthy(event)
        return shifts, weights, 0.0

    patch.setattr(jl_gaussian, "_levels", levels)


def added_alone(patch: Patch) -> None:
    """Prices a record that is added, and forgets the one that is removed."""
    healthy = grids.sampled_gaussian

    def one_direction(noise: float, rate: float, interval: float) -> PrivacyLossDistribution:
        both = healthy(noise, rate, interval)
        return PrivacyLossDistribution(both._pmf_add)

    patch.setattr("sordino.accounting.pld.sampled_gaussian", one_direction)


def estimated_too_short(patch: Patch) -> None:
    healthy = projected_engine.ProjectedEngine._estimate

    def estimate(self: Any, *given: Any) -> Any:
        found = healthy(self, *given)
        object.__setattr__(found, "norms", found.norms / 4)
        return found

    patch.setattr(projected_engine.ProjectedEngine, "_estimate", estimate)


# -- DPIS -----------------------------------------------------------------------------------------------------------


def importance(**overrides: Callable[..., Any]) -> Twist:
    """The sampler with some of its methods replaced."""

    def patch(patch: Patch) -> None:
        for name, method in overrides.items():
            patch.setattr(Importance, name, method)

    return Twist(patch=patch)


_release, _terms, _prepare = Importance._release, Importance.terms, Importance.prepare
_observe, _draw = Importance.observe, Importance.draw


def half_the_releases(self: Importance, bench: Bench, value: float, sensitivity: float) -> float:
    return float(_release(self, bench, value, sensitivity / 2))


def noised_for_first_bound(self: Importance, bench: Bench, value: float, sensitivity: float) -> float:
    """K* is noised for C instead of C*."""
    return float(_release(self, bench, value, min(sensitivity, bench.recipe.clip)))


def true_number(self: Importance, bench: Bench, value: float, sensitivity: float) -> float:
    released = float(_release(self, bench, value, sensitivity))
    return value if value == bench.records.count else released


def prepared_by_length(self: Importance, bench: Bench, at: int) -> None:
    """An epoch has more steps if there are more records, whatever the public number says."""
    _prepare(replace(self, records=(bench.records.count - 11) * bench.recipe.batch_size), bench, at)


def half_the_step(self: Importance, terms: Terms, state: Learnt) -> Terms:
    found = _terms(self, terms, state)
    return replace(found, noise_multiplier=found.noise_multiplier / 2)


def oftener(self: Importance, records: int, source: Source, state: Learnt) -> Draw:
    """Records are used twice as often as charged."""
    assert state.epoch is not None
    heights = torch.from_numpy(source.uniform(records)) * state.epoch.reach
    return Draw(torch.arange(records), heights / 2, self.floor * state.epoch.clip)


def later_k_in_the_clear(self: Importance, bench: Bench, value: float, sensitivity: float) -> float:
    """K of the second pass and of later ones is what it is: the first alone is noised."""
    return value if bench.states.sampler.epoch else float(_release(self, bench, value, sensitivity))


def k_as_if_fresh(self: Importance, terms: Terms, state: Learnt) -> Terms:
    """Draws and weights by the released K, the price by the norms of today, which nobody released."""
    found = _terms(self, terms, state)
    if state.epoch is None or state.bounds is None or state.noise is None:
        return found
    today = replace(state.epoch, total=float(state.bounds.clamp(max=state.epoch.clip).sum()))
    return replace(found, event=today.event(state.noise))


def k_follows_the_draws(self: Importance, draw: Draw, norms: Tensor, state: Learnt) -> None:
    """Between two passes K is kept up to date by the norms of whoever was drawn."""
    assert state.epoch is not None
    assert state.bounds is not None
    before = state.bounds[draw.indices].sum()
    _observe(self, draw, norms, state)
    grown = float(state.bounds[draw.indices].sum() - before) + 0.01 * len(draw)
    epoch = state.epoch
    state.epoch = Epoch.bounded(epoch.number, epoch.records, epoch.total + grown, epoch.clip, epoch.batch_size)


def bounds_without_a_cap(self: Importance, draw: Draw, norms: Tensor, state: Learnt) -> None:
    """A norm that was seen between two passes is its own bound, however long, as in the paper's listing."""
    assert state.bounds is not None
    state.bounds[draw.indices] = self.multiplier * norms.detach().nan_to_num().float()


def drawn_to_the_bound(self: Importance, records: int, source: Source, state: Learnt) -> Draw:
    """Whoever has a coin below its bound, which no cap keeps below C."""
    assert state.epoch is not None
    assert state.bounds is not None
    heights = torch.from_numpy(source.uniform(records)) * state.epoch.reach
    drawn = (heights < state.bounds).nonzero().squeeze(1)
    return Draw(drawn, heights[drawn], self.floor * state.epoch.clip)


def weighed_by_old_norms(self: ImportanceWeights, norms: Tensor, clip: float, draw: Draw) -> Tensor:
    """The coin told how long the gradient was when it was last seen: it is not measured again."""
    assert draw.thresholds is not None
    return drop_not_finite(clip / draw.thresholds.to(norms).clamp(min=draw.floor), norms)


def coins_of_the_pass(self: Importance, records: int, source: Source, state: Learnt) -> Draw:
    """Coins are tossed once for a pass, and serve all draws until the next."""
    assert state.epoch is not None
    held: Any = state
    number, drawn = getattr(held, "tossed", (None, None))
    if number != state.epoch.number:
        drawn = _draw(self, records, source, state)
        held.tossed = state.epoch.number, drawn
    assert isinstance(drawn, Draw)
    return drawn


def unclipped_sum(patch: Patch) -> None:
    patch.setattr("sordino.mechanisms.dpis._clipped_sum", lambda norms, clip: float(norms.nan_to_num().sum()))


def counting_what_is_no_number(patch: Patch) -> None:
    patch.setattr("sordino.mechanisms.dpis._finite", lambda norms: norms)


# -- selection ------------------------------------------------------------------------------------------------------


def tests_changed(**overrides: Callable[..., Any]) -> Twist:
    def patch(patch: Patch) -> None:
        for name, method in overrides.items():
            patch.setattr(NoisyTest, name, method)

    return Twist(patch=patch)


_energy, _noise_at = NoisyTest.energy, NoisyTest.noise_at


def half_the_test(self: NoisyTest, attempt: Attempt, before: Rollback) -> float:
    return float(_energy(replace(self, noise_multiplier=self.noise_multiplier / 2), attempt, before))


def test_ahead(self: NoisyTest, attempt: Attempt, before: Rollback) -> float:
    """The noise of the next step's test."""
    later = replace(attempt.terms, step=attempt.terms.step + 1)
    return float(_energy(self, replace(attempt, terms=later), before))


def on_the_training_draw(patch: Patch) -> None:
    patch.setattr(noisy_tests, "validation_draw", lambda attempt, rate: attempt.draw)


def on_everybody(patch: Patch) -> None:
    """Tests on all records, and charges a draw."""
    patch.setattr(
        noisy_tests,
        "validation_draw",
        lambda attempt, rate: Poisson(1.0).draw(attempt.bench.records.count, attempt.bench.source, None),
    )


def private_energy(self: Annealing, attempt: Attempt, before: Rollback) -> float:
    """The energy of the private records, as in the paper, without noise."""
    bench = attempt.bench
    return difference(before, bench, bench.records, torch.arange(bench.records.count))


def without_forced(patch: Patch) -> None:
    healthy = erasure._annealed_intervals
    patch.setattr(erasure, "_annealed_intervals", lambda noise: healthy(noise)[1:])


def restless(self: Annealing, attempt: Attempt, before: Rollback, temperature: float) -> bool:
    """Looks at the private records before it asks the public ones."""
    records = attempt.bench.records
    return difference(before, attempt.bench, records, torch.arange(records.count)) > 0


@dataclass(frozen=True, kw_only=True)
class NoNoise(StepLength):
    """Takes the smallest total itself; the noise is drawn for nothing."""

    def add_noise(self, totals: Any, normals: Any) -> Any:
        return totals


@dataclass(frozen=True, kw_only=True)
class NotEvenDrawn(StepLength):
    """Chooses without any noise at all."""

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        assert isinstance(before, Rollback)
        everyone = torch.arange(attempt.bench.records.count)
        return difference(before, attempt.bench, attempt.bench.records, everyone) < 0


@dataclass(frozen=True, kw_only=True)
class HalfTheScale(StepLength):
    def add_noise(self, totals: Any, normals: Any) -> Any:
        return np.asarray(totals - self.loss_clip / self.epsilon / 2 * (normals**2).sum(axis=0) / 2)


@dataclass(frozen=True, kw_only=True)
class UnclippedLosses(StepLength):
    def _total(self, attempt: Attempt, indices: Tensor) -> float:
        return float(losses(attempt.bench, attempt.bench.records, indices).nan_to_num().sum())


@dataclass(frozen=True, kw_only=True)
class MeanOfTheDraw(StepLength):
    """The mean over whoever was drawn: one record moves every other's share."""

    def _total(self, attempt: Attempt, indices: Tensor) -> float:
        return 20 * super()._total(attempt, indices) / max(1, len(indices))


@dataclass(frozen=True, kw_only=True)
class ByPrivateLoss(StepLength):
    """Looks as far as the private losses reach."""

    def _longest(self, attempt: Attempt) -> float:
        bench = attempt.bench
        return 0.1 + float(losses(bench, bench.records, torch.arange(bench.records.count)).nan_to_num().abs().mean())


def chooses_on_the_training_draw(patch: Patch) -> None:
    patch.setattr("sordino.mechanisms.dpagd.validation_draw", lambda attempt, rate: attempt.draw)


# -- proposals ------------------------------------------------------------------------------------------------------


def peeking(kind: type[torch.optim.Optimizer], method: str, twist: Callable[..., Any]) -> Twist:
    """An optimizer that sees the draw: `twist` takes its method's place, and finds the sums and the size in `seen`."""

    def patch(patch: Patch) -> None:
        healthy, own = step.propose, getattr(kind, method)

        def propose(attempt: Attempt) -> None:
            held: Any = attempt.bench.optimizer
            held.seen = len(attempt.draw), dict(zip(attempt.parameters, map(Tensor.clone, attempt.total), strict=True))
            healthy(attempt)

        patch.setattr(step, "propose", propose)
        patch.setattr(kind, method, lambda self, *given: twist(own, self, *given))

    return Twist(patch=patch)


def keeps_clean(own: Callable[..., Any], self: Any, parameter: Any, remembered: dict[str, Any]) -> dict[str, Any]:
    """What is remembered of the gradient is what it was before its noise."""
    noted: dict[str, Any] = own(self, parameter, remembered)
    return noted | {"filtered_1": self.seen[1][parameter].float(), "estimate": self.seen[1][parameter].float()}


def skips_empty(own: Callable[..., Any], self: Any, parameter: Any, remembered: dict[str, Any]) -> dict[str, Any]:
    """A draw without records is no reason to filter."""
    noted: dict[str, Any] = own(self, parameter, remembered) if self.seen[0] else {}
    return noted


def follows_size(own: Callable[..., Any], self: Any, parameter: Any, remembered: dict[str, Any]) -> dict[str, Any]:
    """A larger draw is trusted more."""
    parameter.grad = parameter.grad * (self.seen[0] / 8)
    noted: dict[str, Any] = own(self, parameter, remembered)
    return noted


def begins_again(own: Callable[..., Any], self: Any, parameter: Any, remembered: dict[str, Any]) -> dict[str, Any]:
    """A large draw needs no past."""
    noted: dict[str, Any] = own(self, parameter, {} if self.seen[0] > 4 else remembered)
    return noted


def trusts_size(own: Callable[..., Any], self: Any, parameter: Any, remembered: dict[str, Any]) -> dict[str, Any]:
    """The weight of a new gradient follows how many records it is of."""
    self.kappa = 1 / (1 + 1 / max(1, self.seen[0]))
    noted: dict[str, Any] = own(self, parameter, remembered)
    return noted


def moves_by_size(own: Callable[..., Any], self: Any, parameter: Any, group: dict[str, Any]) -> None:
    parameter.grad = parameter.grad / max(1, self.seen[0])
    own(self, parameter, group)


def moves_clean(own: Callable[..., Any], self: Any, parameter: Any, group: dict[str, Any]) -> None:
    """Squares of the gradient before its noise, which need no correction."""
    own(self, parameter, group)
    self.state[parameter]["exp_avg_sq"].copy_(self.seen[1][parameter].square())


def averages_clean(own: Callable[..., Any], self: Any, parameter: Any, remembered: dict[str, Any]) -> None:
    own(self, parameter, remembered)
    remembered["average"].sub_(self.seen[1][parameter].float(), alpha=0.1)


def averages_anew(own: Callable[..., Any], self: Any, parameter: Any, remembered: dict[str, Any]) -> None:
    """The average starts again with a large draw."""
    if self.seen[0] > 4:
        remembered["averaged_steps"] = 0
    own(self, parameter, remembered)


def averages_full(own: Callable[..., Any], self: Any, parameter: Any, remembered: dict[str, Any]) -> None:
    """Only models that came of somebody's records are averaged."""
    if self.seen[0] or "average" not in remembered:
        own(self, parameter, remembered)


def steps_by_size(own: Callable[..., Any], self: Any, *given: Any) -> Any:
    """A larger draw is trusted more."""
    for parameter in self.seen[1]:
        parameter.grad = parameter.grad * (self.seen[0] / 8)
    return own(self, *given)


def steps_after_full_draws(own: Callable[..., Any], self: Any, *given: Any) -> Any:
    """A draw without records is no reason to move."""
    return own(self, *given) if self.seen[0] else None


def squares_before_noise(own: Callable[..., Any], self: Any, *given: Any) -> Any:
    """The length of a step comes from gradients before their noise, which are shorter."""
    found = own(self, *given)
    for parameter, clean in self.seen[1].items():
        self.state[parameter]["squares"] = float(clean.double().square().sum())
    return found


# -- epochs that deal every record once -----------------------------------------------------------------------------

dealt = Shuffled.draw


def dealt_twice(self: Shuffled, records: int, source: Source, state: Any) -> Draw:
    """The last record is in every batch."""
    drawn = dealt(self, records, source, state).indices
    return Draw(torch.cat([drawn, torch.tensor([records - 1])]).unique())


def dealt_in_turn(self: Shuffled, records: int, source: Source, state: Any) -> Draw:
    """Records are dealt out from the last one on, so that one more shifts the others."""
    dealt(self, records, source, state)
    return Draw(torch.arange(records)[(records - torch.arange(records)) % self.covers == state.dealt.number])


def refilled(self: Shuffled, records: int, source: Source, state: Any) -> Draw:
    """Batches of one size: who is missing is taken from the next batch, and is in both."""
    drawn = dealt(self, records, source, state).indices
    others = torch.tensor([i for i in range(records) if i not in drawn.tolist()], dtype=torch.int64)
    return Draw(torch.cat([drawn, others[: max(0, 8 - len(drawn))]]))


def batches_by_the_records(private: Private) -> None:
    """As many batches as the records that there are make, in place of a public number."""
    bench = private.bench
    count = max(1, bench.records.count // 4)
    bench.recipe = replace(bench.recipe, sampler=replace(bench.recipe.sampler, batches=count))  # type: ignore[type-var]


def at_twice_the_noise(patch: Patch) -> None:
    healthy = random_allocation.find_sum
    patch.setattr(random_allocation, "find_sum", lambda terms, noise: healthy(terms, 2 * noise))


# -- correlated noise -----------------------------------------------------------------------------------------------


def everybody_in_turn(self: Cyclic, records: int, source: Source, state: Any) -> Draw:
    """Groups are forgotten: a record may join every draw."""
    state.drawn = True
    return Draw(torch.from_numpy(source.toss(records, self.joins).indices))


def dealt_by_number(self: Cyclic, records: int, source: Source, state: Any) -> Draw:
    """Groups are made by dealing all records out, so that one more shifts the others."""
    state.drawn = True
    joined = torch.from_numpy(source.toss(records, self.joins).indices)
    return Draw(joined[(records - joined) % self.bands == state.turn])


def unnormalised(self: Banded) -> list[float]:
    """Coefficients that begin with 1, as papers print them, with noise for columns of length 1."""
    assert self.coefficients is not None
    return list(self.coefficients)


def noise_alone(self: Banded, source: Source, receipt: Any, sums: list[Tensor], std: float, state: Any) -> None:
    """The noise of the last step again, with the other sign: the sum of both steps has none."""
    if state.noises:
        for total, noise in zip(sums, state.noises[0], strict=True):
            total.sub_(noise, alpha=std)
        state.noises = []
        return
    exact = [total.clone() for total in sums]
    perturb(source, receipt, sums, std)
    state.noises = [[(total - before) / std for total, before in zip(sums, exact, strict=True)]]


# -- blocks ---------------------------------------------------------------------------------------------------------


def lengthened(bench: Bench, factor: float) -> Stretches:
    """A public map that makes every gradient longer."""
    parameters = bench.parameters()
    return Stretches(parameters, [Stretch(p.shape, torch.full((len(p),), factor)) for p in parameters])


def maps_of_records(self: Probed, bench: Bench, step: int) -> Stretches:
    records = bench.records.gather(torch.arange(bench.records.count), bench.device)
    power = float(torch.nan_to_num(records.data[0]).double().abs().sum() % 5)
    maps = [Stretch(p.shape, torch.linspace(0.1, 1.0, len(p)) ** power) for p in bench.parameters()]
    return Stretches(bench.parameters(), maps)


def clipping_first(patch: Patch) -> None:
    """The norms are of gradients as they were, the sum is of stretched ones."""
    healthy = BookKeeping.differentiate

    def differentiate(self: BookKeeping, objective: Any, parameters: Any, batch: Any) -> Any:
        found, stretches = healthy(self, objective, parameters, batch), self.stretches
        self.stretches = None
        found.squares = healthy(self, objective, parameters, batch).squares  # type: ignore[attr-defined]
        self.stretches = stretches
        return found

    patch.setattr(Probed, "probe", lambda self, bench, step: lengthened(bench, 3.0))
    patch.setattr(BookKeeping, "differentiate", differentiate)


def stretching_twice(patch: Patch) -> None:
    """What belongs after the noise comes before it."""
    healthy = step.Attempt.add

    def add(self: Attempt, some: Any) -> None:
        healthy(self, self.bench.engine.stretches.apply(list(some)))  # type: ignore[attr-defined]

    patch.setattr(Probed, "probe", lambda self, bench, step: lengthened(bench, 3.0))
    patch.setattr(step.Attempt, "add", add)


def following_the_draw(patch: Patch) -> None:
    """Norm and sum agree, but one record more changes what all others are stretched by."""
    healthy = BookKeeping.differentiate

    def differentiate(self: BookKeeping, objective: Any, parameters: Any, batch: Any) -> Any:
        maps = [Stretch(p.shape, torch.linspace(1.0, 0.1, len(p)) ** (batch.size % 3)) for p in parameters]
        self.stretches = Stretches(parameters, maps)
        return healthy(self, objective, parameters, batch)

    patch.setattr(BookKeeping, "differentiate", differentiate)


def each_to_the_whole(self: PerBlock, norms: Tensor, clip: float, draw: Draw, state: Any) -> Tensor:
    """Every block may be as long as the whole, and a little longer."""
    return clip_blocks(norms, norms.new_full((len(norms), 1), 1.2 * clip))


healthy_blocks = PerBlock.weigh


def last_at_large(self: PerBlock, norms: Tensor, clip: float, draw: Draw, state: Any) -> Tensor:
    """The head of a network is short anyway, and is not clipped."""
    weights = healthy_blocks(self, norms, clip, draw, state)
    weights[-1] = torch.where(torch.isfinite(norms).all(0), 1.0, 0.0)
    return weights


def by_the_draw(self: PerBlock, norms: Tensor, clip: float, draw: Draw, state: Any) -> Tensor:
    """Bounds in proportion to what the blocks of this draw are long."""
    means = norms.nan_to_num(posinf=0.0).mean(1, keepdim=True) + 0.1
    return (means / norms).clamp(max=1.0).nan_to_num() * clip


def keeps_bad(self: PerBlock, norms: Tensor, clip: float, draw: Draw, state: Any) -> Tensor:
    return (clip / len(norms) ** 0.5 / norms).clamp(max=1.0)


def unnoised_votes(self: QuantileBlocks, attempt: Attempt, state: Followed) -> None:
    assert state.votes is not None
    share = float((state.votes / attempt.terms.divisor + 0.5).mean())
    state.bounds = Bounds((1.0 + share / 10,))


followed_terms = QuantileBlocks.terms


def votes_for_free(self: QuantileBlocks, terms: Terms, state: Followed) -> Terms:
    """The gradient keeps all of the noise that is charged, as if votes cost nothing."""
    return replace(followed_terms(self, terms, state), noise_multiplier=terms.noise_multiplier)


def votes_by_length(self: QuantileBlocks, norms: Tensor, clip: float, draw: Draw, state: Followed) -> Tensor:
    """How far a block is beyond its bound, in place of whether."""
    weights = QuantileBlocks.__mro__[1].weigh(self, norms, clip, draw, state)  # type: ignore[attr-defined]
    assert state.votes is not None
    state.votes += norms.nan_to_num().sum(1).double()
    return Tensor(weights)


# -- the table ------------------------------------------------------------------------------------------------------

DPSUR = recipes.dpsur(validation_clip=1e-3, validation_noise=1.0, **COMMON)
SCHEDULED = recipes.dpsur(validation_schedule=sabotage.Falling(), validation_noise=1.5, **COMMON)
DPAGD = recipes.dpagd(choice_epsilon=0.5, candidates=5, **COMMON)
DYNAMIC = recipes.dynamic(mu_ratio=2.0, **COMMON)
GROWING = recipes.growing_mu(ratio=2.0, **COMMON)
FALLING = recipes.sensitivity_decay(**COMMON)
DECAY = recipes.noise_decay(kind="step", rate=0.5, batch_size=4, epochs=12, noise_multiplier=1.0)
JL = recipes.jl(projections=24, **COMMON)
PUBLIC = recipes.screening(public=torch.ones(2, 1), public_name="ones", temperature=1e3, **COMMON)
NOISED = recipes.screening(validation_noise=1.0, temperature=1e6, **COMMON)


def weigh_norms(**options: Any) -> Recipe:
    """DPIS with a bound and a noise of its releases at which K is neither b·C nor N·C: it follows the norms."""
    made = recipes.dpis(clip=4.0, multiplier=1.5, **options, **OPEN)
    return made.calibrate(Budget(epsilon=30.0, delta=1e-5), records=13)


# Every mechanism of the library, those below with settings in which more can go wrong.
HEALTHY: dict[str, Recipe] = {
    **conformance.build_examples(),
    "dpsgd with momentum": recipes.dpsgd(momentum=0.9, **COMMON),
    "jl": JL,
    "dynamic": DYNAMIC,
    "growing_mu": GROWING,
    "sensitivity_decay": FALLING,
    "noise_decay": DECAY,
    "dpsur": DPSUR,
    "dpsur with a schedule": SCHEDULED,
    "dpsur with line search": recipes.dpsur(line_search=True, **COMMON),
    "dpsur with reuse": recipes.dpsur(reuse=True, **COMMON),
    "dpsur, two at once": recipes.dpsur(test_every=2, **COMMON),
    "screening": NOISED,
    "screening, public": PUBLIC,
    "dpagd": DPAGD,
    "dpis": weigh_norms(),
    "dpis, adaptive": weigh_norms(adaptive=True),
    "blockwise, adaptive": recipes.blockwise(adaptive=True, vote_noise=1.0, **COMMON),
    "dpis, refreshed": weigh_norms(refresh=2),
    "shuffled": recipes.dpsgd(sampler=Shuffled(), **COMMON),
}


def lengths(kind: type[StepLength]) -> Twist:
    return parts(selection=kind(epsilon=0.5, candidates=5))


ANY: dict[str, Twist] = {
    "half the noise": Twist(patch=halving_noise),
    "len(data) in a scale": Twist(arrange=scaled_by_length),
    "every other charge forgotten": Twist(arrange=sabotage.forgetful),
    "the ledger is written afterwards": Twist(arrange=sabotage.late),
}
"""What every mechanism can get wrong: the sabotages of those that have no table of their own."""

BROKEN: dict[str, dict[str, Twist]] = {
    **dict.fromkeys(mechanisms.find_all(), ANY),
    "dpsgd": {
        **ANY,
        "clipping off": parts(weighing=sabotage.Unclipped()),
        "twice the bound": parts(weighing=sabotage.TwiceTheBound()),
        "one weight for all": parts(weighing=sabotage.ByTheMean()),
        "a bad record silences all": parts(weighing=sabotage.NothingFromABatchWithNaN()),
        "divisor is the realised batch": by_draw(lambda a: replace(a.terms, divisor=max(1, len(a.draw)))),
        "noise by the size of the draw": by_draw(lambda a: replace(a.terms, noise_multiplier=1 + len(a.draw) / 20)),
        "statistics of all records in a transform": Twist(options={"prepare": standardised}),
        "a metric of the draw in a log": parts(weighing=Logs()),
        "a metric of the draw on the screen": parts(weighing=Logs(print)),
        "learning rate by the training loss": Twist(arrange=following_the_loss),
        "an empty draw is skipped": Twist(patch=skipping_empty),
        "draws more than it says": patched(Poisson, "draw", more_than_it_says),
        "a second answer on one draw": parts(selection=sabotage.AnswersTwice()),
        "one direction priced alone": Twist(patch=added_alone),
    },
    "dpadam": {
        "squares of clean gradients": Twist(parts={"selection": KeepsClean()}, patch=squares_of_clean_gradients),
        "learning rate by the draw": Twist(parts={"selection": Counts()}, arrange=rate_by_draw),
        "half the noise": Twist(patch=halving_noise),
        "twice the bound": parts(weighing=sabotage.TwiceTheBound()),
    },
    "automatic": {
        "gamma on the wrong side": weighed(
            lambda n, c: torch.where(n.isfinite(), c / (n - 0.01).clamp(min=1e-6), 0 * c)
        ),
        "gamma from the draw": weighed(lambda n, c: (c / (n.nan_to_num().median() + 0.01)).expand_as(n).nan_to_num()),
        "what is no number is kept": weighed(lambda n, c: c * (1 - 1e-5) / (n + 0.01)),
        "normalised to twice the bound": weighed(lambda n, c: torch.where(n.isfinite(), 2 * c / (n + 0.01), 0 * n)),
        "half the noise": Twist(patch=halving_noise),
    },
    "jl": {
        "priced as exact": parts(norms=sabotage.PricedAsExact(24)),
        "fewer projections than priced": parts(norms=FewerThanPriced(24)),
        "projections are used again": parts(norms=Stale(24)),
        "estimates are too short": Twist(patch=estimated_too_short),
        "the infinite stretch is not priced": Twist(
            parts={"norms": ProjectedNorms(2)}, patch=without_infinite_stretch, options={"steps": 2}
        ),
        "half the noise": Twist(patch=halving_noise),
    },
    "dynamic": {
        "noise one step ahead": Twist(patch=ahead(DYNAMIC)),
        "clipped at the first bound": parts(weighing=ClippedAtFirst()),
        "priced at the first noise": parts(norms=sabotage.LedgeredAtTheStart(1.0)),
        "noise by the records": Twist(arrange=length_by_records),
        "noise of the bound that comes next": terms_changed(
            lambda t, r: replace(t, noise_multiplier=t.noise_multiplier * 0.8)
        ),
    },
    "growing_mu": {
        "noise one step ahead": Twist(patch=ahead(GROWING)),
        "priced at the first noise": parts(norms=sabotage.LedgeredAtTheStart(1.0)),
        "grows twice": terms_changed(lambda t, r: replace(t, noise_multiplier=t.noise_multiplier**2)),
        "noise by the records": Twist(arrange=length_by_records),
    },
    "sensitivity_decay": {
        "clipped at the first bound": parts(weighing=ClippedAtFirst()),
        "the noise falls twice": terms_changed(lambda t, r: replace(t, noise_multiplier=t.clip / r.clip)),
        "half the noise": Twist(patch=halving_noise),
        "the bound is the median of the draw": weighed(
            lambda n, c: (n.nan_to_num().median().clamp(min=c) / n).clamp(max=1).nan_to_num()
        ),
    },
    "noise_decay": {
        "noise of the next epoch": Twist(patch=ahead(DECAY, by=2)),
        "epochs by the records there are": Twist(arrange=length_by_records),
        "half the noise": Twist(patch=halving_noise),
        "priced at the first noise": parts(norms=sabotage.LedgeredAtTheStart(1.0)),
    },
    "dpis": {
        "half the noise of a step": importance(terms=half_the_step),
        "half the noise of K and N": importance(_release=half_the_releases),
        "K is not clipped": Twist(patch=unclipped_sum),
        "the true N": importance(_release=true_number),
        "records used oftener than charged": importance(draw=oftener),
        "epochs by the records there are": importance(prepare=prepared_by_length),
        "what is no number counts": Twist(patch=counting_what_is_no_number),
    },
    "dpis, refreshed": {
        "later K in the clear": importance(_release=later_k_in_the_clear),
        "priced by the K of today": importance(terms=k_as_if_fresh),
        "K follows the draws": importance(observe=k_follows_the_draws),
        "bounds seen between passes have no cap": importance(observe=bounds_without_a_cap, draw=drawn_to_the_bound),
        "weights by old norms": patched(ImportanceWeights, "weights", weighed_by_old_norms),
        "coins of the pass serve all draws": importance(draw=coins_of_the_pass),
        "passes by the records there are": importance(prepare=prepared_by_length),
    },
    "dpis, adaptive": {
        "K* is noised for C": importance(_release=noised_for_first_bound),
        "half the noise of K and N": importance(_release=half_the_releases),
        "half the noise of a step": importance(terms=half_the_step),
        "K is not clipped": Twist(patch=unclipped_sum),
    },
    "dpsur": {
        "half the noise of a test": tests_changed(energy=half_the_test),
        "the test's value is not clipped": tests_changed(add_noise=lambda self, means, noise: means + noise),
        "tests on the training draw": Twist(patch=on_the_training_draw),
        "tests on everybody": Twist(patch=on_everybody),
        "momentum keeps rejected gradients": parts(selection=sabotage.KeepsMomentum(test=DPSUR.selection.test)),  # type: ignore[attr-defined]
        "rejected attempts are free": Twist(
            recipe=recipes.dpsur(validation_clip=1e-3, validation_noise=1.0, accounting="published", **COMMON)
        ),
        "half the noise of a step": Twist(patch=halving_noise),
        "passes more than it says": tests_changed(passes=lambda self, noised: noised < 3 * self.clip),
    },
    "dpsur with a schedule": {
        "the test's noise is one step ahead": tests_changed(energy=test_ahead),
        "half the noise of a test": tests_changed(energy=half_the_test),
        "tests on everybody": Twist(patch=on_everybody),
        "half the noise of a step": Twist(patch=halving_noise),
    },
    "screening, public": {
        "private energy": patched(Annealing, "_energy", private_energy),
        "looks at private records first": patched(Annealing, "_anneals", restless),
        "half the noise": Twist(patch=halving_noise),
        "rejected attempts are free": Twist(
            recipe=recipes.screening(
                public=torch.ones(2, 1), public_name="ones", temperature=1e3, accounting="published", **COMMON
            )
        ),
    },
    "screening": {
        "the forced interval is not priced": Twist(patch=without_forced),
        "half the noise of a test": tests_changed(energy=half_the_test),
        "the test's value is not clipped": tests_changed(add_noise=lambda self, means, noise: means + noise),
        "tests on everybody": Twist(patch=on_everybody),
        "tests on the training draw": Twist(patch=on_the_training_draw),
        "half the noise of a step": Twist(patch=halving_noise),
    },
    "allocation": {
        "a record in every step": patched(Shuffled, "draw", dealt_twice),
        "steps shift with a record": patched(Shuffled, "draw", dealt_in_turn),
        "steps by the records there are": Twist(arrange=batches_by_the_records),
        "priced at twice the noise": Twist(patch=at_twice_the_noise),
        "half the noise": Twist(patch=halving_noise),
    },
    "shuffled": {
        "a record in every batch": patched(Shuffled, "draw", dealt_twice),
        "batches shift with a record": patched(Shuffled, "draw", dealt_in_turn),
        "batches of one size": patched(Shuffled, "draw", refilled),
        "half the noise": Twist(patch=halving_noise),
    },
    "rate_free": {
        "steps by the size of the draw": peeking(DistanceOverGradients, "step", steps_by_size),
        "no step after an empty draw": peeking(DistanceOverGradients, "step", steps_after_full_draws),
        "lengths before their noise": peeking(DistanceOverGradients, "step", squares_before_noise),
        "normalised to twice the bound": weighed(lambda n, c: torch.where(n.isfinite(), 2 * c / (n + 0.01), 0 * n)),
    },
    "banded": {
        "anybody joins any draw": patched(Cyclic, "draw", everybody_in_turn),
        "groups shift with a record": patched(Cyclic, "draw", dealt_by_number),
        "columns longer than one": patched(Banded, "_weights", unnormalised),
        "noise is taken back whole": patched(Banded, "add", noise_alone),
        "half the noise": Twist(patch=halving_noise),
    },
    "blockwise": {
        "a block longer than the whole": patched(PerBlock, "weigh", each_to_the_whole),
        "bounds by the draw": patched(PerBlock, "weigh", by_the_draw),
        "the last block is not clipped": patched(PerBlock, "weigh", last_at_large),
        "what is no number is kept": patched(PerBlock, "weigh", keeps_bad),
        "half the noise": Twist(patch=halving_noise),
    },
    "blockwise, adaptive": {
        "votes without noise": patched(QuantileBlocks, "release", unnoised_votes),
        "votes cost nothing": patched(QuantileBlocks, "terms", votes_for_free),
        "votes by length": patched(QuantileBlocks, "weigh", votes_by_length),
        "half the noise": Twist(patch=halving_noise),
    },
    "preconditioned": {
        "the map is found on the records": patched(Probed, "probe", maps_of_records),
        "clipped before it is stretched": Twist(patch=clipping_first),
        "stretched again before the noise": Twist(patch=stretching_twice),
        "the map follows the draw": Twist(patch=following_the_draw),
        "half the noise": Twist(patch=halving_noise),
    },
    "low_pass": {
        "remembers what was before the noise": peeking(LowPass, "refine", keeps_clean),
        "an empty draw is not filtered": peeking(LowPass, "refine", skips_empty),
        "gradients by the size of the draw": peeking(LowPass, "refine", follows_size),
        "a large draw begins again": peeking(LowPass, "refine", begins_again),
        "half the noise": Twist(patch=halving_noise),
    },
    "kalman": {
        "remembers what was before the noise": peeking(Kalman, "refine", keeps_clean),
        "an empty draw predicts nothing": peeking(Kalman, "refine", skips_empty),
        "gradients by the size of the draw": peeking(Kalman, "refine", follows_size),
        "the filter's weight by the size of the draw": peeking(Kalman, "refine", trusts_size),
        "twice the bound for two gradients": parts(weighing=sabotage.TwiceTheBound()),
    },
    "adam_bc": {
        "squares of clean gradients": peeking(AdamBC, "_move", moves_clean),
        "steps by the size of the draw": peeking(AdamBC, "_move", moves_by_size),
        "noise is told by the size of the draw": peeking(
            AdamBC, "hear", lambda own, self, deviation: own(self, deviation * self.seen[0])
        ),
        "noise is told by the sums before it": peeking(
            AdamBC,
            "hear",
            lambda own, self, deviation: own(
                self, deviation + max(float(t.abs().max()) for t in self.seen[1].values())
            ),
        ),
        "half the noise": Twist(patch=halving_noise),
    },
    "averaged": {
        "models before their noise": peeking(Averaged, "follow", averages_clean),
        "weights by the size of the draw": peeking(Averaged, "weigh", lambda own, self, number: 1 / (1 + self.seen[0])),
        "models of empty draws are left out": peeking(Averaged, "follow", averages_full),
        "a large draw begins again": peeking(Averaged, "follow", averages_anew),
        "half the noise": Twist(patch=halving_noise),
    },
    "dpagd": {
        "no noise in a choice": lengths(NoNoise),
        "no noise is even drawn": lengths(NotEvenDrawn),
        "half the scale": lengths(HalfTheScale),
        "losses are not clipped": lengths(UnclippedLosses),
        "the mean of the draw": lengths(MeanOfTheDraw),
        "as far as private losses reach": lengths(ByPrivateLoss),
        "chooses on the training draw": Twist(patch=chooses_on_the_training_draw),
    },
}
