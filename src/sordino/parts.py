"""The slots of a private step: what a part of each must do, what passes between them, and the plain part of each.

::

    sample -> differentiate -> weigh -> sum + noise -> propose -> select

A part is a frozen dataclass: its fields are public, and its arguments are private. A mechanism (`sordino.mechanisms`)
fills one or two slots with its own parts and leaves the plain ones in the others. The plain noise is
`sordino.noise.Independent`; any torch optimizer can make the proposal.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from torch import Tensor, nn

from sordino.errors import InvalidInput
from sordino.gradients import Engine, find_engine
from sordino.gradients.stretch import Stretches, StretchingEngine
from sordino.noise import Source

if TYPE_CHECKING:
    from sordino.accounting.budget import Budget
    from sordino.recipe import Recipe
    from sordino.step import Attempt, Bench


# -- what passes between the slots -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """What a step will do and what it will cost: public, and fixed before any record is touched.

    `clip` bounds every weighted gradient and so is the sensitivity of their sum; noise of deviation
    ``noise_multiplier * clip`` is added to the sum, which is then divided by the public constant `divisor` (law 1).
    """

    step: int
    clip: float
    noise_multiplier: float
    divisor: float
    event: DpEvent

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.clip


@dataclass(frozen=True)
class Draw:
    """The records of one step, by index. Private, including its size.

    If a unit owns several records, the indices are those of units, and `choice` says which of their records are used. A
    sampler that draws more records than are used gives `thresholds`: a record is used if its gradient is longer than
    its threshold, and gradients shorter than `floor` count as that long (importance sampling).
    """

    indices: Tensor
    thresholds: Tensor | None = None
    floor: float = 0.0
    choice: int = 0

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, part: slice) -> Draw:
        thresholds = None if self.thresholds is None else self.thresholds[part]
        return Draw(self.indices[part], thresholds, self.floor, self.choice)

    def split(self, size: int, weights: Tensor | None = None) -> Iterator[Draw]:
        """Return the draw in pieces of about `size` records, as equal as possible: a small rest costs a whole pass.

        A piece may be an eighth larger if that saves a piece: half of all draws are larger than expected. `weights`
        says how many records each unit has; no unit is split, so a piece may be larger by one unit.
        """
        total = len(self) if weights is None else int(weights.sum())
        most = size + size // 8
        if 0 < total <= most:
            yield self
            return
        pieces = -(-total // most)
        edges = [total * piece // pieces for piece in range(pieces + 1)] if pieces else []
        if weights is not None:
            ends = torch.searchsorted(weights.cumsum(0), torch.tensor(edges), right=True)
            edges = list(dict.fromkeys(ends.tolist()))
        for part in starmap(slice, pairwise(edges)):
            yield self[part]


# -- what a part remembers ---------------------------------------------------------------------------------------------


@dataclass
class State:
    """What a part remembers from step to step. Private (law 7), except for fields with metadata ``{"public": kind}``.

    Such a field holds None or a dataclass `kind` of plain numbers that were released and paid for. A checkpoint holds
    only these; a resumed run must compute the rest again. A part makes its own state with `start`, the bench holds one
    for each slot, and only the part reads it.
    """

    def save(self) -> dict[str, Any]:
        """Return the released values, as plain numbers by name."""
        held = (getattr(self, f.name) for f in fields(self) if "public" in f.metadata)
        return {name: value for one in held if one is not None for name, value in asdict(one).items()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue with the released values of a checkpoint."""
        for f in fields(self):
            if saved and "public" in f.metadata:
                try:
                    setattr(self, f.name, f.metadata["public"](**saved))
                except TypeError:
                    names = ", ".join(map(str, saved))[:60]
                    raise InvalidInput(f"released values {names} are not those of this recipe") from None


# -- sample ------------------------------------------------------------------------------------------------------------


