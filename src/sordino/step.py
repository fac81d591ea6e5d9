"""The one private step, the audited core: everything that is ever released about the records passes through here.

::

    records -> sample -> differentiate -> weigh -> sum + noise -> propose -> select -> model
                  \\____________ one event, recorded before anything is released ___________/

`take` reads top to bottom. What it calls are parts: a sampler (`sordino.sampling`), an engine (`sordino.gradients`),
a weighing (`sordino.weighing`), schedules behind ``recipe.terms``, a noise source (`sordino.noise`) and a selector
(`sordino.selection`). A new mechanism is a new part; this file does not change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from dp_accounting import DpEvent
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from sordino.accounting.ledger import Ledger, Receipt
from sordino.distributed import agreement
from sordino.distributed.sharding import placed, whole
from sordino.distributed.team import Team
from sordino.errors import SordinoError, UnsupportedModel
from sordino.gradients.engine import Differentiated, Engine, Objective, total_dtype
from sordino.noise import Source, perturb
from sordino.records import Records
from sordino.run import Run
from sordino.sampling.draw import Draw
from sordino.selection.selector import Snapshot
from sordino.terms import Terms
from sordino.validation.watching import Watch

if TYPE_CHECKING:
    from sordino.recipe import Recipe


@dataclass
class Bench:
    """What a step works on: the parts of the recipe, bound to a model, its records and the run that pays for them.

    The processes of the run's team take the step together; each of them has a bench of its own.
    `schedulers` of the learning rate belong to the proposal: they step with it, and go back when it is rejected.
    `watch` holds examples of real draws against themselves in other company, now and then.
    """

    recipe: Recipe
    objective: Objective
    optimizer: torch.optim.Optimizer
    records: Records
    engine: Engine
    microbatch: int | None
    run: Run
    memory: dict[str, Any] = field(default_factory=dict)
    schedulers: list[LRScheduler] = field(default_factory=list)
    watch: Watch | None = None

    @property
    def source(self) -> Source:
        return self.run.source

    @property
    def ledger(self) -> Ledger:
        return self.run.ledger

    @property
    def team(self) -> Team:
        return self.run.team

    def charge(self, event: DpEvent) -> Receipt:
        """Refuse what the budget cannot pay, then record the event durably; only then may noise be drawn (law 5)."""
        return self.run.charge(event)

    def parameters(self) -> list[nn.Parameter]:
        """What is trained now: the optimizer's parameters that are not frozen, each once."""
        held = (p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad)
        return list({id(p): p for p in held}.values())

    def draw(self) -> Draw:
        """This process's part of a fresh draw, of which all processes see the same coins."""
        assert self.recipe.sampler is not None
        draw = self.recipe.sampler.draw(self.records.count, self.source, self.memory)
        return draw[self.team.own(len(draw))]

    def versions(self) -> list[int]:
        """How often each parameter was written to, frozen ones included: a loss must leave them all alone."""
        return [p._version for p in self.objective.parameters()]

    @property
    def device(self) -> torch.device:
        return next(iter(self.objective.parameters())).device


@dataclass
class Attempt:
    """One step under way. Everything in it but the terms is private."""

    bench: Bench
    terms: Terms
    receipt: Receipt
    draw: Draw
    parameters: list[nn.Parameter]
    versions: list[int]
    released: bool = False

    @cached_property
    def total(self) -> list[Tensor]:
        """The weighted sum so far; made when the first part of the draw has gone through the model, to save memory.

        In double precision, so that adding up many parts rounds nothing: see docs/proofs/rounding.md.
        """
        return [torch.zeros(p.shape, dtype=total_dtype(p), device=p.device) for p in self.parameters]


