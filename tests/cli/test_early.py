"""What is mistyped is said at once: before torch is loaded, with the word that was probably meant."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sordino import __main__ as entry
from sordino import books
from sordino.cli import audit, compare, config, early
from sordino.errors import InvalidInput
from sordino.finetuning import tuned
from sordino.searching import sealing
from sordino.tables import predicting

TYPOS = [
    (["train", "--data", "mnistt", "--epsilon", "3"], "did you mean 'mnist'?"),
    (["train", "--data", "people.csv", "--target", "outcom", "--epsilon", "3"], "did you mean 'outcome'?"),
    (["train", "--recipe", "dpsdg", "--epsilon", "3"], "did you mean 'dpsgd'?"),
    (["train", "--model", "mlpp", "--epsilon", "3"], "did you mean 'mlp'?"),
    (["train", "--optimizer", "adamm", "--epsilon", "3"], "did you mean 'adam'?"),
    (["train", "--accountant", "pdl", "--epsilon", "3"], "did you mean 'pld'?"),
    (["train", "--config", "nowhere.toml"], "cannot read configuration nowhere.toml"),
    (["train", "--data", "mnist", "--preset", "bestt", "--epsilon", "3"], "did you mean 'best'?"),
    (["train", "--data", "digits", "--preset", "best", "--epsilon", "3"], "has no settings for data=digits"),
    (["train", "--data", "mnist", "--preset", "best"], "epsilon is missing"),
    (["train", "--data", "mnist", "--preset", "best", "--epsilon", "3", "--lr", "1"], "--lr and --preset best"),
    (["tune", "--data", "people.csv", "--target", "outcom", "--epsilon", "3"], "did you mean 'outcome'?"),
    (["tune", "--data", "digits", "--method", "mine.py:make", "--epsilon", "3"], "is code of your own"),
    (["trian"], "did you mean 'train'?"),
    (["train", "--eps", "3"], "--eps is not an option of sordino train: did you mean --epsilon?"),
    (["train", "--tagret", "outcome"], "did you mean --target?"),
    (["budget", "create", "--epsilo", "3"], "is not an option of sordino budget create: did you mean --epsilon?"),
    (["audit", "--epsilon", "3"], "--epsilon is not an option of sordino audit: see sordino audit --help"),
    (
        ["train", "--data", "peopel.csv", "--target", "outcome", "--epsilon", "3"],
        "data=peopel.csv does not exist: did you mean people.csv?",
    ),
    (["budget", "creat"], "did you mean 'create'?"),
    (["train", "--epsilon", "0"], "epsilon=0.0 must be > 0 and finite: 1 to 8 is usual"),
    (["train", "--epsilon", "nan"], "epsilon=nan must be > 0"),
    (["train", "--epsilon", "3", "--delta", "1"], "delta=1.0 must be in (0, 1)"),
    (["train", "--epsilon", "3", "--batch-size", "-5"], "batch-size=-5 must be >= 1"),
    (["train", "--noise-multiplier", "0"], "without noise there is no privacy"),
    (["train", "--epsilon", "3", "--lr", "-1"], "lr=-1.0 must be > 0"),
    (["train", "--data", "people.csv", "--target", "outcome"], "epsilon is missing: use --epsilon 3"),
    (["tune", "--data", "people.csv", "--target", "outcome"], "what may be spent on the whole search"),
    (
        ["finetune", "--model", "m", "--data", "people.csv", "--text", "note", "--epsilon", "-3"],
        "epsilon=-3.0 must be > 0",
    ),
    (["calibrate"], "epsilon is missing"),
    (["export", "runs/first"], "Missing option '--to': see sordino export --help"),
    (["check"], "Missing argument 'FILE.py:FUNCTION': see sordino check --help"),
    (["calibrate", "--epsilon", "3", "--delta", "2"], "delta=2.0 must be in (0, 1)"),
    (["calibrate", "--epsilon", "3", "--delta", "1e-5", "--rate", "0.1", "--steps", "0"], "steps=0 must be >= 1"),
    (["account", "--rate", "0.1", "--noise-multiplier", "0", "--steps", "5"], "without noise there is no privacy"),
    (["compare", "--dataset", "digits", "--epsilon", "0"], "epsilon=0.0 must be > 0"),
    (["audit", "--recipe", "dpsdg"], "did you mean 'dpsgd'?"),
    (["audit", "runs/first"], "runs/first holds no config.toml"),
    (["resume", "books"], "books holds no config.toml"),
    (["predict", "books", "--data", "people.csv"], "books holds no trained model"),
    (["predict", "runs/first", "--data", "persons.csv"], "data=persons.csv does not exist"),
    (["predict", "runs/first", "--data", "people.cvs"], "did you mean people.csv?"),
    (["reproduce", "dpsur:tabel2"], "did you mean 'dpsur:table2'?"),
    (["report", "runs/frist"], "did you mean runs/first?"),
    (["report", "runs/first", "--for", "oficer"], "did you mean 'officer'?"),
    (["account", "runs/frist"], "runs/frist is not a folder: give that of a run"),
    (["verify", "runs/frist"], "did you mean runs/first?"),
    (["resume", "runs/frist"], "did you mean runs/first?"),
    (["predict", "runs/frist", "--data", "people.csv"], "runs/frist is not a folder"),
    (["train", "--recipe", "mein.py:softened", "--epsilon", "3"], "did you mean mine.py?"),
    (["train", "--model", "lenet.py:build", "--epsilon", "3"], "lenet.py does not exist: give file.py:function"),
    (["audit", "--recipe", "mein.py:softened"], "did you mean mine.py?"),
    (["check", "mein.py:build"], "did you mean mine.py?"),
    (["compare", "--dataset", "digits", "--recipe", "mein.py:softened"], "did you mean mine.py?"),
    (["export", "runs/first", "--to", "onx"], "did you mean 'onnx'?"),
    (["export", "runs/frist", "--to", "onnx"], "did you mean runs/first?"),
    (["generate", "runs/frist", "--out", "texts.jsonl"], "did you mean runs/first?"),
    (["generate", "runs/first", "--out", "texts.jsonl", "--records", "0"], "records=0 must be >= 1"),
    (["serve", "nowhere"], "nowhere is not a folder"),
    (["compare", "--dataset", "digits", "--method", "dpsg"], "did you mean 'dpsgd'?"),
    (["compare", "--dataset", "fashion-mnist", "--method", "linear-dpsru"], "did you mean 'linear-dpsur'?"),
    (["compare", "--dataset", "digits", "--seeds", "0"], "seeds=0 must be >= 1"),
    (["compare", "--dataset", "digits", "--accounting", "publishd"], "did you mean 'published'?"),
    (["compare", "--dataset", "digts"], "did you mean 'digits'?"),
    (["compare", "--dataset", "persons.csv"], "persons.csv does not exist"),
    (["compare", "--dataset", "digits", "--recipe", "dpsgd"], "must be file.py:function"),
]
ASK = """
import contextlib, io, json, sys
from sordino.cli import app
found = []
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            app(words)
    except SystemExit as end:
        found.append((end.code, said.getvalue(), "torch" in sys.modules))
