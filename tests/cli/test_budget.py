"""`sordino budget`, `train --dataset-budget` and what they say when something is wrong."""

from __future__ import annotations

import json

import pytest


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
    """The names and ranges of a table are the first releases of a run; some have no Rényi price, and are refused."""
    words = ["train", "--data", csv_file, "--target", "outcome", "--batch-size", 16, "--steps", 4, "--held-out", 0]
    words += ["--epsilon", 8, "--dataset-budget"]
    for name, epsilon, composition in (("first", 200, "adaptive"), ("small", 2, "planned"), ("large", 9, "planned")):
        made = ("budget", "create", name, "--epsilon", epsilon, "--delta", 1e-3, "--composition", composition)
        assert sordino(*made).exit_code == 0
    for name, told in (("first", "composition='planned'"), ("small", "nothing was released")):
        refused = sordino(*words, name, "--run", tmp_path / name)
        assert refused.exit_code == 2
        assert told in refused.stderr
        assert json.loads(sordino("budget", "show", name, "--json").stdout)["events"] == 0
    done = sordino(*words, "large", "--run", tmp_path / "large")
    assert done.exit_code == 0, done.stderr
    found = json.loads(sordino("budget", "show", "large", "--json").stdout)
    assert found["events"] > 4
    assert [run["status"] for run in found["runs"]] == ["settled"]
    assert "intact" in sordino("budget", "verify", "large", tmp_path / "large").stdout
