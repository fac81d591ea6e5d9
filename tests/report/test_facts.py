"""What a report says must be what the ledger holds, and nothing that is private."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from scipy.stats import norm

from sordino import mechanisms, recipes
from sordino.accounting import Budget, Ledger, pricing
from sordino.accounting.events import GaussianDpEvent
from sordino.accounting.plans import Bill
from sordino.errors import InvalidInput, LedgerError
from sordino.report import gather, report
from sordino.report.prices import Tariff, bound_detection, price_curve
from sordino.report.run_folder import MOST_BYTES
from sordino.report.run_page import render_run
from tests.runs import AUDIT, OUTCOME, history, make_run


def test_the_guarantee_is_the_ledgers_price(full_run, recipe):
    facts = gather(full_run)
    with Ledger.read(full_run / "ledger.sqlite") as ledger:
        assert facts.guarantee.epsilon == pricing.epsilon(ledger.events(), 1e-5)
        assert facts.proof.fingerprint == ledger.fingerprint()
    assert facts.recipe == recipe
    assert (facts.proof.events, facts.saved_step, facts.finished) == (40, 40, True)
    assert facts.final_accuracy == facts.accuracy[-1][1] == 1 - 0.9**40
    assert facts.twin_accuracy == 0.9777


def test_a_lie_beside_the_ledger_changes_no_price(tmp_path, recipe):
    lie = {"epsilon": 0.1, "basis": "proven", "assumptions": []}
    told = gather(make_run(tmp_path, recipe, name="told", files={"outcome.json": lie}))
    plain = gather(make_run(tmp_path, recipe, name="plain"))
    assert told.guarantee.epsilon == plain.guarantee.epsilon > 2.9


@pytest.mark.parametrize("told", [None, "2.13", {"torch": "2.13.0+cpu"}])
def test_the_versions_that_trained_are_those_that_the_run_wrote_down(tmp_path, recipe, told):
    run = make_run(tmp_path, recipe, files={"outcome.json": {**OUTCOME, "versions": told}})
    facts = gather(run)
    assert facts.trained_with == (told if isinstance(told, dict) else {})
    assert facts.versions["torch"]
    assert ("Trained with" in render_run(facts)) == isinstance(told, dict)


def test_spending_rises_from_nothing_to_the_guarantee(full_run):
    spent = gather(full_run).spending
    assert spent[0] == (0.0, 0.0)
    assert spent[-1] == (40.0, gather(full_run).guarantee.epsilon)
    assert all(before[1] < after[1] for before, after in pairwise(spent))


def test_the_curve_holds_at_every_point(full_run):
    facts = gather(full_run)
    with Ledger.read(full_run / "ledger.sqlite") as ledger:
        for epsilon, delta in facts.curve:
            assert pricing.delta(ledger.events(), epsilon) <= delta * (1 + 1e-6)
    assert (facts.guarantee.epsilon, facts.guarantee.delta) in facts.curve


@pytest.mark.parametrize("false_alarms", [0.0, 1e-3, 0.01, 0.05, 0.3, 0.9, 1.0])
def test_detection_bounds_the_best_test_on_a_gaussian(false_alarms):
    """Neyman-Pearson: against N(0, σ²) and N(1, σ²) the best test of level α has power Φ(Φ⁻¹(α) + 1/σ)."""
    sigma = 1.5
    points = price_curve(Bill((((GaussianDpEvent(sigma), 1),),)), Tariff(1e-5))
    best = norm.cdf(norm.ppf(false_alarms) + 1 / sigma)
    assert best - 1e-6 <= bound_detection(points, false_alarms) <= best + 0.03


def test_detection_would_object_to_a_curve_that_claims_too_much():
    claimed = price_curve(Bill((((GaussianDpEvent(3.0), 1),),)), Tariff(1e-5))
    assert bound_detection(claimed, 0.01) < norm.cdf(norm.ppf(0.01) + 1 / 1.5)


def test_nothing_private_and_no_path_reaches_the_page(full_run):
    """Law 7: membership results, times finer than a minute and somebody's home directory stay where they are."""
    page = render_run(gather(full_run))
    assert "canary of one step" in page
    assert "0.987654" not in page
    assert "membership" not in page.lower()
    assert "somebody" not in page.replace("Imagine somebody", "").replace("else somebody", "")
    assert "patients.csv" in page
    assert not re.search(r"\d\d:\d\d:\d\d", page)


