"""A newcomer's path with a table of their own, in both faces: train, predict new rows, report, audit, export."""

from __future__ import annotations

import json
import logging
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import sordino as package
from sordino.accounting import Ledger
from sordino.accounting.pricing import epsilon
from sordino.errors import InvalidInput
from sordino.tables import exporting, learning
from sordino.tables.files import read_table
from sordino.tables.predicting import MODEL

RECORDS = 3000


def write(path: Path, records: int, seed: int, *, target: bool = True) -> Path:
    """People who buy or not, by age, town and when they were asked; semicolons, decimal commas, missing cells."""
    source = np.random.default_rng(seed)
    age, dose = source.normal(50, 15, records), source.lognormal(0, 1, records)
    town = np.array(["Bern", "Genève", "Rome"])[source.integers(0, 3, records)]
    sick = age + 10 * (town == "Bern") + source.normal(0, 5, records) > 55
    lines = ["patient_id;age;dose;town;visit_date;outcome" if target else "town;dose;visit_date;age;patient_id"]
    for i in range(records):
        aged, dosed = f"{age[i]:.1f}".replace(".", ","), "" if i % 7 == 0 else f"{dose[i]:.3f}".replace(".", ",")
        day = f"{1 + i % 28}.{1 + i % 12}.2023"
        cells = [str(i), aged, dosed, town[i], day, ("no", "yes")[int(sick[i])]]
        lines.append(";".join(cells if target else [town[i], dosed, day, aged, str(i)]))
    path.write_text("\n".join(lines) + "\n", encoding="latin-1")
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    write(folder / "old.csv", RECORDS, 0)
    write(folder / "new.csv", 40, 1, target=False)
    return folder


@pytest.fixture(scope="module")
def trained(home: Path) -> tuple[Path, dict[str, object], str]:
    """A finished run, what it printed for machines, and for people."""
    from typer.testing import CliRunner

    from sordino.cli import app

    run = home / "run"
    words = ["train", "--data", str(home / "old.csv"), "--target", "outcome", "--epsilon", "3", "--run", str(run)]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, (said.stderr, said.exception)
    return run, json.loads((run / "outcome.json").read_text()), said.stdout


def test_train_says_what_was_learnt_what_was_left_out_and_what_to_do_next(trained) -> None:
    run, told, words = trained
    assert told["epsilon"] <= 3
    assert told["figures"]["values"]["auc"]["value"] > 0.85
    assert set(told["columns"]) == {
        "age",
        "dose",
        "town",
        "visit_date: year",
        "visit_date: month",
        "visit_date: weekday",
    }
    for part in (
        "Learnt privately: outcome (no, yes)",
        "Left out: patient_id (its name says that it identifies a record)",
        "AUC",
        "by guessing",
        f"sordino predict {run} --data new.csv",
        f"sordino report {run}",
        f"sordino audit {run}",
    ):
        assert part in words, words
    with Ledger.read(run / "ledger.sqlite") as ledger:
        assert epsilon(ledger.events(), told["delta"]) == pytest.approx(told["epsilon"], rel=1e-6)
    assert tomllib.loads((run / "config.toml").read_text())["data"]["records"] == told["records"]


def test_predict_new_rows_in_any_order_with_unseen_and_missing_cells(sordino, trained, home, tmp_path) -> None:
    run, _, _ = trained
    out = tmp_path / "p.parquet"
    said = sordino("predict", run, "--data", home / "new.csv", "--keep", "patient_id", "--out", out, "--json")
    assert said.exit_code == 0, said.stderr
    assert json.loads(said.stdout)["records"] == 40
    found = pa.parquet.read_table(out).to_pydict()
    assert list(found) == ["patient_id", "predicted", "probability of no", "probability of yes"]
    sums = np.add(found["probability of no"], found["probability of yes"])
    np.testing.assert_allclose(sums, 1, atol=1e-12)
    printed = sordino("predict", run, "--data", home / "new.csv").stdout.splitlines()
    assert printed[0] == '"predicted","probability of no","probability of yes"'
    assert len(printed) == 41
    odd = tmp_path / "odd.csv"
    odd.write_text("age,dose,town,visit_date\n,,,\n1e300,-5,Atlantis,never\nold,NA,Bern,2024-02-30\n")
    assert len(sordino("predict", run, "--data", odd).stdout.splitlines()) == 4
    few = tmp_path / "few.csv"
    few.write_text("age,dose,twon,visit_date\n1,2,secretplace,2024-01-01\n")
    refused = sordino("predict", run, "--data", few)
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
    assert "has no column 'town', which the model was trained with: did you mean 'twon'?" in refused.stderr
    assert "secretplace" not in refused.stderr
    few.write_text("age,visit_date\n1,2024-01-01\n")
    assert "has no columns 'dose', 'town', which the" in sordino("predict", run, "--data", few).stderr
    assert "must end in .csv or .parquet" in sordino("predict", run, "--data", few, "--out", tmp_path / "p.txt").stderr


