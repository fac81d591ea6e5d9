"""The tables of docs/mechanisms are computed from stored runs, with the papers' figures beside them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from benchmarks import results
from benchmarks.mechanisms import (
    CLIP_GRID,
    CORNERS,
    MU_GRID,
    method_at,
    tabulate_dpis,
    tabulate_ratios,
    tabulate_selection,
)
from sordino.lab.experiments import catalogue, read_all, recipe_of
from tests.lab.experiments.cases import row

KNOWN = catalogue()


def finished(
    dataset: str, method: str, accuracies: list[float], epsilon: float = 3.0, seconds: float = 2.0, **changes: Any
) -> list[dict[str, Any]]:
    """Finished runs of a configured method, made up."""
    made = []
    for seed, accuracy in enumerate(accuracies):
        case = KNOWN[dataset, method].case(epsilon, seed, changes.get("accounting", "proven"))
        curve = [{"step": 5, "accuracy": accuracy, "seconds": seconds}]
        told = {"label": case.label, "case": case.to_dict(), "curve": curve, "noise": [0.8], "basis": "proven"}
        made.append(row(method, epsilon, seed, accuracy, dataset=dataset, **{**told, **changes}))
    return made


@pytest.mark.parametrize(
    ("method", "tabulate", "printed"),
    [("scatter-dpsgd", tabulate_dpis, "88.3"), ("selection-dpsgd", tabulate_selection, "89.01")],
)
def test_means_stand_beside_the_printed_figures(method, tabulate, printed):
    text = tabulate(finished("fashion-mnist", method, [0.87, 0.88, 0.89]))
    (line,) = [line for line in text.splitlines() if "88.00 ± 1.00 (3)" in line]
    assert f"| {printed} |" in line
    assert "mnist-scatter" not in text, "nothing is said of what was not run"


def test_the_pages_of_the_repository_say_what_is_stored():
    rows = read_all(results.STORED)
    for page, text in (
        (results.IMPORTANCE, tabulate_dpis(rows)),
        (results.SELECTION, tabulate_selection(rows)),
        (results.SCHEDULES, tabulate_ratios(rows)),
    ):
        assert text.strip() in page.read_text(), "run python -m benchmarks.results write"


def test_times_are_relative_to_the_same_task_and_budget():
    rows = finished("mnist", "pixels-dpsgd", [0.97, 0.98]) + finished("mnist", "pixels-dpis", [0.98], seconds=5.0)
    text = tabulate_dpis(rows)
    assert "| mnist-cnn | 3 | dpsgd | 97.50 ± 0.71 (2) | 98.1 | 0.800 | 1.0× |" in text
    assert "| mnist-cnn | 3 | dpis | 98.00 (1) |  | 0.800 | 2.5× |" in text


def test_published_runs_say_so_and_blocks_tell_no_acceptances():
    rows = finished("mnist", "selection-dpsur", [0.97], 1.0, accounting="published", basis="published")
    rows += finished("mnist", "selection-dpsur-every-4", [0.96], 1.0)
    published, blocks = sorted(line for line in tabulate_selection(rows).splitlines() if line.startswith("| dps"))[::-1]
    assert published.startswith("| dpsur-published | published | 97.00 (1) |")
    assert "| 97.93 |" in published
    assert "in blocks" in blocks


def test_the_grid_of_ratios_shares_the_runs_of_table_1():
    points = list(product(MU_GRID, CLIP_GRID))
    rows = [finished("mnist", method_at(*point), [0.9 + number / 1000], 0.4)[0] for number, point in enumerate(points)]
    text = tabulate_ratios(rows)
    assert "| mnist, ε = 0.4 | 1/ρ_c = 1 | 1/ρ_c = 0.5 | 1/ρ_c = 0.3 | 1/ρ_c = 0.1 |" in text
    assert "| 1/ρ_μ = 0.8 | 90.40 | 90.50 | 90.60 | 90.70 |" in text


def test_ratios_are_those_of_the_schedules():
    recipe = KNOWN["mnist", method_at(0.4, 0.1)].case(0.4).recipe
    assert recipe["mu_ratio"] == 2.5
    assert recipe["clip_ratio"] == 10
    for (mu, clip), method in CORNERS.items():
        terms = recipe_of(KNOWN["mnist", method].case(0.4), 60_000).terms
        first, last = terms(0, {}), terms(4687, {})
        assert last.clip / first.clip == pytest.approx(clip, rel=1e-3), method
        assert last.noise_std / last.clip / (first.noise_std / first.clip) == pytest.approx(mu, rel=1e-3), method
