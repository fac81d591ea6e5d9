"""Experiments: the one place that runs a method on a dataset at an ε with a seed, and keeps the result.

::

    from pathlib import Path
    from sordino.lab.experiments import Case, read, run

    case = Case(
        dataset="fashion-mnist", method="linear", epsilon=3.0, seed=0, average=0.4,
        features={"kind": "scatter", "groups": 27},
        model={"name": "scatter-linear"},
        optimizer={"kind": "sgd", "lr": 16.0, "momentum": 0.9},
        recipe={"name": "dpsgd", "batch_size": 8192, "steps": 292, "clip": 0.1},
    )
    row = run(case, Path("runs/try"))            # resumes after a kill; a finished one is only read
    row["accuracy"], row["basis"], row["guarantee"]["epsilon"], row["seconds"], row["curve"]

    cases = read(Path("mine.toml")).cases(epsilons=[1, 3], seeds=range(3))

A case is plain data (`sordino.lab.experiments.cases`); docs/experiments.md says what its tables may hold.
"""

from __future__ import annotations

from sordino.lab.experiments.cases import Case, Settings, catalogue, read
from sordino.lab.experiments.methods import recipe_of
from sordino.lab.experiments.problem import Problem, model_of, problem_of
from sordino.lab.experiments.results import export, read_all
from sordino.lab.experiments.running import run

__all__ = [
    "Case",
    "Problem",
    "Settings",
    "catalogue",
    "export",
    "model_of",
    "problem_of",
    "read",
    "read_all",
    "recipe_of",
    "run",
]
