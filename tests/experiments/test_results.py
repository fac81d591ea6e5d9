"""docs/results.md is computed from stored results: whatever stands in it was measured or printed by a paper."""

from __future__ import annotations

import json

import pytest

from benchmarks import results
from sordino.experiments import catalogue, store
from tests.experiments.cases import row

pytest.importorskip("matplotlib")


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """An empty store and page of this test's own."""
    monkeypatch.setattr(results, "STORED", tmp_path / "results" / "experiments")
    monkeypatch.setattr(results, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(results, "IMAGES", tmp_path / "img")
    monkeypatch.setattr(results, "CHOICE", tmp_path / "which-method.md")
    (tmp_path / "which-method.md").write_text(f"Before\n\n{results.BEGIN}\nold\n{results.END}\n\nafter\n")
    return tmp_path


def finished(folder, method: str, accuracies: list[float], epsilon: float = 3.0, **changes: object) -> None:
    """Runs of a configured method on Fashion-MNIST, made up."""
    for seed, accuracy in enumerate(accuracies):
        case = catalogue()["fashion-mnist", method].case(epsilon, seed)
        made = row(method, epsilon, seed, accuracy, dataset="fashion-mnist", label=case.label, case=case.to_dict())
        store.write(folder, {**made, **changes})


def page(stored) -> str:
    results.collect([stored / "runs"])
    results.page()
    return (stored / "results.md").read_text()


def test_the_best_proven_method_stands_beside_the_best_printed_figure(stored):
    finished(stored / "runs", "dpsgd-hf", [0.901, 0.902, 0.903])
    finished(stored / "runs", "auto-s", [0.86, 0.87, 0.88])
    text = page(stored)
    line = "| fashion-mnist | 3 | 89.71 (dpsur:table2) | 90.20 ± 0.10 (3) | dpsgd-hf | +0.49 | yes |"
    assert line in text.splitlines()
    assert "falls" not in text
    assert "| fashion-mnist | DPSGD-HF | 3 | 89.01 |  | 90.20 ± 0.10 |" in text, "the papers' tables find the same runs"
    assert (stored / "img" / "fashion-mnist-accuracy-against-epsilon.svg").exists()


def test_what_falls_short_is_said_and_what_is_published_never_counts(stored):
    finished(stored / "runs", "dpsgd-hf", [0.898, 0.898, 0.898])
    finished(stored / "runs", "dpsur", [0.99], basis="published", accounting="published")
    text = page(stored)
    assert "fashion-mnist at ε = 3 falls 0.21 points short of the goal with `dpsgd-hf`" in text
    assert "| 99.00 (1) | dpsur |" not in text


def test_one_lucky_seed_is_not_the_best(stored):
    finished(stored / "runs", "dpsgd-hf", [0.89, 0.89, 0.89])
    finished(stored / "runs", "auto-s", [0.95])
    assert "89.00 ± 0.00 (3) | dpsgd-hf" in page(stored)


def test_mechanisms_on_one_footing_are_set_side_by_side_and_nothing_else_is_touched(stored):
    finished(stored / "runs", "linear-dpsgd", [0.89, 0.90])
    finished(stored / "runs", "linear-dpis", [0.88])
    finished(stored / "runs", "dpsgd-hf", [0.95])
    finished(stored / "runs", "linear-dpsur", [0.99], basis="published", accounting="published")
    for _ in range(2):
        page(stored)
    text = (stored / "which-method.md").read_text()
    assert text.startswith("Before\n\n")
    assert text.endswith("\n\nafter\n")
    assert "| fashion-mnist | dpsgd |  |  | **89.50 ± 0.71 (2)** |  |" in text
    assert "| fashion-mnist | dpis |  |  | 88.00 (1) |  |" in text
    assert not {"old", "95.00", "99.00"} & set(text.replace("(", " ").split())


def test_missing_runs_are_listed(stored):
    finished(stored / "runs", "dpsgd-hf", [0.89, 0.89])
    text = page(stored)
    assert "| fashion-mnist | dpsgd-hf | 1 (0), 2 (0), 3 (2), 4 (0) |" in text
    assert "| imdb | dpsgd-hf |" not in text, "scattering is for images"


def test_shortened_runs_are_not_kept(stored):
    finished(stored / "runs", "dpsgd-hf", [0.99], case={"records": 500})
    assert "99.00" not in page(stored)


def test_runs_of_the_schedule_benchmark_are_read(stored):
    guarantee = {"epsilon": 0.4, "basis": "proven"}
    result = {
        "dataset": "mnist",
        "method": "growing_mu",
        "epsilon": 0.4,
        "seed": 0,
        "mu_ratio": 1.25,
        "clip_ratio": 1.0,
    }
    result |= {"curve": [0.5, 0.9123], "seconds": 3.0, "noise": 2.5, "guarantee": guarantee, "label": "old"}
    (stored / "runs").mkdir()
    grid = {**result, "method": "grid", "curve": [0.1, 0.1]}
    (stored / "runs" / "results.jsonl").write_text(json.dumps(result) + "\n" + json.dumps(grid) + "\n")
    text = page(stored)
    assert "| mnist | growing-mu | proven | 91.23 (1) | 3 |" in text
    assert "| mnist | growing mu | 0.4 | 91.67 |  | 91.23 |" in text
    assert "grid" not in text
