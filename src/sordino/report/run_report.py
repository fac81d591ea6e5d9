"""`report`: one self-contained page about one run."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sordino.accounting.events import fits
from sordino.parts import Always, Constant, Exact, Poisson
from sordino.recipe import Recipe
from sordino.report import page, run_charts, words
from sordino.report.facts import Facts
from sordino.report.folder import whatever_it_holds
from sordino.report.gathering import gather
from sordino.report.scales import Axis, percent, plain


def report(
    run: str | Path,
    path: str | os.PathLike[str],
    *,
    delta: float | None = None,
    audit: Mapping[str, Any] | None = None,
    outcome: Mapping[str, Any] | None = None,
) -> Facts:
    """Write the report of the run in folder `run` to the HTML file `path`, and return the facts it shows.

    The file needs no network and no other file. See `gather` for the arguments.
    """
    with whatever_it_holds(run):
        facts = gather(run, delta=delta, audit=audit, outcome=outcome)
        text = html(facts)
    page.write(path, text)
    return facts


def html(facts: Facts) -> str:
    """The page about `facts`."""
    return page.render("run.html", **context(facts)).html


def context(facts: Facts) -> dict[str, Any]:
    """Everything that the template shows, in words and geometry."""
    return {
        "facts": facts,
        "strength": words.strength(facts.guarantee),
        "bases": words.BASES,
        "change": words.change(facts.guarantee),
        "neighbours": words.neighbours(facts.guarantee),
        "attacks": words.attacks(facts.curve),
        "mechanism": words.mechanism(facts.recipe.name) if facts.recipe else "",
        "view": _view(facts),
    }


def _view(facts: Facts) -> dict[str, Any]:
    epsilon, audit = facts.guarantee.epsilon, facts.audit or {}
    return {
        "finite": math.isfinite(epsilon),
        "trained": "not recorded" not in (facts.setting.model, facts.setting.data),
        "factor": plain(math.exp(epsilon)) if epsilon < 700 else "any size",
        "place": f"{100 * Axis('ε', 0.1, 100.0, log=True).at(epsilon):.1f}%",
        "guarantee": run_charts.of_guarantee(facts),
        "schedules": run_charts.of_schedules(facts),
        "progress": run_charts.of_progress(facts),
        "parameters": _parameters(facts.recipe) if facts.recipe else [],
        "accuracies": _accuracies(facts),
        "audit_passed": audit.get("passed") is True,
        "doubt": percent(1 - audit["confidence"]) if isinstance(audit.get("confidence"), float) else "",
        "attacks": [_attack(attack) for attack in audit.get("attacks", []) if isinstance(attack, dict)],
        "findings": _lines(audit.get("findings")),
        "commands": _commands(facts),
    }


def _parameters(recipe: Recipe) -> list[tuple[str, str]]:
    """The recipe's parts by name; parts that do nothing are left out."""
    poisson = isinstance(recipe.sampler, Poisson)
    rows: list[tuple[str, str | None]] = [
        ("Recipe", recipe.name),
        ("Batches", f"{recipe.batch_size:,} records expected" + (", drawn by Poisson" if poisson else "")),
        ("Sampling rate", f"{recipe.sampler.rate:.4g}" if isinstance(recipe.sampler, Poisson) else None),
        ("Sampler", None if poisson else words.part(recipe.sampler)),
        ("Steps", f"{recipe.steps:,}" if recipe.steps else None),
        ("Noise multiplier", f"{recipe.noise_multiplier:.4g}" if recipe.noise_multiplier else None),
        ("Noise schedule", _unless(Constant, recipe.noise_schedule)),
        ("Clipping bound", f"{recipe.clip:.4g}"),
        ("Clipping schedule", _unless(Constant, recipe.clip_schedule)),
        ("Weighing", words.part(recipe.weighing)),
        ("Norms", _unless(Exact, recipe.norms)),
        ("Selection", _unless(Always, recipe.selection)),
        ("Optimizer", f"{recipe.optimizer.kind}, learning rate {recipe.optimizer.lr:g}"),
        ("Filter", words.part(recipe.rdp_filter) if recipe.rdp_filter else None),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _unless(plainest: type, chosen: object) -> str | None:
    return None if isinstance(chosen, plainest) else words.part(chosen)


def _accuracies(facts: Facts) -> list[tuple[str, str]]:
    rows = []
    if facts.final_accuracy is not None:
        rows.append(("This run", percent(facts.final_accuracy)))
    if facts.twin_accuracy is not None:
        rows.append(("Its twin without privacy, same model and steps", percent(facts.twin_accuracy)))
    if facts.final_accuracy is not None and facts.twin_accuracy is not None:
        rows.append(("What privacy cost", f"{100 * (facts.twin_accuracy - facts.final_accuracy):.1f} points"))
    return rows


def _attack(attack: Mapping[str, Any]) -> dict[str, str]:
    def number(key: str) -> str:
        value = attack.get(key)
        return f"{value:.2f}" if fits(value, "float") else str(value)[:100]

    return {
        "name": str(attack.get("instance", "")),
        "claimed": number("epsilon_claimed"),
        "certain": number("epsilon_certain"),
    }


def _lines(value: Any) -> list[str]:
    return [str(line) for line in value] if isinstance(value, list) else []


def _commands(facts: Facts) -> str:
    folder = shlex.quote(facts.folder)
    lines = [f"sordino account {folder}", f"sordino audit {folder}"]
    if facts.setting.data != "not recorded":
        lines.append(f"sordino train --config {shlex.quote(str(Path(facts.folder) / 'config.toml'))} --run again")
    return "\n".join(lines)
