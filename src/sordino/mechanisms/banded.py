"""Correlated noise: each step cancels a part of the noise of the steps before it (BandMF, from the DP-FTRL family).

Training adds up gradients. What hurts a model is the noise of the sums Σ_{s≤t} g̃_s, not that of single steps. So let C
be a lower-triangular Toeplitz matrix with b bands c_0, …, c_{b−1}, ‖c‖ = 1, and z_t fresh normals. The run releases

    G̃ = G + σ·C⁻¹z,    that is    w_t = (z_t − Σ_{i=1}^{b−1} c_i·w_{t−i}) / c_0,    g̃_t = g_t + σ·w_t,

which is a function of C·G + σ·z. A record that joins at step t moves rows t … t+b−1 of C·G by c_i·g_t, together by no
more than the length of g_t. If it joins at most every b-th step, these rows cost one Gaussian. Draws are cyclic: each
record belongs to one of b groups, by its own coin, and step t draws only from group t mod b, at b times the rate. A run
of T steps costs ⌈T/b⌉ steps of DP-SGD at rate b·q (Choquette-Choo et al. 2023; proof in docs/proofs/banded.md).

More bands cancel more noise but give less amplification; with b = 1 it *is* DP-SGD.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Unpack

import numpy as np
import torch
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import lfilter
from torch import Tensor

from sordino.accounting.budget import Budget
from sordino.accounting.ledger import Receipt
from sordino.accounting.paid_by_epoch import PaidByEpoch
from sordino.combinations import Needs
from sordino.errors import InvalidInput
from sordino.gradients.engine import total_dtype
from sordino.mechanisms import Mechanism
from sordino.noise import Noise, Source, perturb
from sordino.parts import Always, Constant, Draw, Exact, Sampler, Schedule, State, Terms, factor_at
from sordino.recipe import Common, Optimizer, Recipe

if TYPE_CHECKING:
    from sordino.step import Bench

Array = NDArray[np.float64]
STRATEGIES = ("optimised", "sqrt")
STARTS = 256
"""How many steps' noise is followed to the end of a run if the learning rate changes; more are not needed."""
DIGITS = 8
"""Digits of the coefficients: more would only differ between machines."""


# -- who joins --------------------------------------------------------------------------------------------------------


@dataclass
class _Cycle(State):
    """The group of every record or of every user seen so far, whose turn it is, and whether it was drawn. Private."""

    groups: Tensor | None = None
    users: dict[int, int] = field(default_factory=dict)
    turn: int = 0
    drawn: bool = False


