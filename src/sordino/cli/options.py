"""The options that several commands share, each written once; their completion; and what their values must satisfy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from sordino import mechanisms
from sordino.errors import InvalidInput

_Fields = TypeVar("_Fields")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words.")]
Epsilon = Annotated[float | None, typer.Option(help="What may be spent: 1 to 8 is usual, smaller is more private.")]
Delta = Annotated[
    float | None,
    typer.Option(help="Below 1 / records. Default if their number is known: a power of ten, at most a tenth of that."),
]
Rate = Annotated[
    float | None, typer.Option(help="Chance that a record joins a draw; or give --batch-size and --records.")
]
BatchSize = Annotated[int | None, typer.Option(help="Expected size of a draw.")]
RecordCount = Annotated[int | None, typer.Option(help="Public number of records.")]
NoiseMultiplier = Annotated[float | None, typer.Option(help="Noise over clipping bound.")]
Steps = Annotated[int | None, typer.Option(help="Length of training in steps.")]
Epochs = Annotated[float | None, typer.Option(help="Length of training in epochs.")]
AccountantName = Annotated[str, typer.Option("--accountant", help="How events are priced: pld, rdp, ...")]
AdjacencyName = Annotated[str, typer.Option("--adjacency", help="add-or-remove-one or replace-one.")]
RunDirectory = Annotated[Path | None, typer.Option("--run", help="Where to save. Default: runs/ and the time.")]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Run the FILE.py:FUNCTION or module:function that a file names as its model."),
]
SaveEvery = Annotated[int | None, typer.Option(help="Steps between checkpoints. Default: a twentieth of the run.")]

# What the shell offers after an option: public, fixed names, listed here so that torch is not loaded.
DATA = ("cifar10", "digits", "fashion-mnist", "imdb", "infinite-mnist", "mnist", "names")
FEATURES = ("scattering", "patches", "handwriting")
MODELS = (
    *("alexnet", "cifar-cnn", "digits-cnn", "digits-mlp", "embedding-mlp", "imdb-bilstm", "imdb-mlp", "jl-bilstm"),
    *("jl-cifar", "linear", "mlp", "mnist-cnn", "names-lstm", "scatter-cnn", "scatter-linear", "small-cnn"),
    *("transformer", "vgg13"),
)
PRESETS = ("best",)
OF_PRESETS = ("cifar10", "fashion-mnist", "imdb", "mnist", "names")
OPTIMIZERS = ("adam", "adamw", "dog", "sgd")
DTYPES = ("float32", "bfloat16", "int8")
ACCOUNTANTS = ("gdp", "pld", "rdp", "rdp-classic", "rdp-filter", "tcdp", "zcdp", "zcdp-epoch")
PAPER_TABLES = (
    *("auto-s:table", "dpis:table3", "dpis:table4", "dpis:table5", "dpis:table6"),
    *("dpis:table7", "dpis:table8", "dpsur:table2", "dpsur:table3", "dpsur:table4"),
    *("dynamic:table1", "dynamic:table2", "dynamic:table3", "dynamic:table4", "jl:accuracy"),
    *("jl:table2", "jl:table3", "jl:table4", "jl:table5", "screening:table1"),
    *("screening:table3", "tramer-boneh:table"),
)
ADJACENCIES = ("add-or-remove-one", "replace-one")


def list_methods() -> list[str]:
    """List the names of all mechanisms, as people type them."""
    return [name.replace("_", "-") for name in mechanisms.list_names()]


def describe_option(
    panel: str,
    words: str,
    *names: str,
    metavar: str | None = None,
    among: Iterable[str] | Callable[[], Iterable[str]] | None = None,
) -> typer.models.OptionInfo:
    """Describe an option in a panel of the help; the shell completes what was typed by a name `among` these."""

    def complete(incomplete: str) -> list[str]:  # typer knows the argument by this name
        offered = among() if callable(among) else among or ()
        return [name for name in offered if name.startswith(incomplete)]

    found: typer.models.OptionInfo = typer.Option(
        *names, help=words, metavar=metavar, rich_help_panel=panel, autocompletion=complete if among else None
    )
    return found


DatasetBudgetName = Annotated[
    str | None,
    describe_option(
        "Privacy",
        "The dataset's own budget in the vault (sordino budget): the run reserves there what it may spend.",
        "--dataset-budget",
        metavar="NAME",
    ),
]
NoDatasetBudget = Annotated[str | None, typer.Option("--dataset-budget", metavar="NAME", hidden=True)]
"""For commands that draw on no budget, and say why."""


class OptionFields:
    """The base of a dataclass whose fields are the options of a command: None where the user said nothing."""

    def given(self, *names: str) -> dict[str, Any]:
        """Return those of the named options that the user gave."""
        assert set(names) <= set(type(self).__dataclass_fields__)  # type: ignore[attr-defined]  # of a dataclass
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def take_fields(fields: type[_Fields]) -> Callable[[Callable[[_Fields], None]], Callable[..., None]]:
    """Turn the fields of a command's dataclass into its options, as typer reads them."""
    kinds = get_type_hints(fields, include_extras=True)
    options = [each.replace(annotation=kinds[each.name]) for each in inspect.signature(fields).parameters.values()]

    def wrap(command: Callable[[_Fields], None]) -> Callable[..., None]:
        def called(**given: Any) -> None:
            command(fields(**given))

        called.__name__, called.__doc__ = command.__name__, command.__doc__
        called.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # functions may have one
        return called

    return wrap


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


