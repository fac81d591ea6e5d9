"""Run the real step on an instance, many times, and keep what an attacker may see of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sordino.accounting.events import DpEvent, PoissonSampledDpEvent, from_json, to_json
from sordino.accounting.filtered import Filtered
from sordino.audit.claims import Claim, Events
from sordino.audit.instances import LOSSES, Instance
from sordino.audit.witness import Witness
from sordino.noise import Source
from sordino.private import Private
from sordino.recipe import Recipe

Array = NDArray[np.float64]
Arrange = Callable[[Private], None]
Tick = Callable[[], None]
Sources = Callable[[], Source]

LEARNING_RATE = 1e-3
"""Small, so that a gradient stays what it is while the model moves."""


@dataclass(frozen=True)
class Seen:
    """What the attacker sees, one row per trial and one column per step, along the canary and in clipping bounds.

    `released` are the gradients that reached the optimizer, `moved` the steps of the model; both are 0 where a proposal
    was rolled back.
    """

    released: Array
    moved: Array
    kept: Array

    def rows(self, some: slice) -> Seen:
        return Seen(self.released[some], self.moved[some], self.kept[some])

    def __len__(self) -> int:
        return len(self.released)


@dataclass(frozen=True)
class Observed:
    """Trials without the canary and with it, what one costs by the ledger, and what is wrong with the ledger."""

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
    """`trials` trials with the canary and as many without."""
    adapted = instance.adapt(recipe, steps)
    stages = [_Stage(instance, adapted, present, sources, arrange) for present in _sides(instance)]
    runs = -(-2 * trials // instance.lanes) if instance.together else trials
    for stage in stages:
        for _ in range(runs):
            stage.run()
            tick()
    absent, present = (_stacked(stages, canary) for canary in (False, True))
    noises = np.array([adapted.terms(step).noise_multiplier for step in range(steps)])
    findings = tuple(dict.fromkeys(finding for stage in stages for finding in stage.findings()))
    rate = adapted.batch_size / (adapted.records or 1)
    return Observed(absent, present, stages[-1].claim(), noises, rate, findings)


def _sides(instance: Instance) -> tuple[bool, ...]:
    return (True,) if instance.together else (False, True)


def _stacked(stages: list[_Stage], canary: bool) -> Seen:
    parts: list[Seen] = [part for stage in stages for part in stage.seen(canary)]
    return Seen(
        np.concatenate([part.released for part in parts]),
        np.concatenate([part.moved for part in parts]),
        np.concatenate([part.kept for part in parts]),
    )


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
        self.private = self._bound()
        self._heard: Tensor = torch.zeros(instance.coordinates)
        self._runs: list[tuple[Array, Array, Array]] = []
        self._claims: dict[str, Events] = {}
        self._findings: list[str] = []

    def _bound(self) -> Private:
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
        """All steps once, from the beginning."""
        start = len(self.private.bench.ledger)
        nn.init.zeros_(self.model.weight)
        rows = [self._step(step) for step in range(self.private.total)]
        released, moved, kept = (np.stack(column, axis=1) for column in zip(*rows, strict=True))
        self._runs.append((released, moved, kept))
        if len(self._runs) == 1 or self.recipe.budget is not None:
            self._remember(start)
        self._reset()

    def _remember(self, start: int) -> None:
        """What the ledger says of the run since event `start`."""
        charges = [event for sequence, event in self.private.bench.ledger.history() if sequence > start]
        events = _counted([event.event if isinstance(event, Filtered) else event for event in charges])
        self._claims[str(events)] = events

    def _reset(self) -> None:
        """Forget the run; one with a budget has spent it, and begins with a new ledger."""
        if self.recipe.budget is not None:
            self._findings += self.witness.findings(self.private.bench.ledger)
            self.private.close()
            self.private = self._bound()
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

    def seen(self, canary: bool) -> Iterator[Seen]:
        """The trials of every run whose canary was there, or was not."""
        lanes = (self.instance.holds_canary(self.present) == canary).numpy()
        for released, moved, kept in self._runs if lanes.any() else ():
            yield Seen(released[lanes], moved[lanes], kept[lanes])

    def claim(self) -> Claim:
        """What the ledger says of the dearest run: where events depend on what was released, runs differ."""
        return Claim(max(self._claims.values(), key=_rough_cost))

    def findings(self) -> list[str]:
        """Where noise and ledger disagree."""
        return [*self._findings, *self.witness.findings(self.private.bench.ledger)]


def _counted(charges: list[DpEvent]) -> Events:
    counts: dict[str, int] = {}
    for event in charges:
        counts[to_json(event)] = counts.get(to_json(event), 0) + 1
    return [(from_json(text), times) for text, times in counts.items()]


def _rough_cost(events: Events) -> float:
    """Σ (q/σ)², which orders runs of one recipe as their prices do; prices themselves take too long for every run."""
    cost = 0.0
    for event, times in events:
        rate, inner = (
            (event.sampling_probability, event.event) if isinstance(event, PoissonSampledDpEvent) else (1, event)
        )
        cost += times * (rate / getattr(inner, "noise_multiplier", 1.0)) ** 2
    return cost
