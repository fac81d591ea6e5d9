"""Small cases and rows that the tests of experiments share."""

from __future__ import annotations

from typing import Any

from sordino.lab.experiments import Case

Row = dict[str, Any]


def small(method: str = "dpsgd", **changes: Any) -> Case:
    """A few steps on the digits."""
    recipe = {"name": "dpsgd", "batch_size": 100, "steps": 9, "clip": 0.1}
    options: dict[str, Any] = {
        "dataset": "digits",
        "epsilon": 3.0,
        "records": 300,
        "model": {"name": "linear"},
        "optimizer": {"kind": "sgd", "lr": 1.0},
        "recipe": recipe,
    }
    return Case(method=method, **{**options, **changes})


def row(method: str = "a", epsilon: float = 1.0, seed: int = 0, accuracy: float = 0.5, **changes: Any) -> Row:
    """A finished run, made up."""
    curve = [{"step": step, "accuracy": accuracy * step / 10, "epsilon": epsilon * step / 10} for step in (5, 10)]
    made: Row = {
        "label": f"{method}-{epsilon}-{seed}",
        "dataset": "digits",
        "method": method,
        "epsilon": epsilon,
        "seed": seed,
        "accounting": "proven",
        "accuracy": accuracy,
        "seconds": 2.0,
        "basis": "proven",
        "guarantee": {"epsilon": epsilon, "delta": 1e-5, "assumptions": ["noise is secure"]},
        "steps": 10,
        "attempts": 10,
        "accepted": 10,
        "curve": curve,
        "noise": [1.0, 0.5],
        "clip": [0.1, 0.1],
        "case": {},
    }
    return {**made, **changes}