def _is_count(value: float) -> bool:
    return value >= 1


_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "epsilon": (_is_positive, "> 0 and finite: 1 to 8 is usual, smaller is more private"),
    "delta": (lambda value: 0 < value < 1, "in (0, 1): choose it well below 1 / number of records"),
    "metrics_epsilon": (_is_positive, "> 0 and below epsilon, which pays for it too"),
    "prepare": (lambda value: 0 < value < 1, "in (0, 1): it is the share of epsilon for ranges and classes"),
    "rate": (lambda value: 0 < value <= 1, "in (0, 1]: give expected draw size / number of records"),
    "noise_multiplier": (_is_positive, "> 0 and finite: without noise there is no privacy"),
    "batch_size": (_is_count, ">= 1: it is the expected size of a draw"),
    "records": (_is_count, ">= 1: nothing can be learnt from none"),
    "steps": (_is_count, ">= 1: it is the length of training"),
    "seeds": (_is_count, ">= 1: it is how often each run is repeated"),
    "epochs": (_is_positive, "> 0 and finite: it is the length of training"),
    "clip": (_is_positive, "> 0: a zero bound removes every gradient; start with 1.0 or use automatic clipping"),
    "lr": (_is_positive, "> 0 and finite: it scales every step"),
    "momentum": (lambda value: 0 <= value < 1, "in [0, 1): 0.9 is usual, 0 is none"),
    "held_out": (lambda value: 0 <= value < 1, "in [0, 1): it is the share that is not trained on"),
    "per_unit": (_is_count, ">= 1: it is how many records of one unit are used at most"),
    "augment": (_is_count, ">= 1: it is the number of views of a record"),
    "microbatch": (_is_count, ">= 1: it is how many examples are processed at once"),
    "save_every": (_is_count, ">= 1: it counts the steps between checkpoints"),
    "jobs": (_is_count, ">= 1: it is how many trials run at a time"),
    "confidence": (lambda value: 0 < value < 1, "in (0, 1): 0.999 is usual"),
}
"""Which values an option may have, by its name, and what to say about others; users of a value check it again."""


def require_numbers(given: Mapping[str, Any]) -> None:
    """Refuse a number that no command could use, before anything is loaded. None passes: nobody gave it."""
    for name, value in given.items():
        if value is None or name not in _NUMBERS:
            continue
        allows, words = _NUMBERS[name]
        if not allows(value):
            raise InvalidInput(f"{name.replace('_', '-')}={value} must be {words}")


def require_one(first: Any, second: Any, question: str) -> None:
    """Require exactly one of two options."""
    if (first is None) == (second is None):
        raise InvalidInput(question)


def find_rate(rate: float | None, batch_size: int | None, records: int | None) -> float:
    """Return a record's chance to join a draw, given directly or as expected batch size over records."""
    if rate is not None and batch_size is None:
        return rate
    if batch_size is None or records is None or rate is not None:
        raise InvalidInput("the sampling rate is missing or given twice: use --rate, or --batch-size with --records")
    if not 1 <= batch_size <= records:
        raise InvalidInput(
            f"batch-size={batch_size} must be in 1..records={records}: it is the expected size of a draw"
        )
    return batch_size / records


def count_steps(steps: int | None, epochs: float | None, rate: float) -> int:
    """Return the length of training in steps; an epoch is 1 / rate steps."""
    require_one(steps, epochs, "the length of training is missing or given twice: use --steps or --epochs")
    if steps is None:
        assert epochs is not None
        if not (epochs > 0 and math.isfinite(epochs)):
            raise InvalidInput(f"epochs={epochs} must be > 0 and finite")
        if not 0 < rate <= 1:
            raise InvalidInput(f"rate={rate} must be in (0, 1]: give expected draw size / number of records")
        steps = max(1, round(epochs / rate))
    if steps < 1:
        raise InvalidInput(f"steps={steps} must be >= 1")
    return steps


def choose_delta(delta: float | None, records: int | None) -> float:
    """Return the δ asked for, which must be below 1 / records; or a power of ten, at most a tenth of 1 / records."""
    if delta is None:
        if records is None:
            raise InvalidInput("delta is missing: use --delta, well below 1 / number of records")
        return min(1e-5, 10.0 ** math.floor(math.log10(0.1 / records) + 1e-9))
    if records is not None and delta >= 1 / records:
        raise InvalidInput(
            f"delta={delta:g} must be < 1/records = {1 / records:g}: a larger one could publish whole records"
        )
    return delta
