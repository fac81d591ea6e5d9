"""How clipping bound and noise change over the steps: pure functions of the step, knowing nothing of torch.

A schedule is a shape, a factor on the recipe's base value: the noise of step t is ``noise_multiplier * shape(t, T)``.
Calibration finds the base value; the shape stays what the paper says. Any function ``(step, steps) -> float`` will do;
the classes here can also be written to TOML. All of them are 1 at step 0.

Noise means the noise *multiplier* σ/C. What is added to the sum is σ·C, so that a falling clipping bound lowers it too
without costing anything: the price depends on the multipliers alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

from sordino.errors import InvalidInput


class Schedule(Protocol):
    """A positive factor for step `step` of `steps`, counted from 0."""

    def __call__(self, step: int, steps: int) -> float: ...

    def __hash__(self) -> int: ...


def factor_at(schedule: Schedule, step: int, steps: int) -> float:
    """The factor of a schedule, or an error where it is none: without noise or bound there is no privacy."""
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
    """Steps `inner` once per epoch, as the authors' scripts do: all steps of epoch e have the value inner(e, epochs).

    For a falling schedule the value at the epoch's start is the safe side of what the paper's formula says.
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

    A level ends where Σ factor⁻², the privacy spent to first order, passes the next multiple of total/count, and
    has the factor that spends as much as the steps it replaces. Any event that depends on the noise becomes cheap to
    price so, also those of random projections and selective updates; sampled Gaussians are priced well without it.
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
    """Where each level but the last ends, and the factor of each relative to the first."""
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
