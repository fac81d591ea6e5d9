"""What is said before a run: which records, what is released about them, and how they are learnt from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.markup import escape

from sordino.cli import sources
from sordino.cli.choosing import Chosen
from sordino.cli.common import messages
from sordino.cli.session import Session
from sordino.data.tabular_schema import KINDS, Schema, Skip
from sordino.data.tabular_sheet import Sheet
from sordino.lab.networks import parameter_count

_MANY = 12


def plan(chosen: Chosen) -> None:
    """Before anything is spent."""
    choice, records = chosen.config.data, chosen.records
    if sources.is_benchmark(choice.source):
        return
    held = len(records.held_out) if isinstance(records, Sheet) else len(records.test_set)  # type: ignore[arg-type]  # Dataset does not promise a length
    kept = f", {held:,} held out to measure accuracy on, not protected" if held else ", none held out"
    _say("Records", f"{choice.records:,} of {Path(choice.source).name} to train on{kept}")
    if chosen.plan is not None:
        what = [f"kinds and ranges of {counted(len(chosen.plan.columns), 'column')}"] if chosen.plan.columns else []
        what += ["names of the classes"] if chosen.plan.classes else []
        _say("Released", f"{' and '.join(what)}, with noise, for {choice.prepare:.0%} of ε")


def start(session: Session) -> None:
    """When model and schema are known, before the first step."""
    schema, recipe, model = session.config.schema, session.private.bench.recipe, session.config.model
    if schema is not None:
        _schema(schema)
    _say("Model", f"{model.name}, {parameter_count(session.model, trained=True):,} parameters")
    noise = f"noise {recipe.noise_multiplier:.3g} × clip {recipe.clip:g}"
    _say("Recipe", f"{recipe.name}, {recipe.steps:,} steps of about {recipe.batch_size:,} records, {noise}")
    messages().print()


def _schema(schema: Schema) -> None:
    kinds = Counter(type(column) for column in schema.columns.values())
    said = [f"{kinds[cls]} {name}" for name, cls in KINDS.items() if cls is not Skip and kinds[cls]]
    _say("Inputs", f"{schema.width:,} from {', '.join(said)} columns")
    left = [f"{name} ({c.why})" if c.why else name for name, c in schema.columns.items() if isinstance(c, Skip)]
    if left:
        more = f" and {len(left) - _MANY} more" if len(left) > _MANY else ""
        _say("Left out", ", ".join(left[:_MANY]) + more)
    names = schema.classes or ()
    _say("Classes", ", ".join(map(_printable, names[:_MANY])) + (f" ... ({len(names)})" if len(names) > _MANY else ""))


def counted(number: int, what: str) -> str:
    """1 column, 2 columns."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _printable(name: str) -> str:
    """A class may be called anything, also what a terminal would obey."""
    return name if name.isprintable() else repr(name)


def _say(what: str, words: str) -> None:
    messages().print(f"[bold]{what:9}[/bold] {escape(words)}")
