"""Noise screening by simulated annealing: a proposal that does not help is kept less and less often (SA-DPSGD)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from dp_accounting import DpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray

from sordino.accounting.erasure import STEEPNESS, AnnealedErasure
from sordino.errors import InvalidInput
from sordino.records import Collate, Records
from sordino.schedules import Constant
from sordino.selection.energy import Array, difference, validation_draw
from sordino.selection.noisy_test import NoisyTest
from sordino.selection.rejecting import Rejecting, proposal_noise, validation_rate
from sordino.selection.rollback import Rollback
from sordino.selection.selector import Snapshot

if TYPE_CHECKING:
    from sordino.recipe import Recipe
    from sordino.step import Attempt

_ACCEPTED, _REJECTIONS = "selection.accepted", "selection.rejections"


@dataclass(frozen=True, eq=False)
class Public:
    """Records that need no protection, by the name under which the guarantee mentions them."""

    name: str
    records: Records

    @classmethod
    def of(cls, name: str, dataset: Any, collate: Collate | None = None) -> Public:
        """A dataset or tensors, collated like the private records."""
        return cls(name, Records(dataset, collate))


@dataclass(frozen=True, kw_only=True)
class Annealing(Rejecting):
    """Accept with probability min(1, exp(−ΔE·Q0·τ)), τ accepted so far, and always after μ0 rejections (001, Alg. 2).

    Before the first acceptance τ counts as 1. Where the energy comes from decides what an attempt costs:
    - `public` records: the decision is post-processing of the released gradient, each attempt costs its proposal;
    - a noisy `test` on private records: ΔE is clipped and noised first, and the attempt costs an erasure event that
      holds at every temperature;
    - a draw of `private_size` private records without noise: the paper's own, charged by accounting="published" only.
    """

    temperature: float = 10.0
    patience: int = 10
    public: Public | None = None
    test: NoisyTest | None = None
    private_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.temperature < math.inf:
            raise InvalidInput(f"temperature={self.temperature} must be > 0: it is Q0, 10 in the paper")
        if self.patience < 1:
            raise InvalidInput(f"patience={self.patience} must be >= 1: it is how many rejections in a row are allowed")
        if sum(source is not None for source in (self.public, self.test, self.private_size)) != 1:
            raise InvalidInput("give the energy one source: public records, or private ones through a noisy test")
        if self.private_size is not None and not self.published:
            raise InvalidInput(
                f"private_size={self.private_size} without noise reveals its records: give validation_noise, "
                "or public records, or accounting='published' to reproduce the paper"
            )
        if self.test is not None and not isinstance(self.test.schedule, Constant):
            raise InvalidInput("the noise of an annealed test is constant: leave its schedule out")

    @property
    def assumptions(self) -> tuple[str, ...]:
        said = super().assumptions
        if self.public is not None:
            said += (f"proposals were screened on public records ({self.public.name}), which are not protected",)
        return said

    def price(self, proposal: PoissonSampledDpEvent, step: int, recipe: Recipe) -> DpEvent:
        if self.test is None:
            return proposal
        rate = float(proposal.sampling_probability)
        test_rate = validation_rate(self.test.size, recipe)
        return AnnealedErasure(rate, proposal_noise(proposal), test_rate, self.test.noise_multiplier)

    def published_price(self, proposal: PoissonSampledDpEvent, step: int, recipe: Recipe) -> DpEvent:
        """τ accepted updates cost τ times the sampled Gaussian, and the energy nothing (Thm. 1)."""
        return proposal

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        assert isinstance(before, Rollback)
        memory = attempt.bench.memory
        accepted, rejections = memory.get(_ACCEPTED, 0), memory.get(_REJECTIONS, 0)
        kept = rejections >= self.patience or self._anneals(attempt, before, self.temperature * max(accepted, 1))
        memory[_ACCEPTED] = accepted + kept
        memory[_REJECTIONS] = 0 if kept else rejections + 1
        return kept

    def _anneals(self, attempt: Attempt, before: Rollback, temperature: float) -> bool:
        if self.test is not None and temperature * self.test.clip < STEEPNESS[0]:
            return True  # hardly ever a rejection, and that has no price of its own
        energy, coin = np.array([self._energy(attempt, before)]), attempt.bench.source.uniform(1)
        return bool(self.passes(energy, coin, temperature)[0])

    def _energy(self, attempt: Attempt, before: Rollback) -> float:
        bench = attempt.bench
        if self.test is not None:
            return self.test.energy(attempt, before)
        if self.public is not None:
            count = self.public.records.count
            return difference(before, bench, self.public.records, torch.arange(count)) / count
        assert self.private_size is not None
        draw = validation_draw(attempt, validation_rate(self.private_size, bench.recipe))
        return difference(before, bench, bench.records, draw.indices) / self.private_size

    @staticmethod
    def passes(energies: Array, coins: Array, temperature: float) -> NDArray[np.bool_]:
        """Whether uniform coins are at most exp(−ΔE·Q); improvements always pass (Eq. 3)."""
        return coins <= np.exp(-np.maximum(energies, 0.0) * temperature)
