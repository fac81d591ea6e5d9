"""The pages of the server: the list of runs, and one run with its charts, both of which follow what happens."""

from __future__ import annotations

import re
from typing import Any

from sordino.errors import InvalidInput
from sordino.report import page, run_report
from sordino.report.folder import Folder
from sordino.report.page import Page
from sordino.report.shelf import Listed, Shelf

PACKAGE = "sordino.report"
PATIENCE = 3.0
"""Seconds that a list may take; runs that are not priced by then are priced at the next look."""
_RUN = re.compile(r"run/([0-9a-f]{16})")


def find(shelf: Shelf, route: str | None) -> Page | None:
    """The page at `route` below the token; None where there is none."""
    if route == "":
        rows = [_row(row) for row in shelf.listed(PATIENCE)]
        return _page("runs.html", name=Folder(shelf.root).name, root=str(shelf.root), rows=rows)
    named = _RUN.fullmatch(route or "")
    entry = shelf.entries().get(named[1]) if named else None
    if entry is None:
        return None
    try:
        return _page("live.html", **run_report.context(shelf.facts(entry)))
    except InvalidInput as error:
        return _page("problem.html", name=entry.name, problem=str(error))
    except Exception as error:  # noqa: BLE001  # a folder can hold anything, and its page must say so
        return _page("problem.html", name=entry.name, problem=f"this run cannot be shown: {type(error).__name__}")


def _page(template: str, **facts: Any) -> Page:
    scripts = (page.asset(PACKAGE, "live.js"),)
    return page.render(template, packages=(PACKAGE,), scripts=scripts, connect=True, **facts)


def _row(row: Listed) -> dict[str, Any]:
    facts = row.facts
    spent = 0.0
    if facts is not None and facts.budget is not None:
        spent = min(1.0, facts.guarantee.epsilon / facts.budget.epsilon)
    return {"run": row, "facts": facts, "spent": f"{100 * spent:.1f}%", "state": _state(row)}


def _state(row: Listed) -> str:
    if row.problem:
        return "cannot be read"
    if row.facts is None:
        return "is being priced"
    if row.facts.finished:
        return "finished"
    return "running" if row.live else "stopped"
