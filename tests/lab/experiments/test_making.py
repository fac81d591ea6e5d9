"""What features cost once is looked up by what they are, whatever noise a run adds to them."""

from __future__ import annotations

from benchmarks import making
from sordino.lab.experiments.results import keep_lines


def test_features_are_found_by_dataset_and_options_but_not_by_noise(tmp_path):
    stored = tmp_path / "making.jsonl"
    scatter = {"kind": "scatter", "groups": 27}
    keep_lines(stored, {"label": "mnist/x", "dataset": "mnist", "features": scatter, "processor_seconds": 80.0})

    def find(dataset, features):
        return making.find_making({"dataset": dataset, "features": features}, stored)

    assert find("mnist", {"groups": 27, "kind": "scatter", "noise": 8.0, "clip": 0.2, "square_clip": 0.1}) == 80.0
    assert find("mnist", {}) == 0.0
    assert find("fashion-mnist", scatter) is None
    assert find("mnist", {"kind": "scatter", "groups": 9}) is None


def test_nothing_was_measured_where_there_is_no_file(tmp_path):
    assert making.find_making({"dataset": "mnist", "features": {"kind": "letters"}}, tmp_path / "none.jsonl") is None
