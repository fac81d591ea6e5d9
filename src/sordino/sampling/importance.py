"""Importance sampling by gradient norm (DPIS, Wei et al. 2022): long gradients are drawn more often and weigh less.

At the start of an epoch one pass measures every record's norm, and K̃ ≈ Σ min(‖g‖, C) is released once; Ñ, the number of
records, is released once per run (Eqs. 10-12). In every step each record tosses one coin u and is used where

    u · K̃/b < min(max(‖g‖, g_L), C),

that is with probability b·‖ḡ‖/K̃ (Eq. 15), and then enters the sum with length K̃/Ñ. So that not all gradients are
needed for this, a bound ĝ = k·max(‖g‖ when last seen, g_L) ≤ C screens the coins first: only records with u·K̃/b < ĝ are
drawn at all. One coin for both decisions is the paper's pair q_t, p_t exactly: given u·K̃/b < ĝ it is uniform below ĝ.

A record adds at most K̃/Ñ with probability at most b·C/K̃: the event is SGM(b·C/K̃, σ_G·Ñ·C/K̃) (Eq. 13).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from torch import Tensor

from sordino.accounting.filter import Filter, Filtering
from sordino.distributed.sharding import whole
from sordino.errors import InvalidInput
from sordino.noise import Source, noised
from sordino.sampling import importance_plan
from sordino.sampling.draw import Draw, Sampler
from sordino.terms import Terms

if TYPE_CHECKING:
    from sordino.accounting.budget import Budget
    from sordino.recipe import Recipe
    from sordino.step import Bench

XI = 1e-3
"""K̃ exceeds b·C by this share at least, so that a draw never takes a record for sure (Eq. 12)."""
LEAST_CLIP = 0.01
"""An adaptive clipping bound stays above this share of the first one."""


@dataclass(frozen=True)
class Epoch:
    """What an epoch was told about the records: released values and nothing else, hence public."""

    number: int
    records: float
    total: float
    clip: float
    batch_size: float

    @property
    def reach(self) -> float:
        """K̃/b: a coin u belongs to the norm u·K̃/b, and no norm reaches this far."""
        return self.total / self.batch_size

    @property
    def sensitivity(self) -> float:
        """K̃/Ñ, how far a record that is used moves the sum."""
        return self.total / self.records

    def multiplier(self, noise: float) -> float:
        """Noise of deviation σ_G·C over the sensitivity."""
        return noise * (self.records * self.clip / self.total)

    def event(self, noise: float) -> PoissonSampledDpEvent:
        """One step with σ_G = `noise` (Eq. 13)."""
        return PoissonSampledDpEvent(self.clip / self.reach, GaussianDpEvent(self.multiplier(noise)))

    @classmethod
    def bounded(cls, number: int, records: float, total: float, clip: float, batch_size: float) -> Epoch:
        """Noisy values kept where the mechanism is defined: Ñ > b and b·C < K̃ <= Ñ·C (Eq. 12)."""
        least = (1 + XI) * batch_size
        records = max(records, least)
        return cls(number, records, min(max(total, least * clip), records * clip), clip, batch_size)


@dataclass(frozen=True)
class Importance(Sampler):
    """Each record is used with a probability in proportion to its clipped gradient norm.

    `multiplier` is k, by how much a norm may grow unseen before it is clipped to its bound; `floor` is g_L/C, below
    which all gradients count alike; `divider` is a_E, the share of epochs that save for a later K̃ as bad as Ñ·C
    (Sec. 4.2). `external` is C*/C_1 and turns the adaptive clipping bound on, C_e = `quantile`·K̃*/Ñ (Eqs. 16-17).
    `release_noise` is σ_N = σ_K: noise over sensitivity of Ñ, K̃ and K̃*. It and the public number of `records` are set
    by `calibrated`.

    Guarantees: given Ñ, K̃ and C, one step is SGM(b·C/K̃, σ_G·Ñ·C/K̃). Bounds depend on a record's own past coins; those
    only change at which length it is clipped, so that they average out.
    Edge cases: a gradient that is not finite counts as 0; a draw may be empty.
    """

    multiplier: float = 5.0
    floor: float = 0.01
    divider: float = 0.8
    external: float | None = None
    quantile: float = 1.0
    release_noise: float | None = None
    records: int | None = None

    def __post_init__(self) -> None:
        _require(self.multiplier >= 1, f"multiplier={self.multiplier} must be >= 1: norms would be clipped at once")
        _require(0 < self.floor <= 1, f"floor={self.floor} must lie in (0, 1]: a share of the clipping bound; try 0.01")
        _require(0 <= self.divider <= 1, f"divider={self.divider} must lie in [0, 1]: a share of the epochs; try 0.8")
        _require(self.quantile > 0, f"quantile={self.quantile} must be > 0: the mean norm is multiplied by it")
        _require(
            self.external is None or self.external >= 1,
            f"external={self.external} must be >= 1: the outer bound over the first clipping bound; try 4",
        )
        _require(
            self.release_noise is None or self.release_noise > 0,
            f"release_noise={self.release_noise} must be > 0: leave it out for 2 % of the records",
        )

    def calibrated(self, recipe: Recipe, budget: Budget) -> Recipe:
        """Fix the filter, the noise of K̃ and Ñ, and the σ_G that the worst case would need."""
        return importance_plan.calibrated(self, recipe, budget)

    @property
    def releases_per_epoch(self) -> int:
        return 1 if self.external is None else 2

    def steps_per_epoch(self, batch_size: int) -> int:
        """From the public number of records, never from the true one."""
        assert self.records is not None
        return max(1, round(self.records / batch_size))

    def worst(self, clip: float, batch_size: float) -> Epoch:
        """The epoch whose every gradient is long: K̃ = Ñ·C, which is DP-SGD."""
        _require(self.records is not None, "sampler=Importance() is not calibrated: call recipe.calibrate(budget, ...)")
        assert self.records is not None
        return Epoch.bounded(0, self.records, math.inf, clip, batch_size)

    # -- before a step ------------------------------------------------------------------------------------------

    def prepare(self, bench: Bench, step: int) -> None:
        """Open an epoch at its first step; after a resumption measure the norms again, which releases nothing."""
        importance_plan.check(bench.recipe)
        memory, number = bench.memory, step // self.steps_per_epoch(bench.recipe.batch_size)
        self._hear(bench)
        if _epoch(memory) is None or memory["released"]["number"] != number:
            self._open(bench, number)
        elif "bounds" not in memory:
            memory["bounds"] = self.bounds(measure(bench), memory["released"]["clip"])
        if "noise" not in memory:
            memory["noise"] = bench.team.lead(lambda: self._noise(bench, step))

    def _hear(self, bench: Bench) -> None:
        """Learn which norms the other processes saw in the last step, so that all draw by the same bounds."""
        seen = bench.memory.pop("seen", [])
        if bench.team.size > 1:
            for indices, bounds in itertools.chain(*bench.team.gather(seen)):
                bench.memory["bounds"][indices] = bounds

    def _open(self, bench: Bench, number: int) -> None:
        recipe, memory, before = bench.recipe, bench.memory, _epoch(bench.memory)
        records = before.records if before else self._release(bench, bench.records.count, 1.0)
        norms = measure(bench)
        clip = recipe.clip
        if before and self.external is not None:
            outer = self.external * recipe.clip
            mean = self._release(bench, _clipped_sum(norms, outer), outer) / before.records
            clip = min(max(self.quantile * mean, LEAST_CLIP * recipe.clip), outer)
        total = self._release(bench, _clipped_sum(norms, clip), clip)
        epoch = Epoch.bounded(number, records, total, clip, recipe.batch_size)
        memory.pop("noise", None)
        memory.update(released=asdict(epoch), bounds=self.bounds(norms, clip))

    def _release(self, bench: Bench, value: float, sensitivity: float) -> float:
        """`value` with Gaussian noise, paid for first (Eqs. 10, 11 with p_K = 1, 16)."""
        assert self.release_noise is not None
        receipt = bench.charge(GaussianDpEvent(self.release_noise))
        exact = torch.tensor(value, dtype=torch.float64)
        return noised(bench.source, receipt, exact, self.release_noise * sensitivity).item()

    def _noise(self, bench: Bench, step: int) -> float:
        """σ_G from here on: the smallest that what is left pays for, if later epochs turn out as assumed (Sec. 4.2)."""
        allowance, epoch, recipe = bench.run.allowance, _epoch(bench.memory), bench.recipe
        assert isinstance(allowance, Filtering)
        assert isinstance(recipe.rdp_filter, Filter)
        assert epoch is not None
        assert recipe.steps is not None
        return importance_plan.noise(self, recipe.rdp_filter, allowance.left, epoch, step, recipe.steps)

    def terms(self, terms: Terms, memory: dict[str, Any]) -> Terms:
        epoch, noise = _epoch(memory), memory.get("noise", terms.noise_multiplier)
        epoch = epoch or self.worst(terms.clip, terms.divisor)
        return replace(
            terms, clip=epoch.sensitivity, noise_multiplier=epoch.multiplier(noise), event=epoch.event(noise)
        )

    # -- the draw -----------------------------------------------------------------------------------------------

    def draw(self, records: int, source: Source, memory: dict[str, Any]) -> Draw:
        epoch = _epoch(memory)
        assert epoch is not None
        heights = torch.from_numpy(source.uniform(records)) * epoch.reach
        drawn = (heights < memory["bounds"]).nonzero().squeeze(1)
        return Draw(drawn, heights[drawn], self.floor * epoch.clip)

    def observe(self, draw: Draw, norms: Tensor, memory: dict[str, Any]) -> None:
        """Remember the fresh norms of all drawn records, used or not (Alg. 1, line 24)."""
        bounds = self.bounds(norms.detach().cpu(), memory["released"]["clip"])
        memory["bounds"][draw.indices] = bounds
        memory.setdefault("seen", []).append((draw.indices, bounds))

    def bounds(self, norms: Tensor, clip: float) -> Tensor:
        """ĝ = k·max(‖g‖, g_L), never above C.

        The paper caps ĝ nowhere, and a bound above K̃/b would be drawn for sure and weigh too much. A cap at C < K̃/b
        prevents that and changes nothing else: gradients are clipped to C in any case.
        """
        lengths = _finite(norms).clamp(min=self.floor * clip)
        return (self.multiplier * lengths).clamp(max=clip).float()


def measure(bench: Bench) -> Tensor:
    """The norm of every record's gradient at the present model, in microbatches; no gradient is formed or released."""
    parameters = bench.parameters()
    size = bench.microbatch or bench.engine.microbatch(parameters)
    norms, everyone = torch.zeros(bench.records.count), torch.arange(bench.records.count)
    mine = everyone[bench.team.own(len(everyone))]
    with whole(bench.objective, parameters) as parameters:
        for part in mine.split(size) if len(mine) else ():
            batch = bench.records.fetch(part, bench.device)
            norms[part] = bench.engine.differentiate(bench.objective, parameters, batch).norms.detach().float().cpu()
    return bench.team.sum([norms])[0]


def _epoch(memory: dict[str, Any]) -> Epoch | None:
    return Epoch(**memory["released"]) if memory.get("released") else None


def _finite(norms: Tensor) -> Tensor:
    return torch.where(torch.isfinite(norms), norms, torch.zeros_like(norms))


def _clipped_sum(norms: Tensor, clip: float) -> float:
    return float(_finite(norms).double().clamp(max=clip).sum())


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidInput(message)
