"""`sordino verify`: whether a ledger is unchanged, by its chain, its signatures and a receipt kept elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli import early, options
from sordino.cli.terminal import FOUND, UNSURE, caution, console, print_json
from sordino.errors import InvalidInput, LedgerForged, LedgerForked, LedgerRolledBack

if TYPE_CHECKING:
    from sordino.accounting import Ledger
    from sordino.accounting.chain import Key

EPILOG = """
[bold]Examples[/bold]

sordino verify runs/a | tail -1 > receipt.txt (keep it where the run is not)

sordino verify runs/a --head receipt.txt --key ledger.key

sordino verify runs/a --page report.html (whether a page says what the ledger says)

[bold]Verdicts[/bold]: intact (exit 0); rolled back, forked or forged, and of a page: altered or outdated (exit 1)
"""
RECEIPT = "sordino-receipt-1"
_FORM = re.compile(RECEIPT + r" (\d{1,12}) ([0-9a-f]{64}) (\S.*)")
_Run = Annotated[Path, typer.Argument(help="A run's folder; nothing is written.")]
_Head = Annotated[str | None, typer.Option("--head", help="A receipt that this command printed earlier, or its file.")]
_Key = Annotated[Path | None, typer.Option("--key", help="File with the key. Default: SORDINO_LEDGER_KEY.")]


_Page = Annotated[Path | None, typer.Option("--page", help="A page that `sordino report` made of this run.")]


def verify(run: _Run, head: _Head = None, key: _Key = None, page: _Page = None, json: options.Json = False) -> None:
    """Say whether a run's ledger is intact, rolled back, forked or forged, and print a receipt to keep elsewhere."""
    early.require_run(run)
    if page is not None and not page.is_file():
        raise InvalidInput(f"page={page} is not a file: give a page that `sordino report` made")
    from sordino.accounting.chain import find_key, read_key

    kept = None if head is None else _read_receipt(head)
    secret = find_key() if key is None else read_key(key)
    found = _examine(run, kept, secret)
    if page is not None and found["verdict"] == "intact":
        found = {**found, **_examine_page(run, page, secret)}
    if json:
        print_json(found)
    else:
        out = console()
        out.print(f"{run}: {found['verdict']}. {found['reason']}", markup=False)
        if "receipt" in found:
            out.print(found["receipt"], markup=False)
    if found["verdict"] != "intact":
        raise typer.Exit(FOUND)


@dataclass(frozen=True)
class Kept:
    """What a receipt says: after so many events, this run's ledger had this head."""

    events: int
    head: str
    run_id: str


def _read_receipt(given: str) -> Kept:
    """Read the receipt in a text, or in the last line of the file that the text names."""
    text = given
    if not given.startswith(RECEIPT):
        try:
            with Path(given).open("rb") as file:
                text = (file.read(10_000).decode("utf-8", "replace").strip().splitlines() or [""])[-1]
        except OSError as error:
            raise InvalidInput(f"head={given} is neither a receipt nor a file with one: {error.strerror}") from None
    said = _FORM.fullmatch(text.strip())
    if said is None:
        raise InvalidInput(f"head={given} holds no receipt: give the line `{RECEIPT} ...` that verify printed")
    return Kept(int(said[1]), said[2], said[3])


def _examine(run: Path, kept: Kept | None, key: Key | None) -> dict[str, Any]:
    from sordino import books

    verdicts = {LedgerForged: "forged", LedgerRolledBack: "rolled back", LedgerForked: "forked"}
    try:
        with books.reading(run, key) as ledger:
            _require_signature(ledger, key)
            if kept is not None:
                _compare(ledger, kept)
            end = ledger.head()
            told = f"{end.events:,} events of run {ledger.run_id}; {_describe_checks(ledger, kept)}"
            receipt = f"{RECEIPT} {end.events} {end.chain.hex()} {ledger.run_id}"
            plain = {"run_id": ledger.run_id, "events": end.events, "head": end.chain.hex()}
            return {"verdict": "intact", "reason": told, **plain, "signature": ledger.signature, "receipt": receipt}
    except (LedgerForged, LedgerRolledBack, LedgerForked) as error:
        return {"verdict": verdicts[type(error)], "reason": str(error)}


