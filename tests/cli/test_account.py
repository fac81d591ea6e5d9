"""`sordino account` and `sordino calibrate` say what sordino.accounting says."""

from __future__ import annotations

import json
import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from sordino.accounting import ACCOUNTANTS, Budget, calibrate_noise, calibrate_steps, epsilon, pricing
from sordino.cli.options import choose_delta
from sordino.figures import round_up

EVENT = PoissonSampledDpEvent(256 / 60_000, GaussianDpEvent(1.3))
DESCRIBED = ["account", "--batch-size", 256, "--records", 60_000, "--noise-multiplier", 1.3, "--delta", 1e-5]


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
def test_every_accountant_is_asked(sordino, adjacency):
    result = sordino(*DESCRIBED, "--epochs", 5, "--adjacency", adjacency, "--json")
    said = json.loads(result.stdout)
    assert set(said["epsilon"]) == set(ACCOUNTANTS)
    assert said["epsilon"]["pld"]["epsilon"] == epsilon([(EVENT, 1172)], 1e-5, "pld", adjacency)
    assert said["epsilon"]["pld"]["basis"] == "proven"


def test_reference_values_in_words(sordino):
    """The reference value: N=60,000, B=256, sigma=1.3, 5 epochs cost 0.487."""
    words = sordino(*DESCRIBED, "--epochs", 5).stdout
    assert "1,172 steps" in words
    shown = float(next(line for line in words.splitlines() if "pld" in line).split("│")[2])
    assert shown == pytest.approx(0.487, abs=1e-3)


def test_accountant_without_a_price_says_so(sordino, monkeypatch):
    class Refusing:
        name, basis = "shy", "proven"

        def epsilon(self, events, delta, adjacency):
            raise pricing.InvalidInput("shy has no price")

    monkeypatch.setitem(ACCOUNTANTS, "shy", Refusing())
    result = sordino(*DESCRIBED, "--epochs", 5)
    assert result.exit_code == 0
    assert "no price" in result.stdout
    assert "No price by shy: shy has no price" in result.stdout


def test_basis_of_a_run_without_proof_is_not_improved(sordino, tmp_path):
    from sordino.accounting import Ledger

    with Ledger.create(tmp_path / "ledger.sqlite", header={"basis": "published"}) as ledger:
        ledger.charge(EVENT)
    said = json.loads(sordino("account", tmp_path, "--delta", 1e-5, "--json").stdout)
    assert {price["basis"] for price in said["epsilon"].values()} == {"published"}


def test_a_run_without_a_budget_has_the_delta_that_its_report_states(sordino, tmp_path):
    """It was trained with --noise-multiplier alone: like `train` and `report`, it takes a tenth of 1 / records."""
    from sordino import recipes
    from sordino.accounting import Ledger

    recipe = recipes.dpsgd(batch_size=10, epochs=1, noise_multiplier=2.0).for_records(1000)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    with Ledger.create(tmp_path / "ledger.sqlite") as ledger:
        ledger.charge(EVENT)
    said = json.loads(sordino("account", tmp_path, "--json").stdout)
    assert said["delta"] == 1e-4
    assert "at δ = 0.0001 for" in sordino("report", tmp_path).stdout


def test_a_run_says_whom_it_does_not_protect_and_what_nobody_checked(sordino, tmp_path):
    from sordino.accounting import Ledger

    with Ledger.create(tmp_path / "ledger.sqlite") as ledger:
        ledger.charge(EVENT)
        ledger.declare("unprotected", "the held-out records")
        ledger.declare("condition", "your sampler Own draws fairly")
    said = json.loads(sordino("account", tmp_path, "--delta", 1e-5, "--json").stdout)
    assert said["unprotected"] == ["the held-out records"]
    assert said["conditions"] == ["your sampler Own draws fairly"]
    words = sordino("account", tmp_path, "--delta", 1e-5).stdout
    assert "NOT protected: the held-out records." in words
    assert "Provided that your sampler Own draws fairly, which nobody checked." in words


def test_saved_run_is_priced_as_its_guarantee(sordino, small, tmp_path):
    run = tmp_path / "run"
    finished = json.loads(sordino(*small, "--epsilon", 3, "--run", run, "--json").stdout)
    before = {path.name: path.read_bytes() for path in run.glob("*.toml")}
    said = json.loads(sordino("account", run, "--json").stdout)
    assert said["epsilon"]["pld"]["epsilon"] == finished["epsilon"]
    assert said["epsilon"]["rdp"]["epsilon"] >= finished["epsilon"]
    assert said["delta"] == finished["delta"]
    assert before == {path.name: path.read_bytes() for path in run.glob("*.toml")}
    other = json.loads(sordino("account", run, "--delta", 1e-7, "--json").stdout)
    assert other["epsilon"]["pld"]["epsilon"] > finished["epsilon"]


def test_calibrated_noise(sordino):
    arguments = ["calibrate", "--epsilon", 2, "--delta", 1e-5, "--rate", 0.02, "--steps", 100]
    said = json.loads(sordino(*arguments, "--json").stdout)
    assert said["noise_multiplier"] == calibrate_noise(Budget(2, 1e-5), 0.02, 100).noise_multiplier
    assert 2 * (1 - 1e-3) <= said["epsilon"] <= 2
    assert f"noise multiplier {said['noise_multiplier']:.6g}, 100 steps" in sordino(*arguments).stdout


def test_calibrated_steps(sordino):
    arguments = ["calibrate", "--epsilon", 2, "--delta", 1e-5, "--rate", 0.02, "--noise-multiplier", 1.1, "--json"]
    said = json.loads(sordino(*arguments).stdout)
    assert said["steps"] == calibrate_steps(Budget(2, 1e-5), 0.02, 1.1)
    assert said["epsilon"] <= 2


@pytest.mark.parametrize(("records", "delta"), [(60, 1e-5), (1438, 1e-5), (9_999, 1e-5), (60_000, 1e-6), (10**6, 1e-7)])
def test_default_delta_is_at_most_a_tenth_of_one_record(records, delta):
    assert choose_delta(None, records) == pytest.approx(delta, rel=1e-12)
    assert choose_delta(None, records) <= 0.1 / records * (1 + 1e-9)


def test_epsilon_is_never_rounded_down():
    assert round_up(2.9912) == "3.00"
    assert round_up(3.0) == "3.00"
    assert round_up(0.48701, 4) == "0.4871"
    assert round_up(math.inf) == "infinite"
    assert round_up(4.77087e43) == "4.78e+43"
    assert round_up(1e306, 4) == "1e+306"
