"""How well scores tell members from others: AUC, and true positives at few false positives, with their uncertainty.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from sordino.audit.bounds import bound_above, bound_below
from sordino.errors import InvalidInput
from sordino.figures import Estimate

Array = NDArray[np.float64]
LOW_RATES = (0.01, 0.001)


@dataclass(frozen=True)
class Membership:
    """What a membership attack reached. `accuracy` is balanced, at the best threshold of the first half of the scores.

    The interval of the AUC is DeLong's (1988), that of the accuracy Clopper and Pearson's, those of `caught` as in
    `measure_caught`.
    """

    attack: str
    members: int
    others: int
    auc: Estimate
    accuracy: Estimate
    caught: dict[float, Estimate]
    confidence: float = 0.95

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = asdict(self)
        plain["caught"] = {f"{rate:g}": asdict(share) for rate, share in self.caught.items()}
        return plain

    def __str__(self) -> str:
        low = ", ".join(f"TPR {share} at {rate:.1%} FPR" for rate, share in self.caught.items())
        return f"{self.attack}: AUC {self.auc}, accuracy {self.accuracy}, {low}"


def score(attack: str, members: Array, others: Array, confidence: float = 0.95) -> Membership:
    """Judge an attack by its scores, which are higher for those it takes for members."""
    members, others = _require_scores("members", members), _require_scores("others", others)
    return Membership(
        attack=attack,
        members=len(members),
        others=len(others),
        auc=measure_auc(members, others, confidence),
        accuracy=_measure_accuracy(members, others, confidence),
        caught={rate: measure_caught(rate, members, others, confidence) for rate in LOW_RATES},
        confidence=confidence,
    )


def measure_auc(members: Array, others: Array, confidence: float = 0.95) -> Estimate:
    """The chance that a member scores above a non-member, ties counted half (DeLong, DeLong, Clarke-Pearson 1988)."""
    ranks = stats.rankdata(np.concatenate([members, others]))
    own, strange = stats.rankdata(members), stats.rankdata(others)
    beaten = (ranks[: len(members)] - own) / len(others)
    losing = 1 - (ranks[len(members) :] - strange) / len(members)
    value = float(beaten.mean())
    deviation = float(np.sqrt(_find_variance(beaten) / len(members) + _find_variance(losing) / len(others)))
    reach = float(stats.norm.isf((1 - confidence) / 2)) * deviation
    return Estimate(value, max(0.0, value - reach), min(1.0, value + reach))


def measure_caught(rate: float, members: Array, others: Array, confidence: float = 0.95) -> Estimate:
    """Return the share of members above the lowest threshold that at most `rate` of the others exceed.

    The interval accounts for `others` being a sample: the threshold that k of n of them exceed has a true false
    positive rate distributed as Beta(k + 1, n − k), so a strict and a lax threshold enclose the right one.
    """
    error, ordered = (1 - confidence) / 4, np.sort(others)[::-1]
    exceeding = np.arange(len(others))
    strict = exceeding[stats.beta.isf(error, exceeding + 1, len(others) - exceeding) <= rate]
    lax = exceeding[stats.beta.ppf(error, exceeding + 1, len(others) - exceeding) >= rate]

    def count(allowed: int) -> int:
        return int((members > ordered[allowed]).sum())

    low = bound_below(count(int(strict[-1])), len(members), error) if len(strict) else 0.0
    high = bound_above(count(int(lax[0])), len(members), error) if len(lax) else 1.0
    value = count(int(np.floor(rate * len(others) + 1e-9))) / len(members)
    return Estimate(value, min(low, value), max(high, value))


def trace_curve(members: Array, others: Array) -> tuple[Array, Array]:
    """False and true positive rates at every threshold, from (0, 0) to (1, 1)."""
    values = np.concatenate([members, others])
    order = np.argsort(-values, kind="stable")
    is_member = np.concatenate([np.ones(len(members)), np.zeros(len(others))])[order]
    last = np.append(np.diff(values[order]) != 0, True)  # equal scores share a threshold
    true, false = np.cumsum(is_member)[last] / len(members), np.cumsum(1 - is_member)[last] / len(others)
    return np.insert(false, 0, 0.0), np.insert(true, 0, 0.0)


def plot_roc(path: str | Path, attacks: Mapping[str, tuple[Array, Array]], lowest: float = 1e-4) -> Path:
    """Write the curves of several attacks, each as scores of members and of others, to an SVG (or PNG) file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput("ROC plots need matplotlib: install sordino[bench]") from error
    figure = Figure(figsize=(4.5, 4.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="false positive rate", ylabel="true positive rate")
    axes.plot([lowest, 1], [lowest, 1], color="0.6", linestyle="--", label="guessing")
    for name, (members, others) in attacks.items():
        false, true = trace_curve(members, others)
        axes.step(np.maximum(false, lowest / 2), np.maximum(true, lowest / 2), where="post", label=name)
    axes.set(xlim=(lowest, 1), ylim=(lowest, 1))
    axes.legend(loc="lower right", fontsize="small")
    path = Path(path)
    figure.savefig(path)
    return path


def _measure_accuracy(members: Array, others: Array, confidence: float) -> Estimate:
    """Choose the threshold on one half and judge it on the other; using the same scores for both would flatter it."""
    false, true = trace_curve(members[::2], others[::2])
    thresholds = np.unique(np.concatenate([members[::2], others[::2]]))[::-1]
    best = int(np.argmax(true - false))
    threshold = np.inf if best == 0 else thresholds[best - 1]
    size = min(len(members[1::2]), len(others[1::2]))
    if size == 0:
        raise InvalidInput("an attack needs at least two members and two others to be judged by")
    right = (members[1::2][:size] >= threshold).sum() + (others[1::2][:size] < threshold).sum()
    return _estimate(int(right), 2 * size, confidence)


def _estimate(count: int, trials: int, confidence: float) -> Estimate:
    error = (1 - confidence) / 2
    return Estimate(count / trials, bound_below(count, trials, error), bound_above(count, trials, error))


def _find_variance(values: Array) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else 0.0


def _require_scores(name: str, values: Array) -> Array:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or len(values) < 4:
        raise InvalidInput(f"{name} have scores of shape {values.shape}, need a vector of at least 4")
    return np.nan_to_num(values, nan=-np.inf)
