"""`sordino train`: a model from records, privately."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sordino.cli import completing, options
from sordino.cli.common import INTERRUPTED, complain

EPILOG = """
[bold]Examples[/bold]

sordino train --epsilon 3 (the digits of scikit-learn)

sordino train --data patients.csv --target outcome --epsilon 2 (ranges and classes are released with noise)

sordino train --data patients.csv --target outcome --epsilon 2 --bounds age=0:120 --bounds dose=0:5 --classes no,yes

sordino train --data patients.csv --target outcome --draft-schema schema.toml (then correct it, and use --schema)

sordino train --data photos/ --image-size 32 --epsilon 8 (one subfolder for each class)

sordino train --data images.npz --scale 255 --model lenet.py:build --recipe automatic --epsilon 8 --epochs 40

sordino train --config run.toml --run runs/first --json

Ctrl-C finishes the step in hand, saves, and says what was spent; [bold]sordino resume[/bold] goes on from there.
"""
_YOURS, _PRIVACY, _LEARNING, _RUNNING = "Your records", "Privacy", "Learning", "Running"


def _option(
    panel: str, words: str, *names: str, metavar: str | None = None, among: tuple[str, ...] = ()
) -> typer.models.OptionInfo:
    offered = completing.among(among) if among else None
    found: typer.models.OptionInfo = typer.Option(
        *names, help=words, metavar=metavar, rich_help_panel=panel, autocompletion=offered
    )
    return found


_Data = Annotated[
    str | None,
    _option(
        _YOURS,
        "digits, mnist, ...; or a .csv or .tsv table, a .npz (arrays x, y), a folder. Default: digits.",
        among=completing.DATA,
    ),
]
_Target = Annotated[str | None, _option(_YOURS, "The column of a table that holds the class.")]
_Schema = Annotated[Path | None, _option(_YOURS, "TOML with the public kinds, bounds and classes of a table.")]
_Draft = Annotated[Path | None, _option(_YOURS, "Write a schema to start from, for your eyes, and do not train.")]
_Bounds = Annotated[
    list[str] | None,
    _option(
        _YOURS, "Public range of a number; may be repeated. Without a name: of all of them.", metavar="[NAME=]LO:HI"
    ),
]
_Classes = Annotated[
    str | None, _option(_YOURS, "Public names of the classes, or their number.", metavar="NAME,NAME,...")
]
_HeldOut = Annotated[
    float | None, _option(_YOURS, "Share of your records to measure accuracy on, unprotected. Default: 0.2.")
]
_Scale = Annotated[float | None, _option(_YOURS, "Divide the inputs of a .npz by this public number.")]
_ImageSize = Annotated[int | None, _option(_YOURS, "Pixels to which images of a folder are resized. Default: 32.")]
_Grey = Annotated[bool | None, _option(_YOURS, "Read images of a folder without colour.", "--grey")]
_Prepare = Annotated[
    float | None, _option(_PRIVACY, "Share of epsilon for releasing ranges and classes of a table. Default: 0.3.")
]
_Config = Annotated[
    Path | None, _option(_RUNNING, "TOML with the tables data, schema, model, recipe and run.", "--config")
]
_Model = Annotated[
    str | None, _option(_LEARNING, "An architecture (linear, mlp, ...) or FILE.py:FUNCTION.", among=completing.MODELS)
]
_Recipe = Annotated[str | None, _option(_LEARNING, "dpsgd (default), dpadam, automatic, ...", among=completing.RECIPES)]
_Clip = Annotated[float | None, _option(_LEARNING, "Clipping bound of each example's gradient.")]
_Lr = Annotated[float | None, _option(_LEARNING, "Learning rate.")]
_Momentum = Annotated[float | None, _option(_LEARNING, "Momentum of sgd.")]
_Optimizer = Annotated[str | None, _option(_LEARNING, "sgd, adam or adamw.", among=completing.OPTIMIZERS)]
_Seed = Annotated[int | None, _option(_RUNNING, "Repeatable noise, for experiments only.")]
_Engine = Annotated[str | None, _option(_RUNNING, "How gradients are computed; changes no numbers.")]
_Microbatch = Annotated[int | None, _option(_RUNNING, "Examples at once; changes no numbers.")]
_Twin = Annotated[
    bool,
    typer.Option(
        "--non-private-twin",
        help="Also train without privacy, to compare. Its accuracy protects nobody.",
        rich_help_panel=_RUNNING,
    ),
]
_Accountant = Annotated[
    str | None, _option(_PRIVACY, "Who prices the events: pld (default), rdp, ...", among=completing.ACCOUNTANTS)
]
_Adjacency = Annotated[
    str | None, _option(_PRIVACY, "add-or-remove-one (default) or replace-one.", among=completing.ADJACENCIES)
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=EPILOG)(train)


def train(
    data: _Data = None,
    target: _Target = None,
    schema: _Schema = None,
    bounds: _Bounds = None,
    classes: _Classes = None,
    held_out: _HeldOut = None,
    scale: _Scale = None,
    image_size: _ImageSize = None,
    grey: _Grey = None,
    draft_schema: _Draft = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    prepare: _Prepare = None,
    noise_multiplier: options.NoiseMultiplier = None,
    accountant: _Accountant = None,
    adjacency: _Adjacency = None,
    model: _Model = None,
    recipe: _Recipe = None,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    batch_size: options.BatchSize = None,
    clip: _Clip = None,
    lr: _Lr = None,
    momentum: _Momentum = None,
    optimizer: _Optimizer = None,
    config: _Config = None,
    run: options.RunDirectory = None,
    save_every: options.SaveEvery = None,
    seed: _Seed = None,
    engine: _Engine = None,
    microbatch: _Microbatch = None,
    trust_code: options.TrustCode = False,
    non_private_twin: _Twin = False,
    json: options.Json = False,
) -> None:
    """Train a classifier so that the model says almost nothing about any one record; options override --config."""
    given = locals()
    try:
        from sordino.cli.choosing import Flags
        from sordino.cli.launch import launch

        launch(Flags(**given))
    except KeyboardInterrupt:  # before the first step, or a second time while a step is taken
        complain("interrupted at once: what the run had saved and spent stands; sordino resume RUN goes on from there")
        raise typer.Exit(INTERRUPTED) from None
