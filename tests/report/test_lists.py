"""The list of runs: what it shows, in which order, what runs on the same data cost together; and what is kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sordino import Budget, recipes
from sordino.report import briefs
from sordino.report.facts import gather
from sordino.report.runs_page import View, add_up, arrange, read_view, set_side_by_side
from sordino.report.server import find_page
from sordino.report.shelf import Listed, Shelf, Shelved
from tests.runs import OUTCOME, history, make_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path / "cache"))
    for name, epsilon, source in (("a", 1.0, "people.csv"), ("b", 3.0, "people.csv"), ("c", 2.0, "other.csv")):
        recipe = recipes.dpsgd(batch_size=50, steps=8).calibrate(Budget(epsilon, 1e-5), records=1000)
        config = f'[data]\nsource = "/x/{source}"\ntarget = "outcome"\nheld_out = 0.2\n[model]\nname = "mlp"\n[run]\n'
        files = {"config.toml": config, "outcome.json": OUTCOME, "history.jsonl": history(8)}
        make_run(tmp_path / "runs", recipe, name=name, files=files)
    return tmp_path / "runs"


@pytest.fixture
def listed(runs: Path) -> list[Listed]:
    return [
        Listed(Shelved(f"{k:016x}", path), briefs.summarise_facts(gather(path, brief=True)))
        for k, path in enumerate(sorted(runs.iterdir()))
    ]


def test_a_line_says_what_when_and_how(listed):
    brief = listed[0].facts
    assert brief is not None
    assert (brief.data, brief.target, brief.method, brief.model) == ("people.csv", "outcome", "dpsgd", "mlp")
    assert brief.began.endswith("UTC")
    assert brief.finished


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", "cba"),
        ("sort=epsilon", "bca"),
        ("sort=epsilon&order=up", "acb"),
        ("q=people", "ba"),
        ("q=OTHER+mlp", "c"),
        ("sort=%3Cscript%3E&order=sideways", "cba"),
        ("&".join(f"q={k}" for k in range(30)), "cba"),
    ],
)
def test_the_list_is_sorted_and_filtered(listed, query, names):
    (group,) = arrange(listed, read_view(query))
    assert "".join(row.entry.name for row in group["rows"]) == names


def test_runs_on_the_same_data_are_added_up_once_each(listed):
    groups = arrange([*listed, listed[0]], View(grouped=True))
    assert [group["title"] for group in groups] == ["other.csv", "people.csv"]
    both = [row.facts for row in listed[:2] if row.facts]
    total = sum(brief.epsilon for brief in both)
    assert f"2 runs, together ε ≤ {total:.2f}"[:-1] in groups[1]["total"], "a copy of a run is the same run"
    assert "δ = 2e-05" in groups[1]["total"]
    assert add_up([]) == ""


def test_two_runs_side_by_side(listed):
    assert listed[0].facts
    assert listed[1].facts
    lines = set_side_by_side((listed[0].entry, listed[0].facts), (listed[1].entry, listed[1].facts))
    differing = {what for what, _, _, differ in lines if differ}
    assert {"ε", "Budget"} <= differing
    assert "Data" not in differing


def test_the_pages_show_it(runs):
    shelf = Shelf(runs)
    shelf.list_runs(120.0)  # a busy machine prices nothing within the patience of a page
    page = find_page(shelf, "", None, "group=data&sort=epsilon")
    assert page is not None
    for words in ("people.csv: outcome", "dpsgd", "together ε ≤", "Compare the two ticked"):
        assert words in page.html
    assert "form-action 'self'" in page.policy
    chosen = [ident for ident, entry in shelf.find_entries().items() if entry.name in "ab"]
    two = find_page(shelf, "compare", None, "&".join(f"run={ident}" for ident in chosen))
    assert two is not None
    assert "Two runs" in two.html
    one = find_page(shelf, "compare", None, f"run={chosen[0]}&run=../../etc")
    assert one is not None
    assert "must be 2" in one.html


def test_lines_of_finished_runs_are_priced_once(runs, monkeypatch):
    first = Shelf(runs).list_runs(60.0)
    assert all(row.facts for row in first)
    monkeypatch.setattr("sordino.report.reader.Reader.ask", lambda *_, **__: pytest.fail("priced again"))
    again = Shelf(runs).list_runs(60.0)
    assert [row.facts for row in again] == [row.facts for row in first]


def test_what_changed_is_priced_anew_and_what_is_kept_is_not_trusted_blindly(runs, tmp_path):
    run = runs / "a"
    brief = briefs.summarise_facts(gather(run, brief=True))
    briefs.remember(run, ["one"], brief)
    assert briefs.recall(run, ["one"]) == brief
    assert briefs.recall(run, ["two"]) is None
    (kept,) = (tmp_path / "cache" / "briefs").iterdir()
    for text in ("{}", "[]", "no json", '{"epsilon": "nan"}', kept.read_text().replace("run_id", "surprise")):
        kept.write_text(text)
        assert briefs.recall(run, ["one"]) is None, text


def test_a_run_that_goes_on_is_not_kept(runs, tmp_path, recipe):
    going = make_run(runs, recipe, name="going", events=3)
    briefs.remember(going, ["x"], briefs.summarise_facts(gather(going, brief=True)))
    assert briefs.recall(going, ["x"]) is None
