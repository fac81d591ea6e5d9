"""Every mechanism is found by looking into one folder."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sordino import mechanisms, recipes
from sordino.errors import InvalidInput


def test_every_recipe_is_a_mechanism() -> None:
    found = mechanisms.find_all()
    assert list(found) == sorted(recipes.__all__)
    for name, mechanism in found.items():
        assert mechanism.name == name
        assert mechanism.recipe is getattr(recipes, name)
        assert mechanism.title
        assert mechanism.summary
        assert mechanism.paper


def test_a_name_is_found_with_hyphens_too_and_an_unknown_one_is_refused() -> None:
    assert mechanisms.find("growing-mu") is mechanisms.find("growing_mu")
    with pytest.raises(InvalidInput, match="must be one of adam_bc, allocation, automatic"):
        mechanisms.find("dp-sgdd")


def test_names_are_read_without_torch() -> None:
    program = (
        "import sys; from sordino import mechanisms; print(*mechanisms.list_names()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(mechanisms.find_all())
