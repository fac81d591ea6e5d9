"""A table that fills while runs finish: methods down, ε across, on stderr; lines where that is no terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import typer
from rich.live import Live
from rich.table import Table

from sordino.cli.common import INTERRUPTED, complain, messages
from sordino.lab.experiments import Case
from sordino.lab.experiments.cases import EVALUATIONS
from sordino.lab.experiments.pool import Told, run_all

DIED = "its process died twice: run again to go on"


def run_shown(cases: Sequence[Case], folder: Path, workers: int | None, evaluations: int | None = None) -> list[str]:
    """Run all cases with a live table; what failed, one line each."""
    try:
        with LiveTable(cases) as live:
            outcomes = run_all(cases, folder, workers, live.tell, EVALUATIONS if evaluations is None else evaluations)
    except KeyboardInterrupt:
        complain("interrupted: the same command again goes on where this one stopped")
        raise typer.Exit(INTERRUPTED) from None
    return [f"{told.case.label}: {told.error or DIED}" for told in outcomes if told.state == "failed"]


class LiveTable:
    """What is known of every run."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = list({case.label: case for case in cases}.values())
        self._told = {case.label: Told(case, "waiting") for case in self._cases}
        self._console = messages()
        self._live = Live(self._table(), console=self._console, refresh_per_second=2, transient=True)

    def __enter__(self) -> LiveTable:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def tell(self, told: Told) -> None:
        """Take in what became of a run."""
        self._told[told.case.label] = told
        if self._console.is_terminal:
            self._live.update(self._table())
        elif told.state in ("finished", "failed"):
            reached = "" if told.accuracy is None else f" {told.accuracy:.2%}"
            ended = sum(each.state in ("finished", "failed") for each in self._told.values())
            line = f"{ended}/{len(self._told)} {told.state} {told.case.label}{reached} {told.error}"
            self._console.print(line.rstrip(), markup=False)

    def _table(self) -> Table:
        table = Table("dataset", "method", "accounting")
        epsilons = sorted({case.epsilon for case in self._cases})
        for epsilon in epsilons:
            table.add_column(f"ε = {epsilon:g}", justify="right")
        for line in dict.fromkeys((case.dataset, case.method, case.accounting) for case in self._cases):
            table.add_row(*line, *(self._cell(line, epsilon) for epsilon in epsilons))
        running = [told for told in self._told.values() if told.state == "running"]
        table.caption = "   ".join(
            f"{told.case.method} ε {told.case.epsilon:g} #{told.case.seed}: {told.step}/{told.steps or '?'}"
            for told in running
        )
        return table

    def _cell(self, line: tuple[str, str, str], epsilon: float) -> str:
        mine = [
            told
            for told in self._told.values()
            if (told.case.dataset, told.case.method, told.case.accounting, told.case.epsilon) == (*line, epsilon)
        ]
        scores = [100 * told.accuracy for told in mine if told.state == "finished" and told.accuracy is not None]
        failed = " [red]failed[/red]" if any(told.state == "failed" for told in mine) else ""
        mean = f"{statistics.mean(scores):.2f}" if scores else "…"
        return f"{mean} ({len(scores)}/{len(mine)}){failed}" if mine else ""