class Sampler(Protocol):
    """Decides which records a step sees, and what that does to the price.

    A sampler that learns as it goes keeps what it learnt in its own `State`.
    """

    apart: ClassVar[bool] = False
    """Whether each record joins by its own coins, independently of others: audits may then try many at once."""
    knows_users: ClassVar[bool] = False
    """Whether it is proven for users who come and go (`draw_among`); a subclass has to say so again."""
    chooses_noise: ClassVar[bool] = False
    """Whether it chooses its noise as it goes, so that its recipe needs a budget and takes no noise multiplier."""

    def start(self) -> Any:
        """Return what it remembers at the beginning of a run; most samplers need nothing."""
        return State()

    def for_records(self, records: int, batch_size: int) -> Sampler:
        """Return this sampler, prepared for a public number of `records` and an expected size of a draw."""
        return self

    @property
    def covers(self) -> int:
        """Return how many steps one event pays for: 1, or those of an epoch if a record is in one batch of it."""
        return 1

    @property
    def moves_clip(self) -> bool:
        """Whether the clipping bound follows values that it releases, and is among those that a checkpoint holds."""
        return False

    def calibrate(self, recipe: Recipe, budget: Budget) -> Recipe | None:
        """Return `recipe` calibrated to `budget` in this sampler's own way; None to price its plan as usual."""
        return None

    def prepare(self, bench: Bench, step: int) -> None:
        """Make its own releases before a step, each charged; most samplers need none."""
        return

    def terms(self, terms: Terms, state: Any) -> Terms:
        """Turn terms whose event is priced on a known set of records into terms on a fresh draw.

        If one event `covers` several steps, ``terms.event`` has the smallest noise of all of them.
        """
        ...

    def draw(self, records: int, source: Source, state: Any) -> Draw:
        """Return the indices of this step's records; the data itself is not touched."""
        ...

    def draw_among(self, users: Sequence[int], source: Source, state: Any) -> list[int]:
        """Choose whom of the present `users` a round asks; their numbers are permanent, and others may come later."""
        return [users[place] for place in self.draw(len(users), source, state).indices.tolist()]

    def observe(self, draw: Draw, norms: Tensor, state: Any) -> None:
        """Learn from the norms of the drawn records; most samplers do not."""
        return


@dataclass(frozen=True)
class Poisson(Sampler):
    """Each record joins the draw independently with probability `rate`, in time and memory proportional to the draw.

    Guarantees: inclusions are independent of the data and of each other, so the draw amplifies (Mironov, Talwar, Zhang
    2019, Def. 3; Poisson-subsampled PLD). `sordino.bits` says what "independently" means with finitely many bits: the
    cost is negligible.
    Edge cases: an empty draw is a draw, and the step then releases noise alone; rate 1 is the full data.
    """

    rate: float
    knows_users: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise InvalidInput(f"rate={self.rate} must lie in (0, 1]: it is the expected batch size over the records")

    def for_records(self, records: int, batch_size: int) -> Poisson:
        return Poisson(batch_size / records)

    def terms(self, terms: Terms, state: Any) -> Terms:
        return replace(terms, event=self.amplify(terms.event))

    def amplify(self, event: DpEvent) -> DpEvent:
        """Return the event of one answer about a fresh draw; several answers are merged first (law 3)."""
        return PoissonSampledDpEvent(self.rate, event)

    def draw(self, records: int, source: Source, state: Any) -> Draw:
        return Draw(torch.from_numpy(source.toss(records, self.rate).indices))


SEEDED_BY_LOADER = "what the foreign loader draws at random for its records, if anything, comes from secret seeds"
"""Its workers' seeds are secret too, unless the user gave it a seeded generator= or a worker_init_fn= that seeds."""


@dataclass(frozen=True)
class Foreign(Sampler):
    """The user's own loader, shuffled or not; nothing is known about how it chooses records.

    Guarantees: no amplification. Without one record, its batch may hold another one instead and later batches may shift
    by one, so each sum changes by up to two contributions. So every batch is charged as a plain Gaussian with half the
    noise. A record must not occur twice in a batch; the guarantee states this as an assumption. To price a torch
    DataLoader that shuffles by the epoch, use `sordino.mechanisms.shuffled.ShuffledLoader`.
    """

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a guarantee must say about the loader."""
        return (
            "batches came from a foreign loader, so no amplification by sampling is claimed",
            "the foreign loader puts a record into a batch at most once, "
            "and without one record each batch would differ by at most one other",
            SEEDED_BY_LOADER,
        )

    def terms(self, terms: Terms, state: Any) -> Terms:
        if not isinstance(terms.event, GaussianDpEvent):
            raise InvalidInput(f"sampler=Foreign() works with exact norms, not with {terms.event}: use Poisson draws")
        return replace(terms, event=GaussianDpEvent(terms.event.noise_multiplier / 2))

    def passes(self, loader: Iterable[Any], bench: Bench) -> Iterable[Any]:
        """Return the batches of the user's loader, as they come."""
        return loader

    def draw(self, records: int, source: Source, state: Any) -> Draw:
        raise InvalidInput(
            f"sampler={type(self).__name__}() does not draw: pass your loader to private.loader(yours), "
            "or use sampler=Poisson, which is priced with amplification"
        )


