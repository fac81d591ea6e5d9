"""`sordino report`: one page about a run, for people who did not train it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli import options
from sordino.cli.terminal import caution, console, print_json
from sordino.errors import InvalidInput
from sordino.figures import round_up, round_up_digits, to_plain

if TYPE_CHECKING:
    from sordino.report.facts import Facts

EPILOG = """
[bold]Examples[/bold]

sordino report runs/20260101-120000

sordino report runs/20260101-120000 --audit audit.json --output privacy.html (also while it is running)
"""
_Run = Annotated[Path, typer.Argument(help="A run of `sordino train`; nothing in it is changed.")]
_Output = Annotated[Path | None, typer.Option("--output", "-o", help="The HTML file. Default: report.html in the run.")]
_Audit = Annotated[Path | None, typer.Option(help="What `sordino audit --json` printed. Default: audit.json there.")]
_Outcome = Annotated[
    Path | None, typer.Option(help="What `sordino train --json` printed. Default: outcome.json there.")
]


def report(
    run: _Run,
    output: _Output = None,
    delta: options.Delta = None,
    audit: _Audit = None,
    outcome: _Outcome = None,
    json: options.Json = False,
) -> None:
    """Write one HTML file that says what was protected and how strongly; it needs no network and no other file."""
    from sordino.report import report as write

    path = output or run / "report.html"
    facts = write(run, path, delta=delta, audit=_read_object(audit), outcome=_read_object(outcome))
    for words in facts.cautions:
        caution(words)
    if json:
        print_json(_to_plain(facts, path))
        return
    g = facts.guarantee
    claim = f"ε = {round_up(g.epsilon)} at δ = {round_up_digits(g.delta, 3)} for {g.protected}, {g.basis}"
    console().print(f"{path}: {claim}, {path.stat().st_size / 1000:.0f} kB", markup=False)


def _read_object(path: Path | None) -> dict[str, Any] | None:
    from sordino.report.run_folder import parse_object

    if path is None:
        return None
    try:
        return parse_object(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read {path}: {error}") from None


def _to_plain(facts: Facts, path: Path) -> dict[str, Any]:
    guarantee = {**facts.guarantee.to_dict(), "epsilon": to_plain(facts.guarantee.epsilon)}
    return {
        "report": str(path),
        "run": facts.folder,
        **guarantee,
        "events": facts.proof.events,
        "steps": facts.saved_step,
        "total": facts.total_steps,
        "held_out_accuracy": facts.final_accuracy,
        "twin_accuracy": facts.twin_accuracy,
        "ledger": facts.proof.fingerprint,
        "recipe": facts.proof.recipe_fingerprint,
        "cautions": list(facts.cautions),
    }
