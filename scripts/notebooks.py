"""A hook of mkdocs: ``<!-- notebook: NAME -->`` becomes the cells of docs/tutorials/NAME.ipynb, as Markdown and code.

`run` runs the code cells of a notebook in order, in one namespace, as Jupyter would: the tests do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
MARK = re.compile(r"<!-- notebook: ([\w-]+) -->")


def read_cells(path: Path) -> list[tuple[str, str]]:
    """(kind, text) of every cell."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


def to_markdown(path: Path) -> str:
    """The notebook as a page."""
    return "\n\n".join(
        f"```python\n{text}\n```" if kind == "code" else text for kind, text in read_cells(path) if text.strip()
    )


def run(path: Path) -> dict[str, Any]:
    """Run the code cells; an error names the cell."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, (kind, text) in enumerate(read_cells(path)):
        if kind == "code":
            exec(compile(text, f"{path.name}, cell {number}", "exec"), names)
    return names


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return MARK.sub(lambda found: to_markdown(TUTORIALS / f"{found[1]}.ipynb"), markdown)
