"""What a hostile review of the reorganised core found, each as a test that failed then."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
from dp_accounting import DpEvent, GaussianDpEvent

from sordino import Budget, InvalidInput, Recipe, mechanisms, recipes
from sordino.accounting import plans
from sordino.accounting.ledger import Ledger
from sordino.combinations import Needs
from sordino.distributed.team import Team, mirror_ledger
from sordino.errors import CheckpointError
from sordino.mechanisms.dpis import Importance
from sordino.noise import Independent
from sordino.parts import Exact, Flat, Foreign
from sordino.run import DUTIES, list_conditions
from tests.helpers import budgeted, classification, private


def interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Ctrl-C falls into the next call of this function, and into no other."""
    real = getattr(owner, name)

    def interrupted(*_: object, **__: object) -> None:
        monkeypatch.setattr(owner, name, real)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


def test_an_interrupt_while_a_loaded_run_is_priced_grants_no_budget_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with private(budgeted(), run=tmp_path / "run") as first:
        assert len(list(first.steps())) == 10
    with private(budgeted()) as again:
        interrupt_once(monkeypatch, plans, "room")
        with pytest.raises(KeyboardInterrupt):
            again.load(tmp_path / "run")
        assert list(again.steps()) == []
        assert len(again.run.ledger) == 10


def test_an_interrupt_while_others_charges_are_priced_does_not_hide_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger.in_memory()
    with private(budgeted(epsilon=1.0), ledger=ledger) as run:
        run.step()
        for _ in range(3):
            ledger.charge(GaussianDpEvent(2.0))  # somebody else's
        interrupt_once(monkeypatch, plans, "room")
        with pytest.raises(KeyboardInterrupt):
            run.step()
        assert list(run.steps()) == []


def test_an_interrupted_epoch_of_dpis_keeps_no_bounds_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipes.dpis(batch_size=16, epochs=4, adaptive=True, clip=4.0, quantile=0.05)
    calibrated = recipe.calibrate(Budget(epsilon=20, delta=1e-3), records=160)
    with private(calibrated, dataset=classification(160), lr=0.5) as run:
        for _ in range(10):
            run.step()
        interrupt_once(monkeypatch, Importance, "bounds")
        with pytest.raises(KeyboardInterrupt):
            run.step()
        run.step()
        state = run.bench.states.sampler
        assert state.epoch.number == 1
        assert float(state.bounds.max()) <= state.epoch.clip * (1 + 1e-6)


def test_a_copy_of_a_ledger_keeps_the_order_of_its_events() -> None:
    class Follower(Team):
        size, leads = 2, False  # type: ignore[assignment]

        def lead(self, act: Any) -> Any:
            return act()

    events = [GaussianDpEvent(2.0), GaussianDpEvent(5.0), GaussianDpEvent(2.0)]
    with Ledger.in_memory() as ledger:
        for event in events:
            ledger.charge(event)
        copy = mirror_ledger(Follower(), ledger)
        assert copy is not ledger
        assert [event for _, event in copy.history()] == events


@dataclass(frozen=True)
class Loud(Independent):
    """Noise that costs ten times what independent noise does."""

    def event(self, answer: DpEvent) -> DpEvent:
        assert isinstance(answer, GaussianDpEvent)
        return GaussianDpEvent(answer.noise_multiplier / 10)


def test_every_slot_of_a_recipe_has_a_duty_so_that_own_parts_are_a_condition() -> None:
    slots = {"sampler", "norms", "weighing", "selection", "noise", "clip_schedule", "noise_schedule"}
    assert slots <= {field.name for field in fields(Recipe)}
    assert slots | {"source"} == set(DUTIES)
    assert any("Loud" in line for line in list_conditions(Recipe(noise=Loud()), None))


def test_a_foreign_loader_pays_what_the_noise_says() -> None:
    plain = Recipe(batch_size=8, steps=2, noise_multiplier=1.0, sampler=Foreign()).for_records(64)
    loud = Recipe(batch_size=8, steps=2, noise_multiplier=1.0, sampler=Foreign(), noise=Loud()).for_records(64)
    assert plain.terms(0).event == GaussianDpEvent(0.5)
    assert loud.terms(0).event == GaussianDpEvent(0.05)


@dataclass(frozen=True)
class Mine(Flat):
    """A weighing of the user's own."""


def test_the_fingerprint_of_a_recipe_with_an_own_part_is_that_of_version_0_1() -> None:
    assert Recipe(weighing=Mine()).fingerprint() == "54592bbf8d78f256"


def test_what_norms_of_the_users_own_refused_is_not_accepted_in_silence() -> None:
    class Strict(Exact):
        def check(self, recipe: Recipe) -> None:
            raise InvalidInput("not with this recipe")

    with pytest.raises(InvalidInput, match="needs"):
        Recipe(norms=Strict())


def test_a_part_keeps_the_rules_of_what_it_is_derived_from() -> None:
    class Careful(Flat):
        needs: ClassVar = (Needs("norms", "norms={part!r}: no", refused=(Exact,)),)

    class More(Careful):
        needs: ClassVar = (Needs("selection", "selection={part!r}: no", refused=(int,)),)

    with pytest.raises(InvalidInput, match="norms="):
        Recipe(weighing=More())


def test_two_files_cannot_give_one_name_to_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zz_taken.py").write_text('class Other:\n    pass\n\n\nPARTS = {"Sampler": {"shuffled": Other}}\n')
    monkeypatch.setattr(mechanisms, "__path__", [*mechanisms.__path__, str(tmp_path)])
    with pytest.raises(InvalidInput, match="shuffled"):
        mechanisms.find_parts()


def test_a_run_of_users_is_not_loaded_as_one_of_records(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.sqlite", header={"unit": "user"}):
        pass
    with private(budgeted()) as run, pytest.raises(CheckpointError, match="every user"):
        run.load(tmp_path)
