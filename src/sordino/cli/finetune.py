"""`sordino finetune`: a language model from a folder, taught by private texts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from sordino.cli import options
from sordino.cli.terminal import explain_interruption

EPILOG = """
[bold]Examples[/bold]

sordino finetune --model models/distilbert --data reviews.csv --text review --target stars --lora r=8 --epsilon 3

sordino finetune --model models/gpt2 --data letters.jsonl --text body --task causal-lm --epsilon 8

sordino finetune --model tiny/config.json --data notes.parquet --text note --target code --full --epsilon 8

sordino finetune --model models/gpt2 --data posts.csv --text post --task causal-lm --unit user_id --epsilon 8

sordino finetune --model models/qwen --data chats.jsonl --text messages --task causal-lm --dtype bfloat16 --epsilon 8

Models are read from this machine alone. Ctrl-C finishes the step in hand and saves; [bold]sordino resume[/bold] goes on
from there. Then [bold]sordino predict RUN[/bold] or [bold]sordino generate RUN[/bold].
"""
_texts, _privacy, _learning, _running = (
    partial(options.describe_option, panel) for panel in ("Your texts", "Privacy", "Learning", "Running")
)


@dataclass(frozen=True, kw_only=True)
class FinetuneFlags(options.OptionFields):
    """The options of `sordino finetune`, in the order of its help; None where the user said nothing."""

    model: Annotated[str, _learning("A folder with config.json and weights, or a config.json: then they are random.")]
    data: Annotated[Path, _texts("A .csv, .tsv, .jsonl or .parquet file, one record each.")]
    text: Annotated[str, _texts("The column that holds the text; for causal-lm also a list of {role, content}.")]
    target: Annotated[str | None, _texts("The column that holds the class; not for causal-lm.")] = None
    task: Annotated[
        str | None, _texts("classify (default), or causal-lm: to write such texts.", among=("classify", "causal-lm"))
    ] = None
    classes: Annotated[
        str | None,
        _texts("Public names of the classes; without them they are released with noise.", metavar="NAME,..."),
    ] = None
    unit: Annotated[str | None, _texts("The column that says whose text it is: whole owners are then protected.")] = (
        None
    )
    per_unit: Annotated[int | None, _texts("The most texts of one owner in a draw. Default: 8.")] = None
    length: Annotated[
        int | None, _texts("Tokens of a text that are read. Default: 256, or as many as the model takes.")
    ] = None
    held_out: Annotated[float | None, _texts("Share of your records to measure on, unprotected. Default: 0.2.")] = None
    epsilon: options.Epsilon = None
    delta: options.Delta = None
    prepare: Annotated[
        float | None, _privacy("Share of epsilon for releasing the names of the classes. Default: 0.1.")
    ] = None
    noise_multiplier: options.NoiseMultiplier = None
    accountant: Annotated[
        str | None, _privacy("How events are priced: pld (default), rdp, ...", among=options.ACCOUNTANTS)
    ] = None
    adjacency: Annotated[
        str | None, _privacy("add-or-remove-one (default) or replace-one.", among=options.ADJACENCIES)
    ] = None
    dataset_budget: options.DatasetBudgetName = None
    lora: Annotated[
        str | None,
        _learning(
            "Train low-rank changes: r=8, or r=8,alpha=16,targets=q_proj+v_proj. Default where there are weights.",
            metavar="r=RANK,...",
        ),
    ] = None
    full: Annotated[bool, _learning("Train every weight. Default where the weights are random.", "--full")] = False
    dtype: Annotated[
        str | None,
        _learning("How frozen weights are kept: float32 (default), bfloat16 or int8.", among=options.DTYPES),
    ] = None
    recipe: Annotated[
        str | None,
        _learning("dpadam (default), dpsgd, automatic, ...", "--method", "--recipe", among=options.list_methods),
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
    run: options.RunDirectory = None
    save_every: options.SaveEvery = None
    seed: Annotated[int | None, _running("Repeatable noise, for experiments only.")] = None
    engine: Annotated[str | None, _running("How gradients are computed; changes no numbers.")] = None
    microbatch: Annotated[int | None, _running("Texts at once; changes no numbers.")] = None
    json: options.Json = False


@options.take_fields(FinetuneFlags)
def finetune(flags: FinetuneFlags) -> None:
    """Fine-tune a Hugging Face model from a folder so that it says almost nothing about any one text."""
    options.require_numbers(vars(flags))
    with explain_interruption():
        from sordino.cli.text_session import tune_and_report

        tune_and_report(flags)
