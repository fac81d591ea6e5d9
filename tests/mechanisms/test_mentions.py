"""A mechanism is one file: which others know of it by name, counted, with the reason for each that does.

Its own file, its tests and its pages are its own. An event of its own is a file of `accounting`, which says nothing of
mechanisms. The laboratory, which reruns papers, names mechanisms as its business.
"""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import pytest

from sordino import mechanisms

PACKAGE = Path(__file__).parents[2] / "src" / "sordino"
OWN = PACKAGE / "mechanisms"
LABORATORY = PACKAGE / "lab"
OFFERED = "recipes.py"
"""Has the constructors' names for type checkers and editors, which cannot look into a folder."""

KNOWN = {
    "dpis": {"audit/instances.py", "cli/session.py"},  # a run within a budget of its own; the bound that it released
    "dpsgd": {"integrations/transformers.py"},  # what is trained by if nothing else is said
    "screening": {"audit/conformance/checking.py"},  # its public records are replaced by those of the suite
}
"""What knows of a mechanism besides: found when this was first counted, and not to grow."""
FREE_OF_MENTIONS = ("adam_bc", "averaging", "banded", "blockwise", "kalman", "low_pass", "preconditioned")


def list_words(file: Path) -> set[str]:
    """What a mechanism's file is known by: itself, its constructors and its parts."""
    found = [mechanism for mechanism in mechanisms.find_all().values() if _is_of(mechanism.recipe, file.stem)]
    parts = {cls.__name__ for each in found for slot in each.parts.values() for cls in slot.values()}
    return {file.stem, *(mechanism.name for mechanism in found), *parts}


def _is_of(thing: object, stem: str) -> bool:
    return getattr(thing, "__module__", "") == f"sordino.mechanisms.{stem}"


def find_names(text: str) -> set[str]:
    """The names in a program, without its comments and texts."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def find_mentions(words: set[str], own: Path, files: dict[Path, set[str]]) -> set[str]:
    """Files of the package that use one of the words and import what they name from the mechanisms or the recipes."""
    return {
        str(file.relative_to(PACKAGE))
        for file, names in files.items()
        if file != own and words & names and {"mechanisms", "recipes"} & names
    }


@pytest.fixture(scope="module")
def files() -> dict[Path, set[str]]:
    ours = (file for file in sorted(PACKAGE.rglob("*.py")) if LABORATORY not in file.parents)
    return {file: find_names(file.read_text(encoding="utf-8")) for file in ours}


@pytest.mark.parametrize("stem", FREE_OF_MENTIONS)
def test_a_mechanism_is_named_by_its_own_file_and_the_list_for_editors_alone(
    stem: str, files: dict[Path, set[str]]
) -> None:
    own = OWN / f"{stem}.py"
    words = list_words(own)
    assert len(words) >= 2
    assert find_mentions(words, own, files) == {OFFERED}


def test_older_mechanisms_are_known_to_no_more_files_than_they_were(files: dict[Path, set[str]]) -> None:
    found = {}
    for own in sorted(OWN.glob("*.py")):
        outside = {file for file in find_mentions(list_words(own), own, files) if not file.startswith("mechanisms/")}
        if list_words(own) != {own.stem} and outside - {OFFERED}:
            found[own.stem] = outside - {OFFERED}
    assert found == KNOWN


def test_a_mention_would_be_counted(files: dict[Path, set[str]]) -> None:
    more = {**files, PACKAGE / "step.py": find_names("from sordino.mechanisms.banded import Cyclic  # why not")}
    own = OWN / "banded.py"
    assert find_mentions(list_words(own), own, more) == {OFFERED, "step.py"}
    assert find_names("# banded\n'banded'\n") & {"banded"} == set()
