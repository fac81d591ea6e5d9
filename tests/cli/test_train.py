"""`sordino train`: what it trains, prints and writes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch

from sordino import Recipe, recipes
from sordino.accounting import Ledger
from sordino.cli import session
from sordino.cli.choosing import choose
from sordino.cli.train import Flags
from sordino.report import gather
from sordino.report.run_page import render_run


def outcome(result) -> dict:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_json_states_the_guarantee_of_the_ledger(sordino, small, tmp_path):
    run = tmp_path / "run"
    said = outcome(sordino(*small, "--epsilon", 4, "--held-out", 0.2, "--run", run, "--json"))
    assert said["status"] == "finished"
    assert said["steps"] == said["total"] == 6
    assert 4 * (1 - 1e-3) <= said["epsilon"] <= 4
    assert said["delta"] == 1e-5
    assert (said["basis"], said["unit"], said["accountant"]) == ("proven", "record", "pld")
    assert 0 <= said["held_out_accuracy"] <= 1
    assert said["run"] == str(run)
    with Ledger.read(run / "ledger.sqlite") as ledger:
        assert len(ledger) == 6


@pytest.mark.parametrize("adaptive", [True, False])
def test_history_keeps_the_bound_that_adaptive_dpis_released(sordino, tmp_path, adaptive):
    recipe = recipes.dpis(batch_size=256, epochs=3, adaptive=adaptive)
    table = tomli_w.dumps({"recipe": tomllib.loads(recipe.to_toml())})
    (tmp_path / "run.toml").write_text(table)
    result = sordino("train", "--config", tmp_path / "run.toml", "--epsilon", 4, "--run", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.stderr
    bounds = [json.loads(line)["clip"] for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    chart = "The most that one record’s gradient may weigh."
    assert (chart in render_run(gather(tmp_path / "run"))) == adaptive
    if not adaptive:
        assert set(bounds) == {None}, "the recipe states it"
        return
    assert bounds[0] == recipe.clip, "the first epoch has nothing to go by"
    assert len(set(bounds)) > 1, "it moved"
    assert session.reopen(tmp_path / "run").find_released_clip() == bounds[-1], "a resumed run knows it"


def test_words_end_with_guarantee_accuracy_and_directory(sordino, small, tmp_path):
    result = sordino(*small, "--epsilon", 4, "--held-out", 0.2, "--run", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    words = result.stdout
    assert words.index("for every training record, but the held-out records are NOT protected") < words.index(
        "Held-out accuracy: "
    )
    _, _, ending = words.partition(f"Saved in {tmp_path / 'run'}\nNext:\n")
    commands = [line.split() for line in ending.splitlines()]
    assert [words[:3] for words in commands] == [
        ["sordino", name, str(tmp_path / "run")] for name in ("predict", "report", "audit")
    ]
    assert "ε 4.00 of 4.00 planned" in result.stderr


def test_nothing_private_is_shown(sordino, small, tmp_path):
    """Law 7: steps, time and epsilon alone; no training loss, norm or size of a draw."""
    result = sordino(*small, "--epsilon", 4, "--run", tmp_path / "run", "--json")
    lines = [json.loads(line) for line in result.stderr.splitlines() if not line.startswith("caution: ")]
    shown = {
        *("event", "step", "total", "epsilon", "epsilon_so_far", "accuracy", "loss", "seconds_left"),
        *("clip", "events"),
    }
    assert [set(line) for line in lines] == [shown] * 6
    assert all(line["accuracy"] is None and line["loss"] is None for line in lines), "nothing was held out"
    assert all(line["clip"] is None for line in lines), "the recipe states it"
    assert all(line["seconds_left"] % 60 == 0 for line in lines), "the time of a step tells the size of its draw"
    assert set(outcome(result)) == {
        *("status", "run", "steps", "total", "noise_multiplier", "held_out_accuracy", "held_out_loss", "seconds"),
        *("epsilon", "delta", "basis", "unit", "adjacency", "accountant", "assumptions"),
        *("unprotected", "conditions", "versions", "events", "head"),
    }


def test_guarantee_owns_up_to_what_the_preparation_read(sordino, small, tmp_path):
    said = outcome(sordino(*small, "--epsilon", 4, "--held-out", 0.2, "--run", tmp_path / "a", "--json"))
    assert any("held-out records are not protected" in words for words in said["assumptions"])
    assert any("what the user gave as public" in words for words in said["assumptions"])
    said = outcome(sordino(*small, "--epsilon", 4, "--run", tmp_path / "b", "--json"))
    assert not any("held-out" in words for words in said["assumptions"])
    assert said["held_out_accuracy"] is None


def test_npz_whose_classes_are_counted_says_so(sordino, npz_file, tmp_path):
    common = ["--epsilon", 4, "--batch-size", 16, "--steps", 6, "--bounds", "0,10", "--json"]
    said = outcome(sordino("train", "--data", npz_file, *common, "--run", tmp_path / "counted"))
    assert any("--classes 2" in words for words in said["assumptions"])
    assert any("held-out records are not protected" in words for words in said["assumptions"])
    said = outcome(sordino("train", "--data", npz_file, *common, "--classes", 2, "--run", tmp_path / "given"))
    assert not any("--classes" in words for words in said["assumptions"])


def test_a_seed_repeats_a_run_and_another_does_not(sordino, small, tmp_path):
    weights = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        said = outcome(sordino(*small, "--epsilon", 4, "--seed", seed, "--run", tmp_path / name, "--json"))
        assert any("SEEDED" in words for words in said["assumptions"])
        reopened = session.reopen(tmp_path / name)
        weights.append(torch.cat([p.detach().flatten() for p in reopened.model.parameters()]))
        reopened.private.close()
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_run_directory_holds_the_configuration_and_nothing_about_the_records(sordino, small, csv_file, tmp_path):
    outcome(sordino(*small, "--epsilon", 4, "--run", tmp_path / "run", "--json"))
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert written["data"] == {
        "source": str(csv_file),
        "target": "outcome",
        "held_out": 0.0,
        "records": 60,
    }
    number = {"kind": "number", "low": 0.0, "high": 10.0, "missing": False}
    columns = dict.fromkeys(("age", "weight", "height"), number)
    assert written["schema"] == {"classes": ["0", "1"], "columns": columns}
    assert written["model"] == {"name": "linear", "features": 3, "classes": 2}
    names = {path.name for path in (tmp_path / "run").iterdir()}
    known = ("checkpoint-", "ledger.sqlite", "config.toml", "recipe.toml", "history.jsonl", "outcome.json")
    assert all(name.startswith(known) for name in names), names


def test_config_file_and_overrides(sordino, csv_file, tmp_path):
    (tmp_path / "run.toml").write_text(
        """
        [data]
        source = "patients.csv"
        target = "outcome"
        bounds = [0, 10]
        held_out = 0.5
        classes = 2
        [model]
        name = "mlp"
        hidden = 5
        [recipe]
        batch_size = 10
        steps = 4
        [recipe.optimizer]
        kind = "adam"
        lr = 0.02
        [recipe.budget]
        epsilon = 2.0
        delta = 1e-4
        [run]
        seed = 1
        """
    )
    said = outcome(sordino("train", "--config", tmp_path / "run.toml", "--run", tmp_path / "a", "--json"))
    assert (said["total"], said["delta"]) == (4, 1e-4)
    assert said["epsilon"] <= 2
    chosen = choose(Flags(config=tmp_path / "run.toml", epsilon=1.0, lr=0.5, batch_size=5))
    config = chosen.config
    assert config.recipe.budget.epsilon == 1.0
    assert (config.recipe.optimizer.kind, config.recipe.optimizer.lr) == ("adam", 0.5)
    assert (config.recipe.batch_size, config.recipe.records, len(chosen.records.held_out)) == (5, 29, 31)
    written = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    assert written["model"] == {"name": "mlp", "features": 3, "classes": 2, "hidden": 5}


def test_a_run_can_be_repeated_from_its_own_configuration(sordino, small, tmp_path):
    first = outcome(sordino(*small, "--epsilon", 4, "--seed", 3, "--run", tmp_path / "a", "--json"))
    again = ["train", "--config", tmp_path / "a" / "config.toml", "--run", tmp_path / "b", "--json"]
    second = outcome(sordino(*again))
    assert first["noise_multiplier"] == second["noise_multiplier"]
    recipes = [Recipe.from_file(tmp_path / name / "recipe.toml") for name in ("a", "b")]
    assert recipes[0] == recipes[1]
    other = outcome(sordino(*again[:-2], tmp_path / "c", "--json", "--epsilon", 2))
    assert other["noise_multiplier"] > first["noise_multiplier"]


@pytest.mark.parametrize(("recipe", "kind"), [("dpsgd", "sgd"), ("dpadam", "adam"), ("automatic", "sgd")])
def test_recipes_by_name(recipe, kind):
    config = choose(Flags(recipe=recipe, epsilon=3.0)).config
    assert (config.recipe.name, config.recipe.optimizer.kind) == (recipe, kind)
    assert config.recipe.budget.delta == 1e-5


def test_noise_without_a_budget(sordino, small, tmp_path):
    said = outcome(sordino(*small, "--noise-multiplier", 1.5, "--run", tmp_path / "run", "--json"))
    assert said["noise_multiplier"] == 1.5
    assert said["epsilon"] > 0


def test_model_of_the_users_own(sordino, small, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nfrom neighbour import WIDTH\n"
        "def build(): return nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))\n"
    )
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    model = f"{tmp_path / 'mine.py'}:build"
    assert outcome(sordino(*small, "--epsilon", 4, "--model", model, "--run", tmp_path / "run", "--json"))["steps"] == 6


def test_twin_is_compared_but_not_kept(sordino, small, tmp_path):
    arguments = [*small, "--epsilon", 4, "--held-out", 0.2, "--non-private-twin", "--json"]
    result = sordino(*arguments, "--run", tmp_path / "run")
    assert 0 <= outcome(result)["twin_accuracy"] <= 1
    kept = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert kept["twin_accuracy"] == outcome(result)["twin_accuracy"]
    assert any("twin" in line for line in kept["assumptions"])
    assert "caution: the twin" in result.stderr
    assert not any("twin" in path.name for path in (tmp_path / "run").iterdir())


def test_default_directory_is_new_for_every_run(sordino, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [outcome(sordino(*small, "--epsilon", 4, "--json"))["run"] for _ in range(2)]
    assert runs[0] != runs[1]
    assert all(Path(run).parent == Path("runs") for run in runs)


def test_demo_reaches_its_accuracy_within_its_budget(sordino, tmp_path):
    """The goal of `make demo`: epsilon 3 on digits, at least 88 % on held-out records, near the twin."""
    result = sordino("demo", "--run", tmp_path / "run", "--json")
    said = outcome(result)
    assert said["epsilon"] <= 3
    assert said["held_out_accuracy"] >= 0.88
    assert said["twin_accuracy"] >= said["held_out_accuracy"] - 0.02
    assert said["seconds"] < 60
    assert '"event": "progress"' in result.stderr
