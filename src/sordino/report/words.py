"""A guarantee in words for somebody who has to decide, not to compute."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from sordino.accounting import Guarantee
from sordino.report.prices import Points, detection
from sordino.report.scales import percent

STRONG, REASONABLE = 1.0, 10.0
"""The tiers of Ponomareva et al. 2023, "How to DP-fy ML", Sec. 5.2: strong up to 1, reasonable up to 10."""
FALSE_ALARMS = ((0.001, "1 in 1,000"), (0.01, "1 in 100"), (0.05, "1 in 20"))


@dataclass(frozen=True)
class Strength:
    """How strong a guarantee is, as a word, a sentence, and whether anybody may rely on it."""

    word: str
    sentence: str
    reliable: bool


def strength(guarantee: Guarantee) -> Strength:
    """The tier of the guarantee; one that is not proven has none."""
    epsilon, unit, but = guarantee.epsilon, guarantee.unit, ""
    if guarantee.unprotected:
        unit, but = f"training {unit}", f"; {' and '.join(guarantee.unprotected)} are not protected"
    if math.isinf(epsilon):
        return Strength("none", f"No {unit} is protected: what was released may reveal any of them.", False)
    if guarantee.basis != "proven":
        return Strength("not proven", f"Nothing is promised: this ε is {_BASES[guarantee.basis]}.", False)
    if epsilon <= STRONG:
        return Strength("strong", f"What was released is almost the same with or without any one {unit}{but}.", True)
    if epsilon <= REASONABLE:
        sentence = f"Nobody can be sure from what was released that any one {unit} was there{but}."
        return Strength("reasonable", sentence, True)
    return Strength("weak", f"The proof holds, but so large an ε promises little to any one {unit}{but}.", True)


_BASES = {
    "asymptotic": "a limit theorem's, and the true one of this finite run may be larger",
    "published": "what a paper charges where that is no proof, and the true one may be larger",
}
BASES = {
    "proven": "an upper bound with a proof for exactly what was run",
    "asymptotic": "a limit theorem, which is no bound for a finite run: the true ε may be larger",
    "published": "what the paper charges, where that is no proof: for comparison only",
}
ADJACENCIES = {
    "add-or-remove-one": "two data sets that differ by one {unit} more or less",
    "replace-one": "two data sets of one size that differ in one {unit}",
}


def neighbours(guarantee: Guarantee) -> str:
    """Which data sets the guarantee cannot tell apart."""
    return ADJACENCIES[guarantee.adjacency].format(unit=guarantee.unit)


def change(guarantee: Guarantee) -> str:
    """What may be done to the data without being noticed."""
    return {
        "add-or-remove-one": f"adding or removing one {guarantee.unit}",
        "replace-one": f"replacing one {guarantee.unit} by any other",
    }[guarantee.adjacency]


def attacks(curve: Points) -> list[tuple[str, str]]:
    """(false alarms, records found at most) for tests of some strictness."""
    return [(words, percent(math.ceil(1000 * detection(curve, share)) / 1000)) for share, words in FALSE_ALARMS]


def part(chosen: object) -> str:
    """A part of a recipe by its class and its fields."""
    fields = vars(chosen) if dataclasses.is_dataclass(chosen) else {}
    told = [f"{name} {_value(value)}" for name, value in fields.items() if value is not None]
    return ", ".join([type(chosen).__name__, *told])


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"({part(value)})" if dataclasses.is_dataclass(value) else str(value)


MECHANISMS = {
    "dpsgd": "DP-SGD: gradients are clipped one by one, and Gaussian noise is added to their sum",
    "dpadam": "DP-Adam: DP-SGD whose noisy gradients go to Adam",
    "automatic": "AUTO-S: gradients are normalised one by one instead of clipped, then noised",
    "jl": "DP-SGD-JL: gradient norms are estimated by random projections",
    "dynamic": "Dynamic DP-SGD: noise and clipping bound follow a schedule",
    "growing_mu": "Dynamic DP-SGD: the noise falls, so that later steps spend more",
    "sensitivity_decay": "Dynamic DP-SGD: the clipping bound falls",
    "noise_decay": "Noise decay: the noise falls from epoch to epoch",
    "dpis": "DPIS: records with longer gradients are drawn more often and weigh less",
    "dpsur": "DPSUR: an update is kept only if a noisy test finds that it helps",
    "screening": "SA-DPSGD: noisy updates are screened by simulated annealing",
    "dpagd": "DPAGD: the length of every step is chosen by a noisy minimum",
}


def mechanism(name: str) -> str:
    """What a recipe does, or its own name."""
    return MECHANISMS.get(name, name)