# -- differentiate ----------------------------------------------------------------------------------------------------


class Norms(Protocol):
    """Exact or estimated norms."""

    def event(self, noise_multiplier: float) -> DpEvent:
        """Return the event of one noised sum of gradients weighed by these norms."""
        ...

    def engine(self, name: str, source: Source) -> Engine:
        """Return the engine that computes such norms; `name` is the user's choice among those that can."""
        ...

    def prepare(self, engine: Engine) -> None:
        """Called once before every draw, for engines that need fresh randomness."""
        return

    def survey(self, bench: Bench, step: int) -> None:
        """Look at the model, never at a record, before a step is charged; most norms do nothing."""
        return

    def finish(self, bench: Bench, released: list[Tensor]) -> list[Tensor]:
        """Return what the optimizer gets for the noised sums, one for each parameter; most leave them unchanged."""
        return released

    def calibrate(self, recipe: Recipe, budget: Budget) -> Recipe | None:
        """Return the recipe with its noise found by these norms themselves; None if the ordinary search works."""
        return None


@dataclass(frozen=True)
class Exact(Norms):
    """Norms without error: clipping bounds every contribution, so one answer is a plain Gaussian mechanism."""

    def event(self, noise_multiplier: float) -> DpEvent:
        return GaussianDpEvent(noise_multiplier)

    def engine(self, name: str, source: Source) -> Engine:
        return find_engine(name)


class Stretching(Norms):
    """Exact norms in another geometry: of gradients that a public linear map has stretched (`gradients.stretch`).

    The map may depend on the model, whose weights were released, but not on the draw or the data. Every sum, its noise
    and the release are in terms of stretched gradients.
    """

    natural: bool

    @abstractmethod
    def is_due(self, step: int) -> bool:
        """Whether an existing map has to be computed again before this step."""
        ...

    @abstractmethod
    def probe(self, bench: Bench, step: int) -> Stretches:
        """Compute the map of each parameter that is currently trained."""
        ...

    def event(self, noise_multiplier: float) -> DpEvent:
        return GaussianDpEvent(noise_multiplier)

    def engine(self, name: str, source: Source) -> Engine:
        return find_engine(name)

    def survey(self, bench: Bench, step: int) -> None:
        engine: StretchingEngine = bench.engine  # type: ignore[assignment]  # those of exact norms are
        if engine.stretches is None or self.is_due(step) or not engine.stretches.fit(bench.parameters()):
            found = bench.team.lead(lambda: self.probe(bench, step).maps)  # the same bits for all processes
            engine.stretches = Stretches(bench.parameters(), found)

    def finish(self, bench: Bench, released: list[Tensor]) -> list[Tensor]:
        """`natural` maps stretch once more: L L M R R follows the inverse of the moments."""
        engine: StretchingEngine = bench.engine  # type: ignore[assignment]
        assert engine.stretches is not None
        return engine.stretches.apply(released) if self.natural else released


# -- weigh ------------------------------------------------------------------------------------------------------------

ROUNDING = 5e-5
"""Weights shrink by this much, so that rounding in float32 norms and sums moves no sum by more than the bound.

docs/proofs/rounding.md says what rounding does, and how much of it this covers.
"""


class Weighing(Protocol):
    """A function from norms to one weight per example."""

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        """Weights with ``weight * norm <= clip``; 0 where the norm is not finite (law 6)."""
        ...


def drop_not_finite(values: Tensor, norms: Tensor) -> Tensor:
    """Return `values` with 0 where the norm is not finite: one bad record changes only its own contribution (law 6)."""
    return torch.where(torch.isfinite(norms), values, torch.zeros_like(values))


@dataclass(frozen=True)
class Flat:
    """Flat clipping: ``min(1, C / |g|)`` (Abadi et al. 2016, Alg. 1).

    Guarantees: contributions no longer than C. Edge cases: a zero gradient has weight 1; a NaN or infinite one 0.
    """

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        # An infinite norm gives 0 by itself, and NaN is the only other one that is not finite.
        return (clip * (1 - ROUNDING) / norms).clamp_(max=1.0).nan_to_num_(nan=0.0)


