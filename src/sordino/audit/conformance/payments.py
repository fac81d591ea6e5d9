"""What an event pays for: the answers about the records that may be made on its receipt.

The other direction of pricing: not what an event costs, but what it allows. A Gaussian event of multiplier m allows
answers whose movements Δ and deviations σ keep Σ (Δ/σ)² ≤ 1/m²; an erasure allows a proposal, and a verdict whose
probability stays within its interval; and so on. An event of your own joins by ``answers.register``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

from sordino.accounting.erasure import AnnealedErasure, Erasure
from sordino.accounting.events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from sordino.accounting.filter import Filtered
from sordino.accounting.projected import ProjectedGaussian
from sordino.accounting.step_length import NoisyMinimum
from sordino.errors import InvalidInput
from sordino.tables.labels import Unlisted

MOST = 64
"""Equal answers beyond so many are not listed one by one."""


@dataclass(frozen=True)
class Answer:
    """One answer about a draw at `rate`; at rate 1 it is about all records."""

    rate: float = 1.0


@dataclass(frozen=True)
class Noised(Answer):
    """Gaussian noise of `multiplier` times the sensitivity; with `projections` the sensitivity is random (JL)."""

    multiplier: float = math.inf
    projections: int | None = None


@dataclass(frozen=True)
class Verdict(Answer):
    """A test that passes with a probability between `lowest` and `highest`, whatever the records."""

    lowest: float = 0.0
    highest: float = 1.0


@dataclass(frozen=True)
class Energy(Answer):
    """A value within ±C, noised by 2·C·`multiplier`, that decides at any temperature."""

    multiplier: float = math.inf


@dataclass(frozen=True)
class Choice(Answer):
    """The smallest of several totals after exponential noise: `epsilon` times the noise's scale is the sensitivity."""

    epsilon: float = 0.0


@dataclass(frozen=True)
class Unseen(Answer):
    """A value that only one record has shows with probability `delta` at most."""

    delta: float = 0.0


@singledispatch
def answers(event: DpEvent) -> list[Answer]:
    """The answers that `event` pays for, in the order in which they are made."""
    raise InvalidInput(
        f"event {type(event).__name__} is unknown to the conformance suite: say what it pays for with "
        "sordino.audit.conformance.answers.register"
    )


@answers.register
def _(event: NoOpDpEvent) -> list[Answer]:
    return []


@answers.register
def _(event: GaussianDpEvent) -> list[Answer]:
    return [Noised(multiplier=float(event.noise_multiplier))]


@answers.register
def _(event: ProjectedGaussian) -> list[Answer]:
    return [Noised(multiplier=event.noise_multiplier, projections=event.projections)]


@answers.register
def _(event: PoissonSampledDpEvent) -> list[Answer]:
    rate = float(event.sampling_probability)
    return [replace(answer, rate=rate * answer.rate) for answer in answers(event.event)]


@answers.register
def _(event: Filtered) -> list[Answer]:
    return answers(event.event)


@answers.register
def _(event: ComposedDpEvent) -> list[Answer]:
    return [answer for part in event.events for answer in answers(part)]


@answers.register
def _(event: SelfComposedDpEvent) -> list[Answer]:
    return answers(event.event) * min(int(event.count), MOST)


@answers.register
def _(event: Erasure) -> list[Answer]:
    verdict = Verdict(event.test_rate, event.lowest, event.highest)
    return [verdict] if math.isinf(event.noise_multiplier) else [Noised(event.rate, event.noise_multiplier), verdict]


@answers.register
def _(event: AnnealedErasure) -> list[Answer]:
    return [Noised(event.rate, event.noise_multiplier), Energy(event.test_rate, event.test_noise)]


@answers.register
def _(event: NoisyMinimum) -> list[Answer]:
    return [Choice(epsilon=event.epsilon)]


@answers.register
def _(event: Unlisted) -> list[Answer]:
    return [Unseen(delta=event.delta)]


def assigned(paid: Sequence[Answer], made: int) -> list[Answer]:
    """Which answer each of `made` releases on one receipt is: in order, then the last kind again."""
    kinds = [answer for answer in paid if not isinstance(answer, Unseen)]
    return [kinds[min(place, len(kinds) - 1)] for place in range(made)] if kinds else []
