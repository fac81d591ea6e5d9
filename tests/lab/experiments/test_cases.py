"""Equal cases are the same run; every configuration is whole, and mistakes are named in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sordino.errors import InvalidInput
from sordino.lab.experiments import Case, Settings, catalogue, model_of, read, recipe_of
from sordino.lab.experiments.cases import read_methods
from sordino.lab.experiments.methods import build_recipe
from tests.lab.experiments.cases import small

RECORDS = {
    "cifar10": 50_000,
    "digits": 1_438,
    "fashion-mnist": 60_000,
    "imdb": 25_000,
    "infinite-mnist": 250_000,
    "mnist": 60_000,
    "names": 16_060,
}
CHANNELS = {"cifar10": (243, 8, 8), "fashion-mnist": (81, 7, 7), "mnist": (81, 7, 7)}
PUBLIC = (torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64))
KNOWN = catalogue()
ONE_OF_A_KIND = {settings.base["recipe"]["name"]: settings for settings in KNOWN.values() if settings.dataset != "imdb"}
WHOLE = 'method = "a"\nprovenance = "p"\n[data]\nname = "digits"\n[model]\nname = "linear"\n[recipe]\nname = "dpsgd"\n'


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": 2.0},
        {"seed": 1},
        {"delta": 1e-6},
        {"accounting": "published"},
        {"records": 299},
        {"average": 0.4},
        {"optimizer": {"kind": "sgd", "lr": 1.1}},
        {"recipe": {"name": "dpsgd", "batch_size": 100, "steps": 9, "clip": 0.2}},
    ],
)
def test_labels_differ_where_anything_does(changes):
    assert replace(small(), **changes).label != small().label


def test_a_case_survives_json_and_keeps_its_label():
    case = small(average=0.3, features={"kind": "scatter", "groups": 27})
    again = Case.from_dict(json.loads(json.dumps(case.to_dict())))
    assert again == case
    assert again.label == case.label


def test_a_field_that_is_left_out_does_not_rename_old_results():
    """A version with one more optional field must find the results of this one."""
    assert small(published=None, average=0.0).label == small().label
    assert small(published="rdp").label != small().label


def test_shortened_cases_draw_less_and_leave_the_noise_open():
    case = small(
        recipe={
            "name": "dpsur",
            "batch_size": 512,
            "validation_size": 256,
            "noise_multiplier": 2.0,
            "validation_noise": 0.8,
        }
    )
    short = case.shortened(records=200, steps=3)
    assert short.recipe == {
        "name": "dpsur",
        "batch_size": 50,
        "validation_size": 50,
        "steps": 3,
        "validation_noise": 5.0,
    }
    assert short.records == 200
    assert case.shortened(steps=3).recipe["batch_size"] == 512


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"accounting": "hoped"}, "accounting"),
        ({"average": 1.0}, "average"),
        ({"model": {}}, "model"),
        ({"recipe": {}}, "recipe"),
    ],
)
def test_refusals_of_a_case_are_one_line(changes, word):
    with pytest.raises(InvalidInput, match=word) as refused:
        replace(small(), **changes)
    assert "\n" not in str(refused.value)


def public_of(settings: Settings) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The records that a method may look at, where it asks for some."""
    return PUBLIC if settings.base["data"].get("public") else None


def without_files(case: Case) -> Case:
    """Vectors that are read from a file do not change which network is built."""
    model = {key: value for key, value in case.model.items() if key != "embedding"}
    return Case.from_dict({**case.to_dict(), "model": model})


@pytest.mark.parametrize("settings", KNOWN.values(), ids=["-".join(key) for key in KNOWN])
def test_every_configuration_builds_its_model_and_recipe(settings):
    assert settings.provenance
    for epsilon in settings.epsilons:
        case = settings.case(epsilon)
        recipe = build_recipe(case, case.recipe, RECORDS[settings.dataset], public_of(settings))
        assert recipe.noise_multiplier or recipe.steps or recipe.epochs, "the length or the noise must be given"
    shape = CHANNELS.get(settings.dataset, ()) if settings.base.get("features") else ()
    model = model_of(without_files(case), shape)
    assert sum(p.numel() for p in model.parameters()) > 0


@pytest.mark.parametrize("settings", ONE_OF_A_KIND.values(), ids=list(ONE_OF_A_KIND))
def test_one_configuration_of_each_kind_calibrates(settings):
    case = settings.case(settings.epsilons[-1])
    recipe = recipe_of(case, RECORDS[settings.dataset], public_of(settings))
    assert recipe.steps
    assert recipe.noise_multiplier


@pytest.mark.slow
@pytest.mark.parametrize("accounting", ["proven", "published"])
@pytest.mark.parametrize("settings", KNOWN.values(), ids=["-".join(key) for key in KNOWN])
def test_every_configuration_calibrates(settings, accounting):
    if accounting == "published" and {"reuse", "line_search", "test_every"} & set(settings.base["recipe"]):
        with pytest.raises(InvalidInput, match="refinements"):  # ours: no paper prices it
            recipe_of(
                settings.case(settings.epsilons[0], 0, accounting), RECORDS[settings.dataset], public_of(settings)
            )
        return
    for epsilon in settings.epsilons:
        recipe = recipe_of(settings.case(epsilon, 0, accounting), RECORDS[settings.dataset], public_of(settings))
        assert recipe.steps
        assert recipe.noise_multiplier


