"""`sordino train`: a model from records, privately."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from sordino.cli import early, options
from sordino.cli.terminal import explain_interruption

EPILOG = """
[bold]Examples[/bold]

sordino train --epsilon 3 (the digits of scikit-learn)

sordino train --data patients.csv --target outcome --epsilon 2 (ranges and classes are released with noise)

sordino train --data patients.csv --target outcome --epsilon 2 --bounds age=0:120 --bounds dose=0:5 --classes no,yes

sordino train --data visits.parquet --target cost --task regression --unit patient_id --epsilon 2

sordino train --data export.csv --no-header --target column_15 --hold-out 0 --epsilon 2

sordino train --data patients.csv --target outcome --draft-schema schema.toml (then correct it, and use --schema)

sordino train --data photos/ --image-size 32 --epsilon 8 (one subfolder for each class)

sordino train --data images.npz --scale 255 --model lenet.py:build --method automatic --epsilon 8 --epochs 40

sordino train --data patients.csv --target outcome --epsilon 3 --tune (settings are searched within that epsilon)

sordino train --data mnist --preset best --epsilon 3 (the figures of the README, in about a minute after its features)

sordino train --config run.toml --run runs/first --json

Ctrl-C finishes the step in hand, saves, and says what was spent; [bold]sordino resume[/bold] goes on from there.
"""
_yours, _privacy, _learning, _tuning, _running = (
    partial(options.describe_option, panel) for panel in ("Your records", "Privacy", "Learning", "Tuning", "Running")
)


@dataclass(frozen=True, kw_only=True)
class Flags(options.OptionFields):
    """The options of `sordino train`, in the order of its help; None where the user said nothing."""

    data: Annotated[
        str | None,
        _yours(
            "digits, mnist, ...; or a table (.csv, .tsv, .csv.gz, .parquet, .xlsx), a .npz (arrays x, y), a folder. "
            "Default: digits.",
            among=options.DATA,
        ),
    ] = None
    target: Annotated[str | None, _yours("The column of a table that is to be predicted.")] = None
    task: Annotated[
        str | None,
        _yours("classification (default) or regression, of a table.", among=("classification", "regression")),
    ] = None
    schema: Annotated[Path | None, _yours("TOML with the public kinds, bounds and classes of a table.")] = None
    bounds: Annotated[
        list[str] | None,
        _yours("Public range of a number; may be repeated. Without a name: of all of them.", metavar="[NAME=]LO:HI"),
    ] = None
    classes: Annotated[
        str | None,
        _yours("Public names of the classes, or their number.", metavar="NAME,NAME,..."),
    ] = None
    held_out: Annotated[
        float | None,
        _yours(
            "Share of your records to measure on, unprotected. Default: 0.2; 0 trains on all of them.",
            "--hold-out",
            "--held-out",
        ),
    ] = None
    header: Annotated[
        bool | None, _yours("Whether the first line of a table names its columns.", "--header/--no-header")
    ] = None
    separator: Annotated[str | None, _yours("What separates cells, if it cannot be told from the first line.")] = None
    encoding: Annotated[str | None, _yours("Of a table: utf-8, utf-16, latin-1, ...")] = None
    decimal: Annotated[str | None, _yours("The decimal mark: . or ,")] = None
    missing: Annotated[
        list[str] | None, _yours("Another mark of a missing value, such as -9; may be repeated.", "--missing")
    ] = None
    scale: Annotated[float | None, _yours("Divide the inputs of a .npz by this public number.")] = None
    image_size: Annotated[int | None, _yours("Pixels to which images of a folder are resized. Default: 32.")] = None
    grey: Annotated[bool | None, _yours("Read images of a folder without colour.", "--grey")] = None
    features: Annotated[
        str | None,
        _yours(
            "Learn from these features instead of pixels: scattering, patches, handwriting.", among=options.FEATURES
        ),
    ] = None
    draft_schema: Annotated[
        Path | None,
        _yours("Write a schema to start from, for your eyes only, and do not train."),
    ] = None
    epsilon: options.Epsilon = None
    delta: options.Delta = None
    prepare: Annotated[
        float | None, _privacy("Share of epsilon for releasing ranges and classes of a table. Default: 0.3.")
    ] = None
    metrics_epsilon: Annotated[
        float | None, _privacy("Part of epsilon to release held-out figures with, so that they are protected too.")
    ] = None
    unit: Annotated[
        str | None, _privacy("The column that says whose record it is: the guarantee is then about each of them.")
    ] = None
    per_unit: Annotated[int | None, _privacy("Most records of one unit that are used. Default: 3.")] = None
    noise_multiplier: options.NoiseMultiplier = None
    accountant: Annotated[
        str | None, _privacy("How events are priced: pld (default), rdp, ...", among=options.ACCOUNTANTS)
    ] = None
    adjacency: Annotated[
        str | None, _privacy("add-or-remove-one (default) or replace-one.", among=options.ADJACENCIES)
    ] = None
    dataset_budget: options.DatasetBudgetName = None
    model: Annotated[
        str | None, _learning("An architecture (linear, mlp, ...) or FILE.py:FUNCTION.", among=options.MODELS)
    ] = None
    preset: Annotated[
        str | None,
        _learning(
            "best: the settings of our best figures for mnist, fashion-mnist, cifar10, imdb or names.",
            among=options.PRESETS,
        ),
    ] = None
    recipe: Annotated[
        str | None,
        _learning(
            "dpsgd (default), dpadam, automatic, ...; or FILE.py:FUNCTION, which returns a Recipe.",
            *("--method", "--recipe"),
            among=options.list_methods,
        ),
    ] = None
    epochs: options.Epochs = None
    steps: options.Steps = None
    batch_size: options.BatchSize = None
    clip: Annotated[float | None, _learning("Clipping bound of each example's gradient.")] = None
    lr: Annotated[float | None, _learning("Learning rate.")] = None
    momentum: Annotated[float | None, _learning("Momentum of sgd.")] = None
    optimizer: Annotated[
        str | None, _learning("sgd, adam, adamw or dog, which has no rate.", among=options.OPTIMIZERS)
    ] = None
    augment: Annotated[
        int | None, _learning("Random views of an image, shifted, that are averaged before clipping; costs no epsilon.")
    ] = None
    mirror: Annotated[bool | None, _learning("Views of an image are also mirrored left to right.", "--mirror")] = None
    tune: Annotated[
        bool, _tuning("Search for settings; epsilon includes the search. The same as sordino tune.", "--tune")
    ] = False
    space: Annotated[
        Path | None, _tuning("TOML with what is searched, such as lr = { low = 0.01, high = 1.0, log = true }.")
    ] = None
    expected_trials: Annotated[
        float | None, _tuning("Trials on average; how many there are is random and secret. Default: 20.")
    ] = None
    eta: Annotated[
        float | None,
        _tuning("Law of their number: 1 geometric (default); 0 logarithmic, cheaper but often a single trial."),
    ] = None
    jobs: Annotated[int | None, _tuning("Trials at a time, each in a process of its own. Default: 1.")] = None
    public_held_out: Annotated[
        bool,
        _tuning("The held-out records are public: scored without noise, and not protected.", "--public-held-out"),
    ] = False
    config: Annotated[
        Path | None, _running("TOML with the tables data, schema, model, recipe and run.", "--config")
    ] = None
    run: options.RunDirectory = None
    save_every: options.SaveEvery = None
    seed: Annotated[int | None, _running("Repeatable noise, for experiments only.")] = None
    engine: Annotated[str | None, _running("How gradients are computed; changes no numbers.")] = None
    microbatch: Annotated[int | None, _running("Examples at once; changes no numbers.")] = None
    trust_code: options.TrustCode = False
    non_private_twin: Annotated[
        bool, _running("Also train without privacy, to compare. Its accuracy protects nobody.", "--non-private-twin")
    ] = False
    json: options.Json = False


@options.take_fields(Flags)
def train(flags: Flags) -> None:
    """Train a model that says almost nothing about any one record; options override --config."""
    early.check_training(flags)
    with explain_interruption():
        from sordino.cli.launch import train_and_report

        train_and_report(flags)
