"""Selective update and release: keep a proposal if a noisy test says that it helps (DPSUR)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from dp_accounting import DpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

from sordino.errors import InvalidInput
from sordino.schedules import Constant
from sordino.selection.line import shorten
from sordino.selection.noisy_test import NoisyTest
from sordino.selection.rejecting import Rejecting, together
from sordino.selection.reuse import average_with_rejected, forget_rejected
from sordino.selection.rollback import Rollback
from sordino.selection.selector import Snapshot

if TYPE_CHECKING:
    from sordino.recipe import Recipe
    from sordino.step import Attempt, Bench

_BLOCK, _TESTS = "selection.block", "selection.tests"
HALVINGS = 4


@dataclass(frozen=True, kw_only=True)
class Selective(Rejecting):
    """Keep a proposal that passes a `NoisyTest`, else roll it back (DPSUR, Alg. 2).

    By default a rejected proposal leaves no trace and an attempt costs the erasure event. Three refinements use what
    was rejected, and so pay for the proposal and for the verdicts in full:
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
                "dearer than what was paid: leave validation_schedule out"
            )
        if self.published and self.test.share is not None:
            raise InvalidInput("accounting='published' is the paper's algorithm: leave validation_share out")
        if self.published and not self._erases:
            raise InvalidInput("accounting='published' is the paper's algorithm: leave out its refinements")

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
        """T accepted updates cost T times the training and the validation mechanism (Thms. 5.1 and 5.5)."""
        return together(proposal, self.test.gaussian(step, recipe))

    def _tests_at(self, step: int, recipe: Recipe) -> bool:
        assert recipe.steps is not None
        return (step + 1) % self.test_every == 0 or step + 1 == recipe.steps

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        """The state before this proposal, or before the block of proposals that are tested together."""
        if self.test_every == 1:
            return super().snapshot(attempt)
        memory, step = attempt.bench.memory, attempt.terms.step
        if step % self.test_every == 0 or _BLOCK not in memory:
            memory[_BLOCK] = Rollback(attempt.bench)
        before = memory[_BLOCK]
        assert isinstance(before, Rollback)
        return before

    def refine(self, attempt: Attempt) -> None:
        if self.reuse:
            average_with_rejected(attempt)

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        assert isinstance(before, Rollback)
        if not self._tests_at(attempt.terms.step, attempt.bench.recipe):
            return True
        attempt.bench.memory.pop(_BLOCK, None)
        kept = self._searched(attempt, before) if self.line_search else self._passes(attempt, before)
        if kept:
            forget_rejected(attempt)
        return kept

    def _passes(self, attempt: Attempt, before: Rollback) -> bool:
        return bool(self.test.passes(np.array([self.test.energy(attempt, before)]))[0])

    def _searched(self, attempt: Attempt, before: Rollback) -> bool:
        """Test the whole step, half of it, a quarter, ..., as far as paid verdicts reach."""
        memory = attempt.bench.memory
        memory[_TESTS] = memory.get(_TESTS, 0) + self.tests
        for halving in range(HALVINGS + 1):
            if memory[_TESTS] == 0:
                return False
            if halving:
                shorten(before, attempt.parameters)
            memory[_TESTS] -= 1
            if self._passes(attempt, before):
                return True
        return False