def test_predictions_that_cannot_be_written_leave_nothing(sordino, trained, home, tmp_path, monkeypatch) -> None:
    run, _, _ = trained
    nowhere = sordino("predict", run, "--data", home / "new.csv", "--out", tmp_path / "no" / "p.csv")
    assert nowhere.stderr == f"error: cannot write {tmp_path}/no/p.csv: No such file or directory\n"

    def fill_up(table: pa.Table, path: Path) -> None:
        path.write_text("half a line")
        raise OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device")

    monkeypatch.setattr(pa.csv, "write_csv", fill_up)
    full = sordino("predict", run, "--data", home / "new.csv", "--out", tmp_path / "p.csv")
    assert (full.exit_code, full.stderr) == (2, f"error: cannot write {tmp_path}/p.csv: No space left on device\n")
    assert not list(tmp_path.iterdir())


def test_load_gives_a_plain_module_and_its_encoder(trained, home) -> None:
    run, told, _ = trained
    model, encoder = loaded = package.load(run)
    assert type(model) is torch.nn.Linear
    assert not model.training
    inputs = encoder(home / "new.csv")
    assert inputs.shape == (40, told["inputs"])
    chances = loaded.predict_proba(home / "new.csv")
    np.testing.assert_allclose(torch.sigmoid(model(inputs)).detach().numpy()[:, 0], chances[:, 1], atol=1e-6)
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({name: list(cells) for name, cells in read_table(home / "new.csv").columns.items()})
    np.testing.assert_array_equal(loaded.predict_proba(frame), chances)
    assert set(loaded.predict(frame)) <= {"no", "yes"}
    assert loaded.predict_proba(frame[:0]).shape == (0, 2)


def test_report_and_audit_of_the_run(sordino, trained) -> None:
    run, _, _ = trained
    said = sordino("report", run)
    assert said.exit_code == 0, said.stderr
    assert "ε = 3.00" in said.stdout
    assert "held-out records are NOT protected" in said.stdout
    assert "on which the figures below were measured without noise." in (run / "report.html").read_text()
    audited = sordino("audit", run, "--json")
    assert audited.exit_code == 0, (audited.stdout, audited.stderr)
    assert json.loads(audited.stdout.splitlines()[-1])["passed"]
    again = sordino("resume", run)
    assert (again.exit_code, "nothing left to do" in again.stdout) == (0, True)


def test_an_audit_finds_what_is_not_paid_for(sordino, trained, monkeypatch) -> None:
    """The twin: sums that are twice as sensitive as they are charged for."""
    from sordino.tables import additive

    healthy = additive.EncodedRows.add_up
    monkeypatch.setattr(additive.EncodedRows, "add_up", lambda self, *given: 30 * healthy(self, *given))
    audited = sordino("audit", trained[0], "--json")
    assert audited.exit_code == 1
    assert json.loads(audited.stdout.splitlines()[-1])["findings"]


