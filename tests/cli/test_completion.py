"""Shell completion: what is offered is what there is, and offering it loads no torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sordino import recipes
from sordino.accounting.adjacency import required_adjacency
from sordino.accounting.pricing import ACCOUNTANTS
from sordino.cli import completing
from sordino.cli.defaults import OPTIMIZERS
from sordino.lab.data import LOADERS
from sordino.lab.networks import ARCHITECTURES

SCRIPT = "import sys; sys.argv[0] = 'sordino'; from sordino.cli import main; main()"


def shell(**variables: str) -> str:
    """What the `sordino` script answers a shell."""
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)
    return done.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("sordino tr", {"train"}),
        ("sordino train --dr", {"--draft-schema"}),
        ("sordino train --recipe dps", {"dpsgd", "dpsur"}),
        ("sordino train --data mn", {"mnist"}),
        ("sordino train --data patients", set()),
    ],
)
def test_what_is_offered(typed, offered):
    words = typed.split()
    answer = shell(_SORDINO_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(words) - 1))
    assert set(answer.split()) == offered


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_a_script_for_every_shell(name):
    assert "sordino" in shell(_SORDINO_COMPLETE=f"source_{name}")


def test_the_lists_are_up_to_date():
    assert set(completing.DATA) == set(LOADERS)
    assert set(completing.RECIPES) == {name.replace("_", "-") for name in recipes.__all__}
    assert set(completing.MODELS) == {*ARCHITECTURES, "mlp", "small-cnn"}
    assert set(completing.ACCOUNTANTS) == set(ACCOUNTANTS)
    assert set(completing.OPTIMIZERS) == set(OPTIMIZERS)
    assert [required_adjacency(name) for name in completing.ADJACENCIES] == list(completing.ADJACENCIES)
