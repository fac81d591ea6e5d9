"""What the commands say about a run: its records, its releases, how the model learns, and how it ended."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.padding import Padding
from rich.text import Text

from sordino.accounting import Guarantee
from sordino.accounting.guarantee import read_versions
from sordino.books import OUTCOME
from sordino.cli.choosing import Chosen
from sordino.cli.lookup import is_benchmark
from sordino.cli.options import OF_PRESETS
from sordino.cli.progress import format_clock
from sordino.cli.session import Session
from sordino.cli.terminal import INTERRUPTED, console, messages, print_json, save_json, say
from sordino.figures import round_up, to_plain
from sordino.run import SEARCHED
from sordino.tables.defaults import count_parameters
from sordino.tables.reading import Sheet, is_table
from sordino.tables.schema import KINDS, Schema, Skip

_MANY = 12


def announce_release(chosen: Chosen) -> None:
    """Say which records are used and what will be released, before anything is spent."""
    choice, records = chosen.config.data, chosen.records
    if is_benchmark(choice.source):
        return
    held = len(records.held_out) if isinstance(records, Sheet) else len(records.test_set)  # type: ignore[arg-type]  # Dataset does not promise a length
    kept = f", {held:,} held out to measure accuracy on, not protected" if held else ", none held out"
    say("Records", f"{choice.records:,} of {Path(choice.source).name} to train on{kept}")
    if chosen.plan is not None:
        what = [f"kinds and ranges of {_count(len(chosen.plan.columns), 'column')}"] if chosen.plan.columns else []
        what += ["names of the classes"] if chosen.plan.classes else []
        say("Released", f"{' and '.join(what)}, with noise, for {choice.prepare:.0%} of ε")


def announce_training(session: Session) -> None:
    """Say what is trained, when model and schema are known and before the first step."""
    schema, recipe, model = session.config.schema, session.private.bench.recipe, session.config.model
    if schema is not None:
        _announce_schema(schema)
    say("Model", f"{model.name}, {count_parameters(session.model):,} parameters")
    noise = f"noise {recipe.noise_multiplier:.3g} × clip {recipe.clip:g}"
    say("Recipe", f"{recipe.name}, {recipe.steps:,} steps of about {recipe.batch_size:,} records, {noise}")
    if (source := session.config.data.source) in OF_PRESETS:
        say("Hint", f"--data {source} --preset best is more accurate, and faster once its features are computed")
    messages().print()


def _announce_schema(schema: Schema) -> None:
    kinds = Counter(type(column) for column in schema.columns.values())
    said = [f"{kinds[cls]} {name}" for name, cls in KINDS.items() if cls is not Skip and kinds[cls]]
    say("Inputs", f"{schema.width:,} from {', '.join(said)} columns")
    left = [f"{name} ({c.why})" if c.why else name for name, c in schema.columns.items() if isinstance(c, Skip)]
    if left:
        more = f" and {len(left) - _MANY} more" if len(left) > _MANY else ""
        say("Left out", ", ".join(left[:_MANY]) + more)
    say("Classes", list_classes(schema.classes or ()))


def list_classes(names: Sequence[str]) -> str:
    """List the first classes, and say how many there are."""
    return ", ".join(map(_quote, names[:_MANY])) + (f" ... ({len(names)})" if len(names) > _MANY else "")


def _count(number: int, what: str) -> str:
    """1 column, 2 columns."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _quote(name: str) -> str:
    """A class may have any name, even one that a terminal would obey."""
    return name if name.isprintable() else repr(name)