@pytest.mark.parametrize(
    ("dataset", "epsilon", "steps"), [("mnist", 1, 280), ("fashion-mnist", 3, 1081), ("imdb", 2, 298)]
)
def test_published_accounting_gives_the_papers_number_of_updates(dataset, epsilon, steps):
    """T accepted of DPSUR (docs/papers.md), from nothing but the configuration."""
    case = KNOWN[dataset, "dpsur"].case(epsilon, 0, "published")
    assert recipe_of(case, RECORDS[dataset]).steps == pytest.approx(steps, rel=0.01)


def test_what_an_epsilon_changes_is_merged_table_by_table(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(
        'method = "a"\nprovenance = "none"\naverage = 0.1\n[data]\nname = "digits"\n[model]\nname = "linear"\n'
        '[recipe]\nname = "dpsgd"\nclip = 0.1\n[epsilon."0.5"]\naverage = 0.3\nrecipe = { clip = 0.5 }\n'
    )
    settings = read(path)
    assert settings.case(0.5).recipe == {"name": "dpsgd", "clip": 0.5}
    assert settings.case(0.5).average == 0.3
    assert settings.case(1.0).recipe == {"name": "dpsgd", "clip": 0.1}
    assert [case.seed for case in settings.cases([1, 2], range(2))] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("= 3", "TOML"),
        ("colour = 1\n" + WHOLE, "colour"),
        (WHOLE.replace('method = "a"\n', ""), "method"),
        (WHOLE.replace('name = "digits"', "public = 3"), "name of its data"),
        (WHOLE + "[epsilon.one]\naverage = 0.1\n", "number"),
        (WHOLE + "[epsilon]\n1 = 3\n", "tables"),
    ],
)
def test_mistakes_are_one_line(tmp_path, text, word):
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=word) as refused:
        read(path)
    assert "\n" not in str(refused.value)


def test_a_method_may_not_be_configured_twice(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(WHOLE)
    with pytest.raises(InvalidInput, match="twice"):
        catalogue(tmp_path)
    with pytest.raises(InvalidInput, match="cannot read"):
        read(Path("nowhere.toml"))
    with pytest.raises(InvalidInput, match="SORDINO_CONFIGS"):
        catalogue(tmp_path / "nowhere")


def test_methods_that_share_a_file_differ_in_what_their_tables_say(tmp_path):
    path = tmp_path / "linear.toml"
    shared = WHOLE.replace('method = "a"', "average = 0.4") + "clip = 0.1\n[epsilon.1]\noptimizer = { lr = 3.0 }\n"
    path.write_text(
        shared + '[methods.a]\n[methods.b]\naverage = 0.2\nrecipe = { name = "dpis" }\n'
        "epsilon.1.optimizer = { momentum = 0.9 }\nepsilon.2.recipe = { clip = 0.5 }\n"
    )
    plain, changed = read_methods(path)
    assert (plain.method, plain.case(1.0).recipe) == ("a", {"name": "dpsgd", "clip": 0.1})
    assert (changed.method, changed.case(2.0).recipe) == ("b", {"name": "dpis", "clip": 0.5})
    assert changed.case(1.0).optimizer == {"lr": 3.0, "momentum": 0.9}
    assert plain.case(1.0).optimizer == {"lr": 3.0}
    assert (plain.case(1.0).average, changed.case(1.0).average) == (0.4, 0.2)
    assert sorted(method for _, method in catalogue(tmp_path)) == ["a", "b"]
    with pytest.raises(InvalidInput, match="has 2 methods, must have 1"):
        read(path)
    for wrong, word in (("[methods.a]\ncolour = 1\n", "colour"), ('method = "a"\n', "leave one out")):
        path.write_text(f"{wrong}{shared}[methods.b]\n" if "method =" in wrong else shared + wrong)
        with pytest.raises(InvalidInput, match=word):
            read_methods(path)


def test_a_method_begins_with_its_footing(tmp_path):
    path = tmp_path / "dpsgd.toml"
    text = 'method = "{}"\nfooting = "linear"\nprovenance = "x"\n'
    text += '[data]\nname = "mnist"\n[model]\nname = "linear"\n[recipe]\nname = "dpsgd"\n'
    path.write_text(text.format("linear-dpsgd"))
    assert read(path).footing == "linear"
    path.write_text(text.format("dpsgd"))
    with pytest.raises(InvalidInput, match="'dpsgd' must begin with its footing 'linear'"):
        read(path)


def test_provenance_is_one_line_and_longer_stories_are_on_their_page():
    assert {key: len(s.provenance) for key, s in catalogue().items() if len(s.provenance) > 260} == {}
