"""What every page must keep, asked inside the browser; each function returns what is wrong, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.browser import Page

SMALLEST = 12
"""Pixels."""
CONTRAST = 4.5
"""WCAG 2, level AA."""
_CHECKS = (Path(__file__).parent / "page_checks.js").read_text()


def everything(page: Page) -> list[Any]:
    """All that is wrong with a page that has been loaded."""
    return [*page.complaints, *overflow(page), *_ask(page, f"small({SMALLEST})"), *faint_text(page), *charts(page)]


def overflow(page: Page) -> list[Any]:
    """A page that must be scrolled sideways, or text that leaves it."""
    return _ask(page, "overflow()")


def faint_text(page: Page) -> list[Any]:
    """Text that is hard to tell from what is behind it."""
    return _ask(page, f"faint({CONTRAST})")


def charts(page: Page) -> list[Any]:
    """Charts without a line, without words for those who do not see them, or with ticks on top of each other."""
    return _ask(page, "charts()")


def overlaps(page: Page) -> list[Any]:
    """Text that lies on other text, as print layouts are prone to."""
    return _ask(page, "overlaps()")


def _ask(page: Page, question: str) -> list[Any]:
    found = page.evaluate(f"(() => {{ {_CHECKS}; return checks.{question} }})()")
    assert isinstance(found, list)
    return found
