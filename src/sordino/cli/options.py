"""The options that several commands share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words.")]
Epsilon = Annotated[float | None, typer.Option(help="What may be spent: 1 to 8 is usual, smaller is more private.")]
Delta = Annotated[
    float | None,
    typer.Option(
        help="Below 1 / records. Default where the records are known: a power of ten, a tenth of that or less."
    ),
]
Rate = Annotated[
    float | None, typer.Option(help="Chance of a record to join a draw; or give --batch-size and --records.")
]
BatchSize = Annotated[int | None, typer.Option(help="Expected size of a draw.")]
RecordCount = Annotated[int | None, typer.Option(help="Public number of records.")]
NoiseMultiplier = Annotated[float | None, typer.Option(help="Noise over clipping bound.")]
Steps = Annotated[int | None, typer.Option(help="Length of training in steps.")]
Epochs = Annotated[float | None, typer.Option(help="Length of training in epochs.")]
AccountantName = Annotated[str, typer.Option("--accountant", help="Who prices the events: pld, rdp, ...")]
AdjacencyName = Annotated[str, typer.Option("--adjacency", help="add-or-remove-one or replace-one.")]
RunDirectory = Annotated[Path | None, typer.Option("--run", help="Where to save. Default: runs/ and the time.")]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Run the FILE.py:FUNCTION or module:function that a file names as its model."),
]
SaveEvery = Annotated[int | None, typer.Option(help="Steps between checkpoints. Default: a twentieth of the run.")]
