"""Try settings on held-out *training* records, so that the test set decides nothing.

python -m benchmarks.held_out best.toml wide.toml --epsilon 1 --epsilon 3 --out tried.jsonl

Each file is a configuration as in src/sordino/lab/configs, with one method. Of the training records the last tenth is
held out; the others are trained on as the configuration says. A line is written for every run when it ends, and runs
that the file has already are not repeated: a search can be killed and goes on. The best recipes' settings are chosen
so; what was tried is told in docs/provenance.md.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from sordino.errors import InvalidInput
from sordino.lab.experiments.cases import Case, read
from sordino.lab.experiments.problem import Problem, problem_of
from sordino.lab.experiments.results import read_lines
from sordino.lab.experiments.running import train_case

SHARE = 0.1
Files = Annotated[list[Path], typer.Argument(help="Configurations of one method each.")]


def split_training(problem: Problem, share: float = SHARE) -> Problem:
    """The same problem, whose test records are the last `share` of the training records, which are not trained on."""
    inputs, classes = problem.train
    kept = len(classes) - round(share * len(classes))
    if not 0 < kept < len(classes):
        raise InvalidInput(f"share={share} of {len(classes)} training records leaves none to train on or to measure")
    return Problem((inputs[:kept], classes[:kept]), (inputs[kept:], classes[kept:]), problem.public, problem.caveats)


def try_cases(cases: list[Case], tried: Path) -> Iterator[dict[str, Any]]:
    """One row for every case: the stored one, or that of a run on the held-in records, which is then stored."""
    known = {row["label"]: row for row in read_lines(tried)} if tried.exists() else {}
    for case in cases:
        if case.label not in known:
            with tempfile.TemporaryDirectory() as folder:
                row = train_case(
                    case, Path(folder) / case.label, split_training(problem_of(case)), lambda *_: None, evaluations=1
                )
            said = ("label", "method", "epsilon", "seed", "accuracy", "last_iterate", "processor_seconds", "case")
            known[case.label] = {key: row[key] for key in said}
            with tried.open("a") as file:
                file.write(json.dumps(known[case.label]) + "\n")
        yield known[case.label]


def main(
    files: Files,
    epsilon: Annotated[list[float], typer.Option()],
    out: Annotated[Path, typer.Option()],
    seeds: Annotated[int, typer.Option()] = 1,
) -> None:
    """Accuracy on held-out training records, a line for every run."""
    cases = [read(file).case(each, seed) for file in files for each in epsilon for seed in range(seeds)]
    for row in try_cases(cases, out):
        print(f"{row['method']} ε = {row['epsilon']:g} seed {row['seed']}: {100 * row['accuracy']:.2f} %", flush=True)


if __name__ == "__main__":
    typer.run(main)
