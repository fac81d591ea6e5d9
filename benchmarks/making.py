"""What a method's features cost once, in core-seconds.

python -m benchmarks.making mnist/best imdb/linear-dpsgd   # with SORDINO_CACHE an empty folder

Training is timed with every run; features are made once for a dataset and kept, and would be in no time otherwise.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sordino.accounting.ledger import Ledger
from sordino.lab import data
from sordino.lab.experiments import catalogue
from sordino.lab.experiments.problem import counted_words, describe_by, is_counted, problem_of
from sordino.lab.experiments.results import Row, keep_lines, read_lines
from sordino.lab.features.counted import count_words
from sordino.noise import Secure

STORED = Path(__file__).parent / "results" / "making.jsonl"


def find_making(case: dict[str, Any], stored: Path = STORED) -> float | None:
    """Core-seconds of the features of a run's case: 0 where it has none, None where nobody measured them."""
    if not case["features"]:
        return 0.0
    rows = read_lines(stored) if stored.exists() else []
    asked = name_features(case)
    return next((row["processor_seconds"] for row in rows if name_features(row) == asked), None)


def name_features(row: Row) -> tuple[str, str]:
    """What decides the time: the dataset and its features, but for noise, which is added when a run begins."""
    told = {key: value for key, value in row["features"].items() if key not in ("noise", "clip", "square_clip")}
    return row["dataset"], repr(sorted(told.items()))


def main(methods: Annotated[list[str], typer.Argument(help="Each a DATASET/METHOD.")]) -> None:
    """Time what is made before the first step of each; loading the records is not in it."""
    for name in methods:
        dataset, _, method = name.partition("/")
        case = catalogue()[dataset, method].case(1.0)
        options = {key: value for key, value in case.data.items() if key != "public"}
        data.load(dataset, **options)  # the first time it may be prepared, too
        begun = time.process_time()
        data.load(dataset, **options)
        loaded = time.process_time()
        problem = problem_of(case)
        if is_counted(case):
            inputs, choice = problem.train[0], counted_words(case)
            buckets, ledger = int(case.data["words"]), Ledger.in_memory()
            shares = count_words(inputs, buckets, choice, records=len(inputs), ledger=ledger, source=Secure())
            describe_by(problem, shares, choice)
        spent = max(0.0, time.process_time() - loaded - (loaded - begun))
        row = {"label": name, "dataset": dataset, "features": dict(case.features)}
        keep_lines(STORED, {**row, "processor_seconds": round(spent, 1)})
        print(f"{name}: {spent:.0f} core-seconds", flush=True)


if __name__ == "__main__":
    typer.run(main)