@dataclass(frozen=True)
class Outcome:
    """How a run ended, all of it public."""

    status: str
    run: str
    steps: int
    total: int
    noise_multiplier: float
    guarantee: Guarantee
    held_out_accuracy: float | None
    seconds: int
    events: int
    head: str
    runs_code: bool = False
    held_out_loss: float | None = None
    next: tuple[str, ...] = ()
    """Commands to go on with, most wanted first."""

    @property
    def interrupted(self) -> bool:
        return self.status == "interrupted"

    def assuming(self, more: str) -> Outcome:
        """Return the same outcome with one more assumption."""
        return replace(self, guarantee=replace(self.guarantee, assumptions=(*self.guarantee.assumptions, more)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the guarantee's fields among the others."""
        plain = {**vars(self), **self.guarantee.to_dict(), "epsilon": to_plain(self.guarantee.epsilon)}
        del plain["guarantee"], plain["runs_code"], plain["next"]
        return {**plain, "versions": read_versions()}


def report(outcome: Outcome, *, as_json: bool, twin_accuracy: float | None = None) -> None:
    """Report the end of `train`, `resume` and `demo`, and keep it; an interrupted run has its own exit code."""
    twin = {} if twin_accuracy is None else {"twin_accuracy": twin_accuracy}
    told = {**outcome.to_dict(), **twin}
    save_json(Path(outcome.run) / OUTCOME, told)
    if as_json:
        print_json(told)
    else:
        _print(outcome, twin_accuracy)
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def _print(outcome: Outcome, twin_accuracy: float | None) -> None:
    out = console()
    wide = not out.is_terminal  # a file gets whole lines, a terminal whole words
    out.print(f"\n{_describe_end(outcome)}\n", markup=False)
    out.print(f"Guarantee. {replace(outcome.guarantee, assumptions=())}", markup=False, soft_wrap=wide)
    out.print("Assumptions:")
    for assumption in outcome.guarantee.assumptions:
        line = Text(f"- {assumption}")
        out.print(Text("  ") + line if wide else Padding(line, (0, 0, 0, 2)), soft_wrap=wide)
    out.print()
    out.print(_describe_held_out(outcome))
    if twin_accuracy is not None:
        out.print(f"The non-private twin: {twin_accuracy:.1%} (same model and steps, neither clipping nor noise)")
    out.print(f"Saved in {outcome.run}", markup=False)
    if outcome.next and not outcome.interrupted:
        out.print("Next:")
        for command in outcome.next:
            out.print(f"  {command}", markup=False)


def list_next(run: Path, source: str, *, runs_code: bool) -> tuple[str, ...]:
    """List what can be done with a model that was trained on `source`."""
    texts = source in ("imdb", "names")
    new = "new.csv" if is_table(source) else "photos/" if Path(source).is_dir() else "new.txt" if texts else "new.npz"
    name, trust = shlex.quote(str(run)), " --trust-code" if runs_code else ""
    return (
        f"sordino predict {name} --data {new} --out predictions.csv{trust}",
        f"sordino report {name}",
        f"sordino audit {name}{trust}",
    )


def _describe_held_out(outcome: Outcome) -> str:
    if outcome.held_out_accuracy is not None:
        return f"Held-out accuracy: {outcome.held_out_accuracy:.1%}"
    if outcome.held_out_loss is not None:  # a model that writes texts
        per_token = outcome.held_out_loss
        return f"Held-out loss: {per_token:.3f} per token, a perplexity of {math.exp(per_token):.1f}"
    if any(line.startswith(SEARCHED) for line in outcome.guarantee.assumptions):
        return "Held-out accuracy: none (trials were scored with noise; --public-held-out scores them openly)"
    return "Held-out accuracy: not measured (--held-out 0.2 keeps a fifth of the records for it)"


def _describe_end(outcome: Outcome) -> str:
    taken = f"{outcome.steps} of {outcome.total} steps"
    if outcome.interrupted:
        spent = (
            f"ε {round_up(outcome.guarantee.epsilon)} is that of the whole plan: stopping after a look is a choice "
            "among everything that it would have released"
        )
        again = f"sordino resume {shlex.quote(outcome.run)}{' --trust-code' if outcome.runs_code else ''}"
        return f"Interrupted after {taken}; the model is saved. {spent}.\nGo on with: {again}"
    if outcome.status == "budget spent":
        return f"The budget is spent after {taken}: an earlier interruption lost work that was paid for."
    return f"Finished {taken}{f' in {format_clock(outcome.seconds)}' if outcome.seconds else ''}."