@dataclass(frozen=True)
class Cyclic(Sampler):
    """Cyclic Poisson draws: each record is in one of `bands` groups by its own coin, and the groups take turns.

    In its turn a record joins with probability `bands` times `rate`, the share of all records that a draw expects.

    Guarantees: a record joins at most every `bands`-th draw. The first step of a cycle is charged for the whole cycle:
    a record is in one turn of it, priced with the least noise of any turn (docs/proofs/banded.md).
    Edge cases: a draw may be empty. A resumed run begins a cycle with new groups, and is charged for it. If a group is
    smaller than a draw, which `calibrate` refuses, all of it joins. One band is Poisson sampling, coin by coin. The
    groups take 8 bytes per record.
    """

    bands: int = 1
    rate: float | None = None
    apart: ClassVar[bool] = True
    knows_users: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require_bands(self.bands)
        if self.rate is not None and not 0 < self.rate <= 1:
            raise InvalidInput(f"rate={self.rate} must lie in (0, 1]: it is the expected batch size over the records")

    def start(self) -> _Cycle:
        return _Cycle()

    def for_records(self, records: int, batch_size: int) -> Cyclic:
        return replace(self, rate=batch_size / records)

    def calibrate(self, recipe: Recipe, budget: Budget) -> None:
        """Refuse groups that are smaller than a draw: the usual search does the rest."""
        if recipe.records is not None and self.bands * recipe.batch_size > recipe.records:
            raise InvalidInput(
                f"bands={self.bands} times batch_size={recipe.batch_size} must be <= records={recipe.records}: "
                f"a draw comes from one group of records / bands; use at most {recipe.records // recipe.batch_size} "
                "bands, or smaller batches"
            )

    @property
    def covers(self) -> int:
        return self.bands

    @property
    def joins(self) -> float:
        """The probability that a record joins in its turn."""
        if self.rate is None:
            raise InvalidInput("sampler=Cyclic() has no rate: call recipe.calibrate(budget, records=N)")
        return min(1.0, self.bands * self.rate)

    def prepare(self, bench: Bench, step: int) -> None:
        """Advance to the next group once the last one was drawn, whatever became of the draw."""
        state: _Cycle = bench.states.sampler
        if state.drawn:
            state.turn, state.drawn = (state.turn + 1) % self.bands, False

    def terms(self, terms: Terms, state: _Cycle) -> Terms:
        if not isinstance(terms.event, GaussianDpEvent):
            raise InvalidInput(f"sampler=Cyclic() works with exact norms, not with {terms.event}: use Poisson draws")
        if state.turn:
            return replace(terms, event=PaidByEpoch(terms.noise_multiplier))
        return replace(terms, event=PoissonSampledDpEvent(self.joins, terms.event))

    def draw(self, records: int, source: Source, state: _Cycle) -> Draw:
        if state.groups is None and self.bands > 1:
            state.groups = torch.from_numpy(self._deal(records, source))
        joined = torch.from_numpy(source.toss(records, self.joins).indices)
        state.drawn = True
        return Draw(joined if state.groups is None else joined[state.groups[joined] == state.turn])

    def draw_among(self, users: Sequence[int], source: Source, state: _Cycle) -> list[int]:
        """Draw among users; each picks a group when first seen and keeps it, however often it leaves and returns."""
        new = [user for user in users if user not in state.users]
        if self.bands > 1:
            state.users.update(zip(new, self._deal(len(new), source).tolist(), strict=True))
        joined = [users[place] for place in source.toss(len(users), self.joins).indices.tolist()]
        state.drawn = True
        return [user for user in joined if state.users.get(user, 0) == state.turn]

    def _deal(self, count: int, source: Source) -> NDArray[np.int64]:
        """Deal a group to each of so many records or users, each by its own coin."""
        coins = np.floor(source.uniform(count) * self.bands).clip(max=self.bands - 1)
        return coins.astype(np.int64)


# -- the noise --------------------------------------------------------------------------------------------------------


@dataclass
class _Past(State):
    """The noise w of the last steps, newest first, in units of its deviation. Knowing it would undo the noise."""

    noises: list[list[Tensor]] = field(default_factory=list)
    receipt: int = 0


