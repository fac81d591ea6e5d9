"""The figures of docs/mechanisms/preconditioned.md: how directions are counted, and what the page shows."""

from __future__ import annotations

import pytest
import torch

from benchmarks import preconditioning
from benchmarks.results import BEGIN, END
from sordino.lab.experiments.results import read_lines


def test_directions_are_counted() -> None:
    one = torch.ones(6, 1) @ torch.randn(1, 9, generator=torch.Generator().manual_seed(0))
    assert preconditioning.count_directions(torch.eye(5)) == pytest.approx(5)
    assert preconditioning.count_directions(one) == pytest.approx(1)
    assert 1 < preconditioning.count_directions(torch.diag(torch.tensor([3.0, 1.0, 1.0]))) < 3


def test_a_footing_says_its_settings_and_keeps_within_its_budget() -> None:
    footing = preconditioning.FOOTINGS["preconditioned, refreshed"]
    assert str(footing) == "Adam, lr = 0.001, clip = 1, damping = 0.01, probed every 234 steps"
    recipe = footing.build(60_000, epsilon=1.0, epochs=1)
    assert recipe.name == "preconditioned"
    assert recipe.price(1e-5) <= 1


def test_the_page_shows_the_stored_runs_and_all_of_them_are_proven() -> None:
    stored = read_lines(preconditioning.STORED)
    assert stored
    assert all(row["basis"] == "proven" and row["epsilon_spent"] <= row["epsilon"] for row in stored)
    _, _, rest = preconditioning.PAGE.read_text(encoding="utf-8").partition(BEGIN.format(f"{preconditioning.BY} paper"))
    shown, _, _ = rest.partition(END)
    assert shown.strip() == preconditioning.tabulate(stored).strip()
