"""Dynamic DP-SGD and the noise-decay baselines: noise and clipping bound that change over the run.

A schedule is a shape, a factor on the recipe's base value: the noise of step t is ``noise_multiplier * shape(t, T)``.
Calibration finds the base value; the shape is the paper's. All shapes are 1 at step 0.

Noise means the noise *multiplier* σ/C. The noise added to the sum is σ·C, so a decaying clipping bound also lowers it
at no cost: the price depends only on the multipliers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Unpack

from sordino.errors import InvalidInput
from sordino.mechanisms import Mechanism
from sordino.parts import Constant, Flat, Schedule, factor_at
from sordino.recipe import Common, Optimizer, Recipe


@dataclass(frozen=True)
class GrowingMu:
    """Noise falls by `ratio` over the run: σ_t = σ_0 · ρ_μ^(−t/T), so μ_t = ρ_μ^(t/T) · μ_0 (Dynamic DP-SGD, Eq. 13).

    Little privacy is spent early and more later. The paper counts t from 1; here the first step has t = 0.

    >>> GrowingMu(ratio=4)(step=50, steps=100)
    0.5
    """

    ratio: float

    def __post_init__(self) -> None:
        _require_positive("ratio", self.ratio, "it is the last μ over the first; 1 keeps the noise constant")

    def __call__(self, step: int, steps: int) -> float:
        return float(self.ratio ** (-step / steps))


@dataclass(frozen=True)
class SensitivityDecay:
    """The clipping bound falls by `ratio` over the run: C_t = C_0 · ρ_c^(−t/T) (Dynamic DP-SGD, Eq. 14).

    Costs nothing: gradient and noise shrink alike.
    """

    ratio: float

    def __post_init__(self) -> None:
        _require_positive("ratio", self.ratio, "it is the first bound over the last; 1 keeps the bound constant")

    def __call__(self, step: int, steps: int) -> float:
        return float(self.ratio ** (-step / steps))


@dataclass(frozen=True)
class ExponentialDecay:
    """σ_t = σ_0 · e^(−k·t) (Yu et al. 2019, exponential decay; t in epochs there, see `PerEpoch`)."""

    rate: float

    def __post_init__(self) -> None:
        _require_not_negative("rate", self.rate)

    def __call__(self, step: int, steps: int) -> float:
        return math.exp(-self.rate * step)


@dataclass(frozen=True)
class TimeDecay:
    """σ_t = σ_0 / (1 + k·t) (Yu et al. 2019, time-based decay; t in epochs there)."""

    rate: float

    def __post_init__(self) -> None:
        _require_not_negative("rate", self.rate)

    def __call__(self, step: int, steps: int) -> float:
        return 1 / (1 + self.rate * step)


@dataclass(frozen=True)
class StepDecay:
    """σ_t = σ_0 · k^⌊t/period⌋ (Yu et al. 2019, step decay; t in epochs there)."""

    factor: float
    period: int = 10

    def __post_init__(self) -> None:
        _require_positive("factor", self.factor, "it multiplies the noise once per period")
        _require_positive("period", self.period, "it is the number of steps between changes")

    def __call__(self, step: int, steps: int) -> float:
        return float(self.factor ** (step // self.period))


@dataclass(frozen=True)
class PolynomialDecay:
    """σ_t = (σ_0 − σ_end)·(1 − t/T)^power + σ_end (Yu et al. 2019, polynomial decay); `end` is σ_end/σ_0."""

    power: float
    end: float = 0.2

    def __post_init__(self) -> None:
        _require_positive("power", self.power, "1 is a straight line")
        _require_positive("end", self.end, "it is the last noise over the first")

    def __call__(self, step: int, steps: int) -> float:
        return float((1 - self.end) * max(0.0, 1 - step / steps) ** self.power + self.end)


@dataclass(frozen=True)
class VarianceDecay:
    """σ_t² = R^t · σ_0² (Zhang et al. 2021): the noise *variance* shrinks by `rate` each time."""

    rate: float

    def __post_init__(self) -> None:
        _require_positive("rate", self.rate, "0.99 takes one per cent of the variance away each time")

    def __call__(self, step: int, steps: int) -> float:
        return float(self.rate ** (step / 2))


@dataclass(frozen=True)
class PerEpoch:
    """Change `inner` once per epoch, as the authors' scripts do: all steps of epoch e have the value inner(e, epochs).

    For a decaying schedule, the value at the epoch's start is on the safe side of the paper's formula.
    """

    inner: Schedule
    epochs: int

    def __post_init__(self) -> None:
        _require_positive("epochs", self.epochs, "it is into how many stretches the run is cut")

    def __call__(self, step: int, steps: int) -> float:
        return self.inner(step * self.epochs // steps, self.epochs)


@dataclass(frozen=True)
class Levels:
    """`inner` as a staircase of `count` levels, which is what then *runs*: at most `count` different events to price.

    A level ends where Σ factor⁻², the privacy spent to first order, passes the next multiple of total/count. Its factor
    spends as much as the steps that it replaces. This makes any event that depends on the noise fast to price,
    including those of random projections and selective updates; sampled Gaussians do not need it.
    """

    inner: Schedule
    count: int = 16

    def __post_init__(self) -> None:
        _require_positive("count", self.count, "16 lose less than one per cent")

    def __call__(self, step: int, steps: int) -> float:
        ends, factors = _staircase(self.inner, self.count, steps)
        return factors[bisect_right(ends, step)]


@lru_cache(maxsize=64)
def _staircase(inner: Schedule, count: int, steps: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Find where each level but the last ends, and the factor of each level relative to the first."""
    spent = list(accumulate(factor_at(inner, step, steps) ** -2 for step in range(steps)))
    starts = [0]
    for level in range(1, min(count, steps)):
        begin = bisect_right(spent, spent[-1] * level / count)
        if starts[-1] < begin < steps:
            starts.append(begin)
    factors = []
    for begin, end in zip(starts, [*starts[1:], steps], strict=True):
        cost = spent[end - 1] - (spent[begin - 1] if begin else 0.0)
        factors.append(math.sqrt((end - begin) / cost))
    return tuple(starts[1:]), tuple(factor / factors[0] for factor in factors)


