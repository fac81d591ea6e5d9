"""Recipe: a frozen choice of parts. All of it is public: it may be published with the model."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict, get_args

import torch
from dp_accounting import DpEvent
from torch import nn

from sordino import combinations, names
from sordino.accounting import calibration, gaussian, pricing
from sordino.accounting.budget import Budget
from sordino.accounting.filtered import Filter
from sordino.accounting.paid_by_epoch import PaidByEpoch
from sordino.accounting.pricing import Basis
from sordino.errors import InvalidInput
from sordino.noise import Independent, Noise
from sordino.optimizers import DistanceOverGradients
from sordino.parts import (
    Always,
    Blockwise,
    Constant,
    Exact,
    Flat,
    Foreign,
    Norms,
    Poisson,
    Sampler,
    Schedule,
    Selector,
    State,
    Terms,
    Weighing,
    factor_at,
)

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "dog": DistanceOverGradients,
}


class Common(TypedDict, total=False):
    """The arguments that every constructor of a recipe takes in addition to its own; `Recipe` has the defaults."""

    batch_size: int
    epochs: float
    steps: int
    noise_multiplier: float
    sampler: Sampler


@dataclass(frozen=True)
class Optimizer:
    """A torch.optim optimizer by name. `sordino train` builds it; `Private` takes any optimizer that you build."""

    kind: str = "sgd"
    lr: float = 0.5
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _OPTIMIZERS:
            raise InvalidInput(f"optimizer={self.kind!r} must be one of {', '.join(_OPTIMIZERS)}")
        if not self.lr > 0:
            raise InvalidInput(f"lr={self.lr} must be > 0")
        if self.momentum and self.kind != "sgd":
            raise InvalidInput(f"momentum={self.momentum} belongs to sgd, not to {self.kind}: leave it at 0")

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer over these parameters."""
        options: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.kind == "sgd":
            options["momentum"] = self.momentum
        return _OPTIMIZERS[self.kind](parameters, **options)

    def adopt(self, other: Optimizer) -> Optimizer:
        """Return this optimizer with the kind, learning rate, momentum and weight decay of another."""
        names = [each.name for each in fields(Optimizer)]
        return replace(self, **{name: getattr(other, name) for name in names})


