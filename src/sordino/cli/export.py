"""`sordino export`: the model of a run in a format that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sordino.cli import early, options
from sordino.cli.terminal import console, print_json

EPILOG = """
[bold]Examples[/bold]

sordino export runs/20260101-120000 --to onnx

sordino export runs/20260101-120000 --to safetensors --out model.safetensors

The file beside it, FILE.inputs.json, says what the inputs and outputs are. It spends nothing.
"""
FORMATS = ("onnx", "safetensors", "torchscript")
_Run = Annotated[Path, typer.Argument(help="A run of `sordino train`; only the exported file is added.")]
_To = Annotated[str, options.describe_option("Options", "onnx, torchscript or safetensors.", "--to", among=FORMATS)]
_Out = Annotated[Path | None, typer.Option("--out", "-o", help="The file. Default: model and its ending, in the run.")]


def export(
    run: _Run,
    to: _To,
    out: _Out = None,
    trust_code: options.TrustCode = False,
    json: options.Json = False,
) -> None:
    """Write the model of a run as ONNX, TorchScript or safetensors, with its inputs described beside it."""
    early.require_listed("to", to, FORMATS)
    early.require_directory(run)
    from sordino.cli.loading import open_run
    from sordino.tables.exporting import ENDINGS, export_model, require_format

    require_format(to)
    loaded = open_run(run, trust_code=trust_code)
    path = out or run / f"model{ENDINGS[to]}"
    described = export_model(loaded.trained, to, path, loaded.find_shape)
    if json:
        print_json({"run": str(run), "to": to, "out": str(path), "inputs": str(described)})
    else:
        console().print(f"{path}, and {described.name} says what its inputs are", markup=False)
