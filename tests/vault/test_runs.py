"""Real trainings on one dataset's budget: `Private(vault=...)`, its folder, its resumption and its report."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sordino import Budget
from sordino.accounting.events import count_alike
from sordino.accounting.ledger import Ledger
from sordino.errors import BudgetExhausted, InvalidInput, LedgerError, LedgerForked
from sordino.vault import DatasetBudget, Vault, open_budget
from tests.helpers import budgeted, calibrated, private
from tests.vault.ledgers import make_vault


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    made = make_vault(tmp_path)
    made.create("patients", Budget(4, 1e-5))
    return made


def open_patients(vault: Vault) -> DatasetBudget:
    return open_budget("patients", vault.store.place)


def test_what_runs_draw_is_what_the_vault_holds(vault: Vault, tmp_path: Path) -> None:
    """One finishes, one stops early, one is killed: the union of ledgers, and of the killed one its whole plan."""
    recipe = calibrated(steps=6, noise_multiplier=2.0)
    with private(recipe, vault=open_patients(vault), run=tmp_path / "a") as run:
        assert sum(vault.state("patients").held.values()) == 6  # before the first step
        assert len(list(run.steps())) == 6
    with private(recipe, vault=open_patients(vault)) as run:
        assert sum(vault.state("patients").held.values()) == 6  # in memory: at the first step
        run.step()
        assert sum(vault.state("patients").held.values()) == 12
    killed = private(recipe, vault=open_patients(vault), run=tmp_path / "c")
    killed.step()
    state = vault.state("patients")
    assert sum(state.held.values()) == 6 + 1 + 6
    assert state.total == state.rule.price(count_alike([(next(iter(recipe.plan()))[0], 13)]))
    assert "computed again" in vault.verify("patients")
    killed.run.ledger.close()


def test_a_run_that_does_not_fit_is_refused_before_there_is_anything(vault: Vault, tmp_path: Path) -> None:
    before = len(vault.history("patients"))
    with pytest.raises(BudgetExhausted, match="nothing was released"):
        private(calibrated(steps=50, noise_multiplier=0.6), vault=open_patients(vault), run=tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert len(vault.history("patients")) == before


def test_noise_that_can_be_repeated_has_no_place_in_a_promise(vault: Vault, tmp_path: Path) -> None:
    from sordino.noise import Seeded

    for options in ({"seed": 3}, {"seed": None, "source": Seeded(3)}):
        with pytest.raises(InvalidInput, match="leave the seed out"):
            private(calibrated(steps=2), vault=open_patients(vault), run=tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()
    assert len(vault.history("patients")) == 1


def test_in_memory_it_is_refused_at_its_first_step(vault: Vault) -> None:
    run = private(calibrated(steps=50, noise_multiplier=0.6), vault=open_patients(vault))
    with pytest.raises(BudgetExhausted, match="nothing was released"):
        run.step()
    assert len(run.run.ledger) == 0


def test_a_run_goes_on_after_a_stop_and_a_kill_within_what_it_holds(vault: Vault, tmp_path: Path) -> None:
    recipe = budgeted(epsilon=1.0, steps=6)
    with private(recipe, vault=open_patients(vault), run=tmp_path / "a") as run:
        run.step()
        run.step()
        run.save()
    assert sum(vault.state("patients").held.values()) == 2
    again = private(recipe, vault=open_patients(vault))
    again.load(tmp_path / "a")
    assert sum(vault.state("patients").held.values()) == 6
    again.step()
    again.run.ledger.close()  # killed
    last = private(recipe, vault=open_patients(vault))
    last.load(tmp_path / "a")  # from the checkpoint after two steps: one is repeated, within the run's own budget
    steps = len(list(last.steps()))
    last.close()
    assert steps == 3
    assert sum(vault.state("patients").held.values()) == 6
    with Ledger.read(tmp_path / "a" / "ledger.sqlite") as ledger:
        assert count_alike(ledger.events()) == dict(vault.state("patients").held)


def test_a_run_is_not_continued_behind_the_back_of_its_vault(vault: Vault, tmp_path: Path) -> None:
    recipe = calibrated(steps=4, noise_multiplier=2.0)
    with private(recipe, vault=open_patients(vault), run=tmp_path / "a") as run:
        run.step()
        run.save()
    with pytest.raises(LedgerError, match="draws on the budget of dataset 'patients'"):
        private(recipe).load(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    with pytest.raises(LedgerForked, match="is a copy"):
        private(recipe, vault=open_patients(vault)).load(tmp_path / "copy")


def test_a_ledger_that_was_put_back_is_not_settled(vault: Vault, tmp_path: Path) -> None:
    """In the same file, so that it is no copy: the run's own checkpoint has seen more."""
    from typer.testing import CliRunner

    from sordino.cli import app

    run = private(calibrated(steps=6, noise_multiplier=2.0), vault=open_patients(vault), run=tmp_path / "a")
    run.step()
    path = tmp_path / "a" / "ledger.sqlite"
    early = path.read_bytes()
    run.step()
    run.save()
    run.run.ledger.close()  # killed
    path.write_bytes(early)
    words = ["budget", "settle", str(tmp_path / "a"), "--vault", vault.store.place]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "knows of 2 events" in refused.stderr
    assert sum(vault.state("patients").held.values()) == 6


def test_saving_later_moves_the_ledger_and_keeps_the_claim(vault: Vault, tmp_path: Path) -> None:
    with private(calibrated(steps=4, noise_multiplier=2.0), vault=open_patients(vault)) as run:
        run.step()
        run.save(tmp_path / "a")
        run.step()
    state = vault.state("patients")
    assert sum(state.held.values()) == 2
    assert [entry.kind for entry in vault.history("patients")] == ["create", "reserve", "settle"]


def test_steps_in_blocks_stay_within_the_reservation(vault: Vault, tmp_path: Path) -> None:
    """A run reserves steps in its own ledger too; what it never took of them is returned as well."""
    with private(calibrated(steps=60, noise_multiplier=4.0), vault=open_patients(vault), run=tmp_path / "a") as run:
        for _ in range(40):
            run.step()
    assert sum(vault.state("patients").held.values()) == 40


def test_the_report_states_the_datasets_total_beside_its_own(vault: Vault, tmp_path: Path) -> None:
    from sordino.report.facts import gather
    from sordino.report.vault_page import render_page

    with private(budgeted(epsilon=1.0, steps=3), vault=open_patients(vault), run=tmp_path / "a") as run:
        list(run.steps())
        run.save()
    facts = gather(tmp_path / "a", brief=True)
    assert facts.dataset is not None
    assert facts.dataset["dataset"] == "patients"
    assert facts.dataset["epsilon"] == pytest.approx(vault.state("patients").total)
    page = render_page(vault, links={facts.proof.run_id: "0123456789abcdef"}).html
    assert "patients" in page
    assert 'href="run/0123456789abcdef"' in page
    assert "Verified: 3 entries" in page
