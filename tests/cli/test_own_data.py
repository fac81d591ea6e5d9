"""`sordino train` on records of the user's own: tables with open schemas, drafts, folders, texts."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from sordino import Budget, recipes
from sordino.accounting import Ledger
from sordino.accounting.events import PoissonSampledDpEvent
from sordino.accounting.pricing import epsilon
from sordino.cli import progress
from sordino.tables.defaults import choose_model

RECORDS = 1500


@pytest.fixture
def hospital(tmp_path: Path) -> Path:
    """A table with every kind of column, missing values and an identifier."""
    source = np.random.default_rng(0)
    age, dose = source.normal(50, 15, RECORDS), source.lognormal(-4, 1, RECORDS)
    sick = age + 10 * np.log(dose) + source.normal(0, 5, RECORDS) > 10
    lines = ["patient_id;age;dose;town;notes;outcome"]
    for i in range(RECORDS):
        town = ("Bern", "Rome", "")[i % 3]
        notes = '"seems ill; needs\n more rest"' if sick[i] else "is well and may go"
        dose_text = "" if i % 4 == 0 else f"{dose[i]:.5f}"
        lines.append(f"{i};{age[i]:.0f};{dose_text};{town};{notes};{('no', 'yes')[int(sick[i])]}")
    path = tmp_path / "hospital.csv"
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    return path


def outcome(result) -> dict:
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    return json.loads(result.stdout)


def arguments(hospital: Path, run: Path, *more: object) -> list[object]:
    return ["train", "--data", hospital, "--target", "outcome", "--steps", 20, "--run", run, *more]


def test_a_table_and_its_target_are_enough(sordino, hospital, tmp_path):
    run = tmp_path / "run"
    said = outcome(sordino(*arguments(hospital, run, "--epsilon", 3, "--json")))
    assert said["epsilon"] <= 3
    assert said["held_out_accuracy"] > 0.9, "the notes give it away"
    assert any("held-out records are not protected" in words for words in said["assumptions"])
    written = tomllib.loads((run / "config.toml").read_text())
    assert {name: column["kind"] for name, column in written["schema"]["columns"].items()} == {
        "patient_id": "skip",
        "age": "number",
        "dose": "number",
        "town": "category",
        "notes": "text",
    }
    assert written["schema"]["classes"] == ["no", "yes"]
    assert written["data"]["prepare"] == 0.3
    assert written["data"]["records"] == 1162
    with Ledger.read(run / "ledger.sqlite") as ledger:
        events = [event for _, event in ledger.history()]
        assert len(events) == 4 + 20
        assert not any(isinstance(event, PoissonSampledDpEvent) for event in events[:4]), "the preparation comes first"
        assert epsilon(ledger.events(), said["delta"]) == said["epsilon"] > 2.9, "one price for all of it"
        assert epsilon([(event, 1) for event in events[:4]], said["delta"]) <= 0.3 * 3
    again = outcome(sordino("resume", run, "--json"))
    assert (again["epsilon"], again["held_out_accuracy"]) == (said["epsilon"], said["held_out_accuracy"])


def test_words_tell_what_was_released_and_what_was_left_out(sordino, hospital, tmp_path):
    result = sordino(*arguments(hospital, tmp_path / "run", "--epsilon", 3))
    assert result.exit_code == 0, result.stderr
    for words in (
        "1,162 of hospital.csv to train on, 338 held out to measure accuracy on, not protected",
        "kinds and ranges of 4 columns and names of the classes, with noise, for 30% of ε",
        "patient_id (its name says that it identifies a record)",
        "Classes   no, yes",
        "ε 3.00 of 3",
    ):
        assert words in result.stderr, result.stderr


def test_a_public_schema_costs_nothing(sordino, hospital, tmp_path):
    schema = tmp_path / "schema.toml"
    schema.write_text(
        'classes = ["no", "yes"]\n[columns.dose]\nkind = "number"\nlow = 0.0\nhigh = 0.1\nmissing = true\n'
        '[columns.town]\nkind = "category"\nvalues = ["Bern", "Rome"]\n[columns.notes]\nkind = "skip"\n'
    )
    more = ["--schema", schema, "--bounds", "age=0:120", "--epsilon", 3, "--json"]
    said = outcome(sordino(*arguments(hospital, tmp_path / "run", *more)))
    assert said["held_out_accuracy"] > 0.6
    with Ledger.read(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert len(ledger) == 20
    model = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["model"]
    assert model == {"name": "linear", "features": 1 + 2 + 2, "classes": 2}


def test_a_draft_holds_kinds_and_no_number_of_the_records(sordino, hospital, tmp_path):
    schema = tmp_path / "schema.toml"
    result = sordino("train", "--data", hospital, "--target", "outcome", "--draft-schema", schema)
    assert result.exit_code == 0, result.stderr
    columns = tomllib.loads(schema.read_text())["columns"]
    assert columns["age"] == {"kind": "number", "missing": False}
    assert columns["notes"]["kind"] == "text"
    assert not (tmp_path / "runs").exists()
    again = sordino("train", "--data", hospital, "--target", "outcome", "--draft-schema", schema)
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)
    said = outcome(sordino(*arguments(hospital, tmp_path / "run", "--schema", schema, "--epsilon", 3, "--json")))
    assert said["held_out_accuracy"] > 0.9


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--epsilon", 0.01], "too few to release the ranges of 4 columns"),
        (["--epsilon", 3, "--prepare", 1.5], "prepare=1.5 must be in (0, 1)"),
        (["--noise-multiplier", 1], "give --epsilon, or give --schema"),
        (["--epsilon", 3, "--model", "mnist-cnn"], "failed on a batch"),
        (["--epsilon", 3, "--model", "mine.py:build"], "must know its inputs before anything is released"),
        (["--epsilon", 3, "--engine", "warp"], "engine='warp' must be one of"),
        (["--epsilon", 3, "--recipe", "dpis"], "cannot leave a part of its budget"),
        (["--epsilon", 3, "--accountant", "rdp"], "has no RDP price"),
        (["--epsilon", 3, "--bounds", "size=0:1"], "has a column 'size', the data has not"),
        (["--epsilon", 3, "--bounds", "town=0:1"], "column 'town' is not a number in record 1"),
        (["--epsilon", 3, "--schema", "nowhere.toml"], "cannot read schema nowhere.toml"),
        (["--epsilon", 3, "--classes", "yes,maybe"], "must be one of the classes yes, maybe"),
    ],
)
def test_nothing_is_spent_on_a_run_that_cannot_go_on(sordino, hospital, tmp_path, monkeypatch, more, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def build(inputs: int) -> None: ...\n")
    result = sordino(*arguments(hospital, tmp_path / "run", *more))
    errors = [line for line in result.stderr.splitlines() if not line.startswith("caution: ")]
    assert result.exit_code == 2, (result.stderr, result.exception)
    assert len(errors) == 1
    assert words in errors[0]
    assert not (tmp_path / "run").exists()


def test_too_few_records_for_epsilon_are_called_so(sordino, hospital, tmp_path):
    more = ["--bounds", "0,200", "--classes", "no,yes", "--schema", tmp_path / "s.toml", "--epsilon", 0.02, "--json"]
    (tmp_path / "s.toml").write_text('[columns.town]\nkind = "skip"\n[columns.notes]\nkind = "text"\nbuckets = 256\n')
    result = sordino(*arguments(hospital, tmp_path / "run", *more))
    cautions = [line for line in result.stderr.splitlines() if line.startswith("caution: ")]
    assert len(cautions) == 1
    assert "1,162 records are too few for epsilon 0.02 with 518 parameters" in cautions[0]
    assert "it takes about" in cautions[0]


def test_history_is_written_while_training_and_goes_on_after_a_resumption(sordino, hospital, tmp_path):
    run = tmp_path / "run"
    said = outcome(sordino(*arguments(hospital, run, "--epsilon", 3, "--json")))
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert all(set(line) == {"step", "accuracy", "loss", "clip", "events"} for line in lines)
    assert all(0 <= line["accuracy"] <= 1 and line["loss"] > 0 for line in lines)
    assert lines[-1]["accuracy"] == said["held_out_accuracy"]
    with (run / "history.jsonl").open("a") as file:
        file.write('{"step": 99, "accuracy": 0.5, "loss": 1.0, "seconds": 1.0}\n{"step": 1')
    reopened = progress.History(run, 10)
    assert [entry.step for entry in reopened.entries] == list(range(1, 11)), "what was lost is cut off"
    reopened.add(progress.Evaluation(11, None, None))
    assert '"seconds"' not in (run / "history.jsonl").read_text(), "times of steps tell the sizes of draws"
    assert len(list(progress.read_history(run))) == 11


def test_a_folder_of_images(sordino, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="images need Pillow")
    source = np.random.default_rng(0)
    for name, shade in (("dark", 60), ("light", 190)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(150):
            pixels = source.normal(shade, 30, (12, 12, 3)).clip(0, 255).astype(np.uint8)
            image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number:03d}.png")
    run = tmp_path / "run"
    more = ["--epsilon", 8, "--steps", 15, "--image-size", 8, "--run", run, "--json"]
    said = outcome(sordino("train", "--data", tmp_path / "photos", *more))
    assert said["held_out_accuracy"] > 0.9
    assert any("names of the folders" in words for words in said["assumptions"])
    written = tomllib.loads((run / "config.toml").read_text())
    assert written["model"] == {"name": "small-cnn", "channels": 3, "classes": 2}
    assert (written["data"]["records"], written["data"]["image_size"]) == (252, 8)
    assert outcome(sordino("resume", run, "--json"))["held_out_accuracy"] == said["held_out_accuracy"]
    wrong = sordino("train", "--data", tmp_path / "photos", "--epsilon", 8, "--target", "y")
    assert (wrong.exit_code, "does not belong to a folder" in wrong.stderr) == (2, True)


def test_a_hidden_layer_is_for_many_records():
    """From public numbers alone: the shape of the records, their number and the noise."""
    few, many = (
        recipes.dpsgd(batch_size=records // 4, epochs=25).calibrate(Budget(2.0, 1e-6), records=records)
        for records in (400, 40_000)
    )
    assert choose_model("a.csv", (10,), 2, few) == "linear"
    assert choose_model("a.csv", (10,), 2, many) == "mlp"
    assert choose_model("a.csv", (1024,), 2, many) == "linear", "texts stay linear"


def test_a_single_class_is_refused_by_noised_counts_alone(sordino, tmp_path: Path) -> None:
    """With names for the classes nothing about the labels decides whether training begins."""
    path = tmp_path / "one.csv"
    path.write_text("x,y\n" + "".join(f"{number},no\n" for number in range(300)))
    public = ("--target", "y", "--epsilon", 3, "--bounds", "0,300", "--classes", "no,yes", "--steps", 2)
    result = sordino("train", "--data", path, *public, "--run", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