def test_exported_models_predict_the_same(sordino, trained, home, tmp_path) -> None:
    run, told, _ = trained
    loaded = package.load(run)
    inputs, chances = loaded.encoder(home / "new.csv"), loaded.predict_proba(home / "new.csv")
    said = sordino("export", run, "--to", "torchscript", "--out", tmp_path / "m.pt")
    assert said.exit_code == 0, said.stderr
    np.testing.assert_allclose(torch.jit.load(tmp_path / "m.pt")(inputs).numpy(), chances, atol=1e-6)
    described = json.loads((tmp_path / "m.pt.inputs.json").read_text())
    assert described["classes"] == ["no", "yes"]
    assert described["encoder"]["target"] == "outcome"
    tensors = pytest.importorskip("safetensors.torch")
    assert sordino("export", run, "--to", "safetensors", "--out", tmp_path / "m.safetensors").exit_code == 0
    twin = torch.nn.Linear(told["inputs"], 1)
    twin.load_state_dict(tensors.load_file(tmp_path / "m.safetensors"))
    np.testing.assert_allclose(torch.sigmoid(twin(inputs)).detach().numpy()[:, 0], chances[:, 1], atol=1e-6)
    assert "must be one of onnx, safetensors, torchscript" in sordino("export", run, "--to", "pickle").stderr


def test_the_exporter_is_silent_about_itself() -> None:
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = log.getEffectiveLevel()
    with exporting._hush_exporter():
        assert not log.isEnabledFor(logging.WARNING)
        assert log.isEnabledFor(logging.ERROR)
    assert log.getEffectiveLevel() == before


