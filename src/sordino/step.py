"""The one private step, the audited core: everything that is ever released about the records passes through here.

::

    records -> sample -> differentiate -> weigh -> sum + noise -> propose -> select -> model
                  \\____________ one event, recorded before anything is released ___________/

`take` reads top to bottom. It calls parts (`sordino.parts`): a sampler, an engine (`sordino.gradients`), a weighing,
schedules behind ``recipe.terms``, noise from a source (`sordino.noise`) and a selector. A new mechanism
(`sordino.mechanisms`) is a new part; this file does not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from dp_accounting import DpEvent
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from sordino.accounting.ledger import Ledger, Receipt
from sordino.chance import SecretChance
from sordino.distributed import agreement
from sordino.distributed.sharding import shard_like, unshard
from sordino.distributed.team import Team
from sordino.errors import SordinoError, UnsupportedModel
from sordino.gradients.engine import (
    Batch,
    Blocked,
    BlockEngine,
    Differentiated,
    Engine,
    Objective,
    accumulation_dtype,
    add_widely,
    total_dtype,
)
from sordino.noise import Seeded, Source
from sordino.parts import Blockwise, Draw, Snapshot, Terms
from sordino.proposals import tell_noise
from sordino.recipe import Recipe, States
from sordino.records import Records
from sordino.run import Run
from sordino.validation.watching import Watch


@dataclass
class Bench:
    """What a step works on: the parts of the recipe, bound to a model, its records and the run that pays for them.

    The processes of the run's team take the step together; each of them has its own bench. `schedulers` of the learning
    rate belong to the proposal: they step with it, and are rolled back when it is rejected. Now and then, `watch`
    checks that examples of real draws do not depend on the examples beside them. `states` are what the parts remember,
    one for each.
    """

    recipe: Recipe
    objective: Objective
    optimizer: torch.optim.Optimizer
    records: Records
    engine: Engine
    microbatch: int | None
    run: Run
    schedulers: list[LRScheduler] = field(default_factory=list)
    watch: Watch | None = None
    states: States = field(init=False)
    draws: int = field(default=0, init=False)
    chance: SecretChance = field(default_factory=SecretChance, init=False)

    def __post_init__(self) -> None:
        self.states = self.recipe.start()

    @property
    def source(self) -> Source:
        return self.run.source

    @property
    def ledger(self) -> Ledger:
        return self.run.ledger

    @property
    def team(self) -> Team:
        return self.run.team

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """A block in which nobody can know dropout's masks, or anything else that is not drawn from the source."""
        self.shield()
        try:
            yield
        finally:
            self.chance.leave()

    def shield(self) -> None:
        """Begin such a shielded block; ``chance.leave()`` ends it."""
        self.chance.enter(self.device, secret=self.secret)

    @property
    def secret(self) -> bool:
        """Whether random numbers must be secret; with seeded noise they need not be, as it protects no one anyway."""
        return not isinstance(self.source, Seeded)

    def charge(self, event: DpEvent) -> Receipt:
        """Refuse what the budget cannot pay, then record the event durably; only then may noise be drawn (law 5)."""
        return self.run.charge(event)

    def parameters(self) -> list[nn.Parameter]:
        """Return what is currently trained: the optimizer's parameters that are not frozen, each once."""
        held = (p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad)
        return list({id(p): p for p in held}.values())

    def find_blocks(self, parameters: list[nn.Parameter]) -> list[int] | None:
        """Return the block of each parameter, if the recipe weighs blocks separately."""
        weighing = self.recipe.weighing
        if not isinstance(weighing, Blockwise):
            return None
        names = {id(p): name for name, p in self.objective.model.named_parameters()}
        return weighing.find_blocks([names[id(p)] for p in parameters], self.states.weighing)

    def draw(self) -> Draw:
        """Return this process's part of a fresh draw; all processes see the same coins."""
        assert self.recipe.sampler is not None
        draw = self.recipe.sampler.draw(self.records.count, self.source, self.states.sampler)
        draw = replace(draw, choice=self.number_draw())
        return draw if self.team.size == 1 else draw[self.team.own(len(draw))]

    def number_draw(self) -> int:
        """Count the draws of a run, even of a resumed one: a public number that determines which records are used."""
        self.draws = max(self.draws, self.run.position) + 1
        return self.draws

    def split(self, draw: Draw, size: int) -> Iterator[Draw]:
        """Return the draw in pieces of about `size` records; no unit is split."""
        return draw.split(size, self.records.weigh(draw.indices))

    def fetch(self, draw: Draw) -> Batch:
        """Fetch a draw's records to the model's device; the loss never uses a generator that the dataset seeded."""
        device = self.device
        with self.chance.renewed(device) if self.secret and self.records.runs_code else nullcontext():
            return self.records.fetch(draw.indices, device, draw.choice)

    def require_secret(self) -> None:
        """Refuse to continue if a loss or a dataset may have drawn from a generator that somebody seeded."""
        if self.secret:
            self.chance.require_secret()

    def versions(self) -> list[tuple[nn.Parameter, int]]:
        """Return all parameters, including frozen ones, and how often each was written: a loss must change nothing."""
        return [(p, p._version) for p in self.objective.list_owned()[0]]

    @property
    def device(self) -> torch.device:
        return next(self.objective.parameters()).device


