"""Measure all methods on all tables, and write docs/tables.md.

python -m benchmarks.tables                                     # goes on where it was interrupted
python -m benchmarks.tables --again Sordino                     # measure some methods anew
python -m benchmarks.tables --time                              # one run of every method anew, for the seconds
python -m benchmarks.tables --only page                         # the page alone, from what is stored

It needs SORDINO_DATA, and for diffprivlib SORDINO_DIFFPRIVLIB: the interpreter of an environment of its own
(python3 -m venv /tmp/dpl && /tmp/dpl/bin/pip install 'scikit-learn<1.6' diffprivlib). What is missing is left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.tables import page
from benchmarks.tables.cases import CASES, EPSILONS, SEEDS, Case, read
from benchmarks.tables.methods import OPEN, PRIVATE, Method, Missing
from sordino.tables.evaluation import find_area

STORED = Path(__file__).parents[1] / "results" / "tables.jsonl"


def measure(case: Case, name: str, method: Method, epsilon: float | None, seed: int) -> dict[str, Any]:
    """One run."""
    parts = read(case)
    labels = parts.labels(parts.test).astype(float)
    scores, seconds = method(parts, epsilon or 0.0, seed)
    accuracy = float(((scores >= 0.5) == labels).mean())
    area = find_area(scores, labels)[0]
    result = {"auc": round(area, 5), "accuracy": round(accuracy, 5), "processor": round(seconds, 2)}
    return {"table": case.name, "method": name, "epsilon": epsilon, "seed": seed, **result}


def read_stored() -> list[dict[str, Any]]:
    """What was measured so far."""
    return [json.loads(line) for line in STORED.read_text().splitlines()] if STORED.exists() else []


def run(
    again: Annotated[list[str] | None, typer.Option(help="Methods to measure anew.")] = None,
    only: Annotated[str | None, typer.Option(help="One method, or page.")] = None,
    time: Annotated[bool, typer.Option("--time", help="Measure one run of every method anew.")] = False,
) -> None:
    """Measure what is not stored yet, then write the page."""
    rows = [row for row in read_stored() if row["method"] not in (again or ())]
    if time:
        rows = [row for row in rows if row["seed"] != 0 or row["epsilon"] not in (None, 1.0)]
    STORED.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = {(row["table"], row["method"], row["epsilon"], row["seed"]) for row in rows}
    plan: list[tuple[str, Method, float | None]] = [(name, method, None) for name, method in OPEN.items()]
    plan += [(name, method, epsilon) for name, method in PRIVATE.items() for epsilon in EPSILONS]
    missing: set[str] = set()
    for name, method, epsilon in plan:
        for case in CASES:
            for seed in range(SEEDS):
                known = (case.name, name, epsilon, seed) in done
                if known or name in missing or only not in (None, name):
                    continue
                try:
                    row = measure(case, name, method, epsilon, seed)
                except Missing as why:
                    missing.add(name)
                    print(f"{name} is left out: {why}")
                    continue
                print(row, flush=True)
                with STORED.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    page.write(read_stored())


typer.run(run)
