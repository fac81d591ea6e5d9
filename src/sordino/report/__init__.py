"""Reports: one self-contained HTML page about a run, or about several methods side by side; and a server for both."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sordino.report.facts import gather
    from sordino.report.methods_page import comparison
    from sordino.report.run_page import report

__all__ = ["comparison", "gather", "report"]

_HOMES = {"comparison": "methods_page", "gather": "facts", "report": "run_page"}


def __getattr__(name: str) -> object:
    """Load what needs torch when it is first asked for: reading a run's folder does without."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sordino.report' has no attribute {name!r}")
    return getattr(import_module(f"sordino.report.{_HOMES[name]}"), name)
