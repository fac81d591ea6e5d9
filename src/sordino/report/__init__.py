"""Reports: one self-contained HTML page about a run, or about several methods side by side."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sordino.report.comparison import comparison
    from sordino.report.gathering import gather
    from sordino.report.run_report import report

__all__ = ["comparison", "gather", "report"]

_HOMES = {"comparison": "comparison", "gather": "gathering", "report": "run_report"}


def __getattr__(name: str) -> object:
    """Load a public name when it is first asked for: `sordino account` reads a folder and needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sordino.report' has no attribute {name!r}")
    return getattr(import_module(f"sordino.report.{_HOMES[name]}"), name)
