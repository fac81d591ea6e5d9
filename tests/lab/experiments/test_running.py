"""A run is trained once, goes on where it was killed, never costs more than it may, and averages what it says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from sordino.accounting import Ledger, pricing
from sordino.errors import InvalidInput
from sordino.lab.experiments import read_all, run
from sordino.lab.experiments.running import Average
from sordino.private import Private
from sordino.run import FIXED_IN_ADVANCE
from tests.lab.experiments.cases import small


class Killed(BaseException):
    """Nobody catches this."""


def killed_at(steps: int, monkeypatch) -> None:
    """Let the process die inside its step number `steps`, after it was charged."""
    taken, step = [0], Private.step

    def dying(self):
        taken[0] += 1
        if taken[0] == steps:
            self.bench.charge(self.bench.recipe.terms(self.position).event)
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


def test_published_accounting_beside_released_statistics(tmp_path, monkeypatch):
    """Its ledger leaves out what is rejected, so that the statistics have one of their own; ε is that of both."""
    features = {"kind": "scatter", "noise": 8.0, "clip": 1.0, "square_clip": 1.0}
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path / "cache"))
    recipe = {"name": "dpsur", "batch_size": 30, "steps": 3, "clip": 0.1, "noise_multiplier": 4.0}
    recipe |= {"validation_size": 30, "validation_noise": 5.0}
    case = small("dpsur", features=features, model={"name": "linear", "features": 324}, records=120, recipe=recipe)
    row = run(replace(case, accounting="published", epsilon=8.0), tmp_path)
    assert row["basis"] == "published"
    place = tmp_path / "runs" / row["label"]
    with Ledger.read(place / "statistics.sqlite") as apart, Ledger.read(place / "ledger.sqlite") as own:
        assert len(apart) == 2
        alone = pricing.epsilon(own.events(), case.delta, row["guarantee"]["accountant"])
    assert alone < row["guarantee"]["epsilon"] <= 8.0, "the statistics are in it"


def test_public_records_are_not_evaluated_on(tmp_path):
    from sordino.lab.experiments import problem_of

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


def iterates(count: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(3, 2) for _ in range(count)]


def test_the_mean_of_the_last_share():
    models, average = iterates(10), Average(0.4, 10)
    for step, model in enumerate(models):
        average.observe(model, step)
    expected = torch.stack([model.weight for model in models[6:]]).mean(0)
    wrong = torch.stack([model.weight for model in models[5:]]).mean(0)
    assert torch.allclose(average.mean["weight"], expected, atol=1e-6)
    assert not torch.allclose(average.mean["weight"], wrong, atol=1e-3)
    assert average.count == 4


def test_a_resumed_mean_is_the_same():
    models, whole, first, second = iterates(10), Average(0.5, 10), Average(0.5, 10), Average(0.5, 10)
    for step, model in enumerate(models):
        whole.observe(model, step)
    for step in range(7):
        first.observe(models[step], step)
    second.restore(first.state())
    for step in range(7, 10):
        second.observe(models[step], step)
    assert torch.allclose(second.mean["bias"], whole.mean["bias"], atol=1e-6)


def test_it_is_installed_only_for_a_while_and_leaves_frozen_parameters_alone():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    average = Average(0.1, 1)
    average.observe(model, 0)
    first = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    with average.installed(model):
        assert torch.equal(model.weight, first)
    assert torch.equal(model.weight, first + 1)
    assert set(average.mean) == {"weight"}


def test_without_a_share_nothing_is_averaged():
    average = Average(0.0, 5)
    for step in range(5):
        average.observe(nn.Linear(3, 2), step)
    assert not average.mean
