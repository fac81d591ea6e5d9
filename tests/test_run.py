"""What a run says of itself, in Python, ledger and report: the plan, who is not protected, whose parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent
from torch import Tensor

from sordino import Budget
from sordino.accounting import Ledger, plans
from sordino.accounting.pricing import epsilon
from sordino.errors import InvalidInput
from sordino.noise import Seeded
from sordino.parts import Draw, Flat
from sordino.report.facts import gather
from sordino.run import HELD_OUT, announce_together
from sordino.tables import preparing, release
from sordino.tables.schema import Category, Schema, describe_header
from sordino.tables.table import Table
from tests.helpers import budgeted, private
from tests.runs import make_run


def _take(run, steps: int) -> None:
    for _ in range(steps):
        run.step()


def test_a_run_that_somebody_stops_is_priced_by_its_plan_everywhere(tmp_path: Path) -> None:
    recipe = budgeted()
    with private(recipe, run=tmp_path / "run") as run:
        assert run.guarantee().epsilon == 0
        _take(run, 3)
        stopped, prefix = run.guarantee(), run.guarantee(stopped="in advance")
        run.save()
    assert stopped.epsilon == pytest.approx(recipe.price(1e-5))
    assert any("3 of 10 events are spent" in line for line in stopped.assumptions)
    [(event, _)] = recipe.plan()
    assert prefix.epsilon == epsilon([(event, 3)], 1e-5) < stopped.epsilon
    assert plans.IN_ADVANCE in prefix.assumptions
    assert gather(tmp_path / "run").guarantee.epsilon == stopped.epsilon
    (tmp_path / "run" / "recipe.toml").unlink()
    assert gather(tmp_path / "run", delta=1e-5).guarantee.epsilon == stopped.epsilon, "the ledger alone knows the plan"


def test_a_finished_run_says_nothing_about_stopping() -> None:
    with private(budgeted()) as run:
        list(run.steps())
        assert run.guarantee() == run.guarantee(stopped="in advance")
        assert not any("plan" in line for line in run.guarantee().assumptions)
        with pytest.raises(InvalidInput, match="stopped='now'"):
            run.guarantee(stopped="now")  # type: ignore[arg-type]


def test_a_resumed_run_keeps_its_plan(tmp_path: Path) -> None:
    recipe = budgeted()
    with private(recipe, run=tmp_path / "run") as run:
        _take(run, 3)
        run.save()
        _take(run, 2)  # lost: charged, but in no checkpoint
    with private(recipe) as again:
        again.load(tmp_path / "run")
        assert again.position == 3
        list(again.steps())
        assert again.guarantee().epsilon <= 2.0, "never above the budget"
        assert len(again.bench.ledger) == 10
    facts = gather(tmp_path / "run")
    assert facts.guarantee.epsilon <= 2.0
    assert facts.proof.events == 10


def test_ledgers_of_version_0_1_are_priced_by_the_recipe_they_began_with(tmp_path: Path) -> None:
    recipe = budgeted()
    run = make_run(tmp_path, recipe, events=4)
    assert gather(run).guarantee.epsilon == pytest.approx(recipe.price(1e-5))
    (run / "recipe.toml").write_text(replace(recipe, steps=5).to_toml())
    facts = gather(run)
    [(event, _)] = recipe.plan()
    assert facts.guarantee.epsilon == epsilon([(event, 4)], 1e-5)
    assert plans.UNPLANNED in facts.guarantee.assumptions


def test_two_runs_on_one_ledger() -> None:
    """Built before the first step they are one plan; the second built after it is a stage, within its budget."""
    together, apart = Ledger.in_memory(), Ledger.in_memory()
    recipe, other = budgeted(epsilon=4.0), replace(budgeted(epsilon=1.0), budget=None)
    first, second = private(recipe, ledger=together), private(other, ledger=together)
    _take(first, 2)
    _take(second, 2)
    assert first.guarantee().epsilon == epsilon([*recipe.plan(), *other.plan()], 1e-5)
    list(private(other, ledger=apart).steps())
    late = private(recipe, ledger=apart)
    list(late.steps())
    expected = epsilon(other.plan(), 1e-5 / 2) + epsilon(plans.declared(apart)[1].events, 1e-5 / 4)
    assert late.guarantee().epsilon == pytest.approx(expected)
    assert late.guarantee().epsilon <= 4.0
    assert any("2 stages" in line for line in late.guarantee().assumptions)


@dataclass(frozen=True)
class Mine(Flat):
    """A weighing that Sordino has not seen."""

    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return super().weights(norms, clip, draw) / 2


def test_a_part_of_ones_own_is_a_condition_in_the_headline(tmp_path: Path) -> None:
    with private(replace(budgeted(), weighing=Mine()), run=tmp_path / "run") as run:
        _take(run, 1)
        told = run.guarantee()
    assert "proven provided that your weighing Mine keeps weight x norm within the clipping bound" in str(told)
    assert gather(tmp_path / "run", delta=1e-5).guarantee.conditions == told.conditions
    with private(budgeted()) as ours:
        assert ours.guarantee().conditions == ()


def test_who_is_not_protected_stands_in_the_headline_and_in_the_ledger(tmp_path: Path) -> None:
    with private(budgeted(), run=tmp_path / "run") as run:
        run.declare("unprotected", HELD_OUT)
        _take(run, 1)
        assert "every training record, but the held-out records are NOT protected" in str(run.guarantee())
    assert gather(tmp_path / "run").guarantee.unprotected == (HELD_OUT,)


def test_a_draft_of_a_schema_does_not_react_to_one_record(tmp_path: Path) -> None:
    """With eight towns a release would take 16 buckets, with nine 32: the draft says neither."""
    drafts = []
    for towns in (8, 9):
        cells, texts = [f"town{k % towns}" for k in range(99)], ["these are five words here"] * 99
        table = Table("t", {"town": cells, "notes": texts, "age": ["3"] * 99, "y": ["a", "b", "a"] * 33})
        preparing.draft_schema(table, "y", tmp_path / f"{towns}.toml")
        drafts.append((tmp_path / f"{towns}.toml").read_text())
    assert drafts[0] == drafts[1]
    assert "buckets" not in drafts[0]


def test_an_earlier_release_without_a_plan_is_a_stage_of_its_own() -> None:
    ledger = Ledger.in_memory()
    ledger.charge(GaussianDpEvent(8.0))
    with private(budgeted(), ledger=ledger) as run:
        list(run.steps())
        assert run.guarantee().epsilon <= 2.0
        assert any("2 stages" in line for line in run.guarantee().assumptions)


def test_the_same_recipe_twice_before_the_first_step_is_two_plans(tmp_path: Path) -> None:
    ledger, recipe = Ledger.in_memory(), replace(budgeted(), budget=None)
    first, _ = private(recipe, ledger=ledger), private(recipe, ledger=ledger)
    _take(first, 1)
    [(event, count)] = recipe.plan()
    assert first.guarantee(1e-5).epsilon == epsilon([(event, 2 * count)], 1e-5)
    with private(recipe) as run:
        run.resume(tmp_path / "run")
        assert len(run.bench.ledger.declared("plan")) == 1, "begun in memory, moved to a folder"


def test_a_table_without_numbers_pays_for_the_scales_it_might_have_needed() -> None:
    """Whether a column holds numbers is read off noised counts: the releases that follow are planned before."""
    cells = [("red", "blue")[k % 2] for k in range(4_000)]
    table = Table("t", {"colour": cells, "y": ["a", "b"] * 2_000})
    budget, schema = Budget(8.0, 1e-6), describe_header(Schema(), ["colour", "y"], "y", None)
    chosen = release.plan_release(schema, 4_000, budget, 0.3)
    recipe = replace(budgeted(), budget=None)
    assert chosen is not None
    ledger = Ledger.in_memory()
    announce_together(ledger, recipe, chosen.events())
    complete = release.release(table, "y", schema, chosen, ledger, Seeded(0))
    assert isinstance(complete.columns["colour"], Category)
    planned = sum(count for _, count in chosen.events())
    assert len(ledger) == planned - 2, "the scales were not needed"
    with private(recipe, ledger=ledger) as run:
        _take(run, 2)
        assert run.guarantee(1e-5).epsilon == epsilon([*chosen.events(), *recipe.plan()], 1e-5)
        assert len(plans.declared(ledger)) == 1
