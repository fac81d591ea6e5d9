"""The figures of docs/architecture.md are counted right, on a tree made for the purpose."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from scripts import measure_tree
from scripts.measure_tree import Figures, find_cycles, measure, trace


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Five files of 1, 2, 3, 6 and 500 lines; two of one name; one class of two meanings; a circle through a type."""
    package = tmp_path / "src" / "sordino"
    for name, text in {
        "__init__.py": "'''Made up.'''",
        "step.py": "import sordino.parts\ndef take(): return sordino.parts.give()\n",
        "parts.py": "def give():\n    return 1\nclass Draw: ...\n",
        "tables/reading.py": "if TYPE_CHECKING:\n    from sordino.lab import reading\n\n\ndef read():\n    return 2\n",
        "lab/reading.py": "import sordino.tables.reading\n" + "x = 1\n" * 498 + "class Draw: ...\n",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    return tmp_path


def test_a_small_tree_is_counted_right(root: Path) -> None:
    found = measure(root, tracked=7, run=False)
    assert (found.files, found.lines, found.median_file, found.median_function) == (5, 512, 3, 2)
    assert (found.at_root, found.tracked) == (2, 7)
    assert found.long_files == ["sordino.lab.reading (500)"]
    assert found.names_used_twice == ["reading.py (2)", "Draw (2)"]
    assert found.cycles == []
    assert found.cycles_with_types == [["lab", "tables"]]


def test_files_are_entered_by_calls_and_not_by_imports(root: Path) -> None:
    package = root / "src" / "sordino"
    (package / "tables" / "reading.py").write_text("from sordino.parts import give\ngive()\n")
    assert trace(root, "import sordino.step\nstart()\nimport sordino.tables.reading\n") == []
    assert trace(root, "import sordino.step\nsordino.step.take()\nstart()\n") == []
    assert trace(root, "import sordino.step\nstart()\nsordino.step.take()\n") == ["parts.py", "step.py"]
    with pytest.raises(SystemExit, match="no such thing"):
        trace(root, "raise ValueError('no such thing')")


def test_cycles_are_all_found_and_chains_are_none() -> None:
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    two = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"d"}}
    assert find_cycles(two) == [["a", "b", "c"], ["d", "e"]]


def test_stored_figures_stand_beside_todays_and_in_the_page(root: Path, tmp_path: Path) -> None:
    old = dataclasses.replace(measure(root, tracked=7, run=False), label="old")
    kept = tmp_path / "kept.json"
    measure_tree.store(old, kept)
    measure_tree.store(dataclasses.replace(old, label="new", files=3), kept)
    measure_tree.store(dataclasses.replace(old, label="new", files=4), kept)
    table = measure_tree.draw_table(measure_tree.read_stored(kept))
    assert table.splitlines()[0] == "|  | old | new |"
    assert "| Python files in `src/sordino` | 5 | 4 |" in table
    assert "| package cycles, with type-only imports | 1 (of 2 packages) | 1 (of 2 packages) |" in table
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n\n{measure_tree.BEGIN}\nold\n{measure_tree.END}\n\nAfter.\n")
    measure_tree.write_block(page, table)
    measure_tree.write_block(page, table)
    assert page.read_text() == f"Before.\n\n{measure_tree.BEGIN}\n{table}\n{measure_tree.END}\n\nAfter.\n"


def test_the_page_shows_what_is_stored() -> None:
    stored = measure_tree.read_stored()
    assert all(isinstance(entry, Figures) for entry in stored)
    assert measure_tree.draw_table(stored) in measure_tree.PAGE.read_text(encoding="utf-8")