@dataclass
class Attempt:
    """One step in progress. Everything in it except the terms is private."""

    bench: Bench
    terms: Terms
    receipt: Receipt
    draw: Draw
    parameters: list[nn.Parameter]
    versions: list[tuple[nn.Parameter, int]]
    blocks: list[int] | None = None
    released: bool = False

    def differentiate(self, parameters: list[nn.Parameter], batch: Batch) -> Differentiated:
        """Return norms and sums of a part of the draw; norms of blocks if the recipe weighs blocks separately."""
        engine, objective = self.bench.engine, self.bench.objective
        if self.blocks is None:
            return engine.differentiate(objective, parameters, batch)
        apart: BlockEngine = engine  # type: ignore[assignment]  # those of exact norms are
        return apart.differentiate_blocks(objective, parameters, batch, self.blocks)

    @cached_property
    def total(self) -> list[Tensor]:
        """The weighted sum so far; to save memory, it is made only after the first part went through the model.

        It is in double precision from the second part on, so that adding many parts rounds nothing:
        docs/proofs/rounding.md.
        """
        return [torch.zeros(p.shape, dtype=total_dtype(p), device=p.device) for p in self.parameters]

    def is_untouched(self) -> bool:
        """Whether the loss left every parameter unchanged and replaced none."""
        before, now = self.versions, self.bench.versions()
        pairs = zip(before, now, strict=False)
        return len(before) == len(now) and all(old is new and was == is_now for (old, was), (new, is_now) in pairs)

    def add(self, some: Iterable[Tensor]) -> None:
        """Add the sums of a part of the draw, one for each parameter; those of the first part are the total so far.

        A process with a single part keeps the precision that its sums came in, and loses nothing by it.
        """
        sums, alone = iter(some), self.bench.team.size == 1
        if "total" not in vars(self):
            taken: set[int] = set()
            parts = (next(sums) for _ in self.parameters)
            self.total = [take_over(x, x.dtype if alone else total_dtype(x), taken) for x in parts]
        else:
            for place, total in enumerate(self.total):
                self.total[place] = add_widely(total, next(sums))  # zip would hold one sum while the next is formed
        assert next(sums, None) is None, "an engine has exactly one sum for every parameter"


def take_over(found: Tensor, dtype: torch.dtype, taken: set[int]) -> Tensor:
    """Return a sum to write noise into: `found` itself if nothing else shares its memory, otherwise a copy.

    `taken` holds the addresses of earlier sums: two parameters with one tensor would get noise twice.
    """
    own = found.is_contiguous() and not found.requires_grad and found.dtype == dtype
    if own and found.untyped_storage().nbytes() == found.nbytes and found.data_ptr() not in taken:
        taken.add(found.data_ptr())
        return found
    return found.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def take(bench: Bench, step: int) -> bool:
    """Take one private step; returns whether its proposal was kept.

    Guarantees: the released gradient is a Gaussian release of sensitivity ``terms.clip`` about one fresh draw, and
    ``terms.event``, which prices it together with the selector's test, is in the ledger before the noise is drawn.
    Edge cases: an empty draw releases noise alone; an example that is not finite contributes zero; a frozen or unused
    parameter has a zero gradient.
    """
    with bench.shielded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch or the loss, which the probe let speak: they may name a draw's size
        attempt = begin(bench, step)
        before = bench.recipe.selection.snapshot(attempt)
        with unshard(bench.objective, attempt.parameters) as parameters:
            for part in bench.split(attempt.draw, bench.microbatch or bench.engine.microbatch(parameters)):
                batch = bench.fetch(part)
                if bench.watch is not None:
                    bench.watch.look(bench.objective, parameters, batch)
                add(attempt, part, attempt.differentiate(parameters, batch))
        propose(attempt)
        bench.optimizer.step()
        return conclude(attempt, before)