@dataclass(frozen=True)
class Automatic:
    """Automatic clipping, AUTO-S: ``C / (|g| + gamma)`` (Bu et al. 2023, Eq. 5): no need to tune C.

    Guarantees: contributions shorter than C, and so the sensitivity of flat clipping.
    """

    gamma: float = 0.01

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise InvalidInput(f"gamma={self.gamma} must be > 0: it keeps tiny gradients tiny; 0.01 is the usual value")

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return drop_not_finite(clip * (1 - ROUNDING) / (norms + self.gamma), norms)


class Blockwise(ABC):
    """A weighing that gets the norms of blocks of parameters, and weighs each block of an example separately.

    What it learns from draws it releases on the receipt of the step, whose event must pay for both (law 3), and keeps
    in its own `State`.
    """

    def start(self) -> Any:
        """Return what it remembers at the beginning of a run."""
        return State()

    @abstractmethod
    def find_blocks(self, names: Sequence[str], state: Any) -> list[int]:
        """Return the block of every currently trained parameter, by its name; counted from 0 without gaps."""
        ...

    def terms(self, terms: Terms, state: Any) -> Terms:
        """Return the terms of a step whose bounds are found during the run, at the price of more noise."""
        return terms

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        """Refuse: it does not weigh norms of whole gradients."""
        raise InvalidInput(f"weighing={self!r} needs the norms of blocks of parameters: use Flat() for whole gradients")

    @abstractmethod
    def weigh(self, norms: Tensor, clip: float, draw: Draw, state: Any) -> Tensor:
        """[blocks, size] from norms of that shape: of each example Σ (weight * norm)² <= clip²; 0 if not finite."""
        ...

    def release(self, attempt: Attempt, state: Any) -> None:
        """Make the release about the same draw that the terms have paid for; most need none."""
        return


# -- schedule ---------------------------------------------------------------------------------------------------------


class Schedule(Protocol):
    """A positive factor for step `step` of `steps`, counted from 0."""

    def __call__(self, step: int, steps: int) -> float: ...

    def __hash__(self) -> int: ...


def factor_at(schedule: Schedule, step: int, steps: int) -> float:
    """Return the factor of a schedule, or raise an error: without noise or a bound there is no privacy."""
    factor = float(schedule(step, steps))
    if not (factor > 0 and math.isfinite(factor)):
        raise InvalidInput(
            f"schedule {schedule!r} gives {factor} at step {step} of {steps}, must be > 0 and finite: "
            "bound it from below"
        )
    return factor


@dataclass(frozen=True)
class Constant:
    """The same value at every step."""

    def __call__(self, step: int, steps: int) -> float:
        return 1.0


# -- select -----------------------------------------------------------------------------------------------------------


class Snapshot(Protocol):
    """The state before a proposal."""

    def restore(self) -> None:
        """Put everything back, bit for bit."""
        ...


class Selector(Protocol):
    """Sees the model before and after a proposal, and keeps one of them.

    It keeps what it must remember from attempt to attempt in its own `State`, ``attempt.bench.states.selection``.
    """

    def start(self) -> Any:
        """Return what it remembers at the beginning of a run."""
        return State()

    def event(self, proposal: DpEvent) -> DpEvent:
        """Return the price of an attempt: the proposal's own event and whatever the selector's test adds (law 4)."""
        ...

    def terms(self, terms: Terms, recipe: Recipe, state: Any) -> Terms:
        """Return the terms of an attempt, for selectors whose price depends on more than the proposal's."""
        return replace(terms, event=self.event(terms.event))

    def check(self, bench: Bench) -> None:
        """Refuse, before anything is spent, a model for which the price does not hold."""
        return

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        """Remember what a rejection must restore, or nothing if nothing is ever rejected."""
        ...

    def refine(self, attempt: Attempt) -> None:
        """Change the released gradient, now in the parameters, using earlier releases; most leave it alone."""
        return

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        """Decide on the proposal that is now in the model."""
        ...

    @property
    def constant(self) -> bool:
        """Whether every attempt costs the same, as far as the selector is concerned."""
        return True

    @property
    def evaluates(self) -> bool:
        """Whether its price needs losses that do not mix records in eval mode either."""
        return False

    @property
    def counts_attempts(self) -> bool:
        """Whether a rejected attempt is a step of the recipe (law 4); only published accounting says no."""
        return True

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a guarantee must say about the selection."""
        return ()


@dataclass(frozen=True)
class Always(Selector):
    """Keep every proposal. Guarantees: only post-processing, so it costs nothing."""

    def event(self, proposal: DpEvent) -> DpEvent:
        return proposal

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        return None

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        return True


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and restore every module's mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
