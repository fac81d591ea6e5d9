"""A search on a table: one survey, trials that cost exactly what was charged, and an ordinary run at its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from torch import Tensor

from sordino.accounting import Ledger
from sordino.accounting.events import GaussianDpEvent
from sordino.accounting.ledger import Receipt
from sordino.accounting.plans import bill_ledger
from sordino.accounting.selection import Selection
from sordino.books import LEDGER
from sordino.errors import BudgetExhausted, InvalidInput
from sordino.noise import Secure
from sordino.searching import of_tables, search, trials
from sordino.searching.of_tables import ENCODER, plan_table_search, plan_trial, rate_records, tune_table
from sordino.tables.encoder import Encoder
from sordino.tables.learning import fit_encoded
from sordino.tables.predicting import load_model
from sordino.tables.table import Table
from sordino.tables.training import Ready, Wishes, prepare_table

RECORDS = 1500


def make_table() -> Table:
    rng = np.random.default_rng(0)
    age, town = rng.normal(50, 15, RECORDS), rng.integers(0, 3, RECORDS)
    sick = age + 10 * (town == 1) + rng.normal(0, 8, RECORDS) > 53
    columns = {
        "age": [f"{value:.1f}" for value in age],
        "town": [("Bern", "Rome", "Oslo")[place] for place in town],
        "outcome": [("no", "yes")[int(one)] for one in sick],
    }
    return Table("people", columns)


def get_ready(**more: Any) -> Ready:
    return prepare_table(make_table(), Wishes("outcome", 4.0, **more))


@pytest.fixture(scope="module")
def ready() -> Ready:
    return get_ready()


@pytest.fixture(autouse=True)
def _few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "find_memory", lambda: None)
    monkeypatch.setattr(search, "draw_count", lambda cost, source: 3)


def test_a_search_ends_in_an_ordinary_run(ready: Ready, tmp_path: Path) -> None:
    planned = plan_table_search(ready, expected_trials=8)
    fitted, winner = tune_table(planned, tmp_path)
    assert 3.95 < winner.guarantee.epsilon <= 4.0
    assert winner.guarantee.unprotected == ()
    assert winner.alone < 3
    with Ledger.read(tmp_path / LEDGER) as ledger:
        names = [type(event).__name__ for event, _ in ledger.events()]
        assert names[-1] == Selection.__name__
        assert bill_ledger(ledger).epsilon(ready.budget.delta) == pytest.approx(winner.guarantee.epsilon)
        assert len(ledger) == 3
    held = ready.sheet.held_out
    loaded = load_model(tmp_path)
    np.testing.assert_allclose(loaded.predict_proba(held), fitted.learned.predict_proba(held), atol=1e-6)
    assert not (tmp_path / ENCODER).exists()


@pytest.mark.parametrize("settings", [{}, {"steps": 7}, {"steps": 200, "residual": 0.4, "columns": 3}])
def test_every_trial_costs_what_was_charged(ready: Ready, settings: dict[str, Any]) -> None:
    planned = plan_table_search(ready, expected_trials=8)
    plan = plan_trial(planned.base, planned.cost, settings)
    releases = plan.events()[len(planned.base.survey.events()) :]
    assert planned.cost.covers_trial([*releases, *planned.cost.score_event])
    bolder = replace(plan, step_noise=plan.step_noise * 0.999).events()[len(planned.base.survey.events()) :]
    assert not planned.cost.covers_trial([*bolder, *planned.cost.score_event])


def test_a_killed_search_keeps_its_survey(ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fit_encoded
    calls: list[int] = []

    def stop_at_the_second(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fit(*arguments)

    monkeypatch.setattr(of_tables, "fit_encoded", stop_at_the_second)
    planned = plan_table_search(ready, expected_trials=8)
    with pytest.raises(KeyboardInterrupt):
        tune_table(planned, tmp_path)
    tune_table(plan_table_search(ready, expected_trials=8), tmp_path)
    assert len(calls) == 4  # the second trial began anew
    with Ledger.read(tmp_path / LEDGER) as ledger:
        assert len(ledger) == 3
        assert bill_ledger(ledger).epsilon(ready.budget.delta) <= 4.0


def test_a_survey_that_was_killed_is_not_paid_twice(
    ready: Ready, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def charge_and_stop(table: Table, plan: Any, ledger: Ledger, source: Any) -> Encoder:
        ledger.charge(plan.events()[0][0])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(of_tables, "survey", charge_and_stop)
        with pytest.raises(KeyboardInterrupt):
            tune_table(plan_table_search(ready, expected_trials=8), tmp_path)
    with pytest.raises(BudgetExhausted, match="start a new search"):
        tune_table(plan_table_search(ready, expected_trials=8), tmp_path)


def test_figures_cost_their_part_and_public_scores_protect_nobody() -> None:
    shown = tune_table(plan_table_search(get_ready(metrics_epsilon=0.8), expected_trials=8))[0].learned
    assert shown.figures is not None
    assert shown.figures.released
    assert shown.guarantee.epsilon <= 4.0
    assert shown.guarantee.unprotected == ()
    public = tune_table(plan_table_search(get_ready(), expected_trials=8, public_score=True))[0].learned
    assert public.figures is not None
    assert not public.figures.released
    assert public.guarantee.unprotected == ("the held-out records",)


class Listening(Secure):
    """A source that notes what was charged for each release, and the deviation that was drawn."""

    heard: ClassVar[list[tuple[float, float]]] = []

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        if isinstance(receipt.event, GaussianDpEvent):
            self.heard.append((receipt.event.noise_multiplier, std))
        return super().gaussian(receipt, size, std)


def test_figures_and_scores_of_units_have_the_noise_that_was_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit of three records moves the figures by 3, and the score, which divides by 3, by 1."""
    owners = [f"person {place // 3}" for place in range(RECORDS)]
    table = Table("people", {**make_table().columns, "person": owners})
    wishes = Wishes("outcome", 8.0, metrics_epsilon=2.0, unit="person", per_unit=3)
    planned = plan_table_search(prepare_table(table, wishes), expected_trials=8)
    monkeypatch.setattr(of_tables, "Secure", Listening)
    monkeypatch.setattr(trials, "Secure", Listening)
    sums: list[float] = []
    add = trials.add_noise

    def note(source: Any, receipt: Receipt, value: Tensor, std: float) -> Tensor:
        sums.append(float(value.sum()))
        return add(source, receipt, value, std)

    monkeypatch.setattr(trials, "add_noise", note)
    Listening.heard.clear()
    tune_table(planned)
    figures, score = planned.base.figures_noise, planned.cost.score_noise
    assert figures is not None
    assert score is not None
    assert Listening.heard[-1] == (figures, pytest.approx(3 * figures))
    assert [pair for pair in Listening.heard if pair[0] == score] == [(score, pytest.approx(score))] * 3
    held = len(planned.ready.sheet.held_out)
    assert all(held / 9 < total < held / 3 for total in sums)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"lr": [0.1]}, "'lr', which the learner of tables does not have"),
        ({"residual": [2.0]}, "residual=2 of the space"),
        ({"steps": [0]}, "steps=0 of the space"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(ready: Ready, space: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        plan_table_search(ready, space)


def test_without_held_out_records_there_is_no_score() -> None:
    with pytest.raises(InvalidInput, match="leaves no records to score"):
        plan_table_search(get_ready(held_out=0.0))


def test_a_score_lies_between_zero_and_one(ready: Ready) -> None:
    fitted, _ = tune_table(plan_table_search(ready, expected_trials=8))
    encoder = fitted.learned.encoder
    wild = np.array([[1e9], [-1e9], [0.0]])
    for target in (0.0, 1.0):
        values = rate_records(wild, np.full((3, 1), target), encoder)
        assert ((values >= 0) & (values <= 1)).all()
    value = rate_records(np.array([[1e9], [0.0]]), np.zeros((2, 1)), replace(encoder, classes=()))
    assert value.tolist() == [0.0, 1.0]
