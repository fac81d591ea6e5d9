"""What version 0.1 wrote is read for ever: recipes, fingerprints, events, configurations and whole run folders.

So are the recipes of later mechanisms, as they were first written. Nothing in tests/golden/ is ever written again. If a
test here fails, a file that users have can no longer be read.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from dp_accounting import dp_event as dp

from sordino import Recipe, recipes
from sordino.accounting import Ledger
from sordino.accounting.erasure import AnnealedErasure, Erasure
from sordino.accounting.events import NAMES_OF_0_1, DpEvent, from_json, to_json
from sordino.accounting.filtered import Filtered
from sordino.accounting.jl_gaussian import ProjectedGaussian
from sordino.accounting.noisy_minimum import NoisyMinimum
from sordino.accounting.unlisted import Unlisted
from sordino.cli import app, config
from sordino.mechanisms.dynamic import Levels, PerEpoch
from sordino.names import PARTS

GOLDEN = Path(__file__).parent / "golden"
FINGERPRINTS: dict[str, str] = json.loads((GOLDEN / "recipes" / "fingerprints.json").read_text())
GAUSSIAN = dp.GaussianDpEvent(1.25)
EVENTS_THEN: list[DpEvent] = [
    dp.NoOpDpEvent(),
    dp.NonPrivateDpEvent(),
    dp.UnsupportedDpEvent(),
    dp.RandomizedResponseDpEvent(0.1, 4),
    GAUSSIAN,
    dp.LaplaceDpEvent(2.0),
    dp.DiscreteLaplaceDpEvent(1.0, 2),
    dp.SelfComposedDpEvent(GAUSSIAN, 3),
    dp.ComposedDpEvent([GAUSSIAN, dp.LaplaceDpEvent(0.5)]),
    dp.PoissonSampledDpEvent(0.01, GAUSSIAN),
    dp.SampledWithReplacementDpEvent(100, 5, GAUSSIAN),
    dp.SampledWithoutReplacementDpEvent(100, 5, GAUSSIAN),
    dp.SingleEpochTreeAggregationDpEvent(1.0, [4, 5]),
    dp.RepeatAndSelectDpEvent(GAUSSIAN, 2.0, 0.5),
    dp.MixtureOfGaussiansDpEvent(1.0, [0.0, 1.0], [0.5, 0.5]),
    dp.ZCDpEvent(0.5, 0.1),
    dp.TruncatedSubsampledGaussianDpEvent(1000, 0.01, 20, 1.0),
    Erasure(0.03, 1.1, 0.05, 0.25, 0.75, True),
    AnnealedErasure(0.03, 1.1, 0.05, 1.4),
    NoisyMinimum(0.2),
    Filtered(dp.PoissonSampledDpEvent(0.01, GAUSSIAN), 8.0, 3.0, "add-or-remove-one"),
    ProjectedGaussian(1.3, 24),
    Unlisted(1e-6),
]


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_a_recipe_of_0_1_is_read_and_keeps_its_fingerprint(name: str) -> None:
    recipe = Recipe.from_toml((GOLDEN / "recipes" / f"{name}.toml").read_text())
    assert recipe.fingerprint() == FINGERPRINTS[name]
    again = Recipe.from_toml(recipe.to_toml())
    assert again == recipe
    assert again.fingerprint() == FINGERPRINTS[name]


def test_the_recipes_of_0_1_are_what_their_constructors_still_make() -> None:
    made = {
        "dpsgd": recipes.dpsgd(batch_size=32, epochs=2.0),
        "automatic": recipes.automatic(batch_size=32, epochs=2.0),
        "jl": recipes.jl(batch_size=32, epochs=2.0, projections=24),
    }
    for name, recipe in made.items():
        assert Recipe.from_toml((GOLDEN / "recipes" / f"{name}.toml").read_text()) == recipe
    levels = Recipe.from_toml((GOLDEN / "recipes" / "schedule-levels.toml").read_text())
    assert isinstance(levels.noise_schedule, Levels)
    by_epoch = Recipe.from_toml((GOLDEN / "recipes" / "schedule-perepoch.toml").read_text())
    assert isinstance(by_epoch.noise_schedule, PerEpoch)


def test_every_recipe_and_every_name_of_0_1_is_among_the_golden_files() -> None:
    assert set(recipes.__all__) <= set(FINGERPRINTS)
    text = "".join(path.read_text() for path in (GOLDEN / "recipes").glob("*.toml"))
    assert {old for old in PARTS.old if f'"{old}"' not in text} == set()
    events = (GOLDEN / "events.json").read_text()
    assert {old for old in NAMES_OF_0_1 if f'\\"{old}\\"' not in events} == set()


def test_the_events_of_0_1_are_read() -> None:
    rows = json.loads((GOLDEN / "events.json").read_text())
    assert [from_json(row["text"]) for row in rows] == EVENTS_THEN
    for row, event in zip(rows, EVENTS_THEN, strict=True):
        assert type(event).__name__ == row["class"]
        assert from_json(to_json(event)) == event
        assert "dp_event" not in to_json(event)


@pytest.mark.parametrize("name", ["finished/config.toml", "stopped/config.toml", "table.toml"])
def test_a_configuration_of_0_1_is_read_and_written_with_stable_names(name: str, tmp_path: Path) -> None:
    read = config.read_config(GOLDEN / name)
    assert read.recipe is not None
    read.write(tmp_path)
    assert "weighing.Flat" not in (tmp_path / config.FILE).read_text()
    assert config.read_config(tmp_path / config.FILE) == replace(read, data=replace(read.data, source=read.data.source))


def _command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(list(words))
    return int(ended.value.code or 0)


@pytest.mark.parametrize("name", ["finished", "stopped"])
def test_a_run_of_0_1_is_reported_priced_and_gone_on_with(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / name
    shutil.copytree(GOLDEN / name, run)
    assert _command("report", str(run), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["events"] == (6 if name == "finished" else 3)
    assert not [line for line in told["cautions"] if "fingerprint" in line]
    assert _command("account", str(run), "--json") == 0
    assert json.loads(capsys.readouterr().out)["epsilon"]["pld"]["epsilon"] == pytest.approx(told["epsilon"], rel=1e-3)
    assert _command("resume", str(run), "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 6
    with Ledger.read(run / "ledger.sqlite") as ledger:
        assert len(ledger) == 6
        assert {type(event) for event, _ in ledger.events()} == {dp.PoissonSampledDpEvent}
