"""`sordino predict`: what a trained model says about new records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli import early, options
from sordino.cli.terminal import caution, console, print_json
from sordino.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sordino.tables.predicting import Trained
    from sordino.tables.table import Table

EPILOG = """
[bold]Examples[/bold]

sordino predict runs/20260101-120000 --data new.csv --out predictions.csv

sordino predict runs/20260101-120000 --data new.parquet --keep patient_id --out predictions.parquet

sordino predict runs/20260101-120000 --data new.csv (prints a table in CSV)

It spends nothing: the model was paid for when it was trained.
"""
CHANCE, DIGITS = "probability of ", 4
"""How the names of probability columns begin, and how many decimals are printed."""
_Run = Annotated[Path, typer.Argument(help="A run of `sordino train` or `finetune`; nothing in it is changed.")]
_Data = Annotated[
    Path, typer.Option("--data", help="New records: a table, a .npz (array x), or images, as the run was trained on.")
]
_Out = Annotated[Path | None, typer.Option("--out", "-o", help="A .csv or .parquet file. Default: print as CSV.")]
_Keep = Annotated[
    list[str] | None, typer.Option("--keep", help="A column of the new records to copy beside them; may be repeated.")
]
_Header = Annotated[bool | None, typer.Option("--header/--no-header", help="Whether the first line names the columns.")]


def predict(
    run: _Run,
    data: _Data,
    out: _Out = None,
    keep: _Keep = None,
    header: _Header = None,
    separator: Annotated[str | None, typer.Option(help="What separates cells.")] = None,
    encoding: Annotated[str | None, typer.Option(help="Of a table: utf-8, utf-16, latin-1, ...")] = None,
    decimal: Annotated[str | None, typer.Option(help="The decimal mark: . or ,")] = None,
    trust_code: options.TrustCode = False,
    json: options.Json = False,
) -> None:
    """Predict the classes, with probabilities, or the values of new records with the model of a run."""
    early.require_any(run, (early.CONFIG, early.PREPARATION, early.MODEL, early.LEDGER), "trained model")
    early.require_data(data)
    import pyarrow as pa
    import pyarrow.csv

    from sordino.cli.loading import open_run
    from sordino.finetuning.stamping import describe_guarantee, write_stamp
    from sordino.finetuning.tuned import is_finetuned
    from sordino.tables.predicting import TableInputs, write_predictions

    if out is not None and out.suffix.lower() not in (".csv", ".parquet"):
        raise InvalidInput(f"out={out} must end in .csv or .parquet")
    if json and out is None:
        raise InvalidInput("--json describes a file: give --out predictions.csv")
    texts = is_finetuned(run)
    loaded = None if texts else open_run(run, trust_code=trust_code)
    if loaded is None:
        found, kept = _predict_texts(run, data, keep or ())
    elif isinstance((trained := loaded.trained).encoder, TableInputs):
        spelled = {"header": header, "separator": separator, "encoding": encoding, "decimal": decimal}
        table = _read(data, trained, loaded.config, {name: v for name, v in spelled.items() if v is not None})
        found, kept = trained.tabulate(table), _copy(table, keep or ())
    else:
        if keep:
            raise InvalidInput(f"keep={keep[0]!r} is a column of a table, and {data} is not one")
        found, kept = trained.tabulate(data), _name_files(trained, data)
    for name, column in reversed(kept.items()):
        found = found.add_column(0, name if name != "predicted" else "predicted (given)", column)
    if out is None:
        sink = pa.BufferOutputStream()
        pa.csv.write_csv(_round(found), sink)
        typer.echo(sink.getvalue().to_pybytes(), nl=False)  # UTF-8, whatever the terminal
        return
    if texts:
        write_stamp(out, describe_guarantee(run, "predicted classes", records=found.num_rows, file=out.name))
    write_predictions(found, out)
    if json:
        print_json({"run": str(run), "out": str(out), "records": found.num_rows, "columns": found.column_names})
    else:
        console().print(f"{out}: predictions of {found.num_rows:,} records", markup=False)


def _round(found: Any) -> Any:
    """Round probabilities for people to read; a file has all of their digits."""
    import pyarrow as pa
    import pyarrow.compute

    for place, name in enumerate(found.column_names):
        if name.startswith(CHANCE) and pa.types.is_floating(found.schema.field(place).type):
            found = found.set_column(place, name, pyarrow.compute.round(found.column(place), DIGITS))
    return found


def _read(path: Path, trained: Trained, config: Any, spelled: dict[str, Any]) -> Table:
    """Read new records like the training records unless the user says otherwise; the target may be missing."""
    from dataclasses import replace

    from sordino.cli.terminal import show_reading
    from sordino.tables.delimited import Dialect
    from sordino.tables.files import read_table
    from sordino.tables.predicting import TableInputs
    from sordino.tables.reading import require_file
    from sordino.tables.table import Table

    assert isinstance(trained.encoder, TableInputs)
    require_file(str(path))
    trained_on = config.data.dialect if config is not None else Dialect()
    dialect = replace(Dialect(header=trained_on.header, missing=trained_on.missing), **spelled)
    with show_reading() as told:
        table = read_table(path, dialect, told)
    names, header = [name for name in trained.encoder.header if name != trained.encoder.target], trained.encoder.header
    if dialect.header is False and len(table.columns) == len(names):  # without names, without the target
        return Table(table.name, dict(zip(names, table.columns.values(), strict=True)), table.numbers, table.named)
    if dialect.header is False and len(table.columns) != len(header):
        caution(
            f"{path} has {len(table.columns)} columns, the training had {len(header)}: they are told by their place"
        )
    return table


def _predict_texts(run: Path, data: Path, keep: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Predict the classes of new texts by the model of a run of `sordino finetune`."""
    from sordino.cli.progress import open_bar
    from sordino.finetuning.choice import CLASSIFY
    from sordino.finetuning.classifying import tabulate
    from sordino.finetuning.text_files import read_texts
    from sordino.finetuning.tuned import load_tuned

    tuned = load_tuned(run, CLASSIFY)
    table = read_texts(data, list(dict.fromkeys([tuned.choice.text, *keep])))
    with open_bar("predictions") as progress:
        task = progress.add_task("", total=len(table), note="")
        cells = list(table.columns[tuned.choice.text])
        found = tabulate(tuned, cells, lambda done: progress.update(task, completed=done))
    return found, _copy(table, keep)


def _copy(table: Table, names: Any) -> dict[str, Any]:
    import pyarrow as pa

    return {table.require_column(name): pa.array(list(table.columns[name]), pa.string()) for name in names}


def _name_files(trained: Trained, data: Path) -> dict[str, Any]:
    import pyarrow as pa

    from sordino.cli.loading import ImageInputs

    if not isinstance(trained.encoder, ImageInputs):
        return {}
    return {"file": pa.array([str(path) for path in trained.encoder.list(data)], pa.string())}
