"""DPSUR, selective update and release: keep a proposal if a noisy test says that it helps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Unpack

import numpy as np
from dp_accounting import DpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

from sordino.errors import InvalidInput
from sordino.mechanisms import Mechanism
from sordino.mechanisms.noisy_test import NoisyTest
from sordino.mechanisms.rejecting import (
    Attempts,
    Rejecting,
    Rollback,
    average_with_rejected,
    forget_rejected,
    recipe_with,
    shorten,
    together,
)
from sordino.parts import Constant, Schedule, Snapshot
from sordino.recipe import Common, Optimizer, Recipe

if TYPE_CHECKING:
    from sordino.step import Attempt, Bench

HALVINGS = 4


@dataclass
class Tested(Attempts):
    """Where the current block of jointly tested proposals began, and how many paid verdicts are left."""

    block: Rollback | None = None
    tests: int = 0


@dataclass(frozen=True, kw_only=True)
class Selective(Rejecting):
    """Keep a proposal if it passes a `NoisyTest`, otherwise roll it back (DPSUR, Alg. 2).

    By default a rejected proposal leaves no trace, and an attempt costs the erasure event. Three refinements use
    rejected proposals, so they pay for the proposal and for the verdicts in full:
    - `reuse` averages rejected gradients into the next proposal;
    - `line_search` tests shorter and shorter steps along one gradient. An attempt pays for `tests` verdicts; those that
      it does not need are kept for later attempts, so that all are paid before they happen;
    - `test_every=m` tests m steps together and rolls all of them back.
    """

    test: NoisyTest = field(default_factory=NoisyTest)
    reuse: bool = False
    line_search: bool = False
    tests: int = 2
    test_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_every < 1 or self.tests < 1:
            raise InvalidInput(f"test_every={self.test_every} and tests={self.tests} must be >= 1")
        if self.reuse and self.test_every > 1:
            raise InvalidInput(
                f"reuse=True with test_every={self.test_every}: gradients of different models do not average; use 1"
            )
        if self.line_search and not isinstance(self.test.schedule, Constant):
            raise InvalidInput(
                "line_search=True keeps paid verdicts for later, where a schedule of the test's noise would make them "
                "more expensive than what was paid: leave out validation_schedule"
            )
        if self.published and self.test.share is not None:
            raise InvalidInput("accounting='published' is the paper's algorithm: leave validation_share out")
        if self.published and not self._erases:
            raise InvalidInput("accounting='published' is the paper's algorithm: leave out its refinements")

    def start(self) -> Tested:
        return Tested()

    @property
    def _erases(self) -> bool:
        return not (self.reuse or self.line_search or self.test_every > 1)

    @property
    def constant(self) -> bool:
        return isinstance(self.test.schedule, Constant) and self.test_every == 1

    @property
    def evaluates(self) -> bool:
        return self.test.share is not None  # one record's share is bounded, if it moves no other record's loss

    def check(self, bench: Bench) -> None:
        self.test.check(bench)

    def price(self, proposal: PoissonSampledDpEvent, step: int, recipe: Recipe) -> DpEvent:
        if self._erases:
            return self.test.erasure(proposal, step, recipe)
        if not self._tests_at(step, recipe):
            return proposal
        verdict: DpEvent = self.test.verdict(step, recipe)
        if self.line_search and self.tests > 1:
            verdict = SelfComposedDpEvent(verdict, self.tests)
        return together(proposal, verdict)

    def published_price(self, proposal: PoissonSampledDpEvent, step: int, recipe: Recipe) -> DpEvent:
        """Price T accepted updates as T times the training and the validation mechanism (Thms. 5.1 and 5.5)."""
        return together(proposal, self.test.gaussian(step, recipe))

    def _tests_at(self, step: int, recipe: Recipe) -> bool:
        assert recipe.steps is not None
        return (step + 1) % self.test_every == 0 or step + 1 == recipe.steps

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        """Take the state before this proposal, or before the block of proposals that are tested together."""
        if self.test_every == 1:
            return super().snapshot(attempt)
        state: Tested = attempt.bench.states.selection
        if attempt.terms.step % self.test_every == 0 or state.block is None:
            state.block = Rollback(attempt.bench)
        return state.block

    def refine(self, attempt: Attempt) -> None:
        if self.reuse:
            average_with_rejected(attempt)

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        assert isinstance(before, Rollback)
        if not self._tests_at(attempt.terms.step, attempt.bench.recipe):
            return True
        attempt.bench.states.selection.block = None
        kept = self._search_line(attempt, before) if self.line_search else self._passes(attempt, before)
        if kept:
            forget_rejected(attempt)
        return kept

    def _passes(self, attempt: Attempt, before: Rollback) -> bool:
        return bool(self.test.passes(np.array([self.test.energy(attempt, before)]))[0])

    def _search_line(self, attempt: Attempt, before: Rollback) -> bool:
        """Test the whole step, half of it, a quarter, ..., as far as paid verdicts reach."""
        state: Tested = attempt.bench.states.selection
        state.tests += self.tests
        for halving in range(HALVINGS + 1):
            if state.tests == 0:
                return False
            if halving:
                shorten(before, attempt.parameters)
            state.tests -= 1
            if self._passes(attempt, before):
                return True
        return False


def dpsur(
    *,
    clip: float = 0.1,
    lr: float = 2.0,
    momentum: float = 0.9,
    optimizer: str = "sgd",
    validation_size: int = 256,
    validation_noise: float = 1.3,
    validation_clip: float = 0.001,
    validation_share: float | None = 0.39,
    threshold: float = -1.0,
    validation_schedule: Schedule | None = None,
    reuse: bool = False,
    line_search: bool = False,
    tests: int = 2,
    test_every: int = 1,
    accounting: str = "proven",
    **common: Unpack[Common],
) -> Recipe:
    """Keep an update if a noisy test on fresh records says that it helps (DPSUR, Alg. 2; defaults of its MNIST run).

    Every attempt is a step of the recipe and is charged. accounting="published" counts only accepted updates, as the
    paper does; that gives no guarantee. `reuse`, `line_search` and `test_every` go beyond the paper (see `Selective`).
    So does `validation_share`: one record moves the test by at most that share of its clipping bound, which makes an
    attempt cheaper. None is the paper's test, which "published" always uses.

    >>> from sordino import recipes
    >>> recipe = recipes.dpsur(batch_size=1024, noise_multiplier=2.0, steps=1152).for_records(60_000)
    >>> f"{recipe.price(1e-5):.2f}"
    '0.86'
    """
    share = None if accounting == "published" else validation_share
    schedule = validation_schedule or Constant()
    test = NoisyTest(validation_size, validation_clip, validation_noise, threshold, schedule, share)
    selection = Selective(
        test=test, reuse=reuse, line_search=line_search, tests=tests, test_every=test_every, accounting=accounting
    )
    proposer = Optimizer(optimizer, lr=lr, momentum=momentum if optimizer == "sgd" else 0.0)
    return recipe_with("dpsur", selection, clip, proposer, common)


MECHANISMS = (
    Mechanism(
        "dpsur",
        title="DPSUR",
        summary="an update is kept only if a noisy test finds that it helps",
        paper="DPSUR: Accelerating Differentially Private Stochastic Gradient Descent Using Selective Update and "
        "Release, VLDB 2024",
        recipe=dpsur,
        parts={"Selector": {"selective": Selective}},
    ),
)
