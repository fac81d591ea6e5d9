"""A mechanism is one file: which others of the repository know of it by name, counted, with the reason for each.

Its own file, its tests and its pages are its own; an event of its own is a file of `accounting`, which says nothing of
mechanisms. Everything else that git tracks is read: programs by their names and texts, other files by how they would
name a mechanism, such as ``recipe = "dpsur"`` or ``--method dpsur``.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from functools import cache
from pathlib import Path

import pytest

from sordino import mechanisms

ROOT = Path(__file__).parents[2]
OWN = ROOT / "src" / "sordino" / "mechanisms"
OFFERED = "src/sordino/recipes.py"
"""Has the constructors' names for type checkers and editors, which cannot look into a folder."""
FREE = ("tests/", "docs/", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml", "notebooks/")
"""Tests and pages."""
EVIDENCE = ("src/sordino/lab/", "benchmarks/results/", "benchmarks/worth.py")
"""The laboratory reruns papers, stored results say of which method they are, and one benchmark compares all mechanisms:
they name mechanisms as their data."""

FIGURE = "draws a figure of its page"
TABLES = "prints the stored runs of its page"
PRICES = "computes a table of its page"
FORMER = "names that version 0.1 wrote into files, which stay readable"
SHOWN = "an example of a federation that may be told its method"
YARDSTICK = "measures something else than mechanisms, on the plainest one"
DEFAULT = "what is trained by if nothing else is said"
ALLOWED: dict[str, dict[str, str]] = {
    "allocation": {"benchmarks/figures.py": FIGURE},
    "banded": {"benchmarks/figures.py": FIGURE},
    "blockwise": {"benchmarks/figures.py": FIGURE},
    "dpagd": {"benchmarks/mechanisms.py": TABLES},
    "dpis": {
        "benchmarks/figures.py": FIGURE,
        "benchmarks/importance.py": "its own benchmark",
        "benchmarks/mechanisms.py": TABLES,
        "benchmarks/prices.py": PRICES,
        "benchmarks/results.py": TABLES,
    },
    "dpsgd": {
        "benchmarks/draws.py": YARDSTICK,
        "benchmarks/fallbacks.py": YARDSTICK,
        "benchmarks/figures.py": FIGURE,
        "benchmarks/finetuning.py": YARDSTICK,
        "benchmarks/importance.py": YARDSTICK,
        "benchmarks/mechanisms.py": TABLES,
        "benchmarks/preconditioning.py": YARDSTICK,
        "benchmarks/results.py": TABLES,
        "benchmarks/scaling.py": YARDSTICK,
        "benchmarks/speed/methods.py": YARDSTICK,
        "benchmarks/tuning.py": YARDSTICK,
        "benchmarks/units.py": YARDSTICK,
        "benchmarks/vault/steps.py": YARDSTICK,
        "benchmarks/watching.py": YARDSTICK,
        "examples/distributed.py": "an example of several processes, on the plainest mechanism",
        "examples/federated/private_digits/server_app.py": SHOWN,
        "examples/federated/pyproject.toml": SHOWN,
        "examples/lora.py": "an example of adapters, on the plainest mechanism",
        "src/sordino/audit/devices.py": YARDSTICK,
        "src/sordino/cli/choosing.py": DEFAULT,
        "src/sordino/cli/choosing_texts.py": DEFAULT,
        "src/sordino/cli/compare.py": "whose model and length a recipe of the user's own takes",
        "src/sordino/cli/comparing_tables.py": "what the model of a table is compared with",
        "src/sordino/integrations/transformers.py": DEFAULT,
        "src/sordino/names.py": "the plain parts have their names on disk there",
        "src/sordino/recipe.py": DEFAULT,
    },
    "dpsur": {
        "benchmarks/figures.py": FIGURE,
        "benchmarks/mechanisms.py": TABLES,
        "benchmarks/results.py": TABLES,
    },
    "dynamic": {
        "benchmarks/federated.py": "measures rounds with schedules",
        "benchmarks/figures.py": FIGURE,
        "benchmarks/mechanisms.py": TABLES,
        "benchmarks/prices.py": PRICES,
        "benchmarks/results.py": TABLES,
        "examples/federated/private_digits/server_app.py": SHOWN,
        "src/sordino/cli/compare.py": "a study of the laboratory has this name too",
        "src/sordino/names.py": FORMER,
    },
    "jl": {
        "benchmarks/figures.py": FIGURE,
        "benchmarks/jl.py": "its own benchmark",
        "src/sordino/audit/devices.py": "the engine that it asks for has the same name",
        "src/sordino/gradients/projected.py": "the engine that it asks for has the same name",
        "src/sordino/names.py": FORMER,
    },
    "kalman": {"benchmarks/figures.py": FIGURE},
    "low_pass": {"benchmarks/figures.py": FIGURE},
    "preconditioned": {"benchmarks/figures.py": FIGURE, "benchmarks/preconditioning.py": "its own benchmark"},
    "rate_free": {"benchmarks/tuning.py": "what a search has to win against: training with nothing to tune"},
    "screening": {
        "benchmarks/figures.py": FIGURE,
        "benchmarks/mechanisms.py": TABLES,
        "benchmarks/results.py": TABLES,
    },
}
"""What knows of a mechanism besides, and why. A new mechanism needs no line here, unless a figure of its page does."""


@cache
def list_words() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """What the file of a mechanism is known by: names of recipes, and in programs the names of its parts too."""
    found: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
    for mechanism in mechanisms.find_all().values():
        stem = mechanism.recipe.__module__.rpartition(".")[2]
        names, parts = found.get(stem, (frozenset({stem, stem.replace("_", "-")}), frozenset()))
        own = {cls.__name__ for slot in mechanism.parts.values() for cls in slot.values()}
        found[stem] = (names | {mechanism.name, mechanism.name.replace("_", "-")}, parts | own)
    return found


def read_program(text: str) -> tuple[set[str], set[str]]:
    """The names and the texts of a program, without its comments."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    names = {token.string for token in tokens if token.type == tokenize.NAME}
    texts = {token.string for token in tokens if token.type == tokenize.STRING and token.string[0] in "\"'"}
    return names, {str(ast.literal_eval(written)) for written in texts}


def find_mentions(path: str, text: str) -> set[str]:
    """The mechanisms that a file names."""
    if path.endswith(".py"):
        names, texts = read_program(text)
        imports = bool({"mechanisms", "recipes"} & names)
        return {
            stem
            for stem, (words, parts) in list_words().items()
            if texts & words or (imports and names & (words | parts))
        }
    found = set()
    for stem, (words, _) in list_words().items():
        said = "|".join(map(re.escape, sorted(words)))
        if re.search(rf"""recipes\.({said})\b|["']({said})["']|--(method|recipe)[ =]({said})\b""", text):
            found.add(stem)
    return found


def list_files() -> list[str]:
    """Every file of the repository that is neither a test, a page nor evidence."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split(
        "\n"
    )
    return [path for path in tracked if path and not path.startswith((*FREE, *EVIDENCE)) and (ROOT / path).is_file()]


@pytest.fixture(scope="module")
def mentions() -> dict[str, set[str]]:
    """For every mechanism the files that name it, its own not among them."""
    found: dict[str, set[str]] = {stem: set() for stem in list_words()}
    files = list_files()
    if not files:
        pytest.skip("this is no clone of the repository: git lists no files")
    for path in files:
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for stem in find_mentions(path, text):
            if (ROOT / path).parent != OWN:  # mechanisms may build on one another
                found[stem].add(path)
    return found


@pytest.mark.parametrize("stem", sorted(list_words()))
def test_a_mechanism_is_named_by_its_own_file_the_list_for_editors_and_what_has_a_reason(
    stem: str, mentions: dict[str, set[str]]
) -> None:
    assert (OWN / f"{stem}.py").exists()
    assert mentions[stem] == {OFFERED, *ALLOWED.get(stem, {})}


def test_every_reason_is_one_and_those_of_the_package_are_few() -> None:
    assert set(ALLOWED) <= set(list_words())
    assert all(reason for reasons in ALLOWED.values() for reason in reasons.values())
    ours = {stem: [path for path in reasons if path.startswith("src/")] for stem, reasons in ALLOWED.items()}
    assert {stem for stem, paths in ours.items() if paths} == {"dpsgd", "dynamic", "jl"}


def test_a_mention_would_be_counted() -> None:
    assert find_mentions("src/sordino/step.py", "from sordino.mechanisms.banded import Cyclic  # why not") == {"banded"}
    assert find_mentions("src/sordino/cli/train.py", 'if name == "dpis":\n    pass\n') == {"dpis"}
    assert find_mentions("Makefile", "run:\n\tsordino train --method low-pass\n") == {"low_pass"}
    assert find_mentions("any.toml", 'recipe = "growing-mu"\n') == {"dynamic"}
    assert not find_mentions("src/sordino/step.py", '"""Not banded."""\n# banded\nbanded = 1\n')