def test_published_accounting_is_never_called_strong(tmp_path, recipe):
    run = make_run(tmp_path, replace(recipe, basis="published"))
    facts = gather(run)
    assert facts.guarantee.basis == "published"
    page = render_run(facts)
    assert "Nothing is promised" in page
    assert "Do not promise it to anybody" in page


def test_a_header_cannot_make_an_unproven_recipe_proven(tmp_path, recipe):
    run = make_run(tmp_path, replace(recipe, basis="published"), header={"basis": "proven"})
    assert gather(run).guarantee.basis == "published"


def test_a_recipe_that_was_exchanged_is_noticed(tmp_path, recipe):
    run = make_run(tmp_path, recipe)
    assert gather(run).cautions == ()
    (run / "recipe.toml").write_text(replace(recipe, clip=77.0).to_toml())
    assert "may not be those of this run" in gather(run).cautions[0]
    assert "may not be those of this run" in render_run(gather(run))


def test_a_ledger_that_was_changed_is_refused(tmp_path, recipe):
    run = make_run(tmp_path, recipe)
    content = (run / "ledger.sqlite").read_bytes()
    (run / "ledger.sqlite").write_bytes(content.replace(b"noise_multiplier", b"noise_multiplicr"))
    with pytest.raises((LedgerError, InvalidInput)):
        gather(run)


def test_what_training_said_is_added_to_what_the_folder_shows(full_run):
    said = gather(full_run).guarantee.assumptions
    assert OUTCOME["assumptions"][0] in said
    assert any("AES-128" in line for line in said)


def test_a_seed_is_owned_up_to(tmp_path, recipe):
    run = make_run(tmp_path, recipe, files={"config.toml": '[data]\nsource = "x.csv"\n[run]\nseed = 7\n'})
    assert any("SEEDED (seed 7)" in line for line in gather(run).guarantee.assumptions)


def test_links_pipes_and_huge_files_are_not_read(tmp_path, recipe):
    secret = tmp_path / "secret.jsonl"
    secret.write_text(history())
    run = make_run(tmp_path, recipe)
    (run / "history.jsonl").symlink_to(secret)
    os.mkfifo(run / "outcome.json")
    facts = gather(run)
    assert facts.accuracy == ()
    assert facts.twin_accuracy is None
    (run / "audit.json").write_text("x" * (MOST_BYTES + 1))
    with pytest.raises(InvalidInput, match="more than"):
        gather(run)


def test_a_ledger_that_is_a_link_is_not_read(tmp_path, recipe):
    run = make_run(tmp_path, recipe)
    other = tmp_path / "other"
    other.mkdir()
    (other / "ledger.sqlite").symlink_to(run / "ledger.sqlite")
    with pytest.raises(InvalidInput, match="holds no ledger"):
        gather(other)


def test_a_history_cut_short_is_used_as_far_as_it_goes(tmp_path, recipe):
    lines = '{"step": 4, "accuracy": 0.5}\nnull\n{"step": 8, "accuracy": null}\n{"step": 8, "accuracy": 0.75}\n{"st'
    assert gather(make_run(tmp_path, recipe, files={"history.jsonl": lines})).accuracy == ((4, 0.5), (8, 0.75))


def test_a_bound_that_was_chosen_on_the_way_is_drawn_from_the_history(tmp_path):
    recipe = recipes.dpis(batch_size=64, epochs=1).calibrate(Budget(epsilon=4, delta=1e-5), records=640)
    lines = '{"step": 4, "accuracy": null, "clip": 0.5}\n{"step": 8, "accuracy": null, "clip": 0.25}\n'
    facts = gather(make_run(tmp_path, recipe, files={"history.jsonl": lines}))
    assert facts.clip == ((4, 0.5), (8, 0.25))
    assert "The most that one record’s gradient may weigh." in render_run(facts)
    assert "may weigh." not in render_run(replace(facts, clip=()))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"audit.json": "[1]"}, "must hold a JSON object"),
        ({"audit.json": '{"passed": true}'}, "has no attacks"),
        ({"outcome.json": "{"}, "is not JSON"),
        ({"config.toml": "= 3"}, "is not a TOML document"),
        ({"recipe.toml": 'part = "os.system"'}, "part='os.system' is not known"),
    ],
)
def test_damaged_files_are_named_in_one_line(tmp_path, recipe, files, words):
    run = make_run(tmp_path, recipe, files=files)
    with pytest.raises(InvalidInput, match=words) as caught:
        gather(run)
    assert "\n" not in str(caught.value)


