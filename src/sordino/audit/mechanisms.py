"""Audit a recipe in seconds: attack its real step on small worst cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from sordino.audit.deciding import Scores, certified
from sordino.audit.instances import Instance, usual
from sordino.audit.observing import Arrange, Observed, observe
from sordino.audit.result import Audit, Measured
from sordino.audit.statistics import candidates
from sordino.errors import InvalidInput
from sordino.noise import Secure, Seeded, Source
from sordino.recipe import Recipe

Array = NDArray[np.float64]
Progress = Callable[[str, int, int], None]
"""Called with the name of the attack, how many runs it has made, and how many it will make."""
SHORT = 4
BEYOND = 1e30
"""What a value that is not finite counts as: something that is seen at once."""


def mechanism(
    recipe: Recipe,
    *,
    steps: int = SHORT,
    noise_multiplier: float | None = None,
    instances: Sequence[Instance] | None = None,
    trials: int = 2000,
    single_trials: int = 400,
    delta: float = 1e-5,
    confidence: float = 0.999,
    seed: int | None = None,
    source: Callable[[int], Source] | None = None,
    arrange: Arrange | None = None,
    progress: Progress | None = None,
    check: bool = True,
) -> Audit:
    """Attack the parts of `recipe` on small worst cases; raises `AuditFailed` if its claim is refuted.

    All parts are the recipe's own and take the real private step; what changes is the data, the sampling rate (an
    attacker who is drawn once in a thousand steps sees nothing in seconds) and the length: `steps` steps. The claim is
    what the ledger says afterwards. `trials` are made with the canary and without where one run holds many, and
    `single_trials` where each needs runs of its own. `noise_multiplier` replaces the recipe's, which is 1 where it is
    not calibrated. `source` makes a noise source of a number and `arrange` changes a run before it starts, for auditing
    parts of your own; `check=False` returns a failed audit instead of raising.

    Guarantees: a recipe that keeps its claim fails with probability at most 1 − confidence, provided that its lanes are
    independent of each other where an instance has several (see `instances`).
    Limits: passing is no proof; it says that these attackers found nothing.
    """
    if trials < 20 or single_trials < 20:
        raise InvalidInput(f"trials={min(trials, single_trials)} must be >= 20: an audit needs repetition")
    attacked = replace(recipe, noise_multiplier=noise_multiplier or recipe.noise_multiplier or 1.0)
    chosen = usual(recipe) if instances is None else tuple(instances)
    sources = _sources(seed, source)
    measured: list[Measured] = []
    findings: list[str] = []
    for instance in chosen:
        wanted = instance.trials or (trials if instance.together else single_trials)
        tick = _ticker(progress, instance, wanted)
        seen = observe(instance, attacked, instance.steps or steps, wanted, sources, arrange, tick)
        measured.append(_measured(instance, seen, delta, 1 - (1 - confidence) / len(chosen)))
        findings.extend(f"{instance.name}: {finding}" for finding in seen.findings)
    audit = Audit(recipe.name, delta, confidence, tuple(measured), tuple(findings))
    return audit.require_passed() if check else audit


def _sources(seed: int | None, make: Callable[[int], Source] | None) -> Callable[[], Source]:
    numbers = count(0 if seed is None else seed * 1000)
    if make is not None:
        return lambda: make(next(numbers))
    return Secure if seed is None else lambda: Seeded(next(numbers))


def _ticker(progress: Progress | None, instance: Instance, trials: int) -> Callable[[], None]:
    if progress is None:
        return lambda: None
    total = -(-2 * trials // instance.lanes) if instance.together else 2 * trials
    done = count(1)
    return lambda: progress(instance.name, next(done), total)


def _measured(instance: Instance, seen: Observed, delta: float, confidence: float) -> Measured:
    statistics = candidates(seen.noises, seen.rate)
    absent, present = (
        {name: _finite(statistic(side)) for name, statistic in statistics.items()}
        for side in (seen.absent, seen.present)
    )
    rules = certified(Scores(absent, present), seen.claim, confidence)
    refuted = [rule for rule in rules if seen.claim.refuted_by(rule.rates)]
    best = max(refuted or rules, key=lambda rule: rule.rates.mu())
    claimed, implied = seen.claim.epsilon(delta), seen.claim.implied_epsilon(best.rates, delta)
    if implied is not None and not refuted:  # the grid of the comparison is coarser than that of the price
        implied = min(implied, claimed)
    certain = max(rule.rates.epsilon(delta) for rule in rules)
    return Measured(instance.name, claimed, certain, implied, bool(refuted), best)


def _finite(values: Array) -> Array:
    return np.nan_to_num(values, nan=BEYOND, posinf=BEYOND, neginf=-BEYOND)
