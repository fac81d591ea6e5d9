"""Many runs at once in the pool of `sordino compare`, with one line for each that ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sordino.errors import SordinoError
from sordino.lab.experiments import Case
from sordino.lab.experiments.cases import EVALUATIONS
from sordino.lab.experiments.pool import Told, run_all
from sordino.lab.experiments.results import Row, find


def finish(
    cases: Sequence[Case],
    folder: Path,
    keep: Callable[[Case, Row], None],
    workers: int | None = None,
    evaluations: int = EVALUATIONS,
) -> None:
    """Run what has no result in `folder` yet; `keep` is given every result as it comes."""

    def tell(told: Told) -> None:
        if told.state != "running":
            print(told.case.label, told.state, f"{told.accuracy:.4f}" if told.accuracy else told.error, flush=True)
        if told.state == "finished" and (row := find(folder, told.case.label)):
            keep(told.case, row)

    told = run_all(cases, folder, workers, tell, evaluations)
    if failed := [each for each in told if each.state == "failed"]:
        why = failed[0].error or "its process died"
        raise SordinoError(f"{len(failed)} of {len(told)} runs failed, {failed[0].case.label} with: {why}")