@dataclass(frozen=True)
class Banded(Noise):
    """Noise σ·C⁻¹z for a Toeplitz matrix C of `bands` bands: each step's noise comes from fresh normals and past noise.

    `strategy` says how the coefficients of C are found for a run of the recipe's length. "sqrt" takes those of the
    square root of summation, which are optimal without a bound on bands. "optimised" takes those with the least mean
    square error of all models of the run, under SGD with `momentum` (the recipe's optimizer's unless given) and
    learning rates in proportion to `rates`. The recipe sets `coefficients`; only their proportions count.

    Guarantees: if at most every `bands`-th draw holds a given record, one cycle costs one Gaussian of the recipe's
    noise multiplier. It keeps at most `bands` − 1 buffers of past noise, only in memory. They are never saved, so a
    resumed run starts from fresh noise.
    Edge cases: a draw that was charged and never released, or a change of parameters, breaks the chain. The noise then
    starts over, which costs nothing but cancels less. One band is independent noise, bit for bit.
    """

    bands: int = 1
    strategy: str = "optimised"
    momentum: float | None = None
    rates: Schedule = field(default_factory=Constant)
    coefficients: tuple[float, ...] | None = None
    needs: ClassVar[tuple[Needs, ...]] = (
        Needs(
            "sampler",
            "sampler={part!r} has no proof with banded noise: a record must join at most every b-th draw; "
            "use Cyclic(bands) with as many bands as the noise has",
            (Cyclic,),
            alike="bands",
        ),
        Needs("norms", "norms={part!r} has no proof with banded noise: use Exact()", (Exact,), subclasses=True),
        Needs(
            "selection", "selection={part!r} has no proof with banded noise: use Always()", (Always,), subclasses=True
        ),
        Needs("rdp_filter", "rdp_filter={part!r} must be None: a cycle is priced as a whole", (type(None),)),
    )

    def __post_init__(self) -> None:
        _require_bands(self.bands)
        if self.strategy not in STRATEGIES:
            raise InvalidInput(f"strategy={self.strategy!r} must be one of {', '.join(STRATEGIES)}")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise InvalidInput(f"momentum={self.momentum} must lie in [0, 1): that of the optimizer; 0 if it has none")
        given = self.coefficients
        if given is not None:
            object.__setattr__(self, "coefficients", tuple(given))
            if len(given) > self.bands or not given or not given[0] > 0 or not all(map(math.isfinite, given)):
                raise InvalidInput(
                    f"coefficients={given} must be finite, at most bands={self.bands} of them, the first > 0: "
                    "leave them out to compute them"
                )

    def for_steps(self, steps: int, momentum: float = 0.0) -> Banded:
        """Add coefficients for a run of so many steps; `momentum` is the optimizer's, unless one was given."""
        if self.strategy == "sqrt":
            found = find_roots(min(self.bands, steps))
        else:
            own = momentum if self.momentum is None else self.momentum
            found = optimise(min(self.bands, steps), steps, own, self.rates)
        return replace(self, coefficients=tuple(round(value, DIGITS) for value in (found / found[0]).tolist()))

    def start(self) -> _Past:
        return _Past()

    def event(self, answer: DpEvent) -> DpEvent:
        return answer

    def add(self, source: Source, receipt: Receipt, sums: list[Tensor], std: float, state: _Past) -> None:
        if self.bands == 1:
            perturb(source, receipt, sums, std)
            return
        first, *others = self._weights()
        sums[:] = [total.to(total_dtype(total)) for total in sums]  # keeping noise and subtracting it again is exact
        follows = receipt.sequence == state.receipt + 1
        if not (follows and state.noises and _list_places(state.noises[0]) == _list_places(sums)):
            state.noises = []
        past, state.noises = state.noises, []  # an interrupt from here on breaks the chain
        exact = [total.clone() for total in sums]
        for place, total in enumerate(sums):
            total.mul_(first)
            for weight, noise in zip(others, past, strict=False):
                total.sub_(noise[place], alpha=weight * std)
        perturb(source, receipt, sums, std)
        for total, before in zip(sums, exact, strict=True):
            total.div_(first)
            before.sub_(total).div_(-std)  # the added noise, in units of its deviation
        state.noises, state.receipt = [exact, *past][: len(others)], receipt.sequence

    def _weights(self) -> list[float]:
        """Return the coefficients, scaled to length 1: no column of C is longer."""
        if self.coefficients is None:
            raise InvalidInput(
                f"noise=Banded(bands={self.bands}) has no coefficients yet: call recipe.calibrate(budget, records=N)"
            )
        length = math.sqrt(math.fsum(value**2 for value in self.coefficients))
        return [value / length for value in self.coefficients]


def _list_places(tensors: list[Tensor]) -> list[tuple[torch.Size, torch.device]]:
    return [(tensor.shape, tensor.device) for tensor in tensors]


def _require_bands(bands: int) -> None:
    if bands < 1:
        raise InvalidInput(f"bands={bands} must be >= 1: 1 is DP-SGD; try 16")


# -- coefficients -----------------------------------------------------------------------------------------------------


def find_roots(bands: int) -> Array:
    """Return the first coefficients of the square root of the matrix of ones: binom(2k, k)/4^k."""
    k = np.arange(1, bands)
    return np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))


@lru_cache(maxsize=32)
def optimise(bands: int, steps: int, momentum: float = 0.0, rates: Schedule | None = None) -> Array:
    """Find the coefficients that minimise the mean square error of all models, times ‖c‖², by L-BFGS from `find_roots`.

    The noise of step s is in the update of step t with weight η_t·h_{t−s}, where h = 1/((1 − μx)·c(x)) as power series,
    and in the model after step t with the sum of these weights from s to t.
    """
    if bands == 1:
        return np.ones(1)
    changing = rates is not None and not isinstance(rates, Constant)
    factors = np.array([factor_at(rates, step, steps) for step in range(steps)]) if changing and rates else None

    def measure(others: Array) -> tuple[float, Array]:
        c = np.concatenate([[1.0], others])
        with np.errstate(all="ignore"):
            error, slope = measure_error(c, steps, momentum, factors)
            length = c @ c
            value, gradient = math.log(error) + math.log(length), slope / error + 2 * c / length
        return (value, gradient[1:]) if math.isfinite(value) else (1e300, np.zeros_like(others))

    start = find_roots(bands)[1:]
    found = minimize(measure, start, jac=True, method="L-BFGS-B", options={"maxiter": 500, "ftol": 1e-13, "gtol": 1e-9})
    best = found.x if found.fun <= measure(start)[0] else start
    return np.concatenate([[1.0], best])


