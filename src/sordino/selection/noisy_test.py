"""DPSUR's test of a proposal: a clipped, noised difference of losses on a fresh draw."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy.special import ndtr

from sordino.accounting.erasure import Erasure
from sordino.errors import InvalidInput
from sordino.noise import settled
from sordino.schedules import Constant, Schedule, factor_at
from sordino.selection.energy import Array, bounded, difference, validation_draw
from sordino.selection.rejecting import proposal_noise, validation_rate
from sordino.selection.rollback import Rollback

if TYPE_CHECKING:
    from sordino.recipe import Recipe
    from sordino.step import Attempt

LEVELS = 16


@dataclass(frozen=True)
class NoisyTest:
    """ΔE + N(0, (σ_v·2C_v)²) < β·C_v, where ΔE is a mean over a Poisson draw, clipped to ±C_v (DPSUR, Alg. 2).

    `size` is the expected size of the draw and the public divisor of the mean, `clip` C_v, `noise_multiplier` σ_v and
    `threshold` β. The noise may follow a `schedule`, which is run in 16 steps, so that few different events happen.

    Guarantees: clipping the mean bounds the probability of acceptance by Φ((β∓1)/(2σ_v)) (Eqs. 11-12), whatever the
    records; the noisy value is a Gaussian of sensitivity 2C_v and multiplier σ_v on a draw.
    Edge cases: an empty draw has ΔE = 0.
    """

    size: int = 256
    clip: float = 0.001
    noise_multiplier: float = 1.3
    threshold: float = -1.0
    schedule: Schedule = field(default_factory=Constant)

    def __post_init__(self) -> None:
        if not self.size >= 1:
            raise InvalidInput(f"validation_size={self.size} must be >= 1: it is the expected size of a draw")
        if not 0 < self.clip < math.inf:
            raise InvalidInput(f"validation_clip={self.clip} must be > 0: 0.001 is DPSUR's choice")
        if not 0 < self.noise_multiplier < math.inf:
            raise InvalidInput(f"validation_noise={self.noise_multiplier} must be > 0 and finite: no noise, no privacy")
        if math.isnan(self.threshold):
            raise InvalidInput("threshold is not a number: -1 is DPSUR's choice")

    def noise_at(self, step: int, steps: int) -> float:
        """σ_v at a step: the schedule's value at the beginning of its sixteenth of the run."""
        first = -(-(step * LEVELS // steps) * steps // LEVELS)
        return self.noise_multiplier * factor_at(self.schedule, first, steps)

    def acceptance(self, step: int, steps: int) -> tuple[float, float]:
        """The least and the largest probability of acceptance: Eqs. 12 and 11."""
        spread = 2 * self.noise_at(step, steps)
        return float(ndtr((self.threshold - 1) / spread)), float(ndtr((self.threshold + 1) / spread))

    def erasure(self, proposal: PoissonSampledDpEvent, step: int, recipe: Recipe) -> Erasure:
        """The event of an attempt whose proposal is seen only if it passes."""
        low, high = self.acceptance(step, _steps(recipe))
        sigma = proposal_noise(proposal)
        return Erasure(float(proposal.sampling_probability), sigma, validation_rate(self.size, recipe), low, high)

    def verdict(self, step: int, recipe: Recipe) -> Erasure:
        """The event of one verdict alone: one bit."""
        low, high = self.acceptance(step, _steps(recipe))
        return Erasure(1.0, math.inf, validation_rate(self.size, recipe), low, high)

    def gaussian(self, step: int, recipe: Recipe) -> PoissonSampledDpEvent:
        """The event of the noisy value itself, which the paper charges."""
        noise = GaussianDpEvent(self.noise_at(step, _steps(recipe)))
        return PoissonSampledDpEvent(validation_rate(self.size, recipe), noise)

    def energy(self, attempt: Attempt, before: Rollback) -> float:
        """The noisy ΔE of the model as it stands: both losses on one fresh draw, divided by a public constant."""
        bench = attempt.bench
        draw = validation_draw(attempt, validation_rate(self.size, bench.recipe))
        mean = difference(before, bench, bench.records, draw.indices) / self.size
        std = self.noise_at(attempt.terms.step, _steps(bench.recipe)) * 2 * self.clip
        noise = bench.source.gaussian(attempt.receipt, 1, std)
        exact, released = (self.noised(np.array([mean]), drawn) for drawn in (np.zeros(1), noise.numpy()))
        return settled(bench.source, attempt.receipt, torch.from_numpy(exact), torch.from_numpy(released)).item()

    def noised(self, means: Array, noise: Array) -> Array:
        """Clip, then add noise: nothing else of the records reaches the decision."""
        return bounded(means, self.clip) + noise

    def passes(self, noised: Array) -> NDArray[np.bool_]:
        """Whether noisy energies are below β·C_v."""
        return noised < self.threshold * self.clip


def _steps(recipe: Recipe) -> int:
    assert recipe.steps is not None
    return recipe.steps