def begin(bench: Bench, step: int, draw: Draw | None = None) -> Attempt:
    """Sample. The event is recorded first: from here on the step is paid for, whatever happens to it (laws 4 and 5)."""
    bench.records.check_unchanged()
    agreement.require_still(bench.team, step, bench.objective, bench.optimizer, bench.schedulers)
    recipe, parameters = bench.recipe, bench.parameters()
    assert recipe.sampler is not None
    blocks = bench.find_blocks(parameters)
    bench.records.prepare(bench.source)
    recipe.norms.survey(bench, step)
    recipe.norms.prepare(bench.engine)
    recipe.sampler.prepare(bench, step)
    terms = bench.team.lead(lambda: recipe.terms(step, bench.states))  # one bound and one price for all processes
    receipt = bench.charge(terms.event)
    if bench.watch is not None:
        bench.watch.begin()
    draw = bench.draw() if draw is None else draw
    return Attempt(bench, terms, receipt, draw, parameters, bench.versions(), blocks)


def add(attempt: Attempt, part: Draw, differentiated: Differentiated) -> None:
    """Weigh. Add ``sum_i weight_i * gradient_i`` of a part of the draw; ``weight * norm <= clip`` for each example."""
    recipe, norms = attempt.bench.recipe, differentiated.norms
    attempt.bench.require_secret()
    attempt.add(differentiated.weighted_sum(weigh(attempt, part, differentiated)))
    assert recipe.sampler is not None
    recipe.sampler.observe(part, norms, attempt.bench.states.sampler)


def weigh(attempt: Attempt, part: Draw, differentiated: Differentiated) -> Tensor:
    """One weight per example, or one per block of it, so that no contribution is longer than the clipping bound."""
    weighing, clip = attempt.bench.recipe.weighing, attempt.terms.clip
    if isinstance(weighing, Blockwise):
        blocked: Blocked = differentiated  # type: ignore[assignment]  # by an engine that was given blocks
        return weighing.weigh(blocked.block_norms, clip, part, attempt.bench.states.weighing)
    return weighing.weights(differentiated.norms, clip, part)


def propose(attempt: Attempt) -> None:
    """Noise. Release ``(sum + noise) / divisor``: over all processes, noised once, by a public divisor (law 1)."""
    bench, terms, team = attempt.bench, attempt.terms, attempt.bench.team
    if attempt.released:
        raise SordinoError(
            "this draw was released already: a second noise on it would halve the protection; draw again"
        )
    if not attempt.is_untouched():
        raise UnsupportedModel(
            "the loss changed a parameter, as nn.Embedding(max_norm=...) does in place: "
            "records would leak into it without noise"
        )
    if bench.watch is not None:  # either all processes refuse a model that mixes examples, or none does
        bench.watch.settle(team, bench.ledger)
    attempt.released = True
    drop_gradients(bench.optimizer)  # no gradient but the released one may reach the optimizer
    if team.leads:  # exactly one process adds the noise, to its own part of the sum
        noise, secret = bench.recipe.noise, team.secret(bench.source)
        noise.add(secret, attempt.receipt, attempt.total, terms.noise_std, bench.states.noise)
    sums = bench.recipe.norms.finish(bench, team.sum(attempt.total))
    for parameter, noisy in zip(attempt.parameters, sums, strict=True):
        # However many parts there were, which is private, the noised sum is rounded in the same way.
        released = noisy.to(accumulation_dtype(parameter)).div_(terms.divisor)
        parameter.grad = shard_like(released.to(parameter.dtype), parameter)
    attempt.total = []
    if isinstance(bench.recipe.weighing, Blockwise):
        bench.recipe.weighing.release(attempt, bench.states.weighing)
    tell_noise(bench.optimizer, terms.noise_std / terms.divisor)
    bench.recipe.selection.refine(attempt)


def conclude(attempt: Attempt, before: Snapshot | None) -> bool:
    """Select. Keep the proposal that is now in the model, or put everything back as it was."""
    drop_gradients(attempt.bench.optimizer)
    for scheduler in attempt.bench.schedulers:
        scheduler.step()
    kept = attempt.bench.recipe.selection.accepts(attempt, before)
    if not kept and before is not None:
        before.restore()
    return kept


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Do ``optimizer.zero_grad(set_to_none=True)`` without torch's profiler around it, which takes most of the time."""
    if getattr(optimizer.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)  # a user's own zero_grad may do more
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