def test_without_a_budget_delta_must_come_from_somewhere(tmp_path):
    recipe = recipes.dpsgd(batch_size=50, steps=5, noise_multiplier=2.0).for_records(1000)
    assert gather(make_run(tmp_path, recipe)).guarantee.delta == pytest.approx(1e-4)
    (tmp_path / "run" / "recipe.toml").unlink()
    with pytest.raises(InvalidInput, match="use --delta"):
        gather(tmp_path / "run")
    facts = gather(tmp_path / "run", delta=1e-6)
    assert facts.recipe is None
    assert [noise for _, noise in facts.noise] == [2.0, 2.0]
    assert "The folder holds no recipe" in render_run(facts)


@pytest.mark.parametrize("name", ["dynamic", "dpis", "dpsur", "jl"])
def test_every_kind_of_recipe_has_a_report(tmp_path, name):
    extra = {"projections": 30} if name == "jl" else {}
    if name == "dpis":
        recipe = recipes.dpis(batch_size=64, epochs=1).calibrate(Budget(epsilon=4, delta=1e-5), records=640)
    else:
        recipe = getattr(recipes, name)(batch_size=64, steps=10, noise_multiplier=2.0, **extra).for_records(640)
    facts = report(make_run(tmp_path, recipe), tmp_path / "page.html")
    tariff = Tariff(facts.guarantee.delta, facts.guarantee.accountant)
    assert facts.guarantee.epsilon == tariff.price(recipe.plan())
    assert facts.noise
    assert 15_000 < (tmp_path / "page.html").stat().st_size < 90_000
    assert f"{mechanisms.find(name).sentence}." in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_run_that_spent_nothing_or_everything(tmp_path, recipe):
    nothing = gather(make_run(tmp_path, recipe, name="nothing", events=0))
    assert nothing.guarantee.epsilon == 0
    assert "ε = 0.00" in render_run(nothing)
    assert not nothing.finished
    run = tmp_path / "everything"
    run.mkdir()
    with Ledger.create(run / "ledger.sqlite") as ledger:
        ledger.charge(GaussianDpEvent(0.0))
    everything = gather(run, delta=1e-5)
    assert math.isinf(everything.guarantee.epsilon)
    assert "No record is protected" in render_run(everything)


def test_a_failed_audit_is_shown_as_such(tmp_path, recipe):
    broken = {**AUDIT["mechanism"], "passed": False, "findings": ["two draws, one event"]}
    page = render_run(gather(make_run(tmp_path, recipe), audit=broken))
    assert "REFUTED" in page
    assert "two draws, one event" in page
    assert "not refuted" not in page


def test_odd_values_in_an_audit_stay_words(tmp_path, recipe):
    odd = {"passed": "yes", "confidence": None, "attacks": [3, {"epsilon_claimed": None}], "findings": 5}
    page = render_run(gather(make_run(tmp_path, recipe), audit=odd))
    assert "REFUTED" in page


def test_replacement_is_not_called_removal(full_run):
    facts = gather(full_run)
    page = render_run(replace(facts, guarantee=replace(facts.guarantee, adjacency="replace-one")))
    assert "replacing one record by any other" in page
    assert "adding or removing" not in page


def test_an_unknown_basis_is_the_weakest(tmp_path, recipe):
    assert gather(make_run(tmp_path, recipe, header={"basis": "trust me"})).guarantee.basis == "published"


def test_long_histories_and_many_noises_make_no_long_page(tmp_path, recipe):
    long = "".join(f'{{"step": {step // 60}, "accuracy": 0.5}}\n' for step in range(20_000))
    run = make_run(tmp_path, recipe, files={"history.jsonl": long})
    (run / "recipe.toml").unlink()
    with Ledger.open(run / "ledger.sqlite") as ledger:
        for k in range(300):
            ledger.charge(GaussianDpEvent(500.0 + k))
    facts = gather(run, delta=1e-5)
    assert facts.accuracy[0][0] == 0
    assert facts.accuracy[-1][0] == 333
    assert facts.noise[-1] == (340.0, 799.0)
    assert len(render_run(facts)) < 80_000