@dataclass(frozen=True)
class Around(Optimizer, ABC):
    """An optimizer around the one that the other fields describe, or around `inner` (`sordino.proposals`)."""

    inner: Optimizer | None = None

    @abstractmethod
    def wrap(self, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer around `inner`."""
        ...

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self.wrap(super().build(parameters) if self.inner is None else self.inner.build(parameters))

    def adopt(self, other: Optimizer) -> Optimizer:
        adopted = super().adopt(other)
        assert isinstance(adopted, Around)
        return adopted if self.inner is None else replace(adopted, inner=self.inner.adopt(other))


@dataclass
class States:
    """What the parts of a run remember, one state for each slot. Private, except for what `save` returns (law 7)."""

    sampler: Any
    noise: Any
    selection: Any
    weighing: Any = None

    def save(self) -> dict[str, Any]:
        """Return the values that were released and paid for: a checkpoint may hold nothing else.

        Those of the sampler come first, under their own names, as version 0.1 wrote them; those of other slots come
        under the name of the slot.
        """
        saved = {slot: state.save() for slot, state in vars(self).items() if isinstance(state, State)}
        own = saved.pop("sampler", {})
        return own | {slot: values for slot, values in saved.items() if values}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue with the released values of a checkpoint."""
        left = dict(saved)
        given = {slot: left.pop(slot, {}) for slot in ("noise", "selection", "weighing")} | {"sampler": left}
        for slot, state in vars(self).items():
            if isinstance(state, State):
                state.restore(given[slot])


LEAST_CLIP = 1e-15
"""Squares of entries below 10⁻²³ are zero in float32, so that gradients up to 10⁻¹⁸ may seem to have no length."""


@dataclass(frozen=True)
class Recipe:
    """A choice of parts, made complete by `calibrate` or `for_records`.

    `batch_size` is the expected size of a draw and the public divisor of every sum (law 1). The length of training is
    `steps`, or `epochs` until the number of records is known; `sampler` is then Poisson at rate batch_size / records,
    unless you give another one. `noise_multiplier` is noise over sensitivity at the first step, or None until
    calibrated. The schedules multiply `clip` and the noise. `rdp_filter` prices a recipe that chooses its noise as it
    goes. `noise` is the shape of the noise.
    """

    name: str = "dpsgd"
    batch_size: int = 256
    epochs: float | None = None
    steps: int | None = None
    clip: float = 1.0
    noise_multiplier: float | None = None
    clip_schedule: Schedule = field(default_factory=Constant)
    noise_schedule: Schedule = field(default_factory=Constant)
    sampler: Sampler | None = None
    norms: Norms = field(default_factory=Exact)
    weighing: Weighing = field(default_factory=Flat)
    selection: Selector = field(default_factory=Always)
    optimizer: Optimizer = field(default_factory=Optimizer)
    records: int | None = None
    budget: Budget | None = None
    rdp_filter: Filter | None = None
    basis: Basis = "proven"
    noise: Noise = field(default_factory=Independent, metadata=names.UNWRITTEN)

    def __post_init__(self) -> None:
        _require(self.batch_size >= 1, f"batch_size={self.batch_size} must be >= 1: it is the expected size of a draw")
        _require(
            self.clip >= LEAST_CLIP and math.isfinite(self.clip),
            f"clip={self.clip} must be > 0, and at least {LEAST_CLIP:g}: a zero bound removes every gradient, and "
            "float32 cannot measure shorter ones; start with 1.0 or use automatic clipping",
        )
        _require(self.steps is None or self.steps >= 1, f"steps={self.steps} must be >= 1")
        _require(self.epochs is None or self.epochs > 0, f"epochs={self.epochs} must be > 0")
        sigma = self.noise_multiplier
        _require(
            sigma is None or (sigma > 0 and math.isfinite(sigma)),
            f"noise_multiplier={sigma} must be > 0 and finite: without noise there is no privacy",
        )
        _require(self.basis in get_args(Basis), f"basis={self.basis!r} must be one of {', '.join(get_args(Basis))}")
        self.require()

    def require(self, setting: combinations.Setting | None = None, **facts: object) -> None:
        """Refuse parts that are not proven together, or not in this setting; `facts` are for its message."""
        combinations.require(self, setting, **facts)

    def for_records(self, records: int) -> Recipe:
        """Fix the sampling rate and the number of steps for a dataset of about `records` records.

        `records` is a public number. The mechanism uses only this number, never the true length of the dataset.
        """
        _require(records >= 1, f"records={records} must be >= 1: an empty data set cannot be trained on")
        _require(
            self.batch_size <= records,
            f"batch_size={self.batch_size} must be <= records={records}: "
            "every record joins a draw with probability batch_size / records",
        )
        sampler = (self.sampler or Poisson(1.0)).for_records(records, self.batch_size)
        steps = self.steps
        if steps is None and self.epochs is not None:
            steps = max(1, round(self.epochs * records / self.batch_size))
        return replace(self, sampler=sampler, records=records, steps=steps)._fit_noise()

    def _fit_noise(self) -> Recipe:
        """Return the recipe with noise for a run of this length, if the shape of the noise depends on it."""
        fit = getattr(self.noise, "for_steps", None)  # a user's own noise need not know about lengths
        return (
            self if fit is None or self.steps is None else replace(self, noise=fit(self.steps, self.optimizer.momentum))
        )

    def calibrate(self, budget: Budget, *, records: int) -> Recipe:
        """Return this recipe with just enough noise for the budget; or, if the noise is given, with as many steps.

        The price never exceeds the budget and is at most 0.1 % below it.
        """
        _require(
            budget.delta < 1 / records,
            f"delta={budget.delta:g} must be < 1/records = {1 / records:g}: "
            f"a larger one could publish whole records; use {0.1 / records:.0e}",
        )
        recipe = replace(self.for_records(records), budget=budget)
        assert recipe.sampler is not None
        if (by_sampler := recipe.sampler.calibrate(recipe, budget)) is not None:
            return by_sampler
        if recipe.noise_multiplier is None:
            return recipe._with_noise_for(budget)
        if recipe.steps is None:
            return recipe._with_steps_for(budget)
        price = recipe.price(budget.delta, budget.accountant, budget.adjacency)
        _require(
            price <= budget.epsilon,
            f"noise_multiplier={recipe.noise_multiplier:g} over {recipe.steps} steps costs epsilon={price:.4g}, "
            f"above the budget of {budget.epsilon:g}: leave noise_multiplier or steps open to have it calibrated",
        )
        return recipe

    def _with_noise_for(self, budget: Budget) -> Recipe:
        _require(self.steps is not None, "neither steps nor epochs is set: give the length of training")
        if (by_norms := self.norms.calibrate(self, budget)) is not None:
            return by_norms

        def plan(sigma: float) -> list[tuple[DpEvent, int]]:
            return replace(self, noise_multiplier=sigma).plan()

        found = calibration.noise_for(
            budget, plan, start=gaussian.starting_noise(plan(1.0), budget.epsilon, budget.delta)
        )
        return replace(self, noise_multiplier=found.noise_multiplier)

    def _with_steps_for(self, budget: Budget) -> Recipe:
        _require(
            self._constant,
            "neither steps nor epochs is set, and the noise changes over the run: give the length of training",
        )
        event = replace(self, steps=1).terms(0).event
        return replace(self, steps=self._covers * calibration.steps_for(budget, event))._fit_noise()

    def start(self) -> States:
        """Return what the parts remember at the beginning of a run."""
        parts = (self.sampler, self.noise, self.selection, self.weighing)
        return States(*(getattr(part, "start", State)() for part in parts))  # a user's own part need not remember

    def terms(self, step: int, states: States | None = None) -> Terms:
        """Return the public terms of a step: schedules first, then what noise, sampler and selector add to the price.

        Without `states`, these are the terms of a run that has not begun: what is known in advance about the price.
        """
        if self.noise_multiplier is None or self.steps is None or self.sampler is None:
            raise InvalidInput(
                f"recipe {self.name!r} is not calibrated: "
                "call recipe.calibrate(Budget(epsilon=3, delta=1e-5), records=N)"
            )
        if self._same_terms is not None:
            return replace(self._same_terms, step=step)
        return self._find_terms(step, states)

    @cached_property
    def _same_terms(self) -> Terms | None:
        """Return the terms that all steps share except for their number; None if they may differ between steps."""
        parts = (self.clip_schedule, self.noise_schedule, self.sampler, self.norms, self.selection, self.noise)
        same = tuple(map(type, parts)) == (Constant, Constant, Poisson, Exact, Always, Independent)
        plain = same and self.rdp_filter is None and not isinstance(self.weighing, Blockwise)
        return self._find_terms(0, None) if plain else None

    def _find_terms(self, step: int, states: States | None) -> Terms:
        assert self.steps is not None
        assert self.sampler is not None
        clip = max(LEAST_CLIP, self.clip * factor_at(self.clip_schedule, step, self.steps))
        least = min(map(self._noise, self._find_covered(step)))
        event = self.noise.event(self.norms.event(least))
        terms = Terms(step, clip, self._noise(step), self.batch_size, event)
        states = states or self.start()
        if isinstance(self.weighing, Blockwise):
            terms = self.weighing.terms(terms, states.weighing)
        terms = self.sampler.terms(terms, states.sampler)
        terms = self.selection.terms(terms, self, states.selection)
        return terms if self.rdp_filter is None else replace(terms, event=self.rdp_filter.event(terms.event))

    def _noise(self, step: int) -> float:
        assert self.noise_multiplier is not None
        assert self.steps is not None
        return self.noise_multiplier * factor_at(self.noise_schedule, step, self.steps)

    def _find_covered(self, step: int) -> range:
        """Return the steps that an event charged at `step` pays for; if the noise is constant, one stands for all."""
        assert self.steps is not None
        last = min(step + self._covers, self.steps)
        return range(step, step + 1 if isinstance(self.noise_schedule, Constant) else max(step + 1, last))

    def plan(self, start: int = 0) -> list[tuple[DpEvent, int]]:
        """List every event from step `start` to the end, with equal neighbours counted together."""
        if self._constant and self._covers == 1 and start < (self.steps or 0):
            return [(self.terms(start).event, (self.steps or 0) - start)]
        return [(event, sum(1 for _ in run)) for event, run in groupby(self._events(start))]

    def _events(self, start: int) -> Iterator[DpEvent]:
        event: DpEvent | None = None
        for step in range(start, self.steps or 0):
            if event is None or not self._constant:
                event = self.terms(step).event
            yield event if (step - start) % self._covers == 0 else PaidByEpoch(self._noise(step))

    def foresee(self, start: int, count: int) -> list[DpEvent]:
        """Return the events of the next `count` steps from `start` on, one each, as far as they are certain.

        Nothing is certain if a part may make its own releases, choose its price as it goes, or repeat a step.
        """
        certain = (
            self.rdp_filter is None
            and self._covers == 1
            and getattr(type(self.sampler), "prepare", None) is Sampler.prepare
            and self.selection.constant
            and self.selection.counts_attempts
        )
        return [self.terms(step).event for step in range(start, min(start + count, self.steps or 0)) if certain]

    @property
    def _covers(self) -> int:
        """How many steps one event pays for: one, unless the sampler is charged by the epoch."""
        return int(getattr(self.sampler, "covers", 1))  # a user's own sampler need not know about epochs

    @property
    def _constant(self) -> bool:
        return isinstance(self.noise_schedule, Constant) and self.selection.constant

    def price(self, delta: float, accountant: str = "pld", adjacency: str = "add-or-remove-one") -> float:
        """Epsilon of the whole plan at `delta`."""
        _require(self.steps is not None, "steps are not known yet, so there is no price: use recipe.for_records(N)")
        return pricing.epsilon(self.plan(), delta, accountant=accountant, adjacency=adjacency)

    @property
    def amplifies(self) -> bool:
        """Whether our own sampler draws the batches (law 2)."""
        return not isinstance(self.sampler, Foreign)

    def to_toml(self) -> str:
        """Return the recipe as a TOML document, which `from_toml` reads back to an equal recipe."""
        return names.to_toml(self)

    def fingerprint(self) -> str:
        """Return a short hash that is equal if two runs follow the same recipe: of its text as version 0.1 wrote it."""
        try:
            text = names.to_toml(self, first=True)
        except InvalidInput:  # a user's own parts have no stable text, only their plain fields
            text = names.spell(self)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @staticmethod
    def from_toml(text: str) -> Recipe:
        """Read what `to_toml` wrote, or what a user wrote by hand; it may name only Sordino's own parts."""
        recipe = names.from_toml(text, Recipe)
        if not isinstance(recipe, Recipe):
            raise InvalidInput(f'this is a {type(recipe).__name__}, not a recipe: it must begin with part = "recipe"')
        return recipe

    @staticmethod
    def from_file(path: str | Path) -> Recipe:
        """Read a recipe from a file."""
        return Recipe.from_toml(Path(path).read_text())


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidInput(message)
