"""DPAGD: choose how far to go along one noisy gradient by report-noisy-minimum over clipped losses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from dp_accounting import DpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray

from sordino.accounting.noisy_minimum import NoisyMinimum
from sordino.errors import InvalidInput
from sordino.gradients.engine import total_dtype
from sordino.mechanisms import Mechanism
from sordino.mechanisms.noisy_test import Array, losses, validation_draw
from sordino.mechanisms.rejecting import (
    Attempts,
    Rejecting,
    Rollback,
    average_with_rejected,
    forget_rejected,
    move_to,
    recipe_with,
    together,
    validation_rate,
)
from sordino.noise import settle
from sordino.parts import Snapshot
from sordino.recipe import Common, Optimizer, Recipe

if TYPE_CHECKING:
    from sordino.step import Attempt

REVIEW = 10


@dataclass
class Lengths(Attempts):
    """The lengths of the kept steps, which the noisy minimum released."""

    chosen: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StepLength(Rejecting):
    """Take the one of `candidates` lengths between 0 and `longest` with the smallest noisy loss (Lee & Kifer 2018).

    The direction is that of the optimizer's proposal, normalised to length 1. If length 0 wins, no step helps: the
    model stays, and the gradient gets more budget, because the next release at the same model is averaged with it. (Lee
    and Kifer buy a tenth more instead of another whole release, which makes what is spent depend on what was seen; here
    every attempt costs the same, so the budget fixes their number.) After every ten kept steps, `longest` shrinks to
    1.1 times the longest of them.

    Guarantees: a noisy minimum of `epsilon` on a fresh draw of expected `size` records, plus the Gaussian proposal.
    Edge cases: a loss that is not finite counts as the bound `loss_clip`, a negative one as 0.
    """

    epsilon: float = 0.1
    size: int = 256
    loss_clip: float = 3.0
    longest: float = 2.0
    candidates: int = 21

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.published:
            raise InvalidInput("accounting='published' does not exist for step lengths: every attempt is charged")
        for name in ("epsilon", "size", "loss_clip", "longest"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidInput(f"{name}={getattr(self, name)} must be > 0 and finite")
        if self.candidates < 2:
            raise InvalidInput(f"candidates={self.candidates} must be >= 2: no step, and at least one step")

    def start(self) -> Lengths:
        return Lengths()

    @property
    def evaluates(self) -> bool:
        return True  # one record moves a sum of clipped losses by one bound, if it moves no other record's loss

    def price(self, proposal: PoissonSampledDpEvent, step: int, recipe: Recipe) -> DpEvent:
        choice = PoissonSampledDpEvent(validation_rate(self.size, recipe), NoisyMinimum(self.epsilon))
        return together(proposal, choice)

    def published_price(self, proposal: PoissonSampledDpEvent, step: int, recipe: Recipe) -> DpEvent:
        return self.price(proposal, step, recipe)

    def refine(self, attempt: Attempt) -> None:
        average_with_rejected(attempt)

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        assert isinstance(before, Rollback)
        start, movement = before.movement(attempt.parameters)
        norm = math.sqrt(sum(float(m.to(total_dtype(m)).square().sum()) for m in movement))
        if not 0 < norm < math.inf:
            return False
        lengths = np.linspace(0.0, self._longest(attempt), self.candidates)
        draw = validation_draw(attempt, validation_rate(self.size, attempt.bench.recipe))
        totals = []
        for length in lengths:
            move_to(attempt.parameters, start, movement, float(length) / norm)
            totals.append(self._total(attempt, draw.indices))
        normals = attempt.bench.source.gaussian(attempt.receipt, 2 * len(lengths), 1.0).numpy().reshape(2, -1)
        exact = np.array(totals)
        noisy = settle(
            attempt.bench.source,
            attempt.receipt,
            torch.from_numpy(exact),
            torch.from_numpy(self.add_noise(exact, normals)),
        )
        chosen = int(np.argmin(noisy.numpy()))
        move_to(attempt.parameters, start, movement, float(lengths[chosen]) / norm)
        if chosen:
            attempt.bench.states.selection.chosen.append(float(lengths[chosen]))
            forget_rejected(attempt)
        return chosen > 0

    def add_noise(self, totals: Array, normals: Array) -> Array:
        """Subtract exponential noise of scale C/ε from totals.

        The noise is half the sum of two squared standard `normals` (first axis): exponential with mean 1.
        """
        exponential = (normals**2).sum(axis=0) / 2
        return np.asarray(totals - self.loss_clip / self.epsilon * exponential)

    def choose(self, totals: Array, normals: Array) -> NDArray[np.intp]:
        """Return the candidate (last axis) whose noised total is the smallest."""
        chosen: NDArray[np.intp] = np.argmin(self.add_noise(totals, normals), axis=-1)
        return chosen

    def _total(self, attempt: Attempt, indices: torch.Tensor) -> float:
        found = losses(attempt.bench, attempt.bench.records, indices)
        return float(torch.nan_to_num(found, nan=self.loss_clip).clamp(0.0, self.loss_clip).sum())

    def _longest(self, attempt: Attempt) -> float:
        """Find how far to look from the last full ten kept steps; they were released, so looking costs nothing."""
        chosen = attempt.bench.states.selection.chosen
        full = len(chosen) // REVIEW * REVIEW
        return min(self.longest, 1.1 * max(chosen[full - REVIEW : full])) if full else self.longest


def dpagd(
    *,
    clip: float = 3.0,
    loss_clip: float = 3.0,
    choice_epsilon: float = 0.1,
    validation_size: int = 256,
    longest: float = 2.0,
    candidates: int = 21,
    **common: Unpack[Common],
) -> Recipe:
    """Choose every step's length privately, and give the gradient more budget when none helps (Lee & Kifer 2018).

    It takes the one of `candidates` lengths up to `longest` with the smallest noisy loss. This choice is
    `choice_epsilon`-private on a draw of `validation_size` records. The learning rate has no effect: the gradient gives
    only the direction.

    >>> from sordino import recipes
    >>> recipes.dpagd(batch_size=512, epochs=10, choice_epsilon=0.5).selection.candidates
    21
    """
    selection = StepLength(
        epsilon=choice_epsilon, size=validation_size, loss_clip=loss_clip, longest=longest, candidates=candidates
    )
    return recipe_with("dpagd", selection, clip, Optimizer("sgd", lr=1.0), common)


MECHANISMS = (
    Mechanism(
        "dpagd",
        title="DPAGD",
        summary="the length of every step is chosen by a noisy minimum",
        paper="Lee and Kifer, Concentrated Differentially Private Gradient Descent with Adaptive per-Iteration "
        "Privacy Budget, KDD 2018",
        recipe=dpagd,
        parts={"Selector": {"step-length": StepLength}},
    ),
)
