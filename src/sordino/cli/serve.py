"""`sordino serve`: a local page that lists runs and follows them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from sordino.cli import options
from sordino.cli.terminal import console, print_json
from sordino.errors import InvalidInput

EPILOG = """
[bold]Example[/bold]: sordino serve runs/
"""
_Runs = Annotated[Path, typer.Argument(help="A folder that holds runs, or one run.")]
_Vault = Annotated[
    str | None, typer.Option("--vault", help="Also the budgets of datasets in this vault. Default: SORDINO_VAULT.")
]
_Port = Annotated[int, typer.Option(help="Default: one that is free.", min=0, max=65535)]


def serve(runs: _Runs, port: _Port = 0, vault: _Vault = None, json: options.Json = False) -> None:
    """Show runs and their budgets in a browser, on this machine alone; nothing is written. Ctrl-C ends it."""
    if not runs.is_dir():
        raise InvalidInput(f"{runs} is not a folder: give one that holds runs, such as runs/")
    from sordino.report.server import Server
    from sordino.vault import PLACE, open_vault

    opened = open_vault(vault) if vault or os.environ.get(PLACE) else None
    with Server(runs, port, vault=opened) as server:
        if json:
            print_json({"url": server.url})
        else:
            console().print(f"{server.url}\nCtrl-C ends it.", markup=False)
        sys.stdout.flush()  # a program that started this through a pipe waits for the address
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
