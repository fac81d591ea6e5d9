"""`sordino train`: a model from records, privately."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sordino.cli import options

EPILOG = """
[bold]Examples[/bold]

sordino train --epsilon 3 (the digits of scikit-learn)

sordino train --data patients.csv --target outcome --bounds 0,200 --epsilon 2 --held-out 0.2

sordino train --data images.npz --scale 255 --model lenet.py:build --recipe automatic --epsilon 8 --epochs 40

sordino train --config run.toml --run runs/first --json
"""
_Data = Annotated[
    str | None, typer.Option(help="digits, mnist, ... or FILE.npz (arrays x, y) or FILE.csv. Default: digits.")
]
_Target = Annotated[str | None, typer.Option(help="The column of a .csv that holds the class: 0, 1, 2, ...")]
_Scale = Annotated[float | None, typer.Option(help="Divide inputs by this public number.")]
_Bounds = Annotated[str | None, typer.Option(metavar="LO,HI", help="Map inputs from this public range to 0..1.")]
_HeldOut = Annotated[float | None, typer.Option(help="Share of a file's records to measure accuracy on, unprotected.")]
_Classes = Annotated[int | None, typer.Option(help="Public number of classes. Default: counted in the labels.")]
_Config = Annotated[Path | None, typer.Option("--config", help="TOML with the tables data, model, recipe and run.")]
_Model = Annotated[str | None, typer.Option(help="An architecture (mlp, linear, mnist-cnn, ...) or FILE.py:FUNCTION.")]
_Recipe = Annotated[str | None, typer.Option(help="dpsgd (default), dpadam, automatic, ...")]
_Clip = Annotated[float | None, typer.Option(help="Clipping bound of each example's gradient.")]
_Lr = Annotated[float | None, typer.Option(help="Learning rate.")]
_Momentum = Annotated[float | None, typer.Option(help="Momentum of sgd.")]
_Optimizer = Annotated[str | None, typer.Option(help="sgd, adam or adamw.")]
_Seed = Annotated[int | None, typer.Option(help="Repeatable noise, for experiments only.")]
_Engine = Annotated[str | None, typer.Option(help="How gradients are computed; changes no numbers.")]
_Microbatch = Annotated[int | None, typer.Option(help="Examples at once; changes no numbers.")]
_Twin = Annotated[bool, typer.Option(help="Also train without privacy, to compare. Its accuracy protects nobody.")]
_Accountant = Annotated[str | None, typer.Option(help="Who prices the events: pld (default), rdp, ...")]
_Adjacency = Annotated[str | None, typer.Option(help="add-or-remove-one (default) or replace-one.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=EPILOG)(train)


def train(
    data: _Data = None,
    target: _Target = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    clip: _Clip = None,
    lr: _Lr = None,
    momentum: _Momentum = None,
    optimizer: _Optimizer = None,
    recipe: _Recipe = None,
    noise_multiplier: options.NoiseMultiplier = None,
    accountant: _Accountant = None,
    adjacency: _Adjacency = None,
    model: _Model = None,
    held_out: _HeldOut = None,
    scale: _Scale = None,
    bounds: _Bounds = None,
    classes: _Classes = None,
    config: _Config = None,
    run: options.RunDirectory = None,
    save_every: options.SaveEvery = None,
    seed: _Seed = None,
    engine: _Engine = None,
    microbatch: _Microbatch = None,
    non_private_twin: _Twin = False,
    json: options.Json = False,
) -> None:
    """Train a classifier so that the model says almost nothing about any one record; options override --config."""
    given = locals()
    from sordino.cli.choosing import Flags
    from sordino.cli.launch import launch

    launch(Flags(**given))
