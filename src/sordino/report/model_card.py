"""A model card in Markdown for a hub, with the guarantee in its metadata, where machines find it."""

from __future__ import annotations

import html
import json
import re
from typing import Any

from sordino.figures import round_up, to_plain
from sordino.report.facts import Facts
from sordino.report.used import Figure


def write_card(facts: Facts) -> str:
    """Write the card: YAML metadata between two lines of dashes, then text for people.

    The metadata has one key of Sordino's, ``differential_privacy``. Its value is JSON, which is also YAML, so no name
    from a run's folder can end the block or begin another key.
    """
    g = facts.guarantee
    lines = [
        "---",
        "library_name: sordino",
        "tags:",
        "- differential-privacy",
        "- sordino",
        f"differential_privacy: {_write_metadata(facts)}",
        "---",
        "",
        f"# {_escape(facts.about.description or facts.name)}",
        "",
        f"**ε = {round_up(g.epsilon)} at δ = {g.delta:g}, {g.basis}, for {_escape(g.protected)}.**",
        "",
        _escape(str(g)),
        "",
        "## Intended use",
        "",
        _escape(facts.about.purpose) or "Not stated by its owner.",
        "",
        "## Training data",
        "",
        _describe_data(facts),
        "",
        "## What is not protected",
        "",
        *(f"- {_escape(line)}" for line in _list_exposed(facts)),
        "",
        "## Evaluation",
        "",
        *_describe_evaluation(facts),
        "",
        "## Check it",
        "",
        f"The ledger of the run has the hash `{facts.proof.fingerprint}` after {facts.proof.events:,} events. With the "
        "run’s folder, `sordino verify` says whether it is intact and `sordino account` prices it again.",
        "",
    ]
    return "\n".join(lines)


def _write_metadata(facts: Facts) -> str:
    """Write JSON whose numbers are also numbers in YAML 1.1, where 1e-05 without a point would be text."""
    text = json.dumps(_list_metadata(facts), ensure_ascii=True).replace("<", "\\u003c")
    return re.sub(r'(": \d+)(e[+-]\d+)', r"\1.0\2", text)


def _list_metadata(facts: Facts) -> dict[str, Any]:
    g = facts.guarantee
    return {
        "epsilon": to_plain(g.epsilon),
        "delta": g.delta,
        "basis": g.basis,
        "unit": g.unit,
        "adjacency": g.adjacency,
        "accountant": g.accountant,
        "unprotected": list(g.unprotected),
        "conditions": list(g.conditions),
        "events": facts.proof.events,
        "ledger": facts.proof.fingerprint,
        "run": facts.proof.run_id,
        "made_with": dict(facts.versions),
    }


def _describe_data(facts: Facts) -> str:
    count = f", {facts.setting.records:,} {_escape(facts.guarantee.units)} of it" if facts.setting.records else ""
    used = f" Columns: {', '.join(map(_escape, facts.used.columns))}." if facts.used.columns else ""
    return f"{_escape(facts.setting.data)}{count}.{used}"


def _list_exposed(facts: Facts) -> list[str]:
    from sordino.report.officer_page import list_exposed

    return list_exposed(facts)


def _describe_evaluation(facts: Facts) -> list[str]:
    if facts.used.figures:
        how = "released with noise" if facts.used.measured_privately else "not protected"
        table = [
            "| measure | value | between | by guessing |",
            "|---|---|---|---|",
            *map(_write_row, facts.used.figures),
        ]
        return [f"On held-out records ({how}; 95 % intervals):", "", *table]
    if facts.final_accuracy is not None:
        return [f"Held-out accuracy: {facts.final_accuracy:.1%}, on records that are not protected."]
    return ["Not measured: no record was held out, or no figure was kept."]


def _write_row(figure: Figure) -> str:
    between = f"{figure.low:.3f} to {figure.high:.3f}" if figure.has_interval else ""
    guessing = "" if figure.baseline is None else f"{figure.baseline:.3f}"
    return f"| {_escape(figure.title)} | {figure.value:.3f} | {between} | {guessing} |"


def _escape(text: str) -> str:
    """Write a folder's words as one line of plain text, so that no name can become markup, a link or a heading."""
    plain = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]#|!" else letter for letter in plain)
