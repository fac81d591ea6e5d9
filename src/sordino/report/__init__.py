"""Reports: one self-contained HTML page about a run, or about several methods side by side."""

from sordino.report.comparison import comparison
from sordino.report.gathering import gather
from sordino.report.run_report import report

__all__ = ["comparison", "gather", "report"]
