"""`sordino resume`: go on with a run that was interrupted or killed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sordino.cli import early, options

EPILOG = """
[bold]Example[/bold]: sordino resume runs/20260101-120000
"""


def resume(
    run: Annotated[Path, typer.Argument(help="The directory that `sordino train` or `finetune` saved to.")],
    trust_code: options.TrustCode = False,
    json: options.Json = False,
) -> None:
    """Continue a run from its last checkpoint. What was spent stays spent; no noise is drawn twice.

    If a run on a table was killed while its ranges and classes were released, they are released and paid for again.
    """
    if not run.exists():
        early.require_run(run, early.CONFIG)
    early.require_any(run, (early.CONFIG, early.PREPARATION, early.SEARCH, early.LEDGER), early.CONFIG)
    from sordino.books import OUTCOME
    from sordino.cli.terminal import console
    from sordino.errors import InvalidInput
    from sordino.finetuning.tuned import is_finetuned
    from sordino.report.run_folder import Folder
    from sordino.searching.sealing import STATE

    if (run / STATE).exists():
        raise InvalidInput(f"{run} is a search that was killed: give the same `sordino tune` command again to go on")
    if "search" in (Folder(run).json(OUTCOME) or {}):
        console().print(f"{run} is the winner of a search, and finished: there is nothing left to do", markup=False)
        return

    if is_finetuned(run):
        from sordino.cli import text_session

        text_session.finish_and_report(text_session.reopen(run), as_json=json)
        return
    from sordino.cli import tabular
    from sordino.cli.announcing import report
    from sordino.cli.config import read_run_config
    from sordino.cli.launch import finish
    from sordino.cli.session import reopen

    config = read_run_config(run)
    if config is not None and config.learning is not None:
        tabular.resume(run, config, as_json=json)
        return
    if config is not None and config.preset is not None:
        from sordino.cli import presets

        presets.resume(run, config, as_json=json)
        return
    session = reopen(run, trust_code=trust_code)
    try:
        outcome = finish(session, as_json=json)
    finally:
        session.private.close()
    report(outcome, as_json=json)
