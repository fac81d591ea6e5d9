"""`sordino report`: one file about a run, for people who did not train it: a page, a registry entry, a model card."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli import early, options
from sordino.cli.terminal import caution, console, print_json
from sordino.errors import InvalidInput
from sordino.figures import round_up, round_up_digits, to_plain

if TYPE_CHECKING:
    from sordino.report.facts import Facts

EPILOG = """
[bold]Examples[/bold]

sordino report runs/20260101-120000

sordino report runs/20260101-120000 --for officer --about about.toml --pdf (for the people who decide)

sordino report runs/20260101-120000 --for registry --about about.toml (an entry of the public registry, as JSON)

sordino report runs/20260101-120000 --for card (a model card in Markdown, for a hub)

sordino report runs/20260101-120000 --audit audit.json --out privacy.html (also while it is running)
"""
READERS = {"engineer": "report.html", "officer": "officer.html", "registry": "registry.json", "card": "README.md"}
_Run = Annotated[Path, typer.Argument(help="A run of `sordino train`; only the file that is asked for is written.")]
_Output = Annotated[
    Path | None, typer.Option("--out", "--output", "-o", help="The file. Default: in the run, by the kind of reader.")
]
_Audit = Annotated[Path | None, typer.Option(help="What `sordino audit --json` printed. Default: audit.json there.")]
_Outcome = Annotated[
    Path | None, typer.Option(help="What `sordino train --json` printed. Default: outcome.json there.")
]
_For = Annotated[
    str,
    options.describe_option(
        "Options", "engineer (default), officer, registry (JSON) or card (Markdown).", "--for", among=READERS
    ),
]
_About = Annotated[
    Path | None, typer.Option("--about", help="TOML with owner, purpose, ... Default: about.toml in the run.")
]
_Pdf = Annotated[
    bool, typer.Option("--pdf", help="Also print the page to a PDF beside it, with a browser on this machine.")
]


def report(
    run: _Run,
    reader: _For = "engineer",
    output: _Output = None,
    pdf: _Pdf = False,
    about: _About = None,
    owner: Annotated[str | None, typer.Option(help="Whose model it is.")] = None,
    purpose: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    delta: options.Delta = None,
    audit: _Audit = None,
    outcome: _Outcome = None,
    json: options.Json = False,
) -> None:
    """Write one file that says what was protected and how strongly: a page, a registry's entry or a model card."""
    early.require_known("for", reader, READERS)
    early.require_run(run)
    if pdf and reader not in ("engineer", "officer"):
        raise InvalidInput(f"--pdf prints a page, and --for {reader} makes none: leave one of them out")
    if output is not None and output.suffix.lower() == ".pdf":
        if not pdf:
            raise InvalidInput(f"out={output} names a PDF, and no PDF is asked for: add --pdf, or name a file .html")
        output = output.with_suffix(".html")  # the page, which is then printed to the PDF
    from sordino.report.about import read_about, read_about_file
    from sordino.report.printing import find_browser, print_pdf
    from sordino.report.run_folder import Folder

    if pdf:
        find_browser()  # before anything is written
    words = read_about(Folder(run)) if about is None else read_about_file(about)
    words = words.with_given(owner=owner, purpose=purpose)
    path = output or run / READERS[reader]
    told = {"delta": delta, "audit": _read_object(audit), "outcome": _read_object(outcome), "about": words}
    facts = _write(run, path, reader, told)
    printed = path.with_suffix(".pdf") if pdf else None
    if printed is not None:
        print_pdf(path, printed)
    for line in facts.cautions:
        caution(line)
    if json:
        print_json({**_to_plain(facts, path), **({} if printed is None else {"pdf": str(printed)})})
        return
    g = facts.guarantee
    claim = f"ε = {round_up(g.epsilon)} at δ = {round_up_digits(g.delta, 3)} for {g.protected}, {g.basis}"
    console().print(f"{path}: {claim}, {path.stat().st_size / 1000:.0f} kB", markup=False)
    if printed is not None:
        console().print(f"{printed}: the same, printed", markup=False)


def _write(run: Path, path: Path, reader: str, told: dict[str, Any]) -> Facts:
    from sordino.report import report as write_page
    from sordino.report.facts import gather
    from sordino.report.model_card import write_card
    from sordino.report.page import write
    from sordino.report.registry import describe_deployment
    from sordino.report.run_folder import expect_anything

    if reader in ("engineer", "officer"):
        return write_page(run, path, reader=reader, **told)
    with expect_anything(run):
        facts = gather(run, **told)
        if reader == "registry":
            text = dumps(describe_deployment(facts), indent=1, ensure_ascii=False) + "\n"
        else:
            text = write_card(facts)
    write(path, text)
    return facts


def _read_object(path: Path | None) -> dict[str, Any] | None:
    from sordino.report.run_folder import parse_object

    if path is None:
        return None
    try:
        return parse_object(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise InvalidInput(f"{path} does not exist: give what a command printed with --json") from None
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
