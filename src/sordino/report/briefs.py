"""A run in one line of a list: what it is, what it cost and when; and where lines of finished runs are kept.

Pricing a ledger can take seconds, so a list of many runs would take long to appear. The line of a finished run is
therefore kept in the user's own cache. Its name is made from the run's path, the names, sizes and times of its files,
and the version of Sordino: if any of these changes, the run is priced again. A run's own page is always computed from
its ledger.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sordino import __version__
from sordino.books import write_durably
from sordino.report.facts import Facts

MOST_BYTES = 100_000


@dataclass(frozen=True)
class Brief:
    """What a list shows of a run; everything in it is public."""

    run_id: str
    epsilon: float
    delta: float
    basis: str
    unit: str
    data: str
    target: str
    method: str
    model: str
    began: str
    finished: bool
    budget: float | None = None
    saved_step: int | None = None
    total_steps: int | None = None
    accuracy: float | None = None
    auc: float | None = None
    events: int = 0
    dataset: Mapping[str, Any] | None = None

    @property
    def spent(self) -> float:
        """The part of its budget that a run has spent."""
        return min(1.0, self.epsilon / self.budget) if self.budget else 0.0


def summarise_facts(facts: Facts) -> Brief:
    """Make the line of a run."""
    g = facts.guarantee
    auc = next((figure.value for figure in facts.used.figures if figure.name == "auc"), None)
    return Brief(
        run_id=facts.proof.run_id,
        epsilon=g.epsilon,
        delta=g.delta,
        basis=g.basis,
        unit=g.unit,
        data=facts.setting.data,
        target=facts.used.target or "",
        method=facts.recipe.name if facts.recipe else facts.setting.model,
        model=facts.setting.model,
        began=facts.proof.began,
        finished=facts.finished,
        budget=facts.budget.epsilon if facts.budget else None,
        saved_step=facts.saved_step,
        total_steps=facts.total_steps,
        accuracy=facts.final_accuracy,
        auc=auc,
        events=facts.proof.events,
        dataset=facts.dataset,
    )


def recall(path: Path, signature: object) -> Brief | None:
    """Return the cached line of a run whose files have not changed; None if there is no readable one."""
    try:
        with _find_place(path, signature).open("rb") as file:
            plain = json.loads(file.read(MOST_BYTES))
        plain["epsilon"] = float(plain["epsilon"])  # an infinite ε is a word
        known = {f.name for f in fields(Brief)}
        return Brief(**plain) if set(plain) <= known and plain["epsilon"] >= 0 else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def remember(path: Path, signature: object, brief: Brief) -> None:
    """Keep the line of a finished run; if it cannot be written, the run is priced again next time."""
    if not brief.finished:
        return
    plain = asdict(brief)
    plain["epsilon"] = "inf" if math.isinf(brief.epsilon) else brief.epsilon
    with suppress(OSError, ValueError, TypeError):
        place = _find_place(path, signature)
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(place, json.dumps(plain, allow_nan=False).encode())


def _find_place(path: Path, signature: object) -> Path:
    named = json.dumps([__version__, str(path.resolve()), signature])
    return find_cache() / "briefs" / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.json"


def find_cache() -> Path:
    """SORDINO_CACHE, or ``sordino`` in the platform's place for caches."""
    if chosen := os.environ.get("SORDINO_CACHE"):
        return Path(chosen).expanduser()
    places = {"win32": os.environ.get("LOCALAPPDATA"), "darwin": str(Path.home() / "Library" / "Caches")}
    usual = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(places.get(sys.platform) or usual) / "sordino"