def _require_positive(name: str, value: float, meaning: str) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InvalidInput(f"{name}={value} must be > 0 and finite: {meaning}")


def _require_not_negative(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise InvalidInput(f"{name}={value} must be >= 0 and finite: 0 keeps the noise constant")


# The kind of decay, and the constant of its paper: Yu et al. 2019 tuned theirs for 100 epochs of MNIST; 0.99 is ours,
# for Zhang et al. 2021 name none.
DECAYS: dict[str, tuple[Callable[[float], Schedule], float]] = {
    "exponential": (ExponentialDecay, 0.0138),
    "time": (TimeDecay, 0.0281),
    "step": (StepDecay, 0.7008),
    "polynomial": (PolynomialDecay, 3.5277),
    "variance": (VarianceDecay, 0.99),
}


def dynamic(
    *,
    mu_ratio: float = 1.25,
    clip_ratio: float = 10 / 3,
    clip: float = 1.5,
    lr: float = 0.15,
    per_epoch: bool = False,
    **common: Unpack[Common],
) -> Recipe:
    """Growing μ and a decaying clipping bound together: σ_t·C_t = C_0/μ_0 · (ρ_μ ρ_c)^(−t/T) (Dynamic DP-SGD, Alg. 2).

    The defaults are those of the authors' MNIST script at ε = 0.4. μ_0 is found by `calibrate` from the composition of
    all different steps, where the paper uses a limit theorem; sums are divided by the public batch size, where it uses
    the size of the draw. `per_epoch` changes both once per epoch, as the script does.

    >>> from sordino import recipes
    >>> recipe = recipes.dynamic(mu_ratio=2, clip_ratio=4, batch_size=256, epochs=20)
    >>> round(recipe.noise_schedule(50, 100) * recipe.clip_schedule(50, 100), 4)  # 8 ** -0.5
    0.3536
    """
    return _make_recipe("dynamic", GrowingMu(mu_ratio), SensitivityDecay(clip_ratio), clip, lr, per_epoch, common)


def growing_mu(
    *, ratio: float = 1.25, clip: float = 1.5, lr: float = 0.15, per_epoch: bool = False, **common: Unpack[Common]
) -> Recipe:
    """Spend little privacy early and more later: μ_t = ρ_μ^(t/T)·μ_0 (Dynamic DP-SGD, Eqs. 10-13).

    >>> from sordino import recipes
    >>> recipes.growing_mu(ratio=2, batch_size=256, epochs=20).noise_schedule
    GrowingMu(ratio=2)
    """
    return _make_recipe("growing_mu", GrowingMu(ratio), Constant(), clip, lr, per_epoch, common)


def sensitivity_decay(
    *, ratio: float = 10 / 3, clip: float = 1.5, lr: float = 0.15, per_epoch: bool = False, **common: Unpack[Common]
) -> Recipe:
    """Lower the clipping bound, and the noise with it: C_t = ρ_c^(−t/T)·C_0 (Dynamic DP-SGD, Eqs. 14-16).

    >>> from sordino import recipes
    >>> recipes.sensitivity_decay(ratio=4, clip=1.5, batch_size=256, epochs=20).clip_schedule(50, 100)
    0.5
    """
    return _make_recipe("sensitivity_decay", Constant(), SensitivityDecay(ratio), clip, lr, per_epoch, common)


def noise_decay(
    *,
    kind: str = "exponential",
    rate: float | None = None,
    clip: float = 4.0,
    lr: float = 0.05,
    **common: Unpack[Common],
) -> Recipe:
    """The noise falls once per epoch (Yu et al. 2019; kind="variance": Zhang et al. 2021).

    `rate` is the constant of the decay per epoch, the paper's unless given. The papers' own prices are the accountants
    "zcdp-epoch" and "tcdp".

    >>> from sordino import recipes
    >>> recipes.noise_decay(kind="step", batch_size=600, epochs=100).noise_schedule
    PerEpoch(inner=StepDecay(factor=0.7008, period=10), epochs=100)
    """
    if kind not in DECAYS:
        raise InvalidInput(f"kind={kind!r} is unknown: use one of {', '.join(DECAYS)}")
    make, constant = DECAYS[kind]
    schedule = make(constant if rate is None else rate)
    return _make_recipe("noise_decay", schedule, Constant(), clip, lr, True, common)


def _make_recipe(
    name: str, noise: Schedule, bound: Schedule, clip: float, lr: float, per_epoch: bool, common: Common
) -> Recipe:
    if per_epoch:
        noise, bound = _change_per_epoch(noise, common), _change_per_epoch(bound, common)
    return Recipe(
        name=name,
        clip=clip,
        noise_schedule=noise,
        clip_schedule=bound,
        weighing=Flat(),
        optimizer=Optimizer("sgd", lr=lr),
        **common,
    )


def _change_per_epoch(schedule: Schedule, common: Common) -> Schedule:
    if isinstance(schedule, Constant):
        return schedule
    epochs = common.get("epochs")
    if epochs is None:
        raise InvalidInput("epochs=None must be given: the schedule changes once per epoch")
    return PerEpoch(schedule, math.ceil(epochs))


DYNAMIC = "Dynamic Differential-Privacy Preserving SGD, 2021"

MECHANISMS = (
    Mechanism(
        "dynamic",
        title="Dynamic DP-SGD",
        summary="noise and clipping bound follow a schedule",
        paper=DYNAMIC,
        recipe=dynamic,
    ),
    Mechanism(
        "growing_mu",
        title="Dynamic DP-SGD",
        summary="the noise decays, so later steps spend more",
        paper=DYNAMIC,
        recipe=growing_mu,
        parts={"Schedule": {"growing-mu": GrowingMu}},
    ),
    Mechanism(
        "sensitivity_decay",
        title="Dynamic DP-SGD",
        summary="the clipping bound decays",
        paper=DYNAMIC,
        recipe=sensitivity_decay,
        parts={"Schedule": {"sensitivity-decay": SensitivityDecay}},
    ),
    Mechanism(
        "noise_decay",
        title="Noise decay",
        summary="the noise decays from epoch to epoch",
        paper="Yu et al., Differentially Private Model Publishing for Deep Learning, S&P 2019; Zhang et al. 2021",
        recipe=noise_decay,
        parts={
            "Schedule": {
                "exponential-decay": ExponentialDecay,
                "time-decay": TimeDecay,
                "step-decay": StepDecay,
                "polynomial-decay": PolynomialDecay,
                "variance-decay": VarianceDecay,
                "per-epoch": PerEpoch,
                "levels": Levels,
            }
        },
    ),
)
