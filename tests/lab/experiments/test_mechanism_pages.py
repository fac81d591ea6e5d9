"""The tables of docs/mechanisms are computed from stored runs, with the papers' figures beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import dpis, results, selection
from tests.lab.experiments.cases import row


@pytest.fixture(params=[dpis, selection], ids=["dpis", "selection"])
def bench(request, tmp_path, monkeypatch):
    """A benchmark with a store and a page of this test's own."""
    module = request.param
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(f"Before\n\n{results.BEGIN.format(module.__name__)}\nold\n{results.END}\nafter\n")
    return module


def keep(bench, task: str, method: str, accuracies: list[float], epsilon: float = 3.0, seconds: float = 2.0) -> None:
    """Finished runs, made up."""
    for seed, accuracy in enumerate(accuracies):
        case = bench.TASKS[task].case(method, epsilon, seed)
        curve = [{"step": 5, "accuracy": accuracy, "seconds": seconds}]
        bench.store(task, case, row(method, epsilon, seed, accuracy, basis="proven", curve=curve, noise=[0.8]))


def test_means_stand_beside_the_printed_figures(bench):
    keep(bench, "fashion-scatter", "dpsgd", [0.87, 0.88, 0.89])
    text = bench.tables()
    printed = {dpis: "88.3", selection: "89.01"}[bench]
    (line,) = [line for line in text.splitlines() if "88.00 ± 1.00 (3)" in line]
    assert f"| {printed} |" in line


def test_nothing_is_said_of_what_was_not_run(bench):
    assert "mnist" not in bench.tables()
    keep(bench, "mnist-scatter", "dpsgd", [0.97])
    text = bench.tables()
    assert "97.00 (1)" in text
    assert "fashion" not in text


def test_the_table_is_written_between_its_marks(bench):
    keep(bench, "mnist-scatter", "dpsgd", [0.97])
    bench.write()
    text = bench.PAGE.read_text()
    assert text.startswith("Before")
    assert text.endswith("after\n")
    assert "old" not in text
    assert bench.tables().strip() in text


def test_the_pages_of_the_repository_say_what_is_stored():
    for module in (dpis, selection):
        written = module.tables() if module is dpis else module.tables(module.NETWORKS)
        assert written.strip() in Path(module.PAGE).read_text(), f"run python -m {module.__name__} write"


def test_times_are_relative_to_the_same_task_and_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(dpis, "RESULTS", tmp_path)
    keep(dpis, "mnist-cnn", "dpsgd", [0.97, 0.98], seconds=2.0)
    keep(dpis, "mnist-cnn", "dpis", [0.98], seconds=5.0)
    text = dpis.tables()
    assert "| mnist-cnn | 3 | dpsgd | 97.50 ± 0.71 (2) | 98.1 | 0.800 | 1.0× |" in text
    assert "| mnist-cnn | 3 | dpis | 98.00 (1) |  | 0.800 | 2.5× |" in text


def test_runs_that_have_a_stored_result_are_not_made_again(tmp_path, monkeypatch):
    """The folder of the runs may be gone: results in the repository count."""
    monkeypatch.setattr(selection, "RESULTS", tmp_path)
    keep(selection, "digits", "dpsgd", [0.9, 0.9])
    asked = []
    monkeypatch.setattr(selection, "finish", lambda cases, *_: asked.extend(cases))
    selection.every(task=["digits"], method=["dpsgd", "dpsur"], seeds=3)
    assert sorted((case.method, case.epsilon, case.seed) for case in asked) == [
        *(("dpsgd", 1.0, seed) for seed in range(3)),
        ("dpsgd", 3.0, 2),
        *(("dpsur", epsilon, seed) for epsilon in (1.0, 3.0) for seed in range(3)),
    ]


def test_published_runs_say_so_and_blocks_tell_no_acceptances(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "RESULTS", tmp_path)
    case = selection.TASKS["mnist-scatter"].case("dpsur-published", 1.0)
    selection.store("mnist-scatter", case, row("dpsur-published", 1.0, 0, 0.97, basis="published"))
    keep(selection, "mnist-scatter", "dpsur-every-4", [0.96], epsilon=1.0)
    published, blocks = sorted(line for line in selection.tables().splitlines() if line.startswith("| dpsur"))[::-1]
    assert published.startswith("| dpsur-published | published | 97.00 (1) |")
    assert "| 97.93 |" in published
    assert "in blocks" in blocks
