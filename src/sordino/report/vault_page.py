"""The page of a vault: budgets as gauges, who spent what and when, what is left, and the runs with their reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sordino.errors import SordinoError, VaultForged
from sordino.report import page
from sordino.report.page import Page
from sordino.vault import Entry, Vault
from sordino.vault.history import parse_receipt
from sordino.vault.summary import describe_entry, sum_up

Kept = tuple[str, str, str]
"""A run's name, the dataset that it draws on, and its receipt."""
MOST_ENTRIES = 200
"""How many of the newest lines of a history are shown."""


def render_page(
    vault: Vault,
    *,
    only: str | None = None,
    links: Mapping[str, str] | None = None,
    receipts: Sequence[Kept] = (),
    live: bool = False,
) -> Page:
    """Render all datasets that this person may see, or one; `links` has the addresses of runs by their number.

    `receipts` are those that runs keep; one that does not belong to this vault is a caution. A page that is not live
    says whether the whole history was verified.
    """
    budgets: list[dict[str, Any]] = []
    problem = ""
    try:
        names = [only] if only is not None else vault.names()
        budgets.extend(_describe(vault, name, receipts, verify=not live) for name in names)
    except SordinoError as error:
        if not live:
            raise
        problem = str(error)
    finally:
        vault.store.release()
    facts = {"budgets": budgets, "problem": problem, "place": vault.store.place, "links": links or {}}
    return page.render("vault.html", live=live, **facts)


def write_page(vault: Vault, name: str, path: Path) -> None:
    """Write one file about one dataset, for a privacy officer, who needs neither the vault nor a network to read it."""
    page.write(path, render_page(vault, only=name).html)


def _describe(vault: Vault, name: str, receipts: Sequence[Kept], verify: bool) -> dict[str, Any]:
    summary = sum_up(vault.state(name))
    verdict = ""
    if verify:
        try:
            verdict = f"Verified: {vault.verify(name)}."
        except VaultForged as error:
            verdict = f"NOT intact: {error}"
    entries = vault.history(name)
    told = [(each.number, each.at.replace("T", " "), each.person, describe_entry(each)) for each in entries]
    return {
        "summary": summary,
        "width": f"{100 * min(1.0, summary.part):.1f}%",
        "verdict": verdict,
        "strangers": [run for run, dataset, text in receipts if dataset == name and not _has(entries, text)],
        "history": told[-MOST_ENTRIES:],
    }


def _has(entries: Sequence[Entry], text: str) -> bool:
    """Whether a receipt, which may come from anybody, belongs to this history."""
    try:
        _, number, chain, _ = parse_receipt(text)
    except SordinoError:
        return False
    return 0 < number <= len(entries) and entries[number - 1].chain == chain
