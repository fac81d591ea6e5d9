"""Run folders made in moments: a ledger that was charged by a recipe's plan, and the files that lie beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tomli_w

from sordino import Recipe
from sordino.accounting import Ledger


def make_run(
    path: Path,
    recipe: Recipe,
    *,
    name: str = "run",
    events: int | None = None,
    header: dict[str, str] | None = None,
    files: dict[str, Any] | None = None,
) -> Path:
    """A folder as training leaves it after `events` of the plan; `files` are texts, or objects to write as JSON."""
    run = path / name
    run.mkdir(parents=True)
    said = {"recipe": recipe.fingerprint(), "unit": "record", "adjacency": "add-or-remove-one", "basis": recipe.basis}
    plan = [event for event, count in recipe.plan() for _ in range(count)][:events]
    with Ledger.create(run / "ledger.sqlite", header={**said, **(header or {})}) as ledger:
        for event in plan:
            ledger.charge(event)
    (run / "recipe.toml").write_text(recipe.to_toml())
    (run / f"checkpoint-{len(plan):09d}.pt").write_bytes(b"not needed")
    config = {"data": {"source": "/home/somebody/patients.csv", "held_out": 0.2}, "model": {"name": "mlp"}, "run": {}}
    (run / "config.toml").write_text(tomli_w.dumps(config))
    for file, content in (files or {}).items():
        (run / file).write_text(content if isinstance(content, str) else json.dumps(content))
    return run


def history(steps: int = 40) -> str:
    """What training writes while it goes on."""
    lines = ({"step": s, "accuracy": 1 - 0.9**s, "loss": None, "seconds": 0.1 * s} for s in range(1, steps + 1, 3))
    return "".join(json.dumps(line) + "\n" for line in lines)


AUDIT = {
    "run": "runs/x",
    "epsilon": 3.0,
    "delta": 1e-5,
    "mechanism": {
        "name": "dpsgd",
        "passed": True,
        "delta": 1e-5,
        "confidence": 0.999,
        "epsilon_claimed": 3.0,
        "epsilon_lower": 2.1,
        "attacks": [{"instance": "canary of one step", "epsilon_claimed": 3.0, "epsilon_certain": 2.1}],
        "findings": [],
    },
    "membership": [{"name": "loss threshold", "auc": 0.987654}],
}
OUTCOME = {"held_out_accuracy": 0.9312, "twin_accuracy": 0.9777, "assumptions": ["the classes were counted (say so)"]}
