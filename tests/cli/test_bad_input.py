"""Everything a user can get wrong is one line on stderr and exit code 2, and nothing is spent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


def refused(result, words: str) -> None:
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr, result.exception)
    errors = [line for line in result.stderr.splitlines() if not line.startswith("caution: ")]
    assert len(errors) == 1, result.stderr
    assert errors[0].startswith("error: ")
    assert words in errors[0], errors[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epsilon", 0], "epsilon=0.0 must be > 0"),
        (["--epsilon", -1], "epsilon=-1.0 must be > 0"),
        (["--epsilon", "nan"], "epsilon=nan must be > 0"),
        (["--epsilon", "three"], "'three' is not a valid float"),
        ([], "epsilon is missing"),
        (["--delta", 1e-5, "--noise-multiplier", 1], "delta belongs to a budget"),
        (["--epsilon", 3, "--delta", 0.02], "delta=0.02 must be < 1/records"),
        (["--epsilon", 3, "--delta", 0], "delta=0.0 must be in (0, 1)"),
        (["--epsilon", 3, "--batch-size", 61], "batch_size=61 must be <= records=60"),
        (["--epsilon", 3, "--batch-size", 0], "batch-size=0 must be >= 1"),
        (["--epsilon", 3, "--epochs", 2], "are both given"),
        (["--epsilon", 3, "--clip", 0], "clip=0.0 must be > 0"),
        (["--epsilon", 3, "--lr", 0], "lr=0.0 must be > 0"),
        (["--epsilon", 3, "--optimizer", "lbfgs"], "optimizer='lbfgs' must be one of"),
        (["--epsilon", 3, "--optimizer", "adam", "--momentum", 0.9], "momentum=0.9 belongs to sgd"),
        (["--epsilon", 3, "--recipe", "magic"], "recipe='magic' must be one of"),
        (["--epsilon", 3, "--model", "gpt"], "model='gpt' is not known"),
        (["--epsilon", 3, "--model", "nowhere.py:build"], "nowhere.py does not exist"),
        (["--epsilon", 3, "--model", "json:nothing"], "names no function"),
        (["--epsilon", 3, "--model", "json:laods"], "did you mean json:loads?"),
        (["--epsilon", 3, "--model", "json:dumps"], "cannot be built"),
        (["--epsilon", 3, "--model", "mnist-cnn"], "Conv2d '0' failed on a batch"),
        (["--epsilon", 3, "--engine", "warp"], "engine='warp' must be one of"),
        (["--epsilon", 3, "--microbatch", 0], "microbatch=0 must be >= 1"),
        (["--epsilon", 3, "--save-every", 0], "save-every=0 must be >= 1"),
        (["--epsilon", 3, "--accountant", "abacus"], "accountant='abacus' is unknown"),
        (["--epsilon", 3, "--adjacency", "nearby"], "adjacency='nearby' is unknown"),
        (["--epsilon", 3, "--bounds", "5"], "bounds='5' must be two numbers"),
        (["--epsilon", 3, "--bounds", "5,1"], "bounds=5:1 must be finite, the smaller first"),
        (["--epsilon", 3, "--bounds", "age=120:0"], "bounds=age=120:0 must be finite, the smaller first"),
        (["--epsilon", 3, "--scale", 2], "scale=2 is for .npz files"),
        (["--epsilon", 3, "--held-out", 1], "held-out=1.0 must be in [0, 1)"),
        (["--epsilon", 3, "--classes", 1], "classes=1 must be 2 to"),
        (["--epsilon", 3, "--classes", "a,a"], "different names"),
        (["--epsilon", 3, "--classes", "no,yes"], "must be one of the classes no, yes"),
        (["--epsilon", 3, "--noise-multiplier", 0.3], "above the budget"),
        (["--epsilon", 3, "--noise-multiplier", -1], "noise-multiplier=-1.0 must be > 0"),
        (["--epsilon", 3, "--target", "salary"], "has no column 'salary': it has age, weight, height, outcome"),
        (["--epsilon", 3, "--warp", "9"], "--warp is not an option of sordino train: see sordino train --help"),
    ],
)
def test_train_refuses(sordino, small, tmp_path, arguments, words):
    refused(sordino(*small, *arguments, "--run", tmp_path / "run"), words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        ("", "has no header"),
        ("\n\n", "has no header"),
        ("x,z\n1,2\n", "has no column 'y'"),
        ("x,y\n", "has 0 records"),
        ("y\n0\n1\n", "has no column besides 'y'"),
        ("patient_id,y\n7,0\n8,1\n", "has no column besides 'y'"),
        ("x,y\n1,0\n2,1\n", "it takes"),
        ('x,y\n1,0\n"2,1\n', "a quote is not closed"),
        ("x,y\n" + "9" * 200_000 + ",0\n1,1\n", "it takes"),
        ("x\x1b[2J,y\n1,0\n2,1\n", "must be printable"),
        ("x,y\n1,0\n2\n", "record 2 does not have 2 cells"),
        ("x,x,y\n1,1,0\n2,2,1\n", "it takes"),
        (b"\xff\xfe\x00", "has no header"),
    ],
)
def test_csv_is_refused(sordino, tmp_path, content, words):
    path = tmp_path / "data.csv"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    refused(sordino("train", "--data", path, "--target", "y", "--epsilon", 3, "--run", tmp_path / "run"), words)


def test_csv_needs_a_target(sordino, csv_file):
    refused(sordino("train", "--data", csv_file, "--epsilon", 3), "needs --target COLUMN: it has age, weight")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.ones((4, 2))}, "has no array 'y'"),
        ({"x": np.ones((4, 2)), "y": np.ones(5)}, "must be (N, ...) and (N,)"),
        ({"x": np.ones(4), "y": np.ones(4)}, "must be (N, ...) and (N,)"),
        ({"x": np.array([["a"], ["b"]]), "y": np.ones(2)}, "array x is <U1, must be numeric"),
        ({"x": np.array([[{}], [{}]]), "y": np.ones(2)}, "is not a .npz file of plain arrays"),
    ],
)
def test_npz_is_refused(sordino, tmp_path, arrays, words):
    np.savez(tmp_path / "data.npz", **arrays)
    refused(sordino("train", "--data", tmp_path / "data.npz", "--epsilon", 3), words)


def test_other_files_are_refused(sordino, tmp_path, npz_file):
    (tmp_path / "data.npz").write_bytes(b"not a zip file")
    refused(sordino("train", "--data", tmp_path / "data.npz", "--epsilon", 3), "is not a .npz file of plain arrays")
    refused(sordino("train", "--data", npz_file, "--target", "y", "--epsilon", 3), "belongs to a table")
    refused(sordino("train", "--data", tmp_path / "data.parquet", "--epsilon", 3), "does not exist: give a table")
    (tmp_path / "data.parquet").write_text("PAR1")
    refused(sordino("train", "--data", tmp_path / "data.parquet", "--epsilon", 3), "no Parquet, or damaged")


def test_unwritable_run_directory(sordino, small, tmp_path):
    (tmp_path / "file").write_text("")
    refused(sordino(*small, "--epsilon", 3, "--run", tmp_path / "file" / "run"), "cannot create run directory")


def test_second_run_in_one_directory(sordino, small, tmp_path):
    assert sordino(*small, "--epsilon", 3, "--run", tmp_path / "run").exit_code == 0
    refused(sordino(*small, "--epsilon", 3, "--run", tmp_path / "run"), "holds a run already: go on with")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data", "is not a TOML document"),
        ("[date]", "has no table [date]"),
        ("data = 3", "data must be a table"),
        ("[data]\nsuorce = 'x'", "table [data] has no key 'suorce'"),
        ("[data]\nscale = 'x'", "scale='x' must be of type float"),
        ("[data]\nbounds = [1]", "must be two numbers"),
        ("[data]\nrecords = 7", "has 1438 training records, not 7"),
        ("[model]\nname = 7", "name=7 must be of type str"),
        ("[model]\nname = 'mlp'\ndepth = 7", "model mlp has no option 'depth'"),
        ("[model]\nname = 'mlp'\nhidden = 'x'", "cannot be built with"),
        ("[recipe]\nbatch = 7", "Recipe has no field 'batch'"),
        ("[recipe]\nbatch_size = 'many'", "Recipe"),
        ("[recipe.weighing]\npart = 'os.system'", "it must be one of flat"),
        ("[run]\nengine = 7", "engine=7 must be of type str"),
    ],
)
def test_configuration_is_refused(sordino, tmp_path, text, words):
    path = tmp_path / "run.toml"
    path.write_text(text)
    refused(sordino("train", "--config", path, "--epsilon", 3, "--steps", 1, "--run", tmp_path / "run"), words)


def test_missing_configuration(sordino, tmp_path):
    refused(sordino("train", "--config", tmp_path / "none.toml", "--epsilon", 3), "it is not a file")
    (tmp_path / "run.toml").write_text("[recipe]\nsteps = 3")
    twice = sordino("train", "--config", tmp_path / "run.toml", "--recipe", "dpsgd", "--epsilon", 3)
    refused(twice, "are both given")


def test_resume_refuses_what_is_no_run(sordino, tmp_path):
    refused(sordino("resume", tmp_path), "holds no config.toml")
    refused(sordino("account", tmp_path), "holds no ledger.sqlite")


def test_resume_refuses_a_corrupt_checkpoint(sordino, small, tmp_path):
    run = tmp_path / "run"
    assert sordino(*small, "--epsilon", 3, "--run", run).exit_code == 0
    for path in run.glob("checkpoint-*"):
        path.write_bytes(path.read_bytes()[:-3] + b"abc")
    refused(sordino("resume", run), "is damaged")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["account"], "the sampling rate is missing"),
        (["account", "--rate", 0.1, "--batch-size", 5], "the sampling rate is missing or given twice"),
        (["account", "--rate", 0.1], "noise-multiplier is missing"),
        (
            ["account", "--rate", 2, "--noise-multiplier", 1, "--steps", 5, "--delta", 1e-5],
            "rate=2.0 must be in (0, 1]",
        ),
        (["account", "--rate", 0.1, "--noise-multiplier", 0, "--steps", 5], "noise-multiplier=0.0 must be > 0"),
        (["account", "--rate", 0.1, "--noise-multiplier", 1], "the length of training is missing"),
        (["account", "--rate", 0.1, "--noise-multiplier", 1, "--steps", 0], "steps=0 must be >= 1"),
        (["account", "--rate", 0.1, "--noise-multiplier", 1, "--steps", 5], "delta is missing"),
        (
            ["account", "--rate", 0.1, "--noise-multiplier", 1, "--steps", 5, "--delta", 2],
            "delta=2.0 must be in (0, 1)",
        ),
        (["account", "runs/x", "--rate", 0.1], "are both given"),
        (["calibrate"], "epsilon is missing"),
        (["calibrate", "--epsilon", 3, "--delta", 1e-5], "the sampling rate is missing"),
        (["calibrate", "--epsilon", 3, "--delta", 1e-5, "--rate", 0.1], "give the length"),
        (
            ["calibrate", "--epsilon", 3, "--delta", 1e-5, "--rate", 0.1, "--steps", 5, "--noise-multiplier", 1],
            "give the length",
        ),
        (["calibrate", "--epsilon", 3, "--batch-size", 9, "--records", 5, "--steps", 5], "batch-size=9 must be in"),
        (
            ["calibrate", "--epsilon", 3, "--batch-size", 9, "--records", 99, "--steps", 5, "--delta", 0.5],
            "delta=0.5 must be < 1/records",
        ),
        (
            ["calibrate", "--epsilon", 0.01, "--delta", 1e-5, "--rate", 0.5, "--noise-multiplier", 1],
            "one step needs at least",
        ),
    ],
)
def test_accounting_refuses(sordino, arguments, words):
    refused(sordino(*arguments), words)


@pytest.mark.parametrize(
    "arguments",
    [
        ["account", "--noise-multiplier", 0.01, "--rate", 0.01, "--steps", 1000, "--delta", 1e-5],
        ["calibrate", "--epsilon", 1e9, "--delta", 1e-5, "--rate", 0.01, "--steps", 100],
    ],
)
def test_hardly_any_noise_is_priced_and_not_a_traceback(sordino, arguments):
    result = sordino(*arguments)
    assert result.exit_code == 0, result.stderr
    assert "Traceback" not in result.output


def test_a_huge_epsilon_trains_or_is_refused_in_one_line(sordino, small, tmp_path):
    result = sordino(*small, "--epsilon", 1e9, "--run", tmp_path / "run", "--json")
    assert "Traceback" not in result.output
    assert result.exit_code in (0, 2)
    if result.exit_code == 2:
        refused(result, "epsilon")
        assert not (tmp_path / "run" / "ledger.sqlite").exists(), "nothing was spent"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 7", "returned int, must return a model"),
        ("return nn.Conv2d(1, 2, 3)", "the shape of an input is unknown"),
        ("return nn.Linear(2, 1), lambda m, x: m(x)[:, 0], 7", "must hold tensors with one row per example"),
    ],
)
def test_check_refuses(sordino, tmp_path: Path, body, words):
    (tmp_path / "mine.py").write_text(f"from torch import nn\ndef build():\n    {body}\n")
    refused(sordino("check", f"{tmp_path / 'mine.py'}:build"), words)


def test_check_refuses_a_file_that_does_not_import(sordino, tmp_path: Path):
    (tmp_path / "mine.py").write_text("import no_such_package\n")
    refused(sordino("check", f"{tmp_path / 'mine.py'}:build"), "cannot import")
    refused(sordino("check", "mine"), "names no function")
