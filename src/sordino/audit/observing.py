"""Run the real step on an instance, many times: what an attacker may see of it, and whether the ledger pays for it.

The audit is sound even if the attacker's statistics are bad; each is there because it shows some broken mechanism. A
witness at the noise source checks the books against behaviour, not against other books: how often coins were tossed
over all records, how much noise was drawn on which receipt, and whether its event was already in the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino.accounting.erasure import AnnealedErasure, Erasure
from sordino.accounting.events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    from_json,
    to_json,
)
from sordino.accounting.filtered import Filtered
from sordino.accounting.jl_gaussian import ProjectedGaussian
from sordino.accounting.ledger import Ledger, Receipt
from sordino.accounting.paid_by_epoch import PaidByEpoch
from sordino.accounting.random_allocation import RandomAllocation
from sordino.audit.bounds import Claim, Events
from sordino.audit.instances import LOSSES, Instance
from sordino.bits import Tossed
from sordino.noise import Source
from sordino.private import Private
from sordino.recipe import Recipe

Array = NDArray[np.float64]
Arrange = Callable[[Private], None]
Tick = Callable[[], None]
Sources = Callable[[], Source]

LEARNING_RATE = 1e-3
"""Small, so that gradients hardly change while the model moves."""
TOLERANCE = 1e-6
Tested = Erasure | AnnealedErasure | ComposedDpEvent
"""Events of a proposal and its test together."""


@dataclass(frozen=True)
class Seen:
    """What the attacker sees, one row per trial and one column per step, along the canary and in clipping bounds.

    `released` are the gradients that reached the optimizer, `moved` the steps of the model; both are 0 if a proposal
    was rolled back.
    """

    released: Array
    moved: Array
    kept: Array


@dataclass(frozen=True)
class Observed:
    """Trials without the canary and with it, the cost of one by the ledger, and what is wrong with the ledger."""

    absent: Seen
    present: Seen
    claim: Claim
    noises: Array
    rate: float
    findings: tuple[str, ...]


def observe(
    instance: Instance,
    recipe: Recipe,
    steps: int,
    trials: int,
    sources: Sources,
    arrange: Arrange | None = None,
    tick: Tick = lambda: None,
) -> Observed:
    """Run `trials` trials with the canary and as many without."""
    adapted = instance.adapt(recipe, steps)
    sides = (True,) if instance.together else (False, True)
    stages = [_Stage(instance, adapted, present, sources, arrange) for present in sides]
    for stage in stages:
        for _ in range(instance.count_runs(trials) // len(stages)):
            stage.run()
            tick()
    absent, present = (_stack(stages, canary) for canary in (False, True))
    noises = np.array([adapted.terms(step).noise_multiplier for step in range(steps)])
    findings = tuple(dict.fromkeys(finding for stage in stages for finding in stage.findings()))
    rate = adapted.batch_size / (adapted.records or 1)
    return Observed(absent, present, stages[-1].claim(), noises, rate, findings)


def _stack(stages: list[_Stage], canary: bool) -> Seen:
    parts = [part for stage in stages for part in stage.seen(canary)]
    return Seen(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class _Stage:
    """One data set, bound once; every run starts from the same model."""

    def __init__(
        self, instance: Instance, recipe: Recipe, present: bool, sources: Sources, arrange: Arrange | None
    ) -> None:
        self.instance, self.recipe, self.present = instance, recipe, present
        self.sources, self.witness = sources, Witness(sources())
        self.model = nn.Linear(instance.coordinates, 1, bias=False)
        self.data = instance.records(present, recipe.clip)
        self.arrange = arrange
        self.private = self._bind()
        self._heard: Tensor = torch.zeros(instance.coordinates)
        self._runs: list[tuple[Array, Array, Array]] = []
        self._claims: dict[str, Events] = {}
        self._findings: list[str] = []

    def _bind(self) -> Private:
        optimizer = replace(self.recipe.optimizer, lr=LEARNING_RATE, weight_decay=0.0).build(self.model.parameters())
        optimizer.register_step_pre_hook(self._overhear)
        loss = LOSSES[self.instance.loss]
        private = Private(self.model, optimizer, self.data, loss, self.recipe, source=self.witness, validate=False)
        if self.arrange is not None:
            self.arrange(private)
        self.witness.watch(private, self.sources())
        return private

    def _overhear(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.model.weight.grad is not None:
            self._heard = self.model.weight.grad.detach().flatten().clone()

    def run(self) -> None:
        """Take all steps once, from the beginning."""
        start = len(self.private.bench.ledger)
        nn.init.zeros_(self.model.weight)
        rows = [self._step(step) for step in range(self.private.total)]
        released, moved, kept = (np.stack(column, axis=1) for column in zip(*rows, strict=True))
        self._runs.append((released, moved, kept))
        if len(self._runs) == 1 or self.recipe.budget is not None:
            self._remember(start)
        self._reset()

    def _remember(self, start: int) -> None:
        """Remember what the ledger says about the run since event `start`."""
        charges = [event for sequence, event in self.private.bench.ledger.history() if sequence > start]
        events = _count([event.event if isinstance(event, Filtered) else event for event in charges])
        self._claims[str(events)] = events

    def _reset(self) -> None:
        """Forget the run; one with a budget has spent it, and begins with a new ledger."""
        if self.recipe.budget is not None:
            self._findings += self.witness.findings(self.private.bench.ledger)
            self.private.close()
            self.private = self._bind()
            return
        self.private.bench.optimizer.state.clear()
        self.private.bench.states = self.recipe.start()
        self.private.run.position = 0

    def _step(self, step: int) -> tuple[Array, Array, Array]:
        terms = self.recipe.terms(step, self.private.bench.states)
        before, state = self.model.weight.detach().flatten().clone(), self._optimizer_state()
        self.private.step()
        moved = before - self.model.weight.detach().flatten()
        kept = float(bool((moved != 0).any()))
        if not kept and self._optimizer_state() != state:
            self._findings.append("a rejected proposal changed the optimizer's state, in which its gradient lives on")
        scale = terms.divisor / terms.clip * self.instance.direction
        lanes = slice(self.instance.lanes)
        released = self._heard.double().numpy()[lanes] * scale * kept
        return released, moved.double().numpy()[lanes] * scale / LEARNING_RATE, np.full(self.instance.lanes, kept)

    def _optimizer_state(self) -> list[Any]:
        state = self.private.bench.optimizer.state.get(self.model.weight, {})
        return [value.tolist() if isinstance(value, Tensor) else value for _, value in sorted(state.items())]

    def seen(self, canary: bool) -> Iterator[list[Array]]:
        """Return what was seen of every run, for the lanes whose canary was there, or was not."""
        lanes = (self.instance.holds_canary(self.present) == canary).numpy()
        for columns in self._runs if lanes.any() else ():
            yield [column[lanes] for column in columns]

    def claim(self) -> Claim:
        """Return the ledger of the most expensive run: if events depend on releases, runs differ."""
        return Claim(max(self._claims.values(), key=_rough_cost))

    def findings(self) -> list[str]:
        """List where noise and ledger disagree."""
        return [*self._findings, *self.witness.findings(self.private.bench.ledger)]


def _count(charges: list[DpEvent]) -> Events:
    counts: dict[str, int] = {}
    for event in charges:
        counts[to_json(event)] = counts.get(to_json(event), 0) + 1
    return [(from_json(text), times) for text, times in counts.items()]


def _rough_cost(events: Events) -> float:
    """Return Σ (q/σ)², which orders runs of one recipe as their prices do; pricing every run would take too long."""
    cost = 0.0
    for event, times in events:
        rate, inner = (
            (event.sampling_probability, event.event) if isinstance(event, PoissonSampledDpEvent) else (1, event)
        )
        cost += times * (rate / getattr(inner, "noise_multiplier", 1.0)) ** 2
    return cost


# -- what an attacker computes from what is seen ----------------------------------------------------------------------

Statistic = Callable[[Seen], Array]


def compute_log_likelihood_ratio(noises: Array, rate: float) -> Statistic:
    """Σ_t ln(1 − q + q·e^((2x − 1)/(2σ_t²))): the best test there is for DP-SGD as claimed (Neyman and Pearson)."""

    def statistic(seen: Seen) -> Array:
        exponents = (2 * seen.released - 1) / (2 * noises**2)
        with np.errstate(divide="ignore"):
            stay = np.log1p(-rate) if rate < 1 else -np.inf
        return np.asarray((np.logaddexp(stay, np.log(rate) + exponents) * seen.kept).sum(axis=1))

    return statistic


def sum_moves(seen: Seen) -> Array:
    """Sum up how far the model moved: shows what optimizers carry over from rejected proposals."""
    return np.asarray(seen.moved.sum(axis=1))


def find_largest(seen: Seen) -> Array:
    """Find the largest release: shows a record that is sometimes hardly clipped."""
    return np.asarray(np.abs(seen.released).max(axis=1))


def find_spread(seen: Seen) -> Array:
    """Return the largest release minus the smallest: shows noise that repeats itself."""
    return np.asarray(seen.released.max(axis=1) - seen.released.min(axis=1))


def count_kept(seen: Seen) -> Array:
    """Count the proposals that were kept."""
    return np.asarray(seen.kept.sum(axis=1))


def list_statistics(noises: Array, rate: float) -> dict[str, Statistic]:
    """Return every statistic by name."""
    return {
        "log-likelihood ratio": compute_log_likelihood_ratio(noises, rate),
        "where it ended": sum_moves,
        "largest release": find_largest,
        "spread of releases": find_spread,
        "proposals kept": count_kept,
    }


# -- whether the ledger pays for what was really drawn ----------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """One request for noise, and how long the ledger was then; `multiplier` if it is the noise of a step's sum."""

    receipt: Receipt
    multiplier: float | None
    charged: int