def take(bench: Bench, step: int) -> bool:
    """Take one private step; returns whether its proposal was kept.

    Guarantees: the released gradient is a Gaussian release of sensitivity ``terms.clip`` about one fresh draw, and
    ``terms.event``, which prices it together with the selector's test, is in the ledger before the noise is drawn.
    Edge cases: an empty draw releases noise alone; an example that is not finite contributes zero; a frozen or unused
    parameter has a zero gradient.
    """
    attempt = begin(bench, step)
    before = bench.recipe.selection.snapshot(attempt)
    with whole(bench.objective, attempt.parameters) as parameters:
        for part in attempt.draw.split(bench.microbatch or bench.engine.microbatch(parameters)):
            batch = bench.records.fetch(part.indices, bench.device)
            if bench.watch is not None:
                bench.watch.look(bench.objective, parameters, batch)
            add(attempt, part, bench.engine.differentiate(bench.objective, parameters, batch))
    propose(attempt)
    bench.optimizer.step()
    return conclude(attempt, before)


def begin(bench: Bench, step: int, draw: Draw | None = None) -> Attempt:
    """Sample. The event is recorded first: from here on the step is paid for, whatever happens to it (laws 4 and 5)."""
    bench.records.check_unchanged()
    agreement.require_still(bench, step)
    recipe, parameters = bench.recipe, bench.parameters()
    assert recipe.sampler is not None
    recipe.norms.prepare(bench.engine)
    recipe.sampler.prepare(bench, step)
    terms = bench.team.lead(lambda: recipe.terms(step, bench.memory))  # one bound and one price for all processes
    receipt = bench.charge(terms.event)
    if bench.watch is not None:
        bench.watch.begin()
    draw = bench.draw() if draw is None else draw
    return Attempt(bench, terms, receipt, draw, parameters, bench.versions())


def add(attempt: Attempt, part: Draw, differentiated: Differentiated) -> None:
    """Weigh. Add ``sum_i weight_i * gradient_i`` of a part of the draw; ``weight * norm <= clip`` for each example."""
    recipe = attempt.bench.recipe
    weights = recipe.weighing.weights(differentiated.norms, attempt.terms.clip, part)
    sums = iter(differentiated.weighted_sum(weights))
    for total in attempt.total:
        total += next(sums)  # zip would hold one sum while the next is formed
    assert next(sums, None) is None, "an engine has exactly one sum for every parameter"
    assert recipe.sampler is not None
    recipe.sampler.observe(part, differentiated.norms, attempt.bench.memory)


def propose(attempt: Attempt) -> None:
    """Noise. Release ``(sum + noise) / divisor``: over all processes, noised once, by a public divisor (law 1)."""
    terms, parameters, team = attempt.terms, attempt.parameters, attempt.bench.team
    if attempt.released:
        raise SordinoError("this draw was released already: a second noise on it would halve the protection; draw anew")
    if attempt.versions != attempt.bench.versions():
        raise UnsupportedModel(
            "the loss changed a parameter in place, as nn.Embedding(max_norm=...) does: "
            "records would leak into it without noise"
        )
    if attempt.bench.watch is not None:  # all processes refuse a model that mixes examples, or none
        attempt.bench.watch.settle(team, attempt.bench.ledger)
    attempt.released = True
    attempt.bench.optimizer.zero_grad(set_to_none=True)  # no gradient but the released one may reach the optimizer
    if team.leads:  # exactly one process adds the noise, to its own part of the sum
        perturb(team.secret(attempt.bench.source), attempt.receipt, attempt.total, terms.noise_std)
    for parameter, noisy in zip(parameters, team.sum(attempt.total), strict=True):
        parameter.grad = placed(noisy.div_(terms.divisor).to(parameter.dtype), parameter)
    attempt.total = []
    attempt.bench.recipe.selection.refine(attempt)


def conclude(attempt: Attempt, before: Snapshot | None) -> bool:
    """Select. Keep the proposal that now stands in the model, or put everything back as it was."""
    attempt.bench.optimizer.zero_grad(set_to_none=True)
    for scheduler in attempt.bench.schedulers:
        scheduler.step()
    kept = attempt.bench.recipe.selection.accepts(attempt, before)
    if not kept and before is not None:
        before.restore()
    return kept
