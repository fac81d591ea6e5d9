"""A search for the settings of the learner for tables, within one budget.

The description of the table (ranges, categories, classes) is released once, before the search, and every trial learns
from the same encoding. A trial consists of steps over all records, its calibration, and its score on the held-out
records. Each record's own bytes decide in which part it is, so the score costs nothing beyond the training. All
releases of a trial are Gaussian and add up to exactly what was charged for it, however many steps it has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.events import GaussianDpEvent
from sordino.accounting.guarantee import Guarantee
from sordino.accounting.ledger import ASSUMPTION, Ledger
from sordino.accounting.selection import GEOMETRIC
from sordino.books import write_durably
from sordino.errors import BudgetExhausted, InvalidInput
from sordino.noise import Secure, Seeded
from sordino.searching.costs import Cost, Way, plan_search
from sordino.searching.sealing import hide_times
from sordino.searching.search import EXPECTED, Search, Winner
from sordino.searching.spaces import Space, log_uniform, make_space, uniform
from sordino.searching.trials import Candidate
from sordino.tables import evaluation
from sordino.tables.additive import Additive, FitSettings
from sordino.tables.encoder import Encoder
from sordino.tables.learning import (
    CALIBRATION_SHARE,
    PUBLIC,
    Learned,
    LearningPlan,
    build_model,
    digest_table,
    encode_target,
    fit_encoded,
    score,
    to_chances,
)
from sordino.tables.predicting import save_model, use
from sordino.tables.surveying import survey
from sordino.tables.training import Fitted, Ready, plan_table
from sordino.vault.claims import DatasetBudget

Floats = NDArray[np.float64]
ENCODER = "encoder.json"
"""The file with what was released about the table before the search, in case the search is killed."""
SURE = 1 + 1e-9
"""A margin for rounding when noises must add up to another noise."""
SEARCHABLE = tuple(f.name for f in fields(FitSettings) if f.name != "smooth")
MOST_STEPS = 10_000
DEFAULT = Space(
    {
        "variance": log_uniform(0.01, 0.5),
        "residual": uniform(0.3, 1.0),
        "rate": log_uniform(0.03, 0.5),
    }
)
"""What is searched if the user names nothing."""


@dataclass(frozen=True, eq=False)
class TableSearch:
    """A search that is planned: `base` says how the table is surveyed, `cost` what every trial may spend."""

    ready: Ready
    base: LearningPlan
    search: Search

    @property
    def cost(self) -> Cost:
        return self.search.cost


def plan_table_search(
    ready: Ready,
    space: Space | Mapping[str, Any] | None = None,
    *,
    expected_trials: float = EXPECTED,
    eta: float = GEOMETRIC,
    public_score: bool = False,
    way: Way | None = None,
    jobs: int = 1,
    vault: DatasetBudget | None = None,
) -> TableSearch:
    """Plan how the budget will be spent; refuse settings that make no sense before anything is spent."""
    found = DEFAULT if space is None else make_space(space)
    found.require_known(SEARCHABLE, "the learner of tables")
    if not len(ready.sheet.held_out):
        raise InvalidInput("held-out=0 leaves no records to score trials on: hold some out, such as a fifth")
    base = plan_table(ready, shared=vault is not None)
    beside: list[tuple[Any, int]] = list(base.survey.events())
    if base.figures_noise is not None:
        beside.append((GaussianDpEvent(base.figures_noise), 1))
    ways: tuple[Way, ...] = (way,) if way else ("selection", "composition")
    cost = plan_search(
        *(ready.budget,),
        trials=expected_trials,
        eta=eta,
        score=not public_score,
        ways=ways,
        beside=beside,
        slack=0.0,
        disjoint=ready.budget.adjacency == "add-or-remove-one",
    )
    search = Search(
        lambda trial: trial,
        found,
        cost,
        unit=ready.unit,
        jobs=jobs,
        seed=ready.wishes.seed,
        assumptions=(PUBLIC,),
        rows_per_unit=ready.rows_per_unit,
        vault=None if vault is None else vault.over(lambda: digest_table(ready.sheet.train), "table"),
    )
    plan_trial(base, cost, _middle(found))
    return TableSearch(ready, base, search)


def _middle(space: Space) -> dict[str, Any]:
    return {name: law.draw(0.5) for name, law in space.laws.items()}


def plan_trial(base: LearningPlan, cost: Cost, settings: Mapping[str, Any]) -> LearningPlan:
    """Plan one trial: steps and calibration share what a training may spend."""
    whole = {f.name: int for f in fields(FitSettings) if f.type == "int"}
    chosen: dict[str, Any] = {name: whole.get(name, float)(value) for name, value in settings.items()}
    steps = replace(base.settings, **chosen)
    _require_sense(steps)
    last = CALIBRATION_SHARE if base.calibration_noise is not None else 0.0
    noise = cost.training_noise * SURE
    return replace(
        base,
        settings=steps,
        step_noise=noise * math.sqrt(steps.steps / (1 - last)),
        calibration_noise=noise / math.sqrt(last) if last else None,
        figures_noise=None,
    )


def _require_sense(settings: FitSettings) -> None:
    bounds = {
        "steps": (1, MOST_STEPS),
        "residual": (1e-3, 1.0),
        "constant": (0.0, 10.0),
        "variance": (1e-9, 1e3),
        "rate": (1e-6, 10.0),
        "first": (0.0, 0.99),
        "columns": (1, 10**6),
    }
    for name, (low, high) in bounds.items():
        if not low <= (value := getattr(settings, name)) <= high:
            raise InvalidInput(f"{name}={value:g} of the space must be in [{low:g}, {high:g}]")


def rate_records(scores: Floats, targets: Floats, encoder: Encoder) -> Floats:
    """Rate every record in [0, 1]: a class by 1 minus half the Brier score, a number by squared residuals.

    This rewards correct probabilities, and one record moves a sum of it by at most 1.
    """
    if not encoder.classes:
        found: Floats = 1 - np.clip((scores[:, 0] - targets[:, 0]) ** 2 / 4, 0, 1)
        return found
    wanted = np.concatenate([1 - targets, targets], 1) if targets.shape[1] == 1 else targets
    brier: Floats = 1 - ((to_chances(scores, encoder) - wanted) ** 2).sum(1) / 2
    return brier


def tune_table(planned: TableSearch, folder: Path | None = None) -> tuple[Fitted, Winner]:
    """Survey the table, search, and keep the winner; continue a search that was killed in `folder`."""
    ready, base, search = planned.ready, planned.base, planned.search
    sheet, seed = ready.sheet, ready.wishes.seed
    ledger = search.open_books(folder)
    try:
        encoder = _survey_once(planned, ledger, folder)
        targets, known = encode_target(sheet.held_out, encoder)

        def objective(trial: Candidate) -> Additive:
            plan = plan_trial(base, trial.cost, trial.settings)
            fitted = fit_encoded(sheet.train, encoder, plan, trial.ledger, trial.source, lambda done, steps: None)
            scores = score(build_model(fitted), encoder, sheet.held_out)[known]
            values = rate_records(scores, targets[known], encoder)
            if trial.cost.score_noise is None:
                trial.score_publicly(float(values.mean()) if len(values) else 0.0)
            else:
                trial.score(values)
            return fitted

        search.objective = objective
        winner = search.run(folder, ledger)
        model = build_model(winner.state)
        shown = None
        if base.figures_noise is not None:
            source = Secure() if seed is None else Seeded(seed, ledger.incarnation, len(ledger), 7)
            receipt = ledger.charge(GaussianDpEvent(base.figures_noise), "held-out figures")
            scores = score(model, encoder, sheet.held_out)[known]
            shown = evaluation.release(
                scores, targets[known], encoder, base.figures_noise, ready.rows_per_unit, receipt, source
            )
        elif planned.cost.score_noise is None:
            shown = evaluation.measure(score(model, encoder, sheet.held_out)[known], targets[known], encoder)
        guarantee: Guarantee = search.guarantee(ledger)
    finally:
        search.close_books(ledger)
    plan = plan_trial(base, planned.cost, winner.settings)
    learned = Learned(model, encoder, guarantee, plan, shown, shown.cautions if shown else ())
    if folder is not None:
        save_model(folder, learned, ready.header)
        (folder / ENCODER).unlink(missing_ok=True)
        hide_times(folder)
    return Fitted(ready, learned, use(learned, ready.header)), replace(winner, guarantee=guarantee)


def _survey_once(planned: TableSearch, ledger: Ledger, folder: Path | None) -> Encoder:
    """Return the encoding that all trials share: released now, or before the search was killed."""
    kept = None if folder is None else folder / ENCODER
    if kept is not None and kept.exists():
        return Encoder.from_plain(json.loads(kept.read_text()))
    if len(ledger):
        raise BudgetExhausted(
            f"{folder} was killed while it released what the table is like, which its budget pays for once: start a "
            "new search; what was spent adds to what it costs"
        )
    seed = planned.ready.wishes.seed
    source = Secure() if seed is None else Seeded(seed, ledger.incarnation, len(ledger), ledger.next_stream())
    ledger.declare(ASSUMPTION, source.assumption)
    encoder = survey(planned.ready.sheet.train, planned.base.survey, ledger, source)
    if kept is not None:
        write_durably(kept, json.dumps(encoder.to_plain(), allow_nan=False).encode())
    return encoder


def recall_trial(ready: Ready, told: object) -> LearningPlan:
    """Return the plan of the trial that won, from what `outcome.json` says, so that an audit can repeat the trial."""
    try:
        assert isinstance(told, dict)
        planned = plan_table_search(
            ready,
            expected_trials=float(told["expected_trials"]),
            eta=float(told.get("eta", GEOMETRIC)),
            public_score=told["score_noise"] is None,
            way=told["paid_by"],
        )
        return plan_trial(planned.base, planned.cost, told["settings"])
    except (AssertionError, KeyError, TypeError, ValueError, AttributeError):
        raise InvalidInput("outcome.json does not say what was searched: other version, or changed by hand?") from None