def measure_error(c: Array, steps: int, momentum: float = 0.0, rates: Array | None = None) -> tuple[float, Array]:
    """Return the mean square of the noise in the models of a run, for σ = 1 and `c` unscaled, and its gradient."""
    pulse = np.zeros(steps)
    pulse[0] = 1.0
    response = lfilter([1.0], np.convolve([1.0, -momentum], c), pulse)
    if rates is None:
        error, by_response = _follow_constant(response)
    else:
        error, by_response = _follow_changing(response, rates)
    # ∂h/∂c_j = −x^j·h/c(x)
    inner = lfilter([1.0], c, response)
    slope = np.array([-(by_response[j:] @ inner[: steps - j]) for j in range(len(c))])
    return error / steps, slope / steps


def _follow_constant(response: Array) -> tuple[float, Array]:
    """Return Σ_t Σ_{k≤t} r_k² with r the sums of h: every start is the same."""
    steps = len(response)
    models = np.cumsum(response)
    left = steps - np.arange(steps)
    return float(left @ models**2), 2 * np.cumsum((left * models)[::-1])[::-1]


def _follow_changing(response: Array, rates: Array) -> tuple[float, Array]:
    """Return the same if η_t changes: from every start, or from enough of them."""
    steps = len(response)
    starts = np.unique(np.linspace(0, steps - 1, min(steps, STARTS)).astype(np.int64))
    error, slope = 0.0, np.zeros(steps)
    for start in starts:
        count = steps - start
        models = np.cumsum(rates[start:] * response[:count])
        error += float(models @ models)
        slope[:count] += 2 * rates[start:] * np.cumsum(models[::-1])[::-1]
    return error * steps / len(starts), slope * steps / len(starts)


# -- its recipe -------------------------------------------------------------------------------------------------------


def banded(
    *,
    bands: int = 4,
    strategy: str = "optimised",
    clip: float = 1.0,
    lr: float = 0.5,
    momentum: float = 0.0,
    rates: Schedule | None = None,
    **common: Unpack[Common],
) -> Recipe:
    """DP-SGD whose noise is partly cancelled in the next `bands` − 1 steps (Choquette-Choo et al. 2023).

    `strategy` is "optimised" or "sqrt". `rates` are factors on the learning rate over the run: give them if a scheduler
    changes it, so that the noise fits. With `bands`=1 this is `recipes.dpsgd`.

    >>> from sordino import Budget, recipes
    >>> recipe = recipes.banded(bands=4, batch_size=256, epochs=5).calibrate(Budget(3, 1e-5), records=60_000)
    >>> recipe.steps, len(recipe.noise.coefficients), recipe.plan()[0][0].sampling_probability == 4 * 256 / 60_000
    (1172, 4, True)
    """
    if common.get("sampler") is not None:
        raise InvalidInput(f"sampler={common['sampler']!r} cannot be given: banded noise needs its own cyclic draws")
    own: Common = {**common, "sampler": Cyclic(bands)}
    noise = Banded(bands, strategy, rates=rates or Constant())
    return Recipe(name="banded", clip=clip, optimizer=Optimizer("sgd", lr=lr, momentum=momentum), noise=noise, **own)


MECHANISMS = (
    Mechanism(
        "banded",
        title="BandMF",
        summary="the noise of each step cancels a part of the noise before it",
        paper="Choquette-Choo et al., (Amplified) Banded Matrix Factorization: A Unified Approach to Private Training, "
        "NeurIPS 2023",
        recipe=banded,
        parts={"Sampler": {"cyclic-poisson": Cyclic}, "Noise": {"banded": Banded}},
        example={"bands": 2},
    ),
)
