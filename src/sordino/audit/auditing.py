"""Audit a recipe in seconds, by attacks on its real step on small worst cases; audit a saved run and its model, too.

An audit finds a lower bound, to compare with the claim, and fails loudly if it exceeds the claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.audit.bounds import Certified, Scores, certify
from sordino.audit.instances import Instance, choose_instances
from sordino.audit.membership.attacks import Examples, Partition, loss_threshold, white_box
from sordino.audit.membership.scoring import Membership
from sordino.audit.observing import Arrange, Observed, list_statistics, observe
from sordino.errors import InvalidInput, SordinoError
from sordino.figures import round_up_digits
from sordino.noise import Secure, Seeded, Source
from sordino.private import Private
from sordino.recipe import Recipe

Array = NDArray[np.float64]
Progress = Callable[[str, int, int], None]
"""Called with the name of the attack, how many runs it has made, and how many it will make."""
SHORT = 4
BEYOND = 1e30
"""A value that is not finite counts as this number, which an attacker notices at once."""
MOST = 10_000
"""Attack models learn from at most this many members and as many others."""
FEWEST = 16


@dataclass(frozen=True)
class Measured:
    """One attack: what was claimed, and what the attacker demonstrably reached.

    `epsilon_certain` assumes nothing about the mechanism; `epsilon_implied` is the ε of the claimed mechanism at the
    noise that the attacker's errors imply (None if its events do not have a single noise to scale).
    """

    instance: str
    epsilon_claimed: float
    epsilon_certain: float
    epsilon_implied: float | None
    refuted: bool
    best: Certified

    @property
    def epsilon_lower(self) -> float:
        """The better of the two lower bounds."""
        return max(self.epsilon_certain, self.epsilon_implied or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = {**asdict(self), "epsilon_lower": self.epsilon_lower}
        return {key: _plain(value) for key, value in plain.items()}


@dataclass(frozen=True)
class Audit:
    """The outcome of every attack on a recipe, and what is wrong with its books.

    If the recipe keeps its claim, `passed` is False with probability at most 1 − confidence.
    """

    name: str
    delta: float
    confidence: float
    measured: tuple[Measured, ...]
    findings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.findings and not any(attack.refuted for attack in self.measured)

    @property
    def strongest(self) -> Measured:
        """The attack that comes nearest to its claim, or goes furthest beyond it."""
        return max(self.measured, key=lambda m: (m.refuted, m.epsilon_lower / max(m.epsilon_claimed, 1e-9)))

    @property
    def epsilon_claimed(self) -> float:
        return self.strongest.epsilon_claimed

    @property
    def epsilon_lower(self) -> float:
        return self.strongest.epsilon_lower

    def require_passed(self) -> Audit:
        """Return this audit, or raise `AuditFailed`."""
        if not self.passed:
            raise AuditFailed(self)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and for the report."""
        return {
            "name": self.name,
            "passed": self.passed,
            "delta": self.delta,
            "confidence": self.confidence,
            "epsilon_claimed": _plain(self.epsilon_claimed),
            "epsilon_lower": _plain(self.epsilon_lower),
            "attacks": [attack.to_dict() for attack in self.measured],
            "findings": list(self.findings),
        }

    def __str__(self) -> str:
        verdict, delta = "kept" if self.passed else "BROKEN", round_up_digits(self.delta, 3)
        return (
            f"{self.name}: claim {verdict}, {self.epsilon_lower:.2f} <= ε with {self.confidence:.1%} confidence, "
            f"{self.epsilon_claimed:.2f} claimed at δ = {delta} (attack: {self.strongest.instance})"
        )


class AuditFailed(SordinoError):
    """An attacker reached more than the claim allows, or the ledger does not pay for what was drawn."""

    def __init__(self, audit: Audit) -> None:
        super().__init__("; ".join([str(audit), *audit.findings]))
        self.audit = audit


def _plain(value: Any) -> Any:
    return "infinity" if isinstance(value, float) and math.isinf(value) else value


# -- a recipe ---------------------------------------------------------------------------------------------------------


