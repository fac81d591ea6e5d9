"""Estimates how long a run takes from the runs that came with Sordino, for one core of the machine that made them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sordino.lab.experiments.cases import Case
from sordino.lab.experiments.results import Row, read_shipped

START = 5.0
"""Seconds before the first step: loading, features from the disk, calibration."""


def estimate_seconds(case: Case, shipped: Sequence[Row] | None = None) -> float | None:
    """Return the mean time of the shipped runs of its method, at its ε if there are any; None if there are none.

    The time of a shortened run shrinks with the number of records that it draws.
    """
    rows = [row for row in (read_shipped() if shipped is None else shipped) if row["dataset"] == case.dataset]
    rows = [row for row in rows if row["method"] == case.method and row.get("seconds")]
    rows = [row for row in rows if row["epsilon"] == case.epsilon] or rows
    if not rows:
        return None
    seconds = statistics.mean(float(row["seconds"]) for row in rows)
    return START + seconds * _find_share(case, rows[0])


def _find_share(case: Case, whole: Row) -> float:
    """Return the share of a whole run's examples that a shortened run sees."""
    if not case.short:
        return 1.0
    ours, theirs = _count_examples(case.recipe), _count_examples({**whole["case"]["recipe"], "steps": whole["steps"]})
    return 1.0 if ours is None or not theirs else min(1.0, ours / theirs)


def _count_examples(recipe: Mapping[str, Any]) -> float | None:
    steps, size = recipe.get("steps"), recipe.get("batch_size")
    return None if steps is None or size is None else float(steps) * float(size)
