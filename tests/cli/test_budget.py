"""`sordino budget`, `train --dataset-budget` and what they say when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sordino.accounting import Ledger

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "finetune"


@pytest.fixture
def vault(tmp_path, monkeypatch):
    monkeypatch.setenv("SORDINO_VAULT", str(tmp_path / "vault.sqlite"))
    return tmp_path / "vault.sqlite"


def test_a_budget_from_its_making_to_its_end(sordino, vault):
    made = sordino("budget", "create", "patients", "--epsilon", 2, "--delta", 1e-5)
    assert made.exit_code == 0
    assert "epsilon=2 at delta=1e-05 for every record" in made.stdout
    assert "patients" in sordino("budget", "list").stdout
    assert "bob may reserve, at most epsilon=1" in sordino("budget", "grant", "patients", "bob", "--epsilon", 1).stdout
    assert "bob may reserve no more" in sordino("budget", "grant", "patients", "bob", "--revoke").stdout
    assert "epsilon=3 now" in sordino("budget", "raise", "patients", "--epsilon", 3).stdout
    assert "closed" in sordino("budget", "close", "patients").stdout
    told = json.loads(sordino("budget", "history", "patients", "--json").stdout)
    assert [entry["kind"] for entry in told["entries"]] == ["create", "grant", "revoke", "raise", "close"]
    found = json.loads(sordino("budget", "show", "patients", "--json").stdout)
    assert (found["budget"], found["total"], found["left"], found["closed"]) == (3.0, 0.0, 0.0, True)
    assert "intact. 5 entries" in sordino("budget", "verify", "patients").stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("show", "none"), "no vault at"),
        (("create", "a/b", "--epsilon", 1, "--delta", 1e-5), "dataset='a/b'"),
        (("create", "a", "--epsilon", 0, "--delta", 1e-5), "epsilon=0"),
        (("create", "a", "--epsilon", 1, "--delta", 1e-5, "--composition", "sum"), "composition='sum'"),
        (("create", "a", "--epsilon", 1, "--delta", 1e-5, "--order", 1), "order=1"),
    ],
)
def test_bad_input_is_one_line(sordino, vault, words, told):
    result = sordino("budget", *words)
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_runs_reserve_are_refused_settled_and_written_off(sordino, small, vault, tmp_path):
    sordino("budget", "create", "digits", "--epsilon", 3, "--delta", 1e-5)
    first = tmp_path / "first"
    done = sordino(*small, "--epsilon", 1, "--dataset-budget", "digits", "--run", first)
    assert done.exit_code == 0, done.stderr
    found = json.loads(sordino("budget", "show", "digits", "--json").stdout)
    assert [(run["status"], run["events"]) for run in found["runs"]] == [("settled", found["events"])]
    refused = sordino(*small, "--epsilon", 2.9, "--dataset-budget", "digits", "--run", tmp_path / "second")
    assert refused.exit_code == 2
    assert "nothing was released" in refused.stderr
    assert not (tmp_path / "second").exists()
    assert "1 receipts are in it" in sordino("budget", "verify", "digits", first).stdout
    assert "returned" in sordino("budget", "settle", first).stdout
    page = tmp_path / "page.html"
    assert sordino("budget", "show", "digits", "--page", page).exit_code == 0
    assert "Verified" in page.read_text()
    run = found["runs"][0]["name"]
    assert "written off" in sordino("budget", "write-off", "digits", run).stdout
    assert sordino("budget", "settle", first).exit_code == 2


def test_what_is_released_before_training_is_reserved_with_it(sordino, csv_file, vault, tmp_path):
    """The names and ranges of a table are the first releases of a run, for a network as well as without one."""
    words = ["train", "--data", csv_file, "--target", "outcome", "--batch-size", 16, "--steps", 4, "--held-out", 0]
    words += ["--epsilon", 8, "--dataset-budget"]
    for name, epsilon, composition in (("small", 2, "adaptive"), ("large", 40, "adaptive"), ("planned", 9, "planned")):
        made = ("budget", "create", name, "--epsilon", epsilon, "--delta", 1e-3, "--composition", composition)
        assert sordino(*made).exit_code == 0
    refused = sordino(*words, "small", "--run", tmp_path / "small")
    assert refused.exit_code == 2
    assert "nothing was released" in refused.stderr
    assert not (tmp_path / "small").exists()
    assert json.loads(sordino("budget", "show", "small", "--json").stdout)["events"] == 0
    for name in ("large", "planned"):
        done = sordino(*words, name, "--run", tmp_path / name)
        assert done.exit_code == 0, done.stderr
        found = json.loads(sordino("budget", "show", name, "--json").stdout)
        assert found["events"] > 4
        assert [run["status"] for run in found["runs"]] == ["settled"]
        assert "intact" in sordino("budget", "verify", name, tmp_path / name).stdout


def test_a_table_without_a_network_reserves_too_and_resumes_within_it(sordino, csv_file, vault, tmp_path):
    for name, epsilon in (("small", 1), ("large", 60)):
        sordino("budget", "create", name, "--epsilon", epsilon, "--delta", 1e-5)
    words = ["train", "--data", csv_file, "--target", "outcome", "--classes", 2, "--epsilon", 20]
    words += ["--hold-out", 0.3, "--metrics-epsilon", 2, "--json"]
    refused = sordino(*words, "--dataset-budget", "small", "--run", tmp_path / "small")
    assert refused.exit_code == 2
    assert "nothing was released" in refused.stderr
    assert not (tmp_path / "small").exists()
    done = sordino(*words, "--dataset-budget", "large", "--run", tmp_path / "large")
    assert done.exit_code == 0, done.stderr
    events = json.loads(done.stdout)["events"]
    found = json.loads(sordino("budget", "show", "large", "--json").stdout)
    assert [(run["status"], run["events"]) for run in found["runs"]] == [("settled", events)]
    (tmp_path / "large" / "outcome.json").unlink()  # as if it had been killed before that was written
    again = sordino("resume", tmp_path / "large", "--json")
    assert again.exit_code in (0, 2)  # it spent most of its own budget
    held = json.loads(sordino("budget", "show", "large", "--json").stdout)["events"]
    with Ledger.read(tmp_path / "large" / "ledger.sqlite") as ledger:
        assert held == len(ledger)


def test_a_language_model_reserves_the_names_of_its_classes_and_its_steps(sordino, vault, tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    for name, epsilon in (("small", 1), ("large", 60)):
        sordino("budget", "create", name, "--epsilon", epsilon, "--delta", 1e-3)
    texts = ["--data", EXAMPLES / "reviews.csv", "--text", "review", "--target", "mood", "--length", 24]
    words = ["finetune", "--model", EXAMPLES / "tiny-bert" / "config.json", *texts, "--steps", 2, "--epsilon", 8]
    refused = sordino(*words, "--json", "--dataset-budget", "small", "--run", tmp_path / "small")
    assert refused.exit_code == 2
    assert "nothing was released" in refused.stderr
    assert not (tmp_path / "small").exists()
    done = sordino(*words, "--json", "--dataset-budget", "large", "--run", tmp_path / "large")
    assert done.exit_code == 0, done.stderr
    found = json.loads(sordino("budget", "show", "large", "--json").stdout)
    assert [(run["status"], run["events"]) for run in found["runs"]] == [("settled", 3)]
    assert "intact" in sordino("budget", "verify", "large", tmp_path / "large").stdout


@pytest.mark.parametrize("words", [("compare", "--dataset", "digits"), ("audit", "--recipe", "dpsgd")])
def test_what_draws_on_no_budget_says_so(sordino, words):
    result = sordino(*words, "--dataset-budget", "patients")
    assert result.exit_code == 2
    assert "dataset-budget=patients" in result.stderr
    assert len(result.stderr.splitlines()) == 1
