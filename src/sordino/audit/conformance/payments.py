"""What an event pays for, and whether it is priced for that.

The other direction of pricing: not what an event costs, but which answers about the records may be made on its receipt.
A Gaussian event of multiplier m allows answers whose movements Δ and deviations σ keep Σ (Δ/σ)² ≤ 1/m²; an erasure
allows a proposal, and a verdict whose probability stays within its interval; and so on. An event of your own joins by
``answers.register``.

Prices are compared with mechanisms that they must cover, by lower bounds that share no code with the accountants. For
every kind of event there are pairs of output distributions, with a record and without it, that a mechanism of this
event can have. Whatever the accountant says, δ(ε) of the event is at least ∫(P − e^ε·Q)₊ of each such pair, in both
directions: a record that is removed, and one that is added. Here these integrals are sums over a fine grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as distributions
from numpy.typing import NDArray
from scipy import special, stats

from sordino.accounting.erasure import AnnealedErasure, Erasure
from sordino.accounting.events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    to_json,
    unroll,
)
from sordino.accounting.filtered import Filtered
from sordino.accounting.jl_gaussian import ProjectedGaussian
from sordino.accounting.noisy_minimum import NoisyMinimum
from sordino.accounting.pld import pld
from sordino.accounting.random_allocation import RandomAllocation
from sordino.accounting.rdp import rdp_curve
from sordino.accounting.unlisted import Unlisted
from sordino.errors import InvalidInput
from sordino.recipe import Recipe

Array = NDArray[np.float64]
MOST = 64
"""More equal answers than this are not listed one by one."""
EPSILONS = (0.0, 0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 20.0, 60.0)
SLACK = 2e-3
"""How much the grids of both sides may differ, as a share of δ."""
LEAST = 1e-14
"""Smaller values of δ are not compared."""
INTERVAL = 1e-3
"""The grid of losses for prices here; it rounds them up by as much."""
MOST_EVENTS = 4
"""How many different events of a plan are checked: the first, the last and some between."""
GRID: Array = np.linspace(-14.0, 14.0, 8_001)
"""Standard deviations at which densities are added up."""
PIECES = 240
"""How many pieces a random length is cut into."""


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
    """Return the answers that `event` pays for, in the order in which they are made."""
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
def _(event: RandomAllocation) -> list[Answer]:
    return [Noised(multiplier=event.noise_multiplier)]


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


def assign(paid: Sequence[Answer], made: int) -> list[Answer]:
    """Assign an answer to each of `made` releases on one receipt: in order, then the last kind again."""
    kinds = [answer for answer in paid if not isinstance(answer, Unseen)]
    return [kinds[min(place, len(kinds) - 1)] for place in range(made)] if kinds else []


# -- prices -----------------------------------------------------------------------------------------------------------


class Outputs:
    """Two measures on the same points: the output with the record, and without it."""

    def __init__(self, present: Array, without: Array) -> None:
        self.present, self.without = present, without

    def delta(self, epsilon: float) -> float:
        """Return the larger of ∫(P − e^ε·Q)₊ for a record that is removed and for one that is added."""
        grown = math.exp(epsilon)
        removed = np.maximum(self.present - grown * self.without, 0.0).sum()
        return float(max(removed, np.maximum(self.without - grown * self.present, 0.0).sum()))

    def renyi(self, order: float) -> float:
        """Return the larger of the two Rényi divergences of this order."""
        both = [(p, q) for p, q in ((self.present, self.without), (self.without, self.present))]
        sums = [float(np.sum(p[q > 0] ** order * q[q > 0] ** (1 - order))) for p, q in both]
        return max(math.log(total) / (order - 1) for total in sums)


def _sample_gaussian(noise: float, rate: float, shift: float = 1.0, grid: Array = GRID) -> Outputs:
    """N(0, σ²) without the record, (1−q)·N(0, σ²) + q·N(1, σ²) with it."""
    spread = shift / noise
    points = np.concatenate([grid, grid + spread])
    points.sort()
    widths = np.gradient(points)
    without, moved = (stats.norm.pdf(points - by) * widths for by in (0.0, spread))
    return Outputs((1 - rate) * without + rate * moved, without)


@singledispatch
def list_worst(event: DpEvent, rate: float = 1.0) -> Iterator[Outputs]:
    """List pairs of outputs that a mechanism of this event can have on a draw at `rate`; empty if none is known."""
    yield from ()


@list_worst.register
def _(event: GaussianDpEvent, rate: float = 1.0) -> Iterator[Outputs]:
    yield _sample_gaussian(float(event.noise_multiplier), rate)


@list_worst.register
def _(event: PoissonSampledDpEvent, rate: float = 1.0) -> Iterator[Outputs]:
    yield from list_worst(event.event, rate * float(event.sampling_probability))


@list_worst.register
def _(event: RandomAllocation, rate: float = 1.0) -> Iterator[Outputs]:
    """An epoch whose first step alone is checked, or the sums over its halves: for two steps, that is everything."""
    yield _sample_gaussian(event.noise_multiplier, rate / event.steps)
    present, without = np.zeros((1, 1)), np.ones((1, 1))
    for half in (event.steps // 2, event.steps - event.steps // 2):
        if half:
            side = _sample_gaussian(event.noise_multiplier * math.sqrt(half), 1.0, grid=GRID[::40])
            here = rate * half / event.steps * np.outer(without, side.present)
            present = (np.outer(present, side.without) + here).reshape(1, -1)
            without = np.outer(without, side.without).reshape(1, -1)
    yield Outputs(present.ravel() + (1 - rate) * without.ravel(), without.ravel())


@list_worst.register
def _(event: ProjectedGaussian, rate: float = 1.0) -> Iterator[Outputs]:
    """Yield a mixture over the known length Z = √r/χ_r, including lengths with practically no noise."""
    half = event.projections / 2
    edges = stats.gamma.ppf(np.concatenate([[0.0], np.geomspace(1e-15, 1 - 1e-6, PIECES)]), half)
    masses = np.diff(stats.gamma.cdf(edges, half))
    # The shortest length of every piece; rare lengths, which may be beyond any noise, are separate pieces.
    parts = [_sample_gaussian(event.noise_multiplier, rate, math.sqrt(half / edge), GRID[::8]) for edge in edges[1:]]
    present = [mass * part.present for mass, part in zip(masses, parts, strict=True)]
    without = [mass * part.without for mass, part in zip(masses, parts, strict=True)]
    yield Outputs(np.concatenate(present), np.concatenate(without))


@list_worst.register
def _(event: NoisyMinimum, rate: float = 1.0) -> Iterator[Outputs]:
    """Two candidates whose totals are one bound apart, and a record that makes them equal."""
    unlikely = math.exp(-event.epsilon) / 2
    for lies in (np.array([0.5, 0.5]), np.array([1 - unlikely * math.exp(-event.epsilon), 0.0])):
        base = np.array([1 - unlikely, unlikely])
        moved = lies if lies[1] else np.array([lies[0], 1 - lies[0]])
        yield Outputs((1 - rate) * base + rate * moved, base)


@list_worst.register
def _(event: Unlisted, rate: float = 1.0) -> Iterator[Outputs]:
    yield Outputs(np.array([1 - event.delta, event.delta]), np.array([1.0, 0.0]))


@list_worst.register(Erasure)
@list_worst.register(AnnealedErasure)
def _(event: Erasure | AnnealedErasure, rate: float = 1.0) -> Iterator[Outputs]:
    """Proposals that are shown with one probability below a threshold and with another above it."""
    intervals = [(1.0, 1.0)] if isinstance(event, AnnealedErasure) else []
    intervals += event.intervals()[:: max(1, len(event.intervals()) // 4)]
    alone = math.isinf(event.noise_multiplier)
    proposal = Outputs(np.ones(1), np.ones(1)) if alone else _sample_gaussian(event.noise_multiplier, event.rate)
    ratio = proposal.present / np.maximum(proposal.without, 1e-300)
    for low, high in intervals:
        for bound in (0.0, 0.9, 1.0, 1.1, 1.5, math.inf):
            for above, below in ((high, low), (low, high)):
                shown = np.where(ratio > bound, above, below)
                for move in (-event.shift, event.shift):
                    seen = (1 - event.test_rate) * shown + event.test_rate * _move(shown, low, high, move)
                    present, without = proposal.present * seen, proposal.without * shown
                    hidden = [proposal.present.sum() - present.sum(), proposal.without.sum() - without.sum()]
                    yield Outputs(np.append(present, hidden[0]), np.append(without, hidden[1]))


def _move(shown: Array, low: float, high: float, move: float) -> Array:
    """Return the acceptance probabilities with a record that moves the test by so many deviations of its noise."""
    if math.isinf(move):
        return np.full_like(shown, low if move < 0 else high)
    moved: Array = np.clip(special.ndtr(special.ndtri(shown) + move), low, high)
    return moved


def check_prices(recipe: Recipe) -> list[str]:
    """Find where the recipe's plan costs less than a mechanism that it covers."""
    events: dict[str, DpEvent] = {
        to_json(leaf): leaf for event, times in recipe.plan() for leaf, _ in unroll(event, times)
    }
    kinds = list(events.values())
    chosen = kinds[:: max(1, len(kinds) // MOST_EVENTS)]
    return [*(finding for event in chosen for finding in check_event(event)), *_check_composed(recipe)]


def check_event(event: DpEvent) -> list[str]:
    """Find where one event costs less than a mechanism that it covers."""
    if isinstance(event, Filtered):
        return _check_filtered(event)
    charged = pld(event, "add-or-remove-one", INTERVAL)
    for outputs in list_worst(event):
        for epsilon in EPSILONS:
            least, delta = outputs.delta(epsilon) * (1 - SLACK) - LEAST, charged.get_delta_for_epsilon(epsilon)
            if delta < least:
                return [f"{event!r} is priced at δ({epsilon:g}) = {delta:.4g}, a mechanism of it has {least:.4g}"]
    return []


def _check_filtered(event: Filtered) -> list[str]:
    cost = float(rdp_curve(event.event, "add-or-remove-one", [event.order])[0])
    for outputs in list_worst(event.event):
        if cost < (least := outputs.renyi(event.order) * (1 - SLACK)):
            return [f"{event!r} costs {cost:.4g} at order {event.order:g}, a mechanism of it has {least:.4g}"]
    return []


def _check_composed(recipe: Recipe) -> list[str]:
    """Compare the price of all steps with dp_accounting's lower estimate, if all are sampled Gaussians."""
    plan = [(leaf, count) for event, times in recipe.plan() for leaf, count in unroll(event, times)]
    total = None
    for event, count in plan:
        rate, inner = _split_sampled(event)
        if not isinstance(inner, GaussianDpEvent):
            return []
        part = distributions.from_gaussian_mechanism(
            float(inner.noise_multiplier),
            sampling_prob=rate,
            pessimistic_estimate=False,
            use_connect_dots=False,
            value_discretization_interval=1e-3,
        ).self_compose(count)
        total = part if total is None else total.compose(part)
    if total is None:
        return []
    delta = 1e-5
    least, price = float(total.get_epsilon_for_delta(delta)) * (1 - SLACK), recipe.price(delta)
    return (
        [f"{recipe.name} costs ε = {price:.4g} at δ = {delta:g}, at least {least:.4g} is spent"]
        if price < least
        else []
    )


def _split_sampled(event: DpEvent) -> tuple[float, DpEvent]:
    if isinstance(event, PoissonSampledDpEvent):
        return float(event.sampling_probability), event.event
    return 1.0, event
