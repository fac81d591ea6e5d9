"""Every table of the papers resolves to figures and to the cases that rerun them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sordino.errors import InvalidInput
from sordino.experiments import catalogue
from sordino.experiments.papers import best_printed, paper_table, paper_tables
from sordino.experiments.reproducing import cases_of, plan, side_by_side
from tests.experiments.cases import row

KNOWN = catalogue()
TABLES = paper_tables()


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_every_figure_has_a_run_behind_it(table):
    cells = table.cells(table.printed)
    assert cells
    assert table.where
    if table.kind == "attack":
        assert {cell.label.split(", ")[0] for cell in cells} == {"black box", "white box"}
        return
    cases = {(cell.dataset, cell.label, cell.column): table.case(cell, 0, "proven", KNOWN) for cell in cells}
    runs = {case.label for case in cases.values()}
    columns = 3 if table.kind == "epsilon" else 1
    assert len(runs) * columns == len(cells), "two rows that are the same run would print one figure twice"


@pytest.mark.parametrize(
    ("dataset", "best"),
    [
        ("fashion-mnist", (88.38, 89.34, 89.71, 90.18)),
        ("mnist", (97.93, 98.70, 98.88, 98.95)),
        ("cifar10", (64.41, 69.40, 70.83, 71.45)),
    ],
)
def test_the_best_printed_figures_are_those_of_the_goal(dataset, best):
    assert tuple(best_printed(dataset, epsilon)[0] for epsilon in (1.0, 2.0, 3.0, 4.0)) == best
    assert best_printed("digits", 1.0) is None


def test_quick_keeps_one_seed_and_the_column_nearest_three():
    table = paper_table("dpsur:table2")
    quick = plan(table, ["imdb"], KNOWN, quick=True)
    assert {each.cell.column for each in quick} == {3.0}
    assert len(cases_of(quick)) == 5 * 2
    assert len(cases_of(plan(table, ["imdb"], KNOWN, seeds=2))) == 5 * 4 * 2 * 2


def test_the_three_figures_stand_side_by_side():
    table = paper_table("dpsur:table2")
    planned = plan(table, ["imdb"], KNOWN, quick=True)
    first = planned[0]
    found = {
        first.cases["published"][0].label: row(accuracy=0.7, basis="published"),
        first.cases["proven"][0].label: row(accuracy=0.6),
    }
    text = side_by_side(table, planned, found.get)
    assert "| imdb | DPSUR | 3 | 72.16 | 70.00 [published] | 60.00 |" in text
    assert "| imdb | DPSGD | 3 | 70.41 |  |  |" in text


def test_a_table_of_epsilons_reads_the_curve():
    table = paper_table("screening:table3")
    planned = plan(table, ["mnist"], KNOWN, seeds=1)
    labels = {case.label: row(epsilon=6.0, accuracy=0.96) for each in planned for case in each.cases["proven"]}
    lines = side_by_side(table, planned, labels.get).splitlines()
    assert "| mnist | DPSGD | 0.98 | not reached |  | not reached |" in lines
    assert "| mnist | DPSGD | 0.96 | 2.47 |  | 6.00 |" in lines


def test_unknown_names_are_refused_in_one_line():
    with pytest.raises(InvalidInput, match="choose one of dpsur:table2"):
        paper_table("dpsur:table9")
    with pytest.raises(InvalidInput, match="it has mnist"):
        paper_table("dpsur:table2").require("digits")
    table = replace(paper_table("auto-s:table"), variants={"AUTO-S": {"method": "nix"}})
    with pytest.raises(InvalidInput, match="not configured"):
        plan(table, ["mnist"], KNOWN)
