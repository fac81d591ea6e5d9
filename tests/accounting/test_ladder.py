"""Long schedules are priced through a ladder of noises: never below the exact composition, and close to it."""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from sordino.accounting import levels
from sordino.accounting.pricing import delta, epsilon


def _schedule(steps: int) -> list[tuple[PoissonSampledDpEvent, int]]:
    return [(PoissonSampledDpEvent(0.02, GaussianDpEvent(float(noise))), 1) for noise in np.geomspace(3.0, 1.5, steps)]


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", pytest.param("replace-one", marks=pytest.mark.slow)])
def test_the_ladder_is_an_upper_bound_and_close(monkeypatch: pytest.MonkeyPatch, adjacency: str) -> None:
    events = _schedule(40 if adjacency == "add-or-remove-one" else 34)
    assert levels.split(events, "add-or-remove-one")[1]  # enough different noises to be priced by the ladder
    by_ladder, small = epsilon(events, 1e-5, adjacency=adjacency), delta(events, 0.5, adjacency=adjacency)
    monkeypatch.setattr(levels, "MOST_DISTINCT", len(events))
    exact = epsilon([*events, (GaussianDpEvent(1e9), 1)], 1e-5, adjacency=adjacency)
    assert exact * (1 - 1e-9) <= by_ladder <= exact * 1.01
    assert delta([*events, (GaussianDpEvent(1e9), 1)], 0.5, adjacency=adjacency) <= small * (1 + 1e-9)
