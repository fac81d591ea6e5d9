"""docs/results.md is computed from stored results: whatever stands in it was measured or printed by a paper."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks import making, pareto, results
from sordino.errors import InvalidInput
from sordino.lab.experiments import catalogue, recipe_of
from sordino.lab.experiments import results as store
from tests.lab.experiments.cases import row

pytest.importorskip("matplotlib")
KNOWN = catalogue()


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """An empty store and page of this test's own."""
    monkeypatch.setattr(results, "STORED", tmp_path / "results" / "experiments")
    monkeypatch.setattr(results, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(results, "IMAGES", tmp_path / "img")
    for name, page, writers in (
        ("CHOICE", "which-method.md", ["benchmarks.results"]),
        ("SCHEDULES", "dynamic.md", ["benchmarks.results", "benchmarks.results ratios"]),
        ("IMPORTANCE", "dpis.md", ["benchmarks.results"]),
        ("SELECTION", "selection.md", ["benchmarks.results"]),
    ):
        monkeypatch.setattr(results, name, tmp_path / page)
        marked = (f"{results.BEGIN.format(by)}\nold\n{results.END}\n\n" for by in writers)
        (tmp_path / page).write_text(f"Before\n\n{''.join(marked)}after\n")
    return tmp_path


def finished(folder, method: str, accuracies: list[float], epsilon: float = 3.0, **changes: object) -> None:
    """Runs of a configured method on Fashion-MNIST, made up."""
    for seed, accuracy in enumerate(accuracies):
        case = KNOWN["fashion-mnist", method].case(epsilon, seed, str(changes.get("accounting", "proven")))
        made = row(method, epsilon, seed, accuracy, dataset="fashion-mnist", label=case.label, case=case.to_dict())
        store.write(folder, {**made, **changes})


def page(stored, figures: bool = False) -> str:
    results.collect([stored / "runs"])
    results.page(figures)
    paths = [stored / "results.md", *sorted((stored / "results").glob("*.md"))]
    return "\n".join(path.read_text() for path in paths)


def test_the_best_proven_method_stands_beside_the_best_printed_figure(stored):
    finished(stored / "runs", "dpsgd-hf", [0.901, 0.902, 0.903], processor_seconds=3.0)
    finished(stored / "runs", "auto-s", [0.86, 0.87, 0.88])
    text = page(stored, figures=True)
    line = "| 3 | 89.71 (dpsur:table2) | 90.20 ± 0.10 (3) | dpsgd-hf | +0.49 | yes | 89.7 (Tramèr and Boneh 2021) |"
    assert line in text.splitlines()
    assert "| Fashion-MNIST |  |  |  | 90.20 ± 0.10 (3) |  |  |" in text, "the summary has it too"
    assert "below the goal" not in text
    assert "| fashion-mnist | DPSGD-HF | 3 | 89.01 |  | 90.20 ± 0.10 (3) |" in text, "a paper's table has the same runs"
    for name in ("accuracy-against-epsilon", "overview", "cost"):
        assert (stored / "img" / f"fashion-mnist-{name}.svg").exists()


def test_what_falls_short_is_said_and_what_is_published_never_counts(stored):
    finished(stored / "runs", "dpsgd-hf", [0.898, 0.898, 0.898])
    finished(stored / "runs", "dpsur", [0.99], basis="published", accounting="published")
    text = page(stored)
    assert "Fashion-MNIST at ε = 3: `dpsgd-hf` is 0.21 points below the goal" in text
    assert "| 99.00 (1) | dpsur |" not in text


def test_one_lucky_seed_is_not_the_best(stored):
    finished(stored / "runs", "dpsgd-hf", [0.89, 0.89, 0.89])
    finished(stored / "runs", "auto-s", [0.95])
    assert "89.00 ± 0.00 (3) | dpsgd-hf" in page(stored)


def test_the_recipe_called_best_is_not_replaced_by_the_luckiest_of_many_methods(stored):
    finished(stored / "runs", "best", [0.90, 0.90, 0.90])
    finished(stored / "runs", "auto-s", [0.902, 0.902, 0.902])
    assert "90.00 ± 0.00 (3) | best | +0.29 | no |" in page(stored)


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


def test_methods_without_a_cnn_on_cifar10_are_named(stored):
    """A linear layer on fixed features stands for a method elsewhere on the page, and must not hide this."""

    def finish(epsilon):
        case = KNOWN["cifar10", "dpis"].case(epsilon)
        made = row("dpis", epsilon, 0, 0.6, dataset="cifar10", label=case.label, case=case.to_dict())
        store.write(stored / "runs", made)

    assert "auto-s, decay, dynamic, dpis, screening, dpsur." in page(stored)
    finish(3.0)
    assert "auto-s, decay, dynamic, dpis (ε 1, 2, 4), screening, dpsur." in page(stored)
    for epsilon in (1.0, 2.0, 4.0):
        finish(epsilon)
    assert "auto-s, decay, dynamic, screening, dpsur." in page(stored)


def test_a_cnns_footing_has_lines_and_a_best_of_its_own(stored):
    for method, accuracy in (("linear-dpsgd", 0.65), ("cnn-dpsgd", 0.64), ("cnn-dpis", 0.63)):
        case = KNOWN["cifar10", method].case(3.0)
        made = row(method, 3.0, 0, accuracy, dataset="cifar10", label=case.label, case=case.to_dict())
        store.write(stored / "runs", made)
    assert "| cifar10, CNN | dpis | 1 (0), 2 (0), 3 (1), 4 (0) |" in page(stored), "the linear layer's seeds are others"
    text = (stored / "which-method.md").read_text()
    assert "| cifar10 | dpsgd |  |  | **65.00 (1)** |  |" in text
    assert "| cifar10, CNN | dpsgd |  |  | **64.00 (1)** |  |" in text
    assert "| cifar10, CNN | dpis |  |  | 63.00 (1) |  |" in text


def test_runs_on_one_footing_and_shortened_ones_are_not_missing(stored):
    finished(stored / "runs", "linear-dpsgd", [0.89, 0.89, 0.89])
    finished(stored / "runs", "short-dpsgd-ts", [0.86, 0.86, 0.86])
    text = page(stored)
    assert "| fashion-mnist | dpsgd | 1 (0), 2 (0), 4 (0) |" in text
    assert "| fashion-mnist | dpsgd-ts | 1 (0), 2 (0), 4 (0) |" in text


def test_what_shortened_runs_leave_out_is_said_with_its_price(stored):
    """Runs of 400 draws of 2,048 in 36 s: the steps that the paper's noise pays for would take as much longer."""
    finished(stored / "runs", "short-dpsgd-ts", [0.86, 0.86], 4.0, seconds=36.0, steps=400)
    whole = recipe_of(KNOWN["fashion-mnist", "dpsgd-ts"].case(4.0), 60_000).steps
    hours = 36 / 400 * whole / 3600
    line = f"| fashion-mnist | short-dpsgd-ts | 4 | 400 steps of 2,048 | {whole:,} steps of 2,048 | {hours:.1f} |"
    assert line in page(stored).splitlines()


def test_shortened_runs_are_not_kept(stored):
    """A try with `--steps 5` or `--records 500` has the name of its method, and other settings."""
    finished(stored / "runs", "dpsgd-hf", [0.89])
    settings = KNOWN["fashion-mnist", "dpsgd-hf"]
    for case in (settings.case(3.0).shortened(None, 5), settings.case(3.0).shortened(500, None)):
        made = row("dpsgd-hf", 3.0, 0, 0.99, dataset="fashion-mnist", label=case.label, case=case.to_dict())
        store.write(stored / "runs", made)
    text = page(stored)
    assert "89.00 (1)" in text
    assert "99.00" not in text
    assert "94.00" not in text


def test_runs_of_a_papers_table_with_other_settings_have_no_mean_with_the_method(stored):
    """The rows of DPIS's table 5 differ in a setting and are all called dpis."""
    cases = {case.label: case for each in results._planned("dpis:table5") for case in each.cases["proven"]}
    changed = [case for case in cases.values() if case.dataset == "fashion-mnist" and case.seed == 0]
    assert len(changed) > 1
    for place, case in enumerate(changed):
        accuracy = 0.8 + place / 100
        made = row(case.method, case.epsilon, 0, accuracy, dataset=case.dataset, label=case.label, case=case.to_dict())
        store.write(stored / "runs", made)
    text = page(stored)
    assert "80.00" in text, "the paper's table has them"
    assert " ± " not in (stored / "results" / "fashion-mnist.md").read_text()


def test_what_guarantees_rest_on_is_listed_with_the_methods(stored):
    finished(stored / "runs", "dpsgd-hf", [0.89])
    said = {"epsilon": 3.0, "delta": 1e-6, "assumptions": ["noise is secure", "read the training records"]}
    finished(stored / "runs", "auto-s", [0.88], guarantee=said)
    text = page(stored)
    assert "- noise is secure: all" in text.splitlines()
    assert "- read the training records: `auto-s`" in text.splitlines()
    assert "- `auto-s` (fashion-mnist, δ = 1e-06): " in text


def test_the_pages_of_the_repository_are_left_alone(stored):
    text = page(stored)
    assert "No run is stored yet" in text
    assert results.SCHEDULES.parent == results.CHOICE.parent == stored


def test_a_page_without_marks_is_refused(stored):
    (stored / "dynamic.md").write_text("nothing to be seen\n")
    with pytest.raises(InvalidInput, match=r"dynamic.md has no line <!-- written by benchmarks.results -->"):
        page(stored)


def test_runs_of_the_mechanisms_pages_are_on_those_pages_alone(stored):
    """Two writers share dynamic.md, each between marks of its own."""
    for method in ("sensitivity-decay", "dynamic-mu0.4-clip0.1"):
        case = KNOWN["mnist", method].case(0.4)
        made = row(method, 0.4, 0, 0.902, dataset="mnist", label=case.label, case=case.to_dict())
        store.write(stored / "runs", made)
    finished(stored / "runs", "selection-dpsgd", [0.87])
    text = page(stored)
    assert "dynamic-mu" not in text
    assert "selection-dpsgd" not in text
    schedules = (stored / "dynamic.md").read_text()
    assert "| 1/ρ_μ = 0.4 |  |  |  | 90.20 |" in schedules
    assert "| mnist | sensitivity decay | 0.4 | 93.95 |  | 90.20 (1) |" in schedules
    assert "| dpsgd | proven |  |  | 85.54 | 87.00 (1) |" in (stored / "selection.md").read_text()


def test_figures_printed_elsewhere_stand_beside_ours_with_their_public_data(stored):
    finished(stored / "runs", "best", [0.895, 0.895, 0.895], epsilon=3.0)
    finished(stored / "runs", "best", [0.87, 0.87, 0.87], epsilon=1.0)
    text = page(stored)
    figure = "| Fashion-MNIST | Tramèr and Boneh 2021 | 3 | 89.7 | 89.50 ± 0.00 (3) at 3 | none (scattering) |"
    assert f"{figure} RDP, as stated |" in text.splitlines()
    ours = "| 3 | 89.71 (dpsur:table2) | 89.50 ± 0.00 (3) | best | -0.21 | no | 89.7 (Tramèr and Boneh 2021) |"
    assert ours in text.splitlines()
    assert "- Fashion-MNIST at ε = 3: 89.7 by Tramèr and Boneh 2021, 0.2 points above ours." in text
    assert "| MNIST | Tramèr and Boneh 2021 | 1.2 | 98.1 | not run |" in text


def test_a_figure_printed_elsewhere_stands_beside_our_run_at_its_own_epsilon(stored):
    """A luckier run at a smaller ε is compared only where there is none, and nothing at a larger one is."""
    runs = [("best", 1.0, 0.99), ("best", 1.2, 0.98), ("best", 2.0, 0.985), ("static", 2.9, 0.97), ("best", 3.0, 0.995)]
    for method, epsilon, accuracy in runs:
        case = KNOWN["mnist", method].case(epsilon)
        made = row(method, epsilon, 0, accuracy, dataset="mnist", label=case.label, case=case.to_dict())
        store.write(stored / "runs", made)
    text = page(stored)
    assert "| MNIST | Tramèr and Boneh 2021 | 1.2 | 98.1 | 98.00 (1) at 1.2 |" in text
    assert "| MNIST | Tramèr and Boneh 2021 | 2.9 | 98.7 | 99.00 (1) at 1 |" in text
    assert "| 2.9 | none | not run |  |  |  | 98.7 (Tramèr and Boneh 2021) |" in text, "one method of many is no best"


def test_what_a_minute_buys_is_the_best_that_fits(stored, monkeypatch):
    """Features of the method called best took fifty seconds; nobody measured those of the others but the CNN's none."""
    store.keep_lines(
        stored / "making.jsonl", {"label": "fashion-mnist/best", "processor_seconds": 50.0, **features("best")}
    )
    monkeypatch.setattr(pareto, "find_making", partial(making.find_making, stored=stored / "making.jsonl"))
    finished(stored / "runs", "best", [0.90], processor_seconds=30.0)
    finished(stored / "runs", "linear-dpsgd", [0.89], processor_seconds=20.0)
    finished(stored / "runs", "linear-dpis", [0.88], processor_seconds=25.0)
    finished(stored / "runs", "short-dpsgd-ts", [0.85], processor_seconds=40.0)
    finished(stored / "runs", "auto-s", [0.99], processor_seconds=5.0, basis="published", accounting="published")
    text = page(stored)
    kept = "| Fashion-MNIST | 90.0 (best, 30 s) | 90.0 (best, 30 s) | 90.0 (best, 30 s) |"
    nothing = "| Fashion-MNIST | 85.0 (short-dpsgd-ts, 40 s) | 90.0 (best, 80 s) | 90.0 (best, 80 s) |"
    assert text.index(nothing) < text.index(kept)
    front = [line for line in (stored / "results" / "cost.md").read_text().splitlines() if line.startswith("| 3 |")]
    assert front == ["| 3 | linear-dpsgd | 20 | not measured | 89.00 (1) |", "| 3 | best | 30 | 50 | 90.00 (1) |"]


def features(method: str) -> dict[str, object]:
    """What decides how long the features of a method take."""
    case = KNOWN["fashion-mnist", method].case(3.0)
    return {"dataset": case.dataset, "features": case.features}


def test_each_network_of_the_papers_has_its_best_printed_figure_and_our_best_of_it(stored):
    """A linear layer on features is no network of the papers, and what is on the mechanisms' own pages counts here."""
    finished(stored / "runs", "dpsgd-hf", [0.885, 0.885, 0.885])
    finished(stored / "runs", "auto-s", [0.99])
    finished(stored / "runs", "selection-dpsgd", [0.886, 0.886, 0.886])
    finished(stored / "runs", "linear-dpsgd", [0.90, 0.90, 0.90])
    finished(stored / "runs", "dpsgd-ts", [0.99], basis="published", accounting="published")
    text = page(stored)
    line = "| scatter-cnn | 3 | 89.71 (dpsur:table2) | 88.60 ± 0.00 (3) | selection-dpsgd | -1.11 |"
    section = text[text.index("## The papers' own networks") :].partition("\n## ")[0].partition("![")[0]
    assert [each for each in section.splitlines() if each.startswith(("| scatter", "| linear"))] == [line]
