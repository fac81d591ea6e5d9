"""`sordino train --preset best`: the laboratory's best settings as an ordinary run, whose model predicts."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sordino
from sordino.cli import presets
from sordino.cli.config import Config, ModelChoice
from sordino.cli.options import OF_PRESETS
from sordino.errors import CheckpointError, InvalidInput
from sordino.lab import data as benchmarks
from sordino.lab.experiments import model_of, running
from sordino.lab.experiments.cases import catalogue
from sordino.lab.experiments.results import read_shipped
from sordino.tables.reading import DataChoice


@pytest.fixture(scope="module")
def names() -> None:
    try:
        benchmarks.load("names")
    except benchmarks.DataUnavailable as error:
        pytest.skip(str(error))


def test_every_dataset_that_is_offered_has_settings():
    known = catalogue()
    for dataset in OF_PRESETS:
        case = presets.choose_case(known[dataset, "best"], 3.0)
        assert (case.epsilon, case.accounting) == (3.0, "proven")


def test_an_epsilon_between_takes_the_nearest_settings():
    settings = catalogue()["mnist", "best"]
    rates = {epsilon: presets.choose_case(settings, epsilon).optimizer["lr"] for epsilon in (0.5, 1.0, 2.2, 20.0)}
    assert rates == {0.5: 22.0, 1.0: 40.0, 2.2: 70.0, 20.0: 200.0}
    assert presets.choose_case(settings, 2.2).epsilon == 2.2
    with pytest.raises(InvalidInput, match="must be > 0"):
        presets.choose_case(settings, -1.0)


def test_a_run_is_kept_and_predicts(names, tmp_path: Path, sordino_command):
    case = replace(presets.choose_case(catalogue()["names", "best"], 3.0).shortened(600, 4), average=0.5)
    config = Config(data=DataChoice("names"), model=ModelChoice("linear"), preset=presets._to_table(case))
    run = tmp_path / "run"
    presets._train(case, config, run, as_json=True)
    told = json.loads((run / "outcome.json").read_text())
    assert told["epsilon"] <= 3.0
    assert told["unprotected"] == ["the held-out records"]
    (tmp_path / "new.txt").write_text("Rossi\nSmith\n")
    predicted = sordino_command("predict", run, "--data", tmp_path / "new.txt")
    assert predicted.exit_code == 0, predicted.stderr
    assert len(predicted.stdout.splitlines()) == 3
    page = sordino_command("report", run, "--json")
    assert json.loads(page.stdout)["epsilon"] == told["epsilon"]
    again = sordino_command("resume", run, "--json")
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["held_out_accuracy"] == told["held_out_accuracy"], (
        "the same model, and no step more"
    )
    assert json.loads(again.stdout)["events"] == told["events"]
    assert "audit --recipe" in sordino_command("audit", run).stderr
    assert sordino.load(run).predict(["Rossi"]).shape == (1,)


@pytest.fixture
def sordino_command(request):
    return request.getfixturevalue("sordino")


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"name": "linear", "features": 10**12, "classes": 18}},
        {"features": {"kind": "letters", "runs": [2], "buckets": 10**9}},
        {"features": {"kind": "joined", "parts": [[[[[[1]]]]]]}},
        {"dataset": "digits"},
        {"surprise": 1},
    ],
)
def test_a_folder_from_somebody_else_cannot_ask_for_anything(tmp_path, change):
    table = {**presets._to_table(presets.choose_case(catalogue()["names", "best"], 3.0)), **change}
    with pytest.raises(InvalidInput):
        presets.load_preset(tmp_path, table)


@pytest.mark.parametrize("dataset", OF_PRESETS)
def test_what_ships_asks_for_no_more_than_a_folder_may(dataset):
    presets._require_modest(presets._to_table(presets.choose_case(catalogue()[dataset, "best"], 3.0)))


def test_new_texts_have_the_features_that_the_run_counted(tmp_path):
    """What a word is worth was released in the run, and is kept beside its model."""
    case = presets.choose_case(catalogue()["imdb", "best"], 3.0)
    texts = ["a dull film", "a wonderful film", "a wonderful film"]
    shares = torch.zeros(case.data["words"])
    shares[presets.PresetInputs(case, ("bad", "good"))._encode(texts).unique()] = 0.5
    torch.save({"shares": shares}, tmp_path / "statistics.pt")
    rows = presets.PresetInputs(case, ("bad", "good"), running.load_released(case, tmp_path))(texts)
    assert model_of(case)(rows).shape == (3, 2)
    assert rows[1].equal(rows[2])
    assert not rows[0].equal(rows[1])
    assert rows.norm(dim=1).sub(1).abs().max() < 1e-2


@pytest.mark.parametrize("dataset", ["cifar10", "fashion-mnist", "imdb", "mnist"])
def test_classes_are_named_without_the_records(dataset, monkeypatch):
    def refuse(*_, **__):
        raise benchmarks.DataUnavailable("no records here")

    monkeypatch.setattr(benchmarks, "load", refuse)
    case = presets.choose_case(catalogue()[dataset, "best"], 3.0)
    names = presets._name_classes(case)
    assert len(names) == len(set(names)) == case.model["classes"]


@pytest.mark.parametrize("shares", [torch.ones(70), torch.full((65_539,), torch.nan), None])
def test_statistics_that_do_not_fit_are_named_in_one_line(tmp_path, shares):
    case = presets.choose_case(catalogue()["imdb", "best"], 3.0)
    with pytest.raises(InvalidInput, match=r"holds no statistics.pt"):
        running.load_released(case, tmp_path)
    torch.save({"other": torch.ones(1)} if shares is None else {"shares": shares}, tmp_path / "statistics.pt")
    with pytest.raises(CheckpointError, match=r"statistics.pt does not fit the features"):
        running.load_released(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dataset", OF_PRESETS)
def test_it_reaches_the_figures_of_the_documentation(dataset, tmp_path, sordino_command):
    """The mean of the shipped runs at the same ε, within a point: noise is fresh every time."""
    shipped = [
        row["accuracy"]
        for row in read_shipped()
        if (row["dataset"], row["method"], row["epsilon"], row["accounting"]) == (dataset, "best", 3.0, "proven")
    ]
    made = sordino_command(
        "train", "--data", dataset, "--preset", "best", "--epsilon", 3, "--run", tmp_path / "run", "--json"
    )
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["held_out_accuracy"] >= statistics.mean(shipped) - 0.01
    side = 32 if dataset == "cifar10" else 28
    pictures = np.zeros((2, side, side, 3) if dataset == "cifar10" else (2, side, side), dtype=np.uint8)
    texts = dataset in ("imdb", "names")
    assert sordino.load(tmp_path / "run").predict(["Rossi", "Smith"] if texts else pictures).shape == (2,)
