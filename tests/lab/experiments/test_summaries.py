"""Means, spreads and the ε to reach an accuracy, by hand; and what is made of them."""

from __future__ import annotations

import csv
import json
import re
from xml.etree import ElementTree

import pytest

from sordino.errors import InvalidInput
from sordino.lab.experiments import export, summaries
from sordino.lab.experiments.publishing import publish
from tests.lab.experiments.cases import Row, row


def test_mean_and_spread_over_seeds():
    (summary,) = summaries.summarise([row(seed=seed, accuracy=a) for seed, a in enumerate((0.5, 0.6, 0.7))])
    assert summary.text == "60.00 ± 10.00 (3)"
    (alone,) = summaries.summarise([row()])
    assert alone.text == "50.00 (1)"


def test_published_and_proven_are_never_mixed():
    rows = [row(), row(accounting="published", basis="published", accuracy=0.9)]
    assert [summary.mean for summary in summaries.summarise(rows)] == [50.0, 90.0]
    table = summaries.accuracy_table(rows)
    assert "| digits | a | proven | 50.00 (1) |" in table
    assert "| digits | a | published | 90.00 (1) |" in table


def test_a_proof_by_the_papers_accountant_stands_on_a_line_of_its_own(tmp_path):
    """Both are proven, but the noise differs: there is no mean of the two, and neither hides the other."""
    rows = [row(accuracy=0.70), row(accuracy=0.77, accounting="published")]
    table = summaries.accuracy_table(rows)
    assert "| digits | a | proven | 70.00 (1) |" in table
    assert "| digits | a | proven, paper's accountant | 77.00 (1) |" in table
    assert len(summaries.epsilon_to_reach(rows, 0.3)) == 2
    publish(rows, tmp_path)
    page = (tmp_path / "comparison.html").read_text()
    assert "<td>70.0</td>" in page
    assert "<td>77.0</td>" in page
    assert "73.5" not in page


def test_what_is_not_proven_is_never_the_best_of_a_comparison(tmp_path):
    publish([row(accuracy=0.7), row("b", accuracy=0.9, accounting="published", basis="published")], tmp_path)
    page = (tmp_path / "comparison.html").read_text()
    assert '<tr class="best"><td>a</td>' in page
    assert "<tr><td>b (published)</td>" in page


def test_epsilon_to_reach_is_the_first_point_at_the_level():
    rows = [row(epsilon=6.0, accuracy=0.8, seed=seed) for seed in (0, 1)]

    def reached(rows: list[Row], level: float) -> list[tuple[float | None, bool]]:
        return [(found.epsilon, found.at_once) for found in summaries.epsilon_to_reach(rows, level).values()]

    assert reached(rows, 0.4) == [(3.0, True)]
    assert reached(rows, 0.41) == [(6.0, False)]
    assert reached(rows, 0.9) == [(None, False)]
    never = [*rows, row(epsilon=6.0, accuracy=0.3, seed=2)]
    assert reached(never, 0.4) == [(None, True)], "one seed that never gets there counts"
    assert "| ≤ 3.00 | 6.00 | - | 2 | 2 |" in summaries.epsilon_table(rows, [0.4, 0.41, 0.9])
    assert "6.00" not in summaries.epsilon_table(rows, [0.41], least=3), "two evaluations say too little"


def test_a_filter_does_not_say_what_was_spent_on_the_way():
    curve = [{"step": step, "accuracy": step / 10, "epsilon": 4.0} for step in (5, 10)]
    assert not summaries.epsilon_to_reach([row(curve=curve)], 0.4)


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


def test_seventeen_methods_have_seventeen_colours(tmp_path):
    """As many as CIFAR-10 has on the page of results; matplotlib repeats its colours after ten."""
    pytest.importorskip("matplotlib")
    from sordino.lab.experiments.publishing import draw_figures

    rows = [row(f"method-{number:02}", epsilon, 0, 0.5) for number in range(17) for epsilon in (1.0, 2.0)]
    (path,) = (path for path in draw_figures(rows, tmp_path) if path.stem.endswith("accuracy-against-epsilon"))
    drawn = set(re.findall(r"stroke: (#[0-9a-f]{6}); stroke-width: 1.5", path.read_text()))
    assert len(drawn) == 17


def test_parquet_holds_the_same_rows(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [row(seed=seed) for seed in range(3)]
    export(rows, tmp_path / "results.parquet")
    read = parquet.read_table(tmp_path / "results.parquet").to_pylist()
    assert [each["seed"] for each in read] == [0, 1, 2]
    with pytest.raises(InvalidInput, match="csv or"):
        export(rows, tmp_path / "results.xls")


def test_every_line_says_what_stands_behind_it() -> None:
    def row(method: str, steps: int, **case: object) -> dict:
        told = {"model": {"name": "mlp"}, "features": {}, **case}
        plain = {"dataset": "d", "epsilon": 3.0, "accounting": "proven", "basis": "proven", "seconds": 1.0}
        return {**plain, "method": method, "accuracy": 0.5, "steps": steps, "case": told}

    parts = {"kind": "joined", "parts": [{"kind": "patches"}, {"kind": "scatter"}]}
    rows = [
        row("pixels", 10),
        row("pixels", 20),
        row("features", 7, features=parts),
        row("try", 3, records=60, short=True),
    ]
    lines = summaries.accuracy_table(rows, settings=True).splitlines()
    assert "| model | features | length |" in lines[0]
    assert "| d | features | proven | mlp | patches + scatter | 7 steps |" in lines[2]
    assert "| d | pixels | proven | mlp | none: the raw inputs | 10 to 20 steps |" in lines[3]
    assert "3 steps on the first 60 records (SHORTENED)" in lines[4]
    assert "model" not in summaries.accuracy_table(rows).splitlines()[0], "the documentation's tables are as they were"
