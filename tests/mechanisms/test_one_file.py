"""Adding a mechanism is adding one file: the one that docs/extending.md shows, in a folder of its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.mechanisms_index import on_page_markdown
from sordino import Budget, InvalidInput, Recipe, mechanisms, recipes
from sordino.audit import conformance
from sordino.cli import app
from sordino.cli.options import list_methods
from sordino.names import PARTS

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
NAME = "normalised"


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file of the page, found like those of the package; nothing else is changed."""
    shown = re.search(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert shown is not None
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / f"{NAME}.py").write_text(shown[1], encoding="utf-8")
    monkeypatch.setattr(mechanisms, "__path__", [*mechanisms.__path__, str(folder)])
    yield
    sys.modules.pop(f"sordino.mechanisms.{NAME}", None)
    vars(mechanisms).pop(NAME, None)


@pytest.mark.usefixtures("added")
def test_it_is_found_with_its_words_and_its_constructor() -> None:
    mechanism = mechanisms.find(NAME)
    assert mechanism.sentence == "Normalised SGD: gradients are made equally long one by one, then noised"
    assert NAME in mechanisms.list_names()
    assert NAME in recipes.__all__
    assert NAME in dir(recipes)
    assert recipes.__getattr__(NAME) is mechanism.recipe


@pytest.mark.usefixtures("added")
def test_it_is_in_the_index_and_the_reference_of_the_documentation() -> None:
    written = on_page_markdown((PAGE.parent / "api" / "recipes.md").read_text(encoding="utf-8"))
    assert f"| `recipes.{NAME}` | {mechanisms.find(NAME).sentence} |" in written
    assert f"::: sordino.mechanisms.{NAME}\n" in written


@pytest.mark.usefixtures("added")
def test_its_recipe_is_written_and_read_back() -> None:
    recipe = mechanisms.find(NAME).recipe(batch_size=16, epochs=2).calibrate(Budget(4, 1e-5), records=64)
    text = recipe.to_toml()
    assert 'part = "normalised"' in text
    assert Recipe.from_toml(text) == recipe
    assert Recipe.from_toml(text).fingerprint() == recipe.fingerprint()


@pytest.mark.usefixtures("added")
def test_it_conforms() -> None:
    mechanism = mechanisms.find(NAME)
    recipe = mechanism.recipe(batch_size=4, steps=4, noise_multiplier=1.0, **mechanism.example)
    conformance.check(recipe, price=False, thorough=False).require_passed()


def call(*words: object) -> None:
    with pytest.raises(SystemExit) as ended:
        app([str(word) for word in words])
    assert not ended.value.code


@pytest.mark.usefixtures("added")
def test_the_command_line_offers_it_trains_with_it_and_reports_it_by_its_title(tmp_path: Path) -> None:
    run, page = tmp_path / "run", tmp_path / "page.html"
    assert NAME in list_methods()
    call("train", "--data", "digits", "--method", NAME, "--epsilon", 8, "--steps", 2, "--run", run)
    assert 'part = "normalised"' in (run / "recipe.toml").read_text()
    call("report", run, "--output", page)
    assert mechanisms.find(NAME).sentence in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("added")
def test_a_second_file_cannot_take_a_name_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[type(mechanisms.find(NAME).recipe().weighing).__module__]
    monkeypatch.setitem(module.MECHANISMS[0].parts["Weighing"], "flat", module.Normalised)  # type: ignore[index]
    with pytest.raises(InvalidInput, match="two parts are called 'flat' on disk"):
        recipes.dpsgd().to_toml()


def test_without_the_file_its_name_is_unknown() -> None:
    assert PARTS.place(NAME) is None
    with pytest.raises(InvalidInput, match="it must be one of flat, automatic, per-block"):
        Recipe.from_toml('[weighing]\npart = "normalised"')
    with pytest.raises(AttributeError, match="no attribute 'normalised': it has adam_bc"):
        recipes.__getattr__(NAME)
