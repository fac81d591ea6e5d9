"""A run is trained once, goes on where it was killed, and never costs more than it may."""

from __future__ import annotations

import json

import pytest
import torch

from sordino.accounting import Ledger
from sordino.claims import FIXED_IN_ADVANCE
from sordino.errors import InvalidInput
from sordino.experiments import read_all, run
from sordino.private import Private
from tests.experiments.cases import small


class Killed(BaseException):
    """Nobody catches this."""


def killed_at(steps: int, monkeypatch) -> None:
    """Let the process die inside its step number `steps`, after it was charged."""
    taken, step = [0], Private.step

    def dying(self):
        taken[0] += 1
        if taken[0] == steps:
            self.bench.charge(self.bench.recipe.terms(self.position, {}).event)
            raise Killed
        return step(self)

    monkeypatch.setattr(Private, "step", dying)


def test_a_row_tells_the_whole_run(tmp_path):
    row = run(small(average=0.5), tmp_path)
    assert 0 < row["accuracy"] <= 1
    assert row["steps"] == row["attempts"] == row["accepted"] == 9
    assert [point["step"] for point in row["curve"]] == [3, 6, 9]
    assert len(row["noise"]) == len(row["clip"]) == 3
    assert 2.9 < row["guarantee"]["epsilon"] <= 3
    assert FIXED_IN_ADVANCE not in row["guarantee"]["assumptions"], "configurations were tuned on what they run on"
    assert any("choosing them on these records" in line for line in row["guarantee"]["assumptions"])
    assert [point["epsilon"] for point in row["curve"]] == sorted(point["epsilon"] for point in row["curve"])
    assert row["curve"][-1]["epsilon"] == pytest.approx(row["guarantee"]["epsilon"])
    assert row["basis"] == "proven"
    assert json.loads(json.dumps(row)) == row
    assert read_all(tmp_path) == [row]


def test_fewer_evaluations_make_the_same_run(tmp_path):
    row = run(small(), tmp_path, evaluations=1)
    assert [point["step"] for point in row["curve"]] == [9]
    assert row["curve"][-1]["accuracy"] == row["accuracy"]
    assert run(small(), tmp_path) == row  # how often one looks is in no label
    assert [point["step"] for point in run(small(seed=1), tmp_path, evaluations=2)["curve"]] == [6, 9]
    with pytest.raises(InvalidInput, match="evaluations=0 must be >= 1"):
        run(small(seed=2), tmp_path, evaluations=0)
    assert not (tmp_path / "runs" / small(seed=2).label).exists()


def test_a_finished_run_is_not_repeated(tmp_path, monkeypatch):
    row = run(small(), tmp_path)
    killed_at(1, monkeypatch)
    assert run(small(), tmp_path) == row
    with pytest.raises(Killed):
        run(small(seed=1), tmp_path)


def test_a_killed_run_goes_on_and_pays_for_what_was_lost(tmp_path, monkeypatch):
    case = small()
    with monkeypatch.context() as patch:
        killed_at(5, patch)
        with pytest.raises(Killed):
            run(case, tmp_path)
    row = run(case, tmp_path)
    assert [point["step"] for point in row["curve"]][:2] == [3, 6]
    assert row["steps"] == 7, "of nine steps one was lost before the kill and one in it"
    assert row["guarantee"]["epsilon"] <= 3
    with Ledger.read(tmp_path / "runs" / case.label / "ledger.sqlite") as ledger:
        assert len(ledger) == 9


def test_checkpoints_go_when_the_result_is_there(tmp_path):
    case = small()
    run(case, tmp_path)
    assert not list((tmp_path / "runs" / case.label).glob("checkpoint-*"))
    assert list((tmp_path / "runs" / case.label).glob("ledger.sqlite"))
    kept = small(seed=1)
    run(kept, tmp_path, keep=True)
    assert list((tmp_path / "runs" / kept.label).glob("checkpoint-*"))


def test_released_statistics_are_paid_from_the_same_budget(tmp_path, monkeypatch):
    features = {"kind": "scatter", "noise": 8.0, "clip": 1.0, "square_clip": 1.0}
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path / "cache"))
    case = small(features=features, model={"name": "linear", "features": 324}, records=120)
    with monkeypatch.context() as patch:
        killed_at(5, patch)
        with pytest.raises(Killed):
            run(case, tmp_path)
    statistics = (tmp_path / "runs" / case.label / "statistics.pt").read_bytes()
    row = run(case, tmp_path)
    assert (tmp_path / "runs" / case.label / "statistics.pt").read_bytes() == statistics, "released once"
    assert row["guarantee"]["epsilon"] <= 3
    plain = run(small(features={"kind": "scatter"}, model=case.model, records=120), tmp_path)
    assert row["noise"][0] > plain["noise"][0], "the statistics cost something"
    with Ledger.read(tmp_path / "runs" / case.label / "ledger.sqlite") as ledger:
        assert len(ledger) == 9 + 2


def test_public_records_are_not_evaluated_on(tmp_path):
    from sordino.experiments import problem_of

    problem = problem_of(small(data={"public": 100}))
    everything = problem_of(small())
    assert len(problem.public[1]) + len(problem.test[1]) == len(everything.test[1]) == 359
    shown = {tuple(image.flatten().tolist()) for image in problem.public[0]}
    held_out = {tuple(image.flatten().tolist()) for image in problem.test[0]}
    assert not shown & held_out


def test_the_learning_rate_follows_the_position(tmp_path, monkeypatch):
    rates = []
    step = Private.step

    def watching(self):
        rates.append(self.bench.optimizer.param_groups[0]["lr"])
        return step(self)

    monkeypatch.setattr(Private, "step", watching)
    run(small(optimizer={"kind": "sgd", "lr": 0.9, "decay": "linear"}), tmp_path)
    assert torch.allclose(torch.tensor(rates), torch.linspace(0.9, 0.1, 9))
    with pytest.raises(InvalidInput, match="decay"):
        run(small(optimizer={"kind": "sgd", "lr": 0.9, "decay": "sudden"}), tmp_path)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dataset": "nix"}, "data="),
        ({"model": {"name": "nix"}}, "model="),
        ({"model": {"name": "linear", "colour": 1}}, "model=linear"),
        ({"recipe": {"name": "nix"}}, "recipe="),
        ({"recipe": {"name": "dpsgd", "colour": 1}}, "recipe dpsgd"),
        ({"optimizer": {"kind": "nix"}}, "optimizer"),
        ({"features": {"kind": "nix"}}, "kind"),
        ({"features": {"kind": "scatter", "colour": 1}}, "colour"),
        ({"data": {"public": 300}}, "public"),
    ],
)
def test_refusals_are_one_line(tmp_path, changes, word):
    with pytest.raises(InvalidInput, match=word) as refused:
        run(small(**changes), tmp_path)
    assert "\n" not in str(refused.value)