print(json.dumps(found))
"""


def test_no_typing_error_waits_for_torch(tmp_path: Path):
    (tmp_path / "people.csv").write_text("age,outcome\n" + "31,yes\n42,no\n" * 20)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "mine.py").touch()
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "novel.txt").touch()
    (tmp_path / "runs" / "first" / "ledger.sqlite").touch()
    command = [sys.executable, "-c", ASK, json.dumps([words for words, _ in TYPOS])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for (words, expected), (code, said, loaded) in zip(TYPOS, json.loads(done.stdout), strict=True):
        assert expected in said, words
        assert (code, len(said.splitlines())) == (2, 1), words
        assert not loaded, f"{words} loaded torch"


def test_the_names_of_files_are_those_that_runs_have():
    assert (early.LEDGER, early.CONFIG) == (books.LEDGER, config.FILE)
    assert (early.MODEL, early.SEARCH) == (predicting.MODEL, sealing.STATE)
    assert early.PREPARATION in tuned.CONFIGURATIONS


def test_what_may_be_a_column_is_left_to_the_reader(tmp_path: Path):
    """A first line that holds a record is never quoted, early or late."""
    path = tmp_path / "records.csv"
    path.write_text("31,secret-a\n42,secret-b\n" * 10)
    with pytest.raises(InvalidInput) as caught:
        early._check_target(path, "secret-c", {})
    assert "secret-a" not in str(caught.value)
    assert "secret-b" not in str(caught.value)


def test_what_is_right_passes(tmp_path: Path):
    early.require_known("recipe", "growing-mu", ["growing_mu"])
    (tmp_path / "lenet.py").touch()
    early.require_known("model", f"{tmp_path / 'lenet.py'}:build", ["mlp"])
    early.require_known("model", "package.lenet:build", ["mlp"])
    early.require_known("model", None, ["mlp"])
    (tmp_path / "ledger.sqlite").touch()
    early.require_run(tmp_path)


def test_a_ctrl_c_while_the_command_loads_is_no_traceback(monkeypatch: pytest.MonkeyPatch):
    class Loading:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setitem(sys.modules, "sordino.cli", Loading())
    try:
        with pytest.raises(SystemExit) as end:
            entry.main()
        assert end.value.code == 130
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL, "torch's own farewell would show a traceback"
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("dataset", ["digits", "fashion-mnist", "infinite-mnist"])
def test_the_methods_that_are_compared_are_those_that_are_configured(dataset: str):
    """Their names are read without the laboratory, which has them all in full."""
    from sordino.lab.experiments import catalogue

    full = {method for (name, method) in catalogue() if name == dataset}
    assert full
    assert set(compare._list_configured(dataset)) == full


def test_an_audit_that_could_not_be_saved_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.toml").touch()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(InvalidInput, match="cannot write into"):
        audit.audit(tmp_path, None)