def _examine_page(run: Path, page: Path, key: Key | None) -> dict[str, Any]:
    """Check that the page is unaltered, belongs to this ledger, and states what the ledger costs."""
    from sordino import books
    from sordino.report.facts import gather
    from sordino.report.run_folder import expect_anything
    from sordino.report.seals import find_contradiction, read_seal

    seal = read_seal(page)
    content = seal.content
    altered = {"verdict": "altered", "page": str(page)}
    if not seal.whole:
        return {**altered, "reason": f"{page} is not the text that was sealed: somebody changed it"}
    if key is not None and not seal.check(key):
        by = f"by key {seal.signed_by}" if seal.signed_by else "not signed"
        return {**altered, "reason": f"{page} is {by}, must be signed by key {key.name}; or verify it without a key"}
    events, head = content.get("events"), content.get("head")
    with books.reading(run, key) as ledger:
        if ledger.run_id != content.get("run"):
            return {**altered, "reason": f"{page} is of run {str(content.get('run'))[:80]}, not of {ledger.run_id}"}
        if not isinstance(events, int) or not isinstance(head, str) or not re.fullmatch("[0-9a-f]{64}", head):
            return {**altered, "reason": f"{page} does not say which state of the ledger it is of"}
        held, passed = ledger.head(), events <= len(ledger) and ledger.passed(events, head)
    if not passed:
        return {**altered, "reason": f"{page} saw {events} events and another chain than the ledger had then"}
    if held.chain.hex() != head:
        return {
            "verdict": "outdated",
            "page": str(page),
            "reason": f"the ledger went on after {page} was made, from {events} to {held.events} events: make another",
        }
    delta = content["guarantee"].get("delta") if isinstance(content.get("guarantee"), dict) else None
    with expect_anything(run):
        wrong = find_contradiction(seal, gather(run, brief=True, delta=delta if isinstance(delta, float) else None))
    if wrong is not None:
        return {**altered, "reason": f"{page} contradicts the ledger: {wrong}"}
    how = f"signed by key {seal.signed_by}" if key is not None else "not signed" if not seal.signed_by else "unchecked"
    return {"page": str(page), "reason": f"{page} states what the ledger costs; its signature: {how}"}


def _require_signature(ledger: Ledger, key: Key | None) -> None:
    """Require the key's signature if there is a key: a forger without it can only leave it out, or use another."""
    if key is not None and ledger.signature != "checked":
        who = "is not signed" if ledger.signature == "missing" else f"is signed by key {ledger.header['signed']}"
        raise LedgerForged(
            f"ledger {ledger.path} {who}, not by key {key.name}; if that key never signed it, verify it without a key"
        )
    if ledger.signature in UNSURE:
        caution(UNSURE[ledger.signature])


def _compare(ledger: Ledger, kept: Kept) -> None:
    held = len(ledger)
    if ledger.run_id != kept.run_id:
        raise InvalidInput(f"head is a receipt of run {kept.run_id}, the ledger is of run {ledger.run_id}")
    if held < kept.events:
        raise LedgerRolledBack(f"ledger {ledger.path} holds {held} events, the receipt saw {kept.events}")
    if not ledger.passed(kept.events, kept.head):
        raise LedgerForked(
            f"ledger {ledger.path} went another way than the receipt, which saw {kept.events} events and another chain"
        )


def _describe_checks(ledger: Ledger, kept: Kept | None) -> str:
    signed = {"none": "not signed", "checked": "every signature is right", "unchecked": "signature not checked"}
    return f"the chain is whole, {signed[ledger.signature]}, " + (
        "and it goes on from the receipt" if kept else "and nothing in the folder contradicts it"
    )
