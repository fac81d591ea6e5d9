"""Sordino and its peers, each as a function from a table, ε and a seed to the scores of the held-out records.

And to the seconds of the processor that fitting and predicting took: what a run takes on a core of its own, whatever
else the machine does. Importing a library is not counted, nor the encoding that some peers need.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.tables.cases import Parts, encode, write_schema
from sordino import Budget
from sordino.tables.learning import learn
from sordino.tables.schema import Schema
from sordino.tables.table import Table

Scores = NDArray[np.float64]
PEER_PYTHON = "SORDINO_DIFFPRIVLIB"
"""The environment variable with the interpreter that has diffprivlib, which needs scikit-learn below 1.6."""
_EPOCHS, _BATCHES = 20, 20
_DIFFPRIVLIB = """
import sys, time, warnings
import numpy as np
warnings.simplefilter("ignore")
from diffprivlib.models import LogisticRegression
held = np.load(sys.argv[1])
epsilon, seed = float(sys.argv[3]), int(sys.argv[4])
begun = time.process_time()
norm = float(np.quantile(np.linalg.norm(held["x"], axis=1), 0.95))
model = LogisticRegression(epsilon=epsilon, data_norm=norm, max_iter=300, random_state=seed)
model.fit(held["x"], held["y"])
np.save(sys.argv[2], model.predict_proba(held["t"])[:, 1])
print(time.process_time() - begun)
"""


class Missing(Exception):
    """A peer that is not installed, and why."""


def _to_table(frame: Any, name: str) -> Table:
    return Table(name, {column: frame[column].tolist() for column in frame.columns})


def _sordino(parts: Parts, epsilon: float, seed: int, schema: Schema | None = None) -> Scores:
    train, test = _to_table(parts.train, "train"), _to_table(parts.test, "test")
    learned = learn(train, parts.case.target, Budget(epsilon, parts.delta), schema=schema, seed=seed)
    assert learned.guarantee.epsilon <= epsilon
    place = learned.encoder.classes.index(parts.case.positive)
    return learned.predict_proba(test)[:, place]


def _with_schema(parts: Parts, epsilon: float, seed: int) -> Scores:
    return _sordino(parts, epsilon, seed, write_schema(parts))


def _dp_ebm(parts: Parts, epsilon: float, seed: int) -> Scores:
    from interpret.privacy import DPExplainableBoostingClassifier

    frames = []
    for frame in (parts.train, parts.test):
        made = frame.drop(columns=[parts.case.target])
        for name in made.columns:
            numbers = pd.to_numeric(parts.train[name], errors="coerce")
            if numbers.notna().mean() > 0.5:
                made[name] = pd.to_numeric(frame[name], errors="coerce").fillna(0.0)
        frames.append(made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it reads the ranges of the records, which nobody pays for
        model = DPExplainableBoostingClassifier(epsilon=epsilon, delta=parts.delta, random_state=seed, n_jobs=1)
        model.fit(frames[0], parts.labels(parts.train))
    return np.asarray(model.predict_proba(frames[1])[:, 1], np.float64)


def _diffprivlib(parts: Parts, epsilon: float, seed: int) -> tuple[Scores, float]:
    python = os.environ.get(PEER_PYTHON)
    if not python or not Path(python).exists():
        raise Missing(f"{PEER_PYTHON} names no interpreter with diffprivlib and scikit-learn below 1.6")
    train, test = encode(parts)
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder, "given.npz"), Path(folder, "found.npy")
        np.savez(given, x=train, y=parts.labels(parts.train), t=test)
        command = [python, "-c", _DIFFPRIVLIB, str(given), str(found), str(epsilon), str(seed)]
        env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
        said = subprocess.run(command, check=True, capture_output=True, env=env, text=True).stdout
        return np.asarray(np.load(found), np.float64), float(said)


def _opacus(parts: Parts, epsilon: float, seed: int) -> Scores:
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(seed)
    train, test = (torch.from_numpy(part) for part in encode(parts))
    model = torch.nn.Linear(train.shape[1], 1)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    labels = torch.from_numpy(parts.labels(parts.train)).float()
    loader = DataLoader(TensorDataset(train, labels), batch_size=max(1, len(train) // _BATCHES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            target_epsilon=epsilon,
            target_delta=parts.delta,
            epochs=_EPOCHS,
            max_grad_norm=1.0,
        )
        for _ in range(_EPOCHS):
            for inputs, wanted in loader:
                optimizer.zero_grad()
                outputs = model(inputs)[:, 0]
                torch.nn.functional.binary_cross_entropy_with_logits(outputs, wanted).backward()
                optimizer.step()
    with torch.no_grad():
        return np.asarray(model(test)[:, 0].sigmoid().double().numpy(), np.float64)


def _logistic(parts: Parts, epsilon: float, seed: int) -> Scores:
    from sklearn.linear_model import LogisticRegression

    train, test = encode(parts)
    model = LogisticRegression(max_iter=500).fit(train, parts.labels(parts.train))
    return np.asarray(model.predict_proba(test)[:, 1], np.float64)


def _boosting(parts: Parts, epsilon: float, seed: int) -> Scores:
    from sklearn.ensemble import HistGradientBoostingClassifier

    train, test = encode(parts)
    model = HistGradientBoostingClassifier(random_state=seed).fit(train, parts.labels(parts.train))
    return np.asarray(model.predict_proba(test)[:, 1], np.float64)


Method = Callable[[Parts, float, int], tuple[Scores, float]]


def _clock(function: Callable[[Parts, float, int], Scores], needs: str) -> Method:
    """The scores and the seconds, once the library is there and the inputs are encoded."""

    def run(parts: Parts, epsilon: float, seed: int) -> tuple[Scores, float]:
        try:
            importlib.import_module(needs)
        except ImportError:
            raise Missing(f"{needs} is not installed") from None
        encode(parts)
        begun = time.process_time()
        scores = function(parts, epsilon, seed)
        return scores, time.process_time() - begun

    return run


PRIVATE: dict[str, Method] = {
    "Sordino": _clock(_sordino, "sordino.tables.learning"),
    "Sordino, public schema": _clock(_with_schema, "sordino.tables.learning"),
    "DP-EBM": _clock(_dp_ebm, "interpret.privacy"),
    "diffprivlib": _diffprivlib,
    "Opacus": _clock(_opacus, "opacus"),
}
OPEN: dict[str, Method] = {
    "logistic regression": _clock(_logistic, "sklearn.linear_model"),
    "boosting": _clock(_boosting, "sklearn.ensemble"),
}
"""Without privacy: what the noise takes away is measured against them."""