class Witness:
    """Passes every request on to the real source and remembers it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._private: Private | None = None
        self._noises: list[Drawn] = []
        self._draws = 0

    @property
    def assumption(self) -> str:
        return self._source.assumption

    def watch(self, private: Private, source: Source | None = None) -> None:
        """Count requests from now on to the steps of this run; they go to `source` if one is given."""
        self._private, self._source = private, source or self._source
        self._noises, self._draws = [], 0

    def uniform(self, size: int) -> NDArray[np.float64]:
        if self._private is not None and size == self._private.bench.records.count:
            self._draws += 1
        return self._source.uniform(size)

    def toss(self, records: int, rate: float) -> Tossed:
        if self._private is not None and records == self._private.bench.records.count:
            self._draws += 1
        return self._source.toss(records, rate)

    def directions(self, size: int) -> NDArray[np.float32]:
        return self._source.directions(size)

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        if self._private is not None:
            bench = self._private.bench
            terms = bench.recipe.terms(self._private.position, bench.states)
            multiplier = std / terms.clip if terms.event == receipt.event else None
            self._noises.append(Drawn(receipt, multiplier, len(bench.ledger)))
        return self._source.gaussian(receipt, size, std)

    def findings(self, ledger: Ledger) -> list[str]:
        """List what the ledger does not pay for."""
        charges = dict(ledger.history())
        return [*self._unpaid(charges), *self._too_little_noise(charges), *self._draws_paid_twice(charges)]

    def _unpaid(self, charges: dict[int, DpEvent]) -> list[str]:
        found = {
            "were made before their event was in the ledger (law 5)": lambda d: d.receipt.sequence > d.charged,
            "have no event in the ledger (law 4)": lambda d: charges.get(d.receipt.sequence) != d.receipt.event,
            "were charged nothing (law 4)": lambda d: type(d.receipt.event) is NoOpDpEvent,
        }
        counts = {said: sum(map(wrong, self._noises)) for said, wrong in found.items()}
        return [f"{count} of {len(self._noises)} releases {said}" for said, count in counts.items() if count]

    def _too_little_noise(self, charges: dict[int, DpEvent]) -> list[str]:
        """Check that all answers on one receipt together are worth no more than its event: 1/σ² adds up (law 3).

        If a proposal is tested, only the first answer counts, the proposal: the test's noise has another scale.
        """
        answers: dict[int, list[float]] = {}
        for drawn in self._noises:
            if drawn.multiplier is not None:
                worth = math.inf if drawn.multiplier == 0 else drawn.multiplier**-2
                answers.setdefault(drawn.receipt.sequence, []).append(worth)
        for sequence, worths in answers.items():
            event = charges.get(sequence)
            paid, worth = _read_noise(event), worths[0] if isinstance(event, Tested) else sum(worths)
            if paid is not None and worth > paid**-2 * (1 + TOLERANCE):
                return [f"the ledger says noise multiplier {paid:.4g}, {worth**-0.5:.4g} was drawn on the same receipt"]
        return []

    def _draws_paid_twice(self, charges: dict[int, DpEvent]) -> list[str]:
        sampled = sum(_is_sampled(event) for event in charges.values())
        if sampled <= self._draws:
            return []
        return [f"{sampled} events claim a draw of their own, {self._draws} draws were made: merge answers (law 3)"]


def _read_noise(event: DpEvent | None) -> float | None:
    """Return the noise multiplier of one answer, if the event is one."""
    if isinstance(event, PoissonSampledDpEvent | Filtered):
        return _read_noise(event.event)
    if isinstance(event, ComposedDpEvent):  # a proposal, then the cost of its test
        return _read_noise(event.events[0])
    return (
        event.noise_multiplier
        if isinstance(
            event, GaussianDpEvent | PaidByEpoch | RandomAllocation | ProjectedGaussian | Erasure | AnnealedErasure
        )
        else None
    )


def _is_sampled(event: DpEvent) -> bool:
    return isinstance(event, PoissonSampledDpEvent) and event.sampling_probability < 1
