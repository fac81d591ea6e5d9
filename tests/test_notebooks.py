"""The tutorials run from the first cell to the last, and are notebooks that Jupyter opens."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
HOOK: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))


SHORT = "what-epsilon-means"
"""The others train; `make test-slow` runs them."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem == SHORT else pytest.mark.slow, id=path.stem) for path in NOTEBOOKS],
)
def test_every_cell_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pandas" in path.read_text():
        pytest.importorskip("pandas", reason="the tutorial uses a data frame")
    monkeypatch.chdir(tmp_path)
    HOOK["run"](path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_a_notebook_without_outputs_and_with_a_page(path: Path) -> None:
    book = json.loads(path.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    assert all(cell["outputs"] == [] for cell in book["cells"] if cell["cell_type"] == "code")
    assert path.with_suffix(".md").read_text() == f"<!-- notebook: {path.stem} -->\n"
    assert f"tutorials/{path.name}" in (ROOT / "docs" / "tutorials.md").read_text()


def test_a_cell_that_fails_is_named(tmp_path: Path) -> None:
    cells = [{"cell_type": "markdown", "source": ["x"]}, {"cell_type": "code", "source": ["assert ", "1 == 2"]}]
    (tmp_path / "wrong.ipynb").write_text(json.dumps({"cells": cells}))
    with pytest.raises(AssertionError) as caught:
        HOOK["run"](tmp_path / "wrong.ipynb")
    assert caught.traceback[-1].path == Path("wrong.ipynb, cell 1") or "cell 1" in str(caught.traceback[-1].path)


def test_there_are_tutorials() -> None:
    assert len(NOTEBOOKS) >= 3
