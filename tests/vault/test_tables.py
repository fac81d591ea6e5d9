"""Tables on a dataset's budget: everything they release is reserved first, names that may fail by chance included."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
from sklearn.base import clone

from sordino import Budget
from sordino.accounting.events import ComposedDpEvent, GaussianDpEvent, count_alike
from sordino.accounting.ledger import Ledger
from sordino.accounting.unlisted import Unlisted
from sordino.errors import BudgetExhausted, InvalidInput, LedgerError
from sordino.tables.estimators import PrivateClassifier, PrivateRegressor
from sordino.tables.files import to_table
from sordino.tables.learning import learn
from sordino.tables.training import Wishes, prepare_table, train_table
from sordino.vault import DatasetBudget, Vault, open_budget
from tests.vault.ledgers import make_vault

NAMED = ComposedDpEvent([GaussianDpEvent(20.0), Unlisted(1e-6)])


def make_records(count: int = 600) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(0)
    x = source.normal(size=(count, 2))
    return x, (x[:, 0] + 0.3 * source.normal(size=count) > 0).astype(int)


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    made = make_vault(tmp_path)
    made.create("patients", Budget(12, 1e-5))
    return made


def open_patients(vault: Vault, name: str = "patients") -> DatasetBudget:
    return open_budget(name, vault.store.place)


def read_events(folder: Path) -> dict[str, int]:
    with Ledger.read(folder / "ledger.sqlite") as ledger:
        return count_alike(ledger.events())


# -- releases that may fail -------------------------------------------------------------------------------------------


def test_what_may_fail_adds_up_to_at_most_what_is_set_aside_for_it(tmp_path: Path) -> None:
    vault = make_vault(tmp_path)
    rule = vault.create("patients", Budget(3, 1e-5)).rule
    assert rule.failing == pytest.approx(2.5e-6)
    assert rule.filter is not None
    assert rule.filter.epsilon(1e-5 - rule.failing) == pytest.approx(3)  # the rest of δ pays for the conversion
    plain, named = count_alike([(GaussianDpEvent(20.0), 2)]), count_alike([(NAMED, 2)])
    assert rule.cost(named) == rule.cost(plain)
    assert rule.allows(named)
    assert not rule.allows(count_alike([(NAMED, 3)]))
    assert rule.measure(named) == pytest.approx(0.8)
    book = Ledger.in_memory(header={"unit": "record"})
    with open_patients(vault).reserve(book) as kept:
        kept.charge(NAMED)
        kept.charge(NAMED)
        with pytest.raises(BudgetExhausted, match=r"sets delta=2\.5e-06 aside"):
            kept.charge(NAMED)
        kept.charge(GaussianDpEvent(20.0))
    assert len(book) == 3
    assert "computed again" in vault.verify("patients")


def test_replacing_a_record_fails_in_two_ways(tmp_path: Path) -> None:
    vault = make_vault(tmp_path)
    rule = vault.create("patients", Budget(3, 1e-5, adjacency="replace-one")).rule
    assert rule.add_failures(count_alike([(NAMED, 1)])) == pytest.approx(2e-6)


# -- training ---------------------------------------------------------------------------------------------------------


def test_a_table_reserves_its_whole_plan_and_what_it_drew_is_what_the_vault_holds(vault: Vault, tmp_path: Path) -> None:
    x, y = make_records()
    model = PrivateClassifier(4.0, delta=1e-5, run=tmp_path / "a", vault=open_patients(vault))
    model.fit(x, y)
    state = vault.state("patients")
    assert state.held == read_events(tmp_path / "a")
    assert [run.status for run in state.runs.values()] == ["settled"]
    assert any("unlisted" in text for text in state.held)  # the names of the classes, under an adaptive budget
    assert "computed again" in vault.verify("patients")
    PrivateRegressor(2.0, delta=1e-5, vault=open_patients(vault)).fit(x, x[:, 1])
    assert len(vault.state("patients").runs) == 2


def test_a_table_that_does_not_fit_is_refused_before_there_is_a_folder(vault: Vault, tmp_path: Path) -> None:
    x, y = make_records()
    before = len(vault.history("patients"))
    with pytest.raises(BudgetExhausted, match="nothing was released"):
        PrivateClassifier(40.0, delta=1e-5, run=tmp_path / "a", vault=open_patients(vault)).fit(x, y)
    owned = {"who": [f"p{i // 2}" for i in range(len(y))], "x": x[:, 0], "y": y.astype(str)}
    ready = prepare_table(to_table(owned), Wishes("y", 4.0, unit="who", per_unit=2, held_out=0.0))
    with pytest.raises(InvalidInput, match="cannot be added up"):
        train_table(ready, tmp_path / "b", vault=open_patients(vault))
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()
    assert len(vault.history("patients")) == before
    vault.create("people", Budget(12, 1e-5), unit="who")
    train_table(ready, tmp_path / "c", vault=open_patients(vault, "people"))
    assert vault.state("people").held == read_events(tmp_path / "c")


def test_one_that_was_killed_stays_counted_whole_and_is_learnt_anew_within_what_is_left(
    vault: Vault, tmp_path: Path
) -> None:
    x, y = make_records()
    table = to_table({"a": x[:, 0], "b": x[:, 1], "y": y.astype(str)})
    ready = prepare_table(table, Wishes("y", 4.0, delta=1e-5, held_out=0.0))
    claims = open_patients(vault)
    killed = DatasetBudget(claims.vault, claims.name)

    def die(done: int, steps: int) -> None:
        raise SystemExit

    patch = pytest.MonkeyPatch()
    patch.setattr("sordino.vault.claims.RunClaim.settle", lambda self, ledger: None)  # nothing is said at the end
    with pytest.raises(SystemExit):
        train_table(ready, tmp_path / "a", die, vault=killed)
    patch.undo()
    held = vault.state("patients").held
    drawn = read_events(tmp_path / "a")
    assert sum(held.values()) > sum(drawn.values())
    with pytest.raises(LedgerError, match="draws on the budget of dataset 'patients'"):
        train_table(ready, tmp_path / "a", resumed=True)
    train_table(ready, tmp_path / "a", resumed=True, vault=open_patients(vault))
    assert vault.state("patients").held == read_events(tmp_path / "a")
    assert "computed again" in vault.verify("patients")


def test_one_that_is_refused_the_second_time_draws_nothing_more(vault: Vault, tmp_path: Path) -> None:
    """A table does not ask before each release: without room for its whole new plan it must not begin."""
    x, y = make_records()
    table = to_table({"a": x[:, 0], "y": y.astype(str)})
    ledger = Ledger.in_memory(header={"unit": "record"})
    learn(table, "y", Budget(4, 1e-5), ledger=ledger, vault=open_patients(vault))
    spent = len(ledger)
    vault.close("patients")
    with pytest.raises(BudgetExhausted, match="closed"):
        learn(table, "y", Budget(4, 1e-5), ledger=ledger, vault=open_patients(vault))
    assert len(ledger) == spent


def test_searches_over_copies_of_an_estimator_draw_on_the_same_budget(vault: Vault) -> None:
    x, y = make_records(300)
    model = PrivateClassifier(4.0, delta=1e-5, classes=[0, 1], vault=open_patients(vault))
    for each in (clone(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each.fit(x, y)
    assert len(vault.state("patients").runs) == 3
    with pytest.raises(BudgetExhausted):
        [clone(model).fit(x, y) for _ in range(20)]
    assert vault.state("patients").rule.allows(vault.state("patients").held)
    assert "computed again" in vault.verify("patients")


def test_a_budget_by_its_name(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = make_records(300)
    monkeypatch.setenv("SORDINO_VAULT", vault.store.place)
    PrivateClassifier(4.0, classes=[0, 1], vault="patients").fit(x, y)
    assert len(vault.state("patients").runs) == 1
