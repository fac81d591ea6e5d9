"""Every Python block of README.md and docs/ runs, in order, page by page: examples that rot fail here."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python[^\n]*\n(?P<code>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
# The only way to keep a block from running, and it must say why.
EXCUSE = re.compile(r"<!-- not executed: \S[^>]*-->\s*\Z")


@dataclass(frozen=True)
class Block:
    """One block of code and the line of its page on which it starts."""

    code: str
    line: int


def runnable_blocks(text: str) -> list[Block]:
    """Return the blocks of one page that carry no excuse right before them."""
    return [
        Block(match["code"], text.count("\n", 0, match.start("code")) + 1)
        for match in FENCE.finditer(text)
        if not EXCUSE.search(text[: match.start()])
    ]


def run_page(page: Path) -> None:
    """Run the blocks of `page` in one namespace; a traceback points at the line of the page.

    The namespace is a real module, because dataclasses and pickle look theirs up by name.
    """
    module = ModuleType("page_under_test")
    sys.modules[module.__name__] = module
    try:
        for block in runnable_blocks(page.read_text(encoding="utf-8")):
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_every_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page)


def test_the_readme_shows_code() -> None:
    assert runnable_blocks((ROOT / "README.md").read_text(encoding="utf-8"))


def test_a_page_that_is_wrong_is_found_and_located(tmp_path: Path) -> None:
    page = tmp_path / "wrong.md"
    page.write_text("# Title\n\n```python\nx = 1\n```\n\n```python\nassert x == 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run_page(page)
    assert caught.traceback[-1].lineno + 1 == 9


def test_only_a_reason_directly_before_a_block_excuses_it() -> None:
    code = "```python\nraise\n```\n"
    assert not runnable_blocks(f"<!-- not executed: needs a GPU -->\n\n{code}")
    assert len(runnable_blocks(f"<!-- not executed: -->\n{code}")) == 1
    assert len(runnable_blocks(f"<!-- not executed: needs a GPU -->\nSome words.\n\n{code}")) == 1
    assert len(runnable_blocks(f"<!-- not executed: needs a GPU -->\n{code}{code}")) == 1


def test_other_languages_are_left_alone() -> None:
    assert not runnable_blocks("```\nplain\n```\n\n```bash\nmake demo\n```\n")


def relative_links(text: str) -> list[str]:
    """Return the targets of links that point into this repository."""
    targets = re.findall(r"\]\(([^)\s#]+)", text)
    return [target for target in targets if "://" not in target and not target.startswith("mailto:")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    missing = [t for t in relative_links(page.read_text(encoding="utf-8")) if not (page.parent / t).exists()]
    assert not missing


def test_a_dead_link_would_be_seen() -> None:
    assert relative_links("[a](no/such.md#part) and [b](https://example.org)") == ["no/such.md"]
