"""docs/performance.md and the README's figures come from what was measured: misses are named, gaps are dashes."""

from __future__ import annotations

import pytest

pytest.importorskip("opacus")
pytest.importorskip("matplotlib")

from benchmarks import page
from benchmarks.speed import measuring, plots, store
from benchmarks.speed.cases import CASES
from benchmarks.speed.stacks import PARTS

NAME, TINY = "MNIST CNN 26k, 256", "linear model, 64 inputs"


def measured(name=NAME, one=None, two=None, peaks=None, fails=None, profile=None):
    def rows(times):
        return {method: {"seconds": value, "starts": [value], "steps": 1} for method, value in (times or {}).items()}

    case = CASES[name]
    return {
        "name": name,
        "kind": case.kind,
        "batch": case.batch,
        "parameters": 26_010,
        "trained": 26_010,
        "times": {"1": rows(one), "2": rows(two)},
        "peaks": peaks or {},
        "setups": {"Sordino": 2.5},
        "profile": profile or {},
        "fails": fails or {},
        "clock": "wall",
        "took": 60.0,
        "taken": store.describe(),
    }


def parts(**given):
    return {part: given.get(part.replace(" ", "_"), 0.0) for part in PARTS}


def test_the_page_and_the_readme_are_those_of_the_stored_results():
    results, scale = store.read_all(), store.read(store.SCALE) or {}
    assert results, "run make bench"
    written = (page.DOCS / "performance.md").read_text()
    assert written == page.compose(results, scale, page.read_notes()), "run python -m benchmarks.speed --part page"
    readme = page.README.read_text()
    said = page.summarise(results)
    assert readme == page.put_between(readme, said), "run python -m benchmarks.speed --part page"
    assert said in written


def test_the_readme_must_have_a_place_for_the_figures():
    assert page.put_between(f"a\n{page.BEGIN}\nold\n{page.END}\nb", "new") == f"a\n{page.BEGIN}\nnew\n{page.END}\nb"
    with pytest.raises(ValueError, match="has no lines"):
        page.put_between("a text without a place", "new")


def test_notes_are_about_networks_that_exist():
    assert set(page.read_notes()) <= set(CASES)


def test_the_table_has_ratios_the_best_peer_and_dashes():
    row = measured(one={"SGD": 0.1, "Sordino": 0.11, "Opacus hooks": 0.3, "Opacus ghost": 0.22})
    other = measured(TINY, one={"SGD": 0.001, "Sordino": 0.0015})
    lines = page.tabulate_times({NAME: row, TINY: other}).splitlines()
    assert lines[0].startswith("| time of a step ÷ SGD | SGD, ms | target | Sordino | Opacus hooks | Opacus ghost |")
    assert lines[2] == f"| {NAME} | 100.0 | 1.15 | 1.10 | 3.00 | 2.20 | 2.00 |"
    assert lines[3] == f"| {TINY} | 1.00 | +0.6 ms | 1.50 | - | - | - |"
    assert page.tabulate_times({NAME: row}, 2) == "Not measured yet."


def test_two_threads_that_are_not_measured_anew_stay_with_their_date():
    older = {**measured(two={"SGD": 0.1, "Sordino": 0.2}), "taken": {"at": "earlier"}}
    newer = measured(one={"SGD": 0.3, "Sordino": 0.4})
    both = measuring.carry_double(newer, older)
    assert both["times"] == {"1": newer["times"]["1"], "2": older["times"]["2"]}
    assert (both["double"], both["taken"]) == ({"at": "earlier"}, newer["taken"])
    assert measuring.carry_double(newer, both)["double"] == {"at": "earlier"}
    own = measured(two={"SGD": 0.1})
    assert measuring.carry_double(own, older) is own
    assert measuring.carry_double(newer, None) is newer


def test_a_missed_aim_is_named_with_the_parts_that_missed_it_and_the_note():
    profile = {
        "SGD": parts(forward=0.04, backward=0.06),
        "Sordino": parts(forward=0.05, backward=0.03, norms_and_sums=0.04, noise=0.006),
    }
    row = measured(
        one={"SGD": 0.1, "Sordino": 0.126, "Opacus ew": 0.15, "vmap": 0.4},
        two={"SGD": 0.06, "Sordino": 0.06},
        peaks={"SGD": 2e6, "Sordino": 3e6},
        profile=profile,
    )
    said = page.list_missed({NAME: row}, {NAME: "The limit is known.", TINY: "not shown"})
    assert said.splitlines() == [
        f"- **{NAME}**: 1.26 times as long as SGD on one thread (aim 1.15); "
        "1.19 times as fast as Opacus ew on one thread (aim 1.3); "
        "1.50 times SGD's peak memory (aim 1.2). Relative to SGD's step: forward +0.10, backward -0.30, "
        "norms and sums +0.40, noise +0.06.",
        "  The limit is known.",
    ]


