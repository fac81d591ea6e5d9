"""Losses on a fresh draw, the difference that a proposal makes to them, and DPSUR's noisy test of that difference."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import Tensor

from sordino.accounting.erasure import Erasure
from sordino.errors import InvalidInput
from sordino.gradients.engine import FullPrecision, total_dtype
from sordino.mechanisms.rejecting import Rollback, proposal_noise, validation_rate
from sordino.noise import settle, widen
from sordino.parts import Constant, Draw, Poisson, Schedule, evaluating, factor_at
from sordino.records import Records

if TYPE_CHECKING:
    from sordino.recipe import Recipe
    from sordino.step import Attempt, Bench

AT_ONCE = 1024
"""Examples at once. Losses without gradients need little memory, so these are more than an engine takes."""
LEVELS = 16
SINGLE = 4
ROUNDING = 1.01
"""A margin: in float32, the last digits of other records' losses depend on the batch they are computed in."""
DIGITS = 3200
"""Losses count up to so many last digits below a record's bound: sixteen that flip in both losses are within it."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class NoisyTest:
    """ΔE + N(0, (σ_v·2C_v)²) < β·C_v, where ΔE is a mean over a Poisson draw, clipped to ±C_v (DPSUR, Alg. 2).

    `size` is the expected size of the draw and the public divisor of the mean, `clip` C_v, `noise_multiplier` σ_v and
    `threshold` β. The noise may follow a `schedule`, which is run in 16 steps, so that few different events happen.
    `share` bounds how far one record moves ΔE, in C_v: before the mean is taken, its own difference is clipped to
    c = share·size·C_v, which the paper does not do.

    Guarantees: clipping the mean bounds the probability of acceptance by Φ((β∓1)/(2σ_v)) (Eqs. 11-12), whatever the
    records; the noisy value is a Gaussian of sensitivity 2C_v and multiplier σ_v on a draw. With a `share` one
    record moves it by c/size at most, that is by share/(2σ_v) deviations, which makes an attempt cheaper.
    Edge cases: an empty draw has ΔE = 0.
    """

    size: int = 256
    clip: float = 0.001
    noise_multiplier: float = 1.3
    threshold: float = -1.0
    schedule: Schedule = field(default_factory=Constant)
    share: float | None = None

    def __post_init__(self) -> None:
        if not self.size >= 1:
            raise InvalidInput(f"validation_size={self.size} must be >= 1: it is the expected size of a draw")
        if not 0 < self.clip < math.inf:
            raise InvalidInput(f"validation_clip={self.clip} must be > 0: 0.001 is DPSUR's choice")
        if not 0 < self.noise_multiplier < math.inf:
            raise InvalidInput(f"validation_noise={self.noise_multiplier} must be > 0 and finite: no noise, no privacy")
        if self.share is not None and not 0 < self.share < math.inf:
            raise InvalidInput(
                f"share={self.share} must be > 0 and finite: it bounds how far one record moves the test, in its "
                "clipping bound; try 0.39, or None for the paper's test"
            )
        if math.isnan(self.threshold):
            raise InvalidInput("threshold is not a number: -1 is DPSUR's choice")

    def noise_at(self, step: int, steps: int) -> float:
        """Return σ_v at a step: the schedule's value at the beginning of its sixteenth of the run."""
        first = -(-(step * LEVELS // steps) * steps // LEVELS)
        return self.noise_multiplier * factor_at(self.schedule, first, steps)

    def acceptance(self, step: int, steps: int) -> tuple[float, float]:
        """Return the least and the largest probability of acceptance: Eqs. 12 and 11."""
        spread = 2 * self.noise_at(step, steps)
        return float(ndtr((self.threshold - 1) / spread)), float(ndtr((self.threshold + 1) / spread))

    def erasure(self, proposal: PoissonSampledDpEvent, step: int, recipe: Recipe) -> Erasure:
        """Return the event of an attempt whose proposal is seen only if it passes."""
        rate, sigma = float(proposal.sampling_probability), proposal_noise(proposal)
        return self._event(rate, sigma, step, recipe)

    def verdict(self, step: int, recipe: Recipe) -> Erasure:
        """Return the event of one verdict alone: one bit."""
        return self._event(1.0, math.inf, step, recipe)

    def _event(self, rate: float, noise_multiplier: float, step: int, recipe: Recipe) -> Erasure:
        steps, test_rate = _steps(recipe), validation_rate(self.size, recipe)
        low, high = self.acceptance(step, steps)
        return Erasure(rate, noise_multiplier, test_rate, low, high, shift=self.shift(step, steps))

    def shift(self, step: int, steps: int) -> float:
        """How far one record moves the test value, in deviations of its noise."""
        return math.inf if self.share is None else ROUNDING * self.share / (2 * self.noise_at(step, steps))

    @property
    def record_clip(self) -> float:
        """c, the bound of one record's own difference."""
        return math.inf if self.share is None else self.share * self.size * self.clip

    def largest_loss(self, bench: Bench) -> float:
        """How far a loss counts: the last digits of a longer one, which other records move, may exceed the bound."""
        kinds = {p.dtype for p in bench.objective.parameters() if p.is_floating_point()}
        return self.record_clip / (DIGITS * max((torch.finfo(kind).eps for kind in kinds), default=1.0))

    def gaussian(self, step: int, recipe: Recipe) -> PoissonSampledDpEvent:
        """Return the event of the noisy value itself, which the paper charges."""
        noise = GaussianDpEvent(self.noise_at(step, _steps(recipe)))
        return PoissonSampledDpEvent(validation_rate(self.size, recipe), noise)

    def energy(self, attempt: Attempt, before: Rollback) -> float:
        """Return the noisy ΔE of the current model: both losses on one fresh draw, divided by a public constant."""
        bench = attempt.bench
        draw = validation_draw(attempt, validation_rate(self.size, bench.recipe))
        found = difference(
            before, bench, bench.records, draw.indices, self.record_clip, largest=self.largest_loss(bench)
        )
        mean = found / self.size
        std = self.noise_at(attempt.terms.step, _steps(bench.recipe)) * 2 * self.clip
        noise = bench.source.gaussian(attempt.receipt, 1, std)
        exact, released = (self.add_noise(np.array([mean]), drawn) for drawn in (np.zeros(1), noise.numpy()))
        return settle(bench.source, attempt.receipt, torch.from_numpy(exact), torch.from_numpy(released)).item()

    def add_noise(self, means: Array, noise: Array) -> Array:
        """Clip, then add noise: nothing else about the records reaches the decision."""
        return clip_energy(means, self.clip) + noise

    def passes(self, noised: Array) -> NDArray[np.bool_]:
        """Whether noisy energies are below β·C_v."""
        return noised < self.threshold * self.clip

    def check(self, bench: Bench) -> None:
        """Refuse half precision, whose rounding moves other records' losses by more than the price allows for."""
        if self.share is None:
            return
        for parameter in bench.objective.parameters():
            if parameter.is_floating_point() and parameter.element_size() < SINGLE:
                raise InvalidInput(
                    f"share={self.share:g} needs losses in float32 or better, a parameter is "
                    f"{parameter.dtype}: train in float32, or give validation_share=None"
                )


def _steps(recipe: Recipe) -> int:
    assert recipe.steps is not None
    return recipe.steps


def validation_draw(attempt: Attempt, rate: float) -> Draw:
    """Take a fresh Poisson draw of the private records, independent of the one that made the proposal."""
    bench = attempt.bench
    return Poisson(rate).draw(bench.records.count, bench.source, None)


def losses(bench: Bench, records: Records, indices: Tensor) -> Tensor:
    """Return one loss per record of the current model, in eval mode, in float64; each process computes its part.

    If a unit owns several records, its loss is the mean over them, over the same ones each time. Autocast around the
    step is off and products are in full float32: coarser products would round a record's loss differently beside other
    records.
    """
    size = bench.microbatch or AT_ONCE
    found = torch.zeros(len(indices), dtype=torch.float64)
    mine = torch.arange(len(indices))[bench.team.own(len(indices))]
    with torch.no_grad(), FullPrecision(bench.device), evaluating(bench.objective.model):
        for part in mine.split(size) if len(mine) else ():
            batch = records.fetch(indices[part], bench.device)
            each = bench.objective.losses(batch.data, batch.size)
            each = each.to(total_dtype(each))
            found[part] = widen(each if batch.groups is None else batch.groups.mean(each)).cpu()
    return bench.team.sum([found])[0]


def difference(
    before: Rollback,
    bench: Bench,
    records: Records,
    indices: Tensor,
    record_clip: float = math.inf,
    largest: float = math.inf,
) -> float:
    """Return the sum of loss(proposed) − loss(before), both on the same records (DPSUR, Alg. 2, lines 10-11).

    Each record's own difference is clipped to ±`record_clip`, so one record moves the sum by no more. A loss counts as
    at most `largest`.
    Edge cases: without records the sum is 0; a record whose loss was not finite before counts 0; if the proposal makes
    a loss NaN, the difference is +∞.
    """
    proposed = losses(bench, records, indices)
    with before.in_place():
        current = losses(bench, records, indices)
    proposed = torch.nan_to_num(proposed, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    worse = proposed.clamp(-largest, largest) - current.clamp(-largest, largest)
    each = torch.where(torch.isfinite(current), worse, torch.zeros_like(worse)).clamp(-record_clip, record_clip)
    total = float(each.sum())
    return total if total == total else float("inf")


def clip_energy(energy: Array, clip: float) -> Array:
    """Clip to ±C_v: whatever the records, the result moves by at most 2·C_v (DPSUR, Alg. 2, line 12)."""
    return np.clip(energy, -clip, clip)


PARTS = {"NoisyTest": {"noisy-test": NoisyTest}}
"""Their names in recipes on disk; a recipe is given these parts, so no mechanism has their names."""