def audit_recipe(
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

    The audit uses the recipe's own parts and takes the real private step. It replaces the data, the sampling rate (an
    attacker who is drawn once in a thousand steps sees nothing in seconds) and the length, which is `steps` steps. The
    claim is what the ledger says afterwards.

    - `trials` is the number of trials with the canary, and of as many without, where one run holds many of them.
      `single_trials` is the number where each trial needs runs of its own.
    - `noise_multiplier` replaces the recipe's, which is 1 if the recipe is not calibrated.
    - `source` makes a noise source from a number, and `arrange` changes a run before it starts: to audit your parts.
    - `check=False` returns a failed audit instead of raising.

    Guarantees: a recipe that keeps its claim fails with probability at most 1 − confidence. This holds where the lanes
    of an instance that has several are independent of each other (see `instances`). Limits: passing is not a proof. It
    only says that these attackers found nothing.
    """
    if trials < 20 or single_trials < 20:
        raise InvalidInput(f"trials={min(trials, single_trials)} must be >= 20: an audit needs repetition")
    attacked = replace(recipe, noise_multiplier=noise_multiplier or recipe.noise_multiplier or 1.0)
    chosen = choose_instances(recipe) if instances is None else tuple(instances)
    sources = _make_sources(seed, source)
    measured: list[Measured] = []
    findings: list[str] = []
    for instance in chosen:
        wanted = instance.trials or (trials if instance.together else single_trials)
        tick = _make_ticker(progress, instance, wanted)
        seen = observe(instance, attacked, instance.steps or steps, wanted, sources, arrange, tick)
        measured.append(_measure(instance, seen, delta, 1 - (1 - confidence) / len(chosen)))
        findings.extend(f"{instance.name}: {finding}" for finding in seen.findings)
    audit = Audit(recipe.name, delta, confidence, tuple(measured), tuple(findings))
    return audit.require_passed() if check else audit


def _make_sources(seed: int | None, make: Callable[[int], Source] | None) -> Callable[[], Source]:
    numbers = count(0 if seed is None else seed * 1000)
    if make is not None:
        return lambda: make(next(numbers))
    return Secure if seed is None else lambda: Seeded(next(numbers))


def _make_ticker(progress: Progress | None, instance: Instance, trials: int) -> Callable[[], None]:
    if progress is None:
        return lambda: None
    total, done = instance.count_runs(trials), count(1)
    return lambda: progress(instance.name, next(done), total)


def _measure(instance: Instance, seen: Observed, delta: float, confidence: float) -> Measured:
    statistics = list_statistics(seen.noises, seen.rate)
    absent, present = (
        {name: _make_finite(statistic(side)) for name, statistic in statistics.items()}
        for side in (seen.absent, seen.present)
    )
    rules = certify(Scores(absent, present), seen.claim, confidence)
    refuted = [rule for rule in rules if seen.claim.refuted_by(rule.rates)]
    best = max(refuted or rules, key=lambda rule: rule.rates.mu())
    claimed, implied = seen.claim.epsilon(delta), seen.claim.implied_epsilon(best.rates, delta)
    if implied is not None and not refuted:  # the grid of the comparison is coarser than that of the price
        implied = min(implied, claimed)
    certain = max(rule.rates.epsilon(delta) for rule in rules)
    return Measured(instance.name, claimed, certain, implied, bool(refuted), best)


def _make_finite(values: Array) -> Array:
    return np.nan_to_num(values, nan=BEYOND, posinf=BEYOND, neginf=-BEYOND)


# -- a saved run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunAudit:
    """What attackers found about a run. `membership` describes the private records: no guarantee covers it."""

    epsilon: float
    delta: float
    mechanism: Audit
    membership: tuple[Membership, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and for the report."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "mechanism": self.mechanism.to_dict(),
            "membership": [attack.to_dict() for attack in self.membership],
        }


def audit_run(
    private: Private,
    members: Examples,
    others: Examples,
    *,
    seed: int | None = None,
    trials: int = 2000,
    progress: Progress | None = None,
) -> RunAudit:
    """Attack the recipe of a run, and its model by loss and by an attack model that knows half of the members.

    `members` are records that were trained on, `others` were held out.
    """
    guarantee, model = private.guarantee(), private.bench.objective.model
    examples, partition = _choose_examples(members, others)
    audit = audit_recipe(private.bench.recipe, seed=seed, trials=trials, progress=progress, check=False)
    attacks: list[Callable[[], Membership]] = [
        lambda: loss_threshold(model, examples, partition),
        lambda: white_box(model, examples, partition, seed=seed or 0),
    ]
    found = []
    for number, attack in enumerate(attacks):
        found.append(attack())
        if progress is not None:
            progress("membership", number + 1, len(attacks))
    return RunAudit(guarantee.epsilon, guarantee.delta, audit, tuple(found))


def _choose_examples(members: Examples, others: Examples) -> tuple[Examples, Partition]:
    """Choose at most `MOST` of each, and say who is who."""
    if len(others[1]) < FEWEST:
        raise InvalidInput(
            f"{len(others[1])} records were held out, must be >= {FEWEST} to tell members from: use --held-out"
        )
    sizes = [min(MOST, len(part[1])) for part in (members, others)]
    inputs, labels = (torch.cat([members[i][: sizes[0]], others[i][: sizes[1]]]) for i in (0, 1))
    nobody, places = torch.zeros(0, dtype=torch.int64), torch.arange(sum(sizes))
    return (inputs, labels), Partition(places[: sizes[0]], places[sizes[0] :], nobody, nobody)
