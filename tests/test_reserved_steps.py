"""Steps paid for in blocks: killed anywhere, nothing is drawn that is not on disk, no receipt is used twice."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sordino import Budget, Private, Recipe, recipes
from sordino.accounting.ledger import Ledger, Receipt
from sordino.errors import LedgerError
from sordino.noise import Secure
from sordino.run import MOST_RESERVED, SHARE
from tests.helpers import budgeted, calibrated, classification, private

STEPS = 6 * SHARE


class Watched(Secure):
    """Secure noise that calls `tell` with every receipt before the noise is drawn."""

    def __init__(self, tell: Callable[[Receipt], None]) -> None:
        super().__init__()
        self.tell = tell

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        self.tell(receipt)
        return super().gaussian(receipt, size, std)


def build(recipe: Recipe, tell: Callable[[Receipt], None], **options: Any) -> Private:
    return private(recipe, source=Watched(tell), validate=False, seed=None, **options)


def read(folder: Path) -> int:
    with Ledger.read(folder / "ledger.sqlite") as ledger:
        return len(ledger)


def test_every_draw_is_on_disk_before_it_is_made_and_writes_become_rare(tmp_path: Path) -> None:
    folder, seen, held = tmp_path / "run", [], []

    def tell(receipt: Receipt) -> None:
        seen.append(receipt.sequence)
        held.append(read(folder))

    run = build(calibrated(steps=STEPS), tell, run=folder)
    for step in run.steps():
        assert len(run.bench.ledger) == step.number
        assert held[-1] - step.number <= min(MOST_RESERVED, step.number // SHARE)
    assert seen == list(range(1, STEPS + 1))
    assert all(on_disk >= number for on_disk, number in zip(held, seen, strict=True))
    assert len(set(held)) < STEPS / 2, "most steps wrote nothing"
    assert held[:SHARE] == seen[:SHARE], "a short run reserves nothing"
    assert read(folder) == STEPS, "nothing is left over at the end of the plan"
    run.close()


def train_until(folder: Path, log: Path, last: int, recipe: Recipe) -> int:
    """Train in a forked process that kills itself when draw number `last` is about to be made; its exit status."""
    child = os.fork()
    if child == 0:
        file, drawn = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 0

        def tell(receipt: Receipt) -> None:
            nonlocal drawn
            drawn += 1
            if drawn == last:
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(file, f"{receipt.sequence}\n".encode())

        try:
            torch.set_num_threads(1)
            run = build(recipe, tell)
            run.resume(folder)
            for _ in run.steps():
                pass
            run.save()
            run.close()
        except Exception:
            traceback.print_exc()  # a child says nothing else of what went wrong
            raise
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks are POSIX's")
@pytest.mark.parametrize("place", [0, 1, 2], ids=["before the first of a block", "in the middle", "after the last"])
def test_killed_around_a_block_nothing_is_under_counted(tmp_path: Path, place: int) -> None:
    """Blocks begin at draws 33, 36, 39, 42, 45 and 48 (two steps along with each), then they are longer."""
    folder, log, recipe = tmp_path / "run", tmp_path / "draws", budgeted(steps=STEPS)
    assert os.WTERMSIG(train_until(folder, log, 2 * SHARE + 1 + place, recipe)) == signal.SIGKILL
    drawn = list(map(int, log.read_text().split()))
    assert drawn == list(range(1, 2 * SHARE + 1 + place))
    lost = read(folder) - len(drawn)
    assert lost == 3 - place, "what was reserved and not drawn is spent, and so is the step under way"
    assert train_until(folder, log, 0, recipe) == 0
    drawn = list(map(int, log.read_text().split()))
    assert len(set(drawn)) == len(drawn), "a receipt was used twice"
    with Ledger.read(folder / "ledger.sqlite") as ledger:
        assert len(ledger) >= len(drawn) + lost
        assert recipe.budget is not None
        assert recipe.budget.allows(ledger.events())


def test_a_run_that_stops_cleanly_and_goes_on_loses_nothing(tmp_path: Path) -> None:
    receipts: list[int] = []
    recipe, folder = budgeted(steps=STEPS), tmp_path / "run"
    for stop in (2 * SHARE + 2, 3 * SHARE + 2, STEPS):
        run = build(recipe, lambda receipt: receipts.append(receipt.sequence))
        run.resume(folder)
        for step in run.steps():
            if step.number == stop:
                break
        run.save()
        run.close()
    assert receipts == list(range(1, STEPS + 1))
    assert read(folder) == STEPS
    run = private(recipe)
    run.load(folder)
    assert not any("beyond" in line or "more than" in line for line in run.guarantee().assumptions)
    run.close()


def test_an_older_ledger_that_gives_back_what_was_used_since_is_not_believed(tmp_path: Path) -> None:
    """Put back after the resumed run had used some: of equal length, so that only the history can tell."""
    recipe, folder = calibrated(steps=STEPS), tmp_path / "run"
    run = build(recipe, lambda receipt: None, run=folder)
    for _ in range(2 * SHARE + 1):
        run.step()
    run.close()
    older = (folder / "ledger.sqlite").read_bytes()
    again = build(recipe, lambda receipt: None)
    again.load(folder)
    assert again.bench.ledger.reserved == 2
    again.step()
    (folder / "history.jsonl").write_text(json.dumps({"step": 1, "events": len(again.bench.ledger)}) + "\n")
    again.close()
    (folder / "ledger.sqlite").write_bytes(older)
    third = build(recipe, lambda receipt: None)
    third.load(folder)
    assert (len(third.bench.ledger), third.bench.ledger.reserved) == (2 * SHARE + 3, 0)
    third.close()


def test_a_block_holds_no_more_than_the_budget_and_the_plan_pay_for(tmp_path: Path) -> None:
    """The budget ends in the middle of what would be a block: the rest of the block is not written."""
    whole = budgeted(steps=STEPS)
    assert whole.budget is not None
    assert whole.noise_multiplier is not None
    cut = Budget(whole.budget.epsilon * 0.8, whole.budget.delta)
    recipe = replace(whole, budget=cut)
    run = build(recipe, lambda receipt: None, run=tmp_path / "run")
    taken = sum(1 for _ in run.steps())
    assert 2 * SHARE < taken < STEPS
    assert read(tmp_path / "run") == taken, "what is not paid for is not reserved"
    assert cut.allows(run.bench.ledger.events())
    run.close()


def test_a_full_disk_at_a_reservation_releases_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="limits of the size of files are POSIX's")
    run = build(calibrated(steps=STEPS), lambda receipt: None, run=tmp_path / "run")
    while run.bench.ledger.reserved == 0:
        run.step()
    while run.bench.ledger.reserved:
        run.step()
    before, position = [p.detach().clone() for p in run.bench.objective.parameters()], run.position
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(LedgerError, match="cannot be used"):
            run.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(map(torch.equal, run.bench.objective.parameters(), before))
    assert read(tmp_path / "run") == run.position == position
    for _ in run.steps():
        pass
    assert read(tmp_path / "run") == STEPS
    run.close()


def test_two_runs_on_one_ledger_reserve_nothing_against_each_other() -> None:
    """The second run's charges are others than those that the first reserved: one block is lost, and no more."""
    ledger = Ledger.in_memory()
    first = private(calibrated(steps=STEPS), ledger=ledger)
    for _ in range(2 * SHARE + 1):
        first.step()
    assert ledger.reserved == 2
    second = private(calibrated(steps=STEPS, noise_multiplier=2.0), ledger=ledger)
    for _ in range(2 * SHARE):
        first.step()
        second.step()
    assert len(ledger) == 6 * SHARE + 1 + 1, "of the two one was used first"
    assert (ledger.reserved, ledger.forfeits) == (0, 1)


