"""A search on a dataset's budget: all of it is reserved before it begins, and what was never charged goes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from sordino import Budget, tune
from sordino.errors import BudgetExhausted, InvalidInput, LedgerError
from sordino.searching import Candidate, make_space, search, uniform
from sordino.searching.of_tables import plan_table_search, tune_table
from sordino.vault import DatasetBudget, Vault, open_budget
from tests.helpers import calibrated, private
from tests.searching.test_of_tables import get_ready
from tests.searching.test_search import spend
from tests.vault.ledgers import make_vault

SPACE = make_space({"level": uniform(0, 1)})


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Vault:
    monkeypatch.setattr(search, "find_memory", lambda: None)
    monkeypatch.setattr(search, "draw_count", lambda cost, source: 2)
    made = make_vault(tmp_path)
    made.create("patients", Budget(12, 1e-4))
    return made


def open_patients(vault: Vault) -> DatasetBudget:
    return open_budget("patients", vault.store.place)


def test_a_search_is_one_event_of_the_datasets_budget(vault: Vault, tmp_path: Path) -> None:
    won = tune(spend, SPACE, Budget(3, 1e-5), expected_trials=8, run=tmp_path / "a", vault=open_patients(vault))
    held = vault.state("patients").held
    assert list(held.values()) == [1]
    assert "selection" in next(iter(held))
    assert won.guarantee.epsilon <= 3
    assert 0 < vault.state("patients").total <= 12
    assert "computed again" in vault.verify("patients")


def test_a_search_without_room_is_refused_before_there_is_anything(vault: Vault, tmp_path: Path) -> None:
    big = Budget(30, 1e-5)
    with pytest.raises(BudgetExhausted, match="nothing was released"):
        tune(spend, SPACE, big, expected_trials=8, run=tmp_path / "a", vault=open_patients(vault))
    assert not (tmp_path / "a").exists()
    assert vault.state("patients").held == {}


def test_a_search_that_is_repeatable_or_goes_on_without_its_vault_is_refused(vault: Vault, tmp_path: Path) -> None:
    small = Budget(3, 1e-5)
    with pytest.raises(InvalidInput, match="seed"):
        tune(spend, SPACE, small, expected_trials=8, vault=open_patients(vault), seed=1)

    def die(trial: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(die, SPACE, small, expected_trials=8, run=tmp_path / "a", vault=open_patients(vault), rehearse=False)
    with pytest.raises(LedgerError, match="give that vault"):
        tune(spend, SPACE, small, expected_trials=8, run=tmp_path / "a")
    assert sum(vault.state("patients").held.values()) == 1
    tune(spend, SPACE, small, expected_trials=8, run=tmp_path / "a", vault=open_patients(vault))
    assert sum(vault.state("patients").held.values()) == 1


def test_a_table_and_its_search_draw_on_the_budget(vault: Vault, tmp_path: Path) -> None:
    planned = plan_table_search(get_ready(delta=1e-6), expected_trials=4, vault=open_patients(vault))
    tune_table(planned, tmp_path / "a")
    state = vault.state("patients")
    assert sum(state.held.values()) == sum(count for _, count in planned.cost.beside) + 1
    assert state.total <= 12


def test_a_trial_draws_on_no_budget_of_its_own(vault: Vault) -> None:
    """Each one's reservation would stay in the vault, and tell how many there were."""

    def objective(trial: Candidate) -> object:
        return private(calibrated(steps=2), vault=open_patients(vault))

    with pytest.raises(InvalidInput, match="vault= has no place in a trial"):
        tune(objective, SPACE, Budget(3, 1e-5), expected_trials=8, rehearse=False)
    assert vault.state("patients").held == {}
