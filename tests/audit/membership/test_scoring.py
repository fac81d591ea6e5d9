"""Scores of attacks: against their definitions, against scikit-learn, and with intervals that cover."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from sordino.audit.membership import plot_roc
from sordino.audit.membership.scoring import measure_auc, measure_caught, score, trace_curve


def normals(shift: float, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(shift, 1, size), generator.normal(0, 1, size)


@pytest.mark.parametrize("decimals", [1, 8])
def test_auc_and_curve_equal_those_of_scikit_learn(decimals: int) -> None:
    members, others = (np.round(x, decimals) for x in normals(0.5, 300, 0))
    labels = np.repeat([1, 0], 300)
    values = np.concatenate([members, others])
    assert measure_auc(members, others).value == pytest.approx(metrics.roc_auc_score(labels, values))
    false, true, _ = metrics.roc_curve(labels, values, drop_intermediate=False)
    ours = trace_curve(members, others)
    assert np.allclose(ours[0], false)
    assert np.allclose(ours[1], true)


def test_the_interval_of_the_auc_covers_as_often_as_it_says() -> None:
    truth = stats.norm.cdf(0.5 / np.sqrt(2))
    shares = [measure_auc(*normals(0.5, 100, seed)) for seed in range(400)]
    covered = np.mean([share.low <= truth <= share.high for share in shares])
    assert 0.92 <= covered <= 0.98


def test_true_positives_at_few_false_ones() -> None:
    truth = stats.norm.sf(stats.norm.isf(0.01) - 3.0)
    shares = [measure_caught(0.01, *normals(3.0, 1000, seed)) for seed in range(200)]
    assert np.mean([share.low <= truth <= share.high for share in shares]) >= 0.95
    assert np.mean([abs(share.value - truth) <= 0.02 for share in shares]) < 0.95, "the threshold is uncertain too"
    assert measure_caught(0.001, *normals(3.0, 100, 0)).low == 0.0, "a hundred others say nothing of one in a thousand"
    assert measure_caught(0.001, np.zeros(100), np.zeros(100)).value == 0.0, "ties with all others catch nobody"


def test_guessing_is_not_taken_for_an_attack_and_a_real_one_is() -> None:
    accuracies = [score("guess", *normals(0.0, 60, seed)).accuracy.value for seed in range(200)]
    assert np.mean(accuracies) == pytest.approx(0.5, abs=0.015), "thresholds chosen on the judged scores would flatter"
    found = score("real", *normals(1.0, 2000, 3))
    assert found.accuracy.value == pytest.approx(stats.norm.cdf(0.5), abs=0.03)
    assert found.auc.low > 0.7


def test_the_result_is_plain_and_readable(tmp_path: Path) -> None:
    members, others = normals(1.0, 500, 2)
    found = score("loss threshold", members, others)
    assert set(found.to_dict()["caught"]) == {"0.01", "0.001"}
    assert "at 0.1% FPR" in str(found)
    picture = plot_roc(tmp_path / "roc.svg", {"loss": (members, others)})
    assert "<svg" in picture.read_text()
    with pytest.raises(ValueError, match="at least 4"):
        score("x", members[:2], others)