def test_a_budget_knows_what_another_run_took_from_the_reservation() -> None:
    """Two runs of one recipe draw on the same reserved charges: each sees what the other has spent."""
    recipe, ledger = budgeted(steps=4 * SHARE), Ledger.in_memory()
    runs = [private(recipe, ledger=ledger, seed=None) for _ in range(2)]
    for _ in range(4 * SHARE):
        for run in runs:
            for _ in run.steps():
                break
    assert recipe.budget is not None
    assert recipe.budget.allows(ledger.events())


OWN: dict[str, dict[str, Any]] = {
    "noise_decay": {"epochs": 7.5},
    "dpsur": {"steps": 30, "validation_size": 16},
    "dpagd": {"steps": 30, "validation_size": 16},
    "dpis": {"epochs": 7.5},
    "screening": {"steps": 30, "public": classification(8), "public_name": "other records"},
}
"""What the constructors of recipes ask for besides a batch size."""


LENGTHY = ("noise_decay", "dynamic", "jl", "growing_mu", "sensitivity_decay")
"""The prices of their plans take long; they foresee in the way of others."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LENGTHY else ()) for name in dir(recipes)]
)
def test_what_a_recipe_foresees_is_what_its_steps_are_charged(name: str) -> None:
    options = OWN.get(name, {"steps": 6})
    recipe = getattr(recipes, name)(batch_size=16, **options).calibrate(Budget(epsilon=8, delta=1e-5), records=64)
    foreseen = recipe.foresee(0, 100)
    by_cycles = name in ("allocation", "banded")
    unforeseen = recipe.rdp_filter is not None or not recipe.selection.constant or by_cycles
    assert len(foreseen) == (0 if unforeseen else recipe.steps)
    run = private(recipe)
    for _ in range(4):
        run.step()
    assert foreseen[:4] in ([], [event for _, event in run.bench.ledger.history()])
