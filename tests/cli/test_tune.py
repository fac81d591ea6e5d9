"""`sordino tune`: from a file to a run that predicts and reports, and says what the search cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from sordino.cli import describing
from sordino.searching import search
from sordino.searching.sealing import STATE

RECORDS = 1500


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    age, town = rng.normal(50, 15, RECORDS), rng.choice(["Bern", "Rome"], RECORDS)
    sick = age + rng.normal(0, 8, RECORDS) > 53
    path = tmp_path_factory.mktemp("people") / "people.csv"
    rows = [f"{a:.1f},{t},{'yes' if s else 'no'}" for a, t, s in zip(age, town, sick, strict=True)]
    path.write_text("\n".join(["age,town,outcome", *rows]) + "\n")
    return path


@pytest.fixture(autouse=True)
def _two_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "draw_count", lambda cost, source: 2)


def test_a_table_is_searched_and_used(people: Path, tmp_path: Path, sordino: Callable[..., Result]) -> None:
    run, space = tmp_path / "run", tmp_path / "space.toml"
    space.write_text("rate = [0.05, 0.1]\nsteps = { low = 20, high = 60, whole = true }\n")
    options = ["--data", people, "--target", "outcome", "--epsilon", 4, "--run", run]
    said = sordino("tune", *options, "--space", space, "--expected-trials", 6)
    assert said.exit_code == 0, (said.stderr, said.exception)
    assert "Searched: rate: 0.05, 0.1; steps: 20 to 60, whole" in said.stdout
    assert "do not quote that" in said.stdout
    assert "the exact number is secret" in said.stderr
    assert "sordino report" in said.stdout
    assert "sordino audit" in said.stdout
    told = json.loads((run / "outcome.json").read_text())
    assert told["epsilon"] <= 4
    assert told["search"]["epsilon_of_one_trial"] < told["epsilon"]
    assert told["search"]["settings"]["rate"] in (0.05, 0.1)
    assert told["unprotected"] == []
    assert told["seconds"] == 0
    assert len({path.stat().st_mtime for path in run.iterdir()}) == 1
    assert sordino("predict", run, "--data", people, "--out", tmp_path / "new.csv").exit_code == 0
    assert sordino("report", run).exit_code == 0
    page = (run / "report.html").read_text()
    assert "settings were searched on these records" in page
    assert "NOT protected" not in page
    assert sordino("verify", run).exit_code == 0
    assert "nothing left to do" in sordino("resume", run).stdout
    audited = sordino("audit", run)
    assert audited.exit_code == 0, (audited.stderr, audited.exception)
    assert "none moved by more than the ledger pays for" in audited.stdout
    assert "trials that lost were forgotten" in audited.stdout
    assert "at δ = 1e-05" in sordino("account", run).stdout  # the budget in the plan names it
    (run / "outcome.json").write_text('{"search": {"settings": {}}}')
    assert "does not say what was searched" in sordino("audit", run).stderr
    assert "holds a run already" in sordino("tune", *options).stderr


@pytest.fixture
def images(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 2, 80)
    pixels = rng.uniform(0, 60, (80, 1, 8, 8))
    pixels[classes == 1, :, :4] += 150
    path = tmp_path / "images.npz"
    np.savez(path, x=pixels, y=classes)
    return path


def test_features_are_computed_once_for_all_trials(
    images: Path, tmp_path: Path, sordino: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    scatter = describing.KINDS["scattering"]

    def count(pictures: Any, folder: Any) -> Any:
        seen.append(len(pictures))
        return scatter(pictures, folder)

    monkeypatch.setitem(describing.KINDS, "scattering", count)
    run, space = tmp_path / "run", tmp_path / "space.toml"
    space.write_text("lr = [1.0, 2.0]\n")
    options = ["--data", images, "--scale", 255, "--features", "scattering", "--batch-size", 16, "--steps", 2]
    said = sordino("tune", *options, "--epsilon", 8, "--run", run, "--space", space, "--expected-trials", 3)
    assert said.exit_code == 0, (said.stderr, said.exception)
    assert "none (trials were scored with noise" in said.stdout
    assert len(seen) == 2  # of those to train on and those held out, whatever the number of trials
    assert sum(seen) == 80
    assert 'features = "scattering"' in (run / "config.toml").read_text()
    assert 'name = "linear"' in (run / "config.toml").read_text()
    assert sordino("predict", run, "--data", images, "--out", tmp_path / "new.csv").exit_code == 0
    assert seen[2:] == [80]


def test_features_are_for_images(people: Path, npz_file: Path, sordino: Callable[..., Result]) -> None:
    said = sordino("tune", "--data", npz_file, "--scale", 10, "--epsilon", 8, "--features", "scattering")
    assert "are for images" in said.stderr
    table = ["--data", people, "--target", "outcome", "--epsilon", 4]
    assert "not for a table" in sordino("train", *table, "--features", "patches").stderr
    assert "features=dreams are unknown" in sordino("train", *table, "--features", "dreams").stderr


@pytest.mark.slow
def test_a_recipe_that_chooses_its_noise_is_searched(
    npz_file: Path, tmp_path: Path, sordino: Callable[..., Result]
) -> None:
    run, space = tmp_path / "run", tmp_path / "space.toml"
    space.write_text("lr = [0.1, 0.5]\nbatch_size = [8, 16]\n")
    options = ["--data", npz_file, "--scale", 10, "--held-out", 0.3, "--method", "dpis", "--steps", 3, "--epsilon", 8]
    said = sordino("tune", *options, "--run", run, "--space", space, "--expected-trials", 3, "--json")
    assert said.exit_code == 0, (said.stderr, said.exception)
    told = json.loads(said.stdout)
    assert 7.9 < told["epsilon"] <= 8
    assert told["basis"] == "proven"
    assert told["search"]["settings"]["batch_size"] in (8, 16)
    assert sordino("report", run).exit_code == 0
    assert sordino("verify", run).exit_code == 0
    assert "filter" not in (run / "recipe.toml").read_text()


def test_train_with_tune_is_the_same_command(people: Path, tmp_path: Path, sordino: Callable[..., Result]) -> None:
    options = ["--data", people, "--target", "outcome", "--epsilon", 4, "--run", tmp_path / "run", "--json"]
    said = sordino("train", *options, "--tune", "--public-held-out", "--expected-trials", 5)
    assert said.exit_code == 0, (said.stderr, said.exception)
    told = json.loads(said.stdout)
    assert told["search"]["paid_by"] == "selection"
    assert told["unprotected"] == ["the held-out records"]
    assert told["figures"]["values"]["auc"]["value"] > 0.8


def test_a_recipe_is_searched_and_used(npz_file: Path, tmp_path: Path, sordino: Callable[..., Result]) -> None:
    run, space = tmp_path / "run", tmp_path / "space.toml"
    space.write_text("lr = [0.1, 0.5]\n")
    options = ["--data", npz_file, "--scale", 10, "--held-out", 0.3, "--batch-size", 16, "--steps", 3, "--epsilon", 8]
    said = sordino("tune", *options, "--run", run, "--space", space, "--expected-trials", 3)
    assert said.exit_code == 0, (said.stderr, said.exception)
    told = json.loads((run / "outcome.json").read_text())
    assert told["epsilon"] <= 8
    assert told["steps"] == 3
    assert sordino("report", run).exit_code == 0
    assert "settings were searched" in (run / "report.html").read_text()
    said = sordino("account", run)
    assert said.exit_code == 0
    assert "4 events" in said.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "outcome", "--epsilon", 4, "--hold-out", 0], "leaves no records to score"),
        (["--target", "outcome"], "epsilon is missing"),
        (["--target", "outcome", "--epsilon", 4, "--expected-trials", 0], "expected trials=0"),
        (["--target", "outcome", "--epsilon", 4, "--space", "nowhere.toml"], "cannot read space nowhere.toml"),
        (["--target", "outcome", "--epsilon", 4, "--non-private-twin"], "does not go with a search"),
        (["--target", "outcome", "--epsilon", 4, "--method", "dpsgd"], "needs a table whose ranges"),
    ],
)
def test_bad_input_spends_nothing(
    people: Path, tmp_path: Path, sordino: Callable[..., Result], options: list[object], words: str
) -> None:
    said = sordino("tune", "--data", people, "--run", tmp_path / "run", *options)
    assert said.exit_code == 2
    assert words in said.stderr
    assert not (tmp_path / "run").exists()


def test_options_of_a_search_need_a_search(people: Path, sordino: Callable[..., Result]) -> None:
    said = sordino("train", "--data", people, "--target", "outcome", "--epsilon", 4, "--jobs", 2)
    assert "--jobs is for a search: add --tune" in said.stderr


def test_a_killed_search_is_not_resumed_as_a_training(tmp_path: Path, sordino: Callable[..., Result]) -> None:
    (tmp_path / STATE).write_bytes(b"sealed")
    assert "give the same `sordino tune` command again" in sordino("resume", tmp_path).stderr