def test_aims_that_are_met_are_not_named():
    row = measured(
        one={"SGD": 0.1, "Sordino": 0.115, "Opacus ew": 0.15},
        two={"SGD": 0.1, "Sordino": 0.1},
        peaks={"SGD": 2e6, "Sordino": 2.4e6},
    )
    assert page.list_missed({NAME: row}, {NAME: "a note"}) == "None."


def test_a_linear_model_has_its_aim_in_milliseconds():
    assert page.find_missed(TINY, measured(TINY, one={"SGD": 0.0005, "Sordino": 0.0011})) == []
    missed = page.find_missed(TINY, measured(TINY, one={"SGD": 0.0005, "Sordino": 0.0015}))
    assert missed == ["1.00 ms longer than SGD (aim 0.6)"]


def test_lstms_have_a_larger_lead_to_keep():
    name = "BiLSTM64 trained embedding, 64x150"
    row = measured(name, one={"SGD": 0.1, "Sordino": 0.12, "Opacus hooks": 0.42})
    assert page.find_missed(name, row)[1:] == ["3.50 times as fast as Opacus hooks on one thread (aim 4)"]


def test_a_lead_that_plain_training_does_not_have_is_said_to_be_out_of_reach():
    row = measured(one={"SGD": 0.1, "Sordino": 0.1, "Opacus hooks": 0.105})
    assert page.find_missed(NAME, row) == [
        "1.05 times as fast as Opacus hooks on one thread (aim 1.3, SGD itself 1.05)"
    ]


def test_what_does_not_run_is_said():
    row = measured(one={"SGD": 0.1}, fails={"Sordino": "UnsupportedModel: no", "vmap": "RuntimeError: `it`"})
    assert page.find_missed(NAME, row) == ["does not run (UnsupportedModel: no)"]
    said = page.list_fails({NAME: row})
    assert f"- **vmap** on {NAME}: `RuntimeError: 'it'`" in said
    assert page.list_fails({NAME: measured()}) == "Every method runs on every network."
    assert "Sordino fails: UnsupportedModel: no" in page.tell(row)


def test_the_summary_has_ranges_by_kind():
    other = "MNIST CNN 26k, 2048"
    results = {
        NAME: measured(one={"SGD": 0.1, "Sordino": 0.126, "Opacus ew": 0.15}),
        other: measured(other, one={"SGD": 1.0, "Sordino": 0.96, "Opacus ew": 2.0}),
        TINY: measured(TINY, one={"SGD": 0.0005, "Sordino": 0.001}),
    }
    said = " ".join(page.summarise(results).split())
    assert "takes 1.0 to 1.3 times as long as one of SGD for CNNs." in said
    assert "takes 0.5 ms more. That is the whole step" in said
    assert "The fastest peer takes 1.5 to 2.0 times as long as SGD." in said


def test_growth_is_judged():
    flat = {"points": {"Sordino": {"10000 records": 0.001, "1000000000 records": 0.0011}}, "fails": {}}
    said = page.judge_growth("records", flat)
    assert said == "The slowest step takes 1.10 times as long as the fastest: the aim of 1.2 is met."
    steep = {"points": {"Sordino": {"10000 records": 0.001, "100000 records": 0.003}}}
    steep["fails"] = {"Sordino @ 1000000000 records": "MemoryError"}
    said = page.judge_growth("records", steep)
    assert "takes 3.00 times as long as the fastest: the aim of 1.2 is missed." in said
    assert said.endswith(" It does not run with 1,000,000,000 records.")
    linear = {"points": {"SGD": {}, "Sordino": {"layers 1": 0.01, "layers 2": 0.018}}, "fails": {}}
    assert page.judge_growth("layers", linear) == "2 times as many layers take 1.8 times as long."
    assert "| layers 2 | - | 18.00 |" in page.tabulate_growth("layers", linear)


def test_a_page_is_composed_of_one_network_and_says_what_is_missing():
    row = measured(one={"SGD": 0.1, "Sordino": 0.11}, peaks={"SGD": 2e6, "Sordino": 2e6})
    text = page.compose({NAME: row}, {}, {})
    assert "Not measured yet: linear model, 64 inputs;" in text
    assert "{" not in text
    assert "Measured on " in text
    assert "the source code changed" not in text


def test_plots_are_drawn_from_what_there_is(tmp_path):
    row = measured(one={"SGD": 0.1, "Sordino": 0.11})
    growth = {"points": {"SGD": {"layers 1": 0.01}, "Sordino": {"layers 1": 0.01, "layers 2": 0.02}}, "fails": {}}
    plots.draw({NAME: row}, {"axes": {"layers": growth}}, tmp_path)
    first = (tmp_path / "speed.svg").read_bytes()
    assert b"Sordino" in first
    assert b"layers" in (tmp_path / "growth.svg").read_bytes()
    plots.draw({NAME: row}, {}, tmp_path)
    assert (tmp_path / "speed.svg").read_bytes() == first
