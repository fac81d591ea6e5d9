"""Noise screening by simulated annealing: a proposal that does not help is kept less and less often (SA-DPSGD)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from dp_accounting import DpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray

from sordino.accounting.erasure import STEEPNESS, AnnealedErasure
from sordino.errors import InvalidInput
from sordino.mechanisms import Mechanism
from sordino.mechanisms.noisy_test import Array, NoisyTest, difference, validation_draw
from sordino.mechanisms.rejecting import Attempts, Rejecting, Rollback, proposal_noise, recipe_with, validation_rate
from sordino.parts import Constant, Snapshot
from sordino.recipe import Common, Optimizer, Recipe
from sordino.records import Collate, Records

if TYPE_CHECKING:
    from sordino.step import Attempt


@dataclass(frozen=True, eq=False)
class Public:
    """Records that need no protection, by the name under which the guarantee mentions them."""

    name: str
    records: Records

    @classmethod
    def of(cls, name: str, dataset: Any, collate: Collate | None = None) -> Public:
        """Return a dataset or tensors, collated like the private records."""
        return cls(name, Records(dataset, collate))


@dataclass
class Screened(Attempts):
    """How many proposals were accepted, and how many were rejected in a row since then."""

    accepted: int = 0
    rejections: int = 0


@dataclass(frozen=True, kw_only=True)
class Annealing(Rejecting):
    """Accept with probability min(1, exp(−ΔE·Q0·τ)), τ accepted so far, and always after μ0 rejections (Alg. 2).

    Before the first acceptance τ counts as 1. Where the energy comes from decides what an attempt costs:
    - `public` records: the decision is post-processing of the released gradient, each attempt costs its proposal;
    - a noisy `test` on private records: ΔE is clipped and noised first, and the attempt costs an erasure event that
      holds at every temperature;
    - a draw of `private_size` private records without noise: the paper's own way, only with accounting="published".
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
            raise InvalidInput("the noise of an annealed test is constant: leave out its schedule")

    def start(self) -> Screened:
        return Screened()

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
        """Price τ accepted updates as τ times the sampled Gaussian, and the energy as nothing (Thm. 1)."""
        return proposal

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        assert isinstance(before, Rollback)
        state: Screened = attempt.bench.states.selection
        temperature = self.temperature * max(state.accepted, 1)
        kept = state.rejections >= self.patience or self._anneals(attempt, before, temperature)
        state.accepted += kept
        state.rejections = 0 if kept else state.rejections + 1
        return kept

    def _anneals(self, attempt: Attempt, before: Rollback, temperature: float) -> bool:
        if self.test is not None and temperature * self.test.clip < STEEPNESS[0]:
            return True  # rejections are very rare, and have no separate price
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


def screening(
    *,
    public: Any = None,
    public_name: str | None = None,
    collate: Collate | None = None,
    clip: float = 0.1,
    lr: float = 0.5,
    momentum: float = 0.0,
    optimizer: str = "sgd",
    temperature: float = 10.0,
    patience: int = 10,
    validation_size: int | None = None,
    validation_noise: float | None = None,
    validation_clip: float = 0.001,
    accounting: str = "proven",
    **common: Unpack[Common],
) -> Recipe:
    """Screen proposals by simulated annealing (noise screening, Alg. 2; defaults of its MNIST run).

    The energy is the mean loss on `public` records, which the guarantee names by `public_name`; or on a draw of
    `validation_size` private ones, clipped and noised by `validation_noise`. Every attempt is charged.
    accounting="published" charges only accepted updates, and allows private records without noise: no guarantee.

    >>> import torch
    >>> from sordino import recipes
    >>> held_out = (torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64))
    >>> recipe = recipes.screening(public=held_out, public_name="zeros", batch_size=512, epochs=1)
    >>> recipe.selection.assumptions[1]
    'proposals were screened on public records (zeros), which are not protected'
    """
    if (public is None) != (public_name is None):
        raise InvalidInput("public and public_name go together: the guarantee says which records were not protected")
    source: Public | None = None
    test: NoisyTest | None = None
    if public is not None:
        source = Public.of(str(public_name), public, collate)
    if validation_noise is not None:
        test = NoisyTest(validation_size or 256, validation_clip, validation_noise)
    selection = Annealing(
        temperature=temperature,
        patience=patience,
        public=source,
        test=test,
        private_size=validation_size if test is None else None,
        accounting=accounting,
    )
    return recipe_with("screening", selection, clip, Optimizer(optimizer, lr=lr, momentum=momentum), common)


MECHANISMS = (
    Mechanism(
        "screening",
        title="SA-DPSGD",
        summary="noisy updates are screened by simulated annealing",
        paper="An efficient differential privacy deep learning method based on noise screening, 2022",
        recipe=screening,
        parts={"Selector": {"annealing": Annealing}},
        example={"validation_noise": 1.0},
    ),
)
