"""Shell completion: what is offered is what there is, and offering it loads no torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sordino import mechanisms
from sordino.accounting.events import require_adjacency
from sordino.accounting.pricing import ACCOUNTANTS
from sordino.cli import options
from sordino.lab.data import LOADERS
from sordino.lab.experiments.papers import paper_tables
from sordino.lab.networks import ARCHITECTURES
from sordino.tables.defaults import OPTIMIZERS

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
        ("sordino train --method dps", {"dpsgd", "dpsur"}),
        ("sordino train --recipe growing", {"growing-mu"}),
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
    assert set(options.DATA) == set(LOADERS)
    assert options.list_methods() == [name.replace("_", "-") for name in mechanisms.find_all()]
    assert set(options.MODELS) == {*ARCHITECTURES, "mlp", "small-cnn"}
    assert set(options.PAPER_TABLES) == set(paper_tables())
    assert set(options.ACCOUNTANTS) == set(ACCOUNTANTS)
    assert set(options.OPTIMIZERS) == set(OPTIMIZERS)
    assert [require_adjacency(name) for name in options.ADJACENCIES] == list(options.ADJACENCIES)