@pytest.mark.slow
def test_exported_onnx_predicts_the_same(sordino, trained, home, tmp_path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    loaded = package.load(trained[0])
    inputs, chances = loaded.encoder(home / "new.csv"), loaded.predict_proba(home / "new.csv")
    said = sordino("export", trained[0], "--to", "onnx", "--out", tmp_path / "m.onnx")
    assert said.exit_code == 0, said.stderr
    session = runtime.InferenceSession(tmp_path / "m.onnx")
    for part in (inputs, inputs[:1]):
        found = session.run(["probabilities"], {"inputs": part.numpy()})[0]
        np.testing.assert_allclose(found, chances[: len(part)], atol=1e-6)


def test_a_regression_by_unit_with_protected_figures(sordino, home, tmp_path) -> None:
    run = tmp_path / "run"
    more = ["--task", "regression", "--unit", "patient_id", "--metrics-epsilon", 1, "--epsilon", 40, "--json"]
    said = sordino("train", "--data", home / "old.csv", "--target", "age", "--run", run, *more)
    assert said.exit_code == 0, (said.stderr, said.exception)
    told = json.loads(said.stdout)
    assert told["task"] == "regression"
    assert "patient_id" in told["unit"]
    assert told["figures"]["released"]
    assert "r2" in told["figures"]["values"]
    values = package.load(run).predict(home / "old.csv")
    assert values.dtype == np.float64
    truth = [float(cell) for cell in read_table(home / "old.csv").columns["age"]]
    assert np.corrcoef(values, truth)[0, 1] > 0.3, np.corrcoef(values, truth)
    with pytest.raises(InvalidInput, match="no probabilities"):
        package.load(run).predict_proba(home / "old.csv")
    page = sordino("report", run)
    assert page.exit_code == 0, page.stderr
    assert "NOT protected" not in page.stdout, "the held-out figures were paid for"
    assert "those held out to measure on were protected by noise" in (run / "report.html").read_text()


def test_no_header_and_all_rows(sordino, home, tmp_path) -> None:
    lines = (home / "old.csv").read_bytes().splitlines(keepends=True)
    bare, new = tmp_path / "bare.csv", tmp_path / "new.csv"
    bare.write_bytes(b"".join(lines[1:]))
    new.write_bytes(b"".join(line.rpartition(b";")[0] + b"\n" for line in lines[1:6]))
    refused = sordino("train", "--data", bare, "--target", "outcome", "--epsilon", 3, "--run", tmp_path / "no")
    assert refused.exit_code == 2
    assert "give --no-header" in refused.stderr
    assert not any(cell in refused.stderr for cell in ("Bern", "yes", "2023"))
    run = tmp_path / "run"
    more = ["--no-header", "--target", "column_6", "--hold-out", 0, "--epsilon", 3, "--json"]
    said = sordino("train", "--data", bare, *more, "--run", run)
    assert said.exit_code == 0, (said.stderr, said.exception)
    assert json.loads(said.stdout)["records"] == RECORDS
    assert json.loads(said.stdout)["figures"] is None
    assert len(sordino("predict", run, "--data", new).stdout.splitlines()) == 6
    page = sordino("report", run)
    assert "for every record, proven" in page.stdout, "none were held out"
    assert "held out to measure on" not in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--target", "outcme"], "did you mean 'outcome'?"),
        (["--target", "age"], "--task regression"),
        (["--target", "outcome", "--task", "regression"], "are not numbers"),
        (["--target", "outcome", "--task", "guess"], "task='guess' must be"),
        (["--target", "outcome", "--bounds", "agee=0:100"], "did you mean 'age'?"),
        (["--target", "outcome", "--classes", "a,b"], "must be one of the classes a, b"),
        (["--target", "outcome", "--unit", "patient_id", "--steps", 5], "--unit is for tables without a network"),
        (["--target", "outcome", "--hold-out", 1], "must be in [0, 1)"),
        (["--target", "outcome", "--metrics-epsilon", 9], "metrics_epsilon=9"),
        (["--target", "outcome", "--metrics-epsilon", 1, "--hold-out", 0], "nothing to measure on"),
        (["--target", "outcome", "--delta", 0.1], "delta=0.1 must be <"),
        ([], "needs --target COLUMN: it has patient_id, age"),
    ],
)
def test_nothing_is_spent_on_nonsense(sordino, home, tmp_path, more, words) -> None:
    run = tmp_path / "run"
    said = sordino("train", "--data", home / "old.csv", "--epsilon", 3, "--run", run, *more)
    assert said.exit_code == 2, (said.stdout, said.exception)
    errors = [line for line in said.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert words in errors[0], errors[0]
    assert not (run / "ledger.sqlite").exists()


def test_a_run_killed_on_the_way_learns_anew_within_its_budget(sordino, home, tmp_path, monkeypatch) -> None:
    run, healthy = tmp_path / "run", learning.Ledger.charge

    class Killed(BaseException):
        """As a kill would end it: nothing is tidied up."""

    def charge(self, event, *more, **named):
        receipt = healthy(self, event, *more, **named)
        if len(self) == 9:
            raise Killed
        return receipt

    with monkeypatch.context() as patch:
        patch.setattr(learning.Ledger, "charge", charge)
        with pytest.raises(Killed):
            sordino("train", "--data", home / "old.csv", "--target", "outcome", "--epsilon", 3, "--run", run)
    assert not (run / MODEL).exists()
    refused = sordino("predict", run, "--data", home / "new.csv")
    assert refused.exit_code == 2
    assert (
        "sordino resume"
        in sordino("train", "--data", home / "old.csv", "--target", "outcome", "--epsilon", 3, "--run", run).stderr
    )
    said = sordino("resume", run, "--json")
    assert said.exit_code == 0, (said.stderr, said.exception)
    told = json.loads(said.stdout.splitlines()[-1])
    with Ledger.read(run / "ledger.sqlite") as ledger:
        assert len(ledger) > 9 + 40, "what was spent before stays spent"
        assert epsilon(ledger.events(), told["delta"]) <= told["epsilon"] <= 3
    assert len(sordino("predict", run, "--data", home / "new.csv").stdout.splitlines()) == 41


def test_a_damaged_model_is_one_line(sordino, trained, home, tmp_path) -> None:
    plain = json.loads((trained[0] / MODEL).read_text())
    wrong = [
        {**plain, "weights": [[1.0]]},
        {**plain, "weights": "x"},
        {**plain, "encoder": {}},
        {**plain, "kind": "other"},
        {key: value for key, value in plain.items() if key != "header"},
        [1],
    ]
    for number, content in enumerate(wrong):
        run = tmp_path / str(number)
        run.mkdir()
        (run / MODEL).write_text(json.dumps(content))
        said = sordino("predict", run, "--data", home / "new.csv")
        assert (said.exit_code, len(said.stderr.splitlines())) == (2, 1), said.stderr


def test_a_network_on_a_table_is_used_in_the_same_way(sordino, home, tmp_path) -> None:
    run = tmp_path / "run"
    more = ["--target", "outcome", "--epsilon", 6, "--steps", 10, "--model", "linear", "--json"]
    said = sordino("train", "--data", home / "old.csv", *more, "--run", run)
    assert said.exit_code == 0, (said.stderr, said.exception)
    printed = sordino("predict", run, "--data", home / "new.csv")
    assert printed.exit_code == 0, printed.stderr
    assert len(printed.stdout.splitlines()) == 41
    assert package.load(run).predict_proba(home / "new.csv").shape == (40, 2)


def test_arrays_of_a_run_are_predicted_too(sordino, npz_file, tmp_path) -> None:
    run = tmp_path / "run"
    more = ["--scale", 10, "--epsilon", 8, "--steps", 5, "--batch-size", 16, "--json"]
    assert sordino("train", "--data", npz_file, *more, "--run", run).exit_code == 0
    new = tmp_path / "new.npz"
    np.savez(new, x=np.zeros((5, 3)))
    said = sordino("predict", run, "--data", new)
    assert said.exit_code == 0, said.stderr
    assert len(said.stdout.splitlines()) == 6
    assert sordino("export", run, "--to", "torchscript").exit_code == 0
    exported = torch.jit.load(run / "model.pt")(torch.zeros(5, 3)).numpy()
    np.testing.assert_allclose(exported, package.load(run).predict_proba(np.zeros((5, 3))), atol=1e-6)


def test_what_is_lost_in_the_noise_says_what_it_cost_and_leaves_a_ledger(sordino, tmp_path) -> None:
    """Only the releases can tell that no column is of use: then they are spent, and that is no bad input."""
    source = np.random.default_rng(0)
    lines = [f"w{i},{('no', 'yes')[int(one)]}" for i, one in enumerate(source.integers(0, 2, 1500))]
    (tmp_path / "own.csv").write_text("\n".join(["word,outcome", *lines]) + "\n")
    run = tmp_path / "run"
    asked = ("train", "--data", tmp_path / "own.csv", "--target", "outcome", "--epsilon", 1, "--run", run)
    said = sordino(*asked)
    assert said.exit_code == 1
    assert "no column could be told from the noise" in said.stderr
    with Ledger.read(run / "ledger.sqlite") as ledger:
        spent = epsilon(ledger.events(), 1e-5)
        assert len(ledger) == 2
    assert f"ε = {np.ceil(100 * spent) / 100:.2f} of 1 was spent" in said.stderr
    assert sordino("verify", run).exit_code == 0
    assert sordino("report", run).exit_code == 0
    assert "holds a run already" in sordino(*asked).stderr


def test_a_class_that_would_be_lost_in_the_noise_is_refused_before_anything_is_spent(sordino, tmp_path) -> None:
    lines = [f"{i % 13},{'no' if i % 100 else 'yes'}" for i in range(1500)]
    (tmp_path / "rare.csv").write_text("\n".join(["x,outcome", *lines]) + "\n")
    asked = ("train", "--data", tmp_path / "rare.csv", "--target", "outcome", "--epsilon", 1, "--run", tmp_path / "run")
    said = sordino(*asked)
    assert said.exit_code == 2
    assert "fewer than 2 classes of more than" in said.stderr
    assert not (tmp_path / "run").exists()
    assert sordino(*asked, "--classes", "no,yes").exit_code == 0


def test_methods_are_compared_on_a_table(sordino, tmp_path):
    patients = Path(__file__).parents[2] / "examples" / "patients.csv"
    asked = ["--dataset", patients, "--target", "outcome", "--method", "additive", "--epsilon", 2, "--seeds", 2]
    result = sordino("compare", *asked, "--out", tmp_path / "compared")
    assert result.exit_code == 0, result.stderr
    assert "additive" in result.stdout
    assert "epsilon = 4 in all" in result.stderr
    assert (tmp_path / "compared" / "comparison.html").exists()
