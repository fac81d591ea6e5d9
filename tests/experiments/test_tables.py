"""Means, spreads and the ε to reach an accuracy, by hand; and what is made of them."""

from __future__ import annotations

import csv
import json
from xml.etree import ElementTree

import pytest

from sordino.errors import InvalidInput
from sordino.experiments import export, tables
from sordino.experiments.publishing import publish
from tests.experiments.cases import row


def test_mean_and_spread_over_seeds():
    (summary,) = tables.summaries([row(seed=seed, accuracy=a) for seed, a in enumerate((0.5, 0.6, 0.7))])
    assert summary.text == "60.00 ± 10.00 (3)"
    (alone,) = tables.summaries([row()])
    assert alone.text == "50.00 (1)"


def test_published_and_proven_are_never_mixed():
    rows = [row(), row(accounting="published", basis="published", accuracy=0.9)]
    assert [summary.mean for summary in tables.summaries(rows)] == [50.0, 90.0]
    table = tables.accuracy_table(rows)
    assert "| digits | a | proven | 50.00 (1) |" in table
    assert "| digits | a | published | 90.00 (1) |" in table


def test_epsilon_to_reach_is_the_first_point_at_the_level():
    rows = [row(epsilon=6.0, accuracy=0.8, seed=seed) for seed in (0, 1)]
    key = ("digits", "a", "proven")
    assert tables.epsilon_to_reach(rows, 0.4) == {key: 3.0}
    assert tables.epsilon_to_reach(rows, 0.41) == {key: 6.0}
    assert tables.epsilon_to_reach(rows, 0.9) == {key: None}
    never = [*rows, row(epsilon=6.0, accuracy=0.3, seed=2)]
    assert tables.epsilon_to_reach(never, 0.4) == {key: None}, "one seed that never gets there counts"
    assert "| 3.00 | - |" in tables.epsilon_table(rows, [0.4, 0.9])


def test_everything_is_published(tmp_path):
    rows = [row(method, epsilon, seed) for method in "ab" for epsilon in (1.0, 3.0) for seed in (0, 1)]
    names = {path.name for path in publish(rows, tmp_path)}
    assert {"results.csv", "table.md", "comparison.html"} <= names
    with (tmp_path / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 8
    assert json.loads(lines[0]["curve"]) == rows[0]["curve"]
    figures = list((tmp_path / "figures").glob("*.svg"))
    pytest.importorskip("matplotlib")
    assert len(figures) == 4
    for path in figures:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_parquet_holds_the_same_rows(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [row(seed=seed) for seed in range(3)]
    export(rows, tmp_path / "results.parquet")
    read = parquet.read_table(tmp_path / "results.parquet").to_pylist()
    assert [each["seed"] for each in read] == [0, 1, 2]
    with pytest.raises(InvalidInput, match="csv or"):
        export(rows, tmp_path / "results.xls")
