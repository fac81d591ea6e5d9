"""Record and replay: every recipe conforms, and every sabotage of its own path is found.

The healthy recipe beside each sabotage goes through the very same check: what is found is the sabotage.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sordino import mechanisms, recipes
from sordino.audit import conformance
from tests.audit.conformance.recipe_sabotages import ANY, BROKEN, HEALTHY

CASES = [(recipe, name) for recipe, twists in BROKEN.items() for name in twists]


VARIANTS = {"dpadam", "growing_mu", "sensitivity_decay", "noise_decay", "kalman", "averaged"}
"""Kin of others: they are replayed in the slow tests, and so are their sabotaged twins."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in VARIANTS else ()) for n in HEALTHY])
def test_every_recipe_conforms(name: str) -> None:
    found = conformance.check(HEALTHY[name])
    assert found.passed, found.findings
    assert found.replays >= 14
    assert found.releases > found.replays


FREE = ("adam_bc", "averaged", "kalman", "low_pass", "rate_free")
"""They change what is made of a release, which is DP-SGD's: the suite has the sabotages of that."""


@pytest.mark.parametrize(
    ("recipe", "name"), [pytest.param(*case, marks=pytest.mark.slow if case[0] in FREE else ()) for case in CASES]
)
def test_every_sabotage_of_a_recipe_is_found(recipe: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twist = BROKEN[recipe][name]
    broken = replace(twist.recipe or HEALTHY[recipe], **twist.parts)
    if twist.patch is not None:
        twist.patch(monkeypatch)
    found = conformance.check(broken, arrange=twist.arrange, price="priced" in name, thorough=False, **twist.options)
    assert not found.passed
    assert not all("the run ended with" in finding for finding in found.findings), "an error is no finding"
    with pytest.raises(conformance.ConformanceFailed, match="does NOT conform"):
        found.require_passed()


def test_every_recipe_of_the_library_has_four_sabotages_at_least() -> None:
    assert set(recipes.__all__) <= set(mechanisms.find_all()) <= set(BROKEN) <= set(HEALTHY)
    assert all(len(twists) >= 4 for twists in BROKEN.values())


SHARED = {"half the noise", "twice the bound", *ANY}
"""What any step can get wrong: it is no mechanism's own way."""
NEWER = ("adam_bc", "allocation", "averaged", "banded", "blockwise", "kalman", "low_pass", "preconditioned")


@pytest.mark.parametrize("recipe", NEWER)
def test_the_newer_mechanisms_have_four_ways_of_their_own_to_be_wrong(recipe: str) -> None:
    assert len(BROKEN[recipe].keys() - SHARED) >= 4


ADDED = """
from dataclasses import replace
from sordino import recipes
from sordino.mechanisms import Mechanism

def tight(**common):
    return replace(recipes.dpsgd(**common), name="tight", clip=0.5)

MECHANISMS = (Mechanism("tight", title="Tight", summary="DP-SGD with a small bound", paper="none", recipe=tight),)
"""


def test_a_mechanism_that_is_added_as_one_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tight.py").write_text(ADDED)
    monkeypatch.setattr(mechanisms, "__path__", [*mechanisms.__path__, str(tmp_path)])
    try:
        recipe = conformance.build_examples()["tight"]
    finally:
        sys.modules.pop("sordino.mechanisms.tight", None)
    assert recipe.clip == 0.5
    assert conformance.check(recipe, steps=2, price=False).passed
