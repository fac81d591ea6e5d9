"""Learns from a table within one budget: survey, fit, calibrate, measure. `sordino train` and the estimators call it.

::

    learned = learn(table, "income", Budget(epsilon=1, delta=1e-6), held_out=other)
    learned.predict(new)                  # names of classes, or values
    learned.predict_proba(new)            # [N, classes]
    learned.model, learned.encoder        # a plain nn.Module on encoder.encode(table), and its public encoder
    learned.figures, learned.guarantee

Every release about the records is a Gaussian event. All of them are declared as one plan in the ledger before the first
one, and priced together: `plan_learning` says in advance what will be spent on what.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn

from sordino.accounting import plans
from sordino.accounting.budget import Budget
from sordino.accounting.calibration import noise_for
from sordino.accounting.events import DpEvent, Events, GaussianDpEvent
from sordino.accounting.guarantee import UNPROTECTED, Guarantee
from sordino.accounting.ledger import ASSUMPTION, Ledger
from sordino.accounting.pricing import require_accountant
from sordino.books import LEDGER, require_fresh
from sordino.errors import InvalidInput, LostInNoise
from sordino.noise import Secure, Source
from sordino.run import FIXED_IN_ADVANCE, FLOATING_POINT, HELD_OUT, assemble, weaken
from sordino.tables import evaluation
from sordino.tables.additive import (
    Additive,
    EncodedRows,
    FitSettings,
    balance,
    calibrate,
    choose_settings,
    choose_start,
    count_scores,
    fit,
    to_probabilities,
    to_probability,
)
from sordino.tables.encoder import Encoder
from sordino.tables.encoding import NO_CLASS, encode_labels
from sordino.tables.evaluation import Figures
from sordino.tables.matching import Matched, add_matched_noise
from sordino.tables.release import SHARED_UNLISTED, tell_spent
from sordino.tables.schema import Column, Schema, Skip
from sordino.tables.surveying import (
    Survey,
    count_fine,
    find_fine_reach,
    list_coarse,
    read_codes,
    require_classes_in_sight,
    survey,
)
from sordino.tables.table import Table, find_missing, parse_numbers
from sordino.vault.claims import DatasetBudget, require_untied

Floats = NDArray[np.float64]
TASKS = ("classification", "regression")
UNLISTED_SHARE = 0.1
"""The share of δ for values that only one record has."""
CALIBRATION_SHARE = 0.02
"""The share of the budget, in squares of 1/σ, for the calibration of probabilities."""
COARSE, FINE = 40.0, 40.0
"""For the two releases of the survey: how many deviations of a count's noise all records should be."""
LEAST, MOST = (0.01, 0.04), 0.25
"""Limits of the survey's shares."""
MOST_PRECISE = 1e3
"""The largest 1/σ of one release: less noise would not help, and the rest of a larger ε is not spent."""
CERTAIN = 4.0
"""If all records are fewer than this many deviations of a count, the survey says nothing."""
UNNAMED = 0.1
"""A larger share of records without a named class is worth a caution."""
MANY_VALUES = 20
"""A target that reads as numbers and has more different values than this is not a class."""
PUBLIC = (
    "the names of the columns, the number of records, what the user gave as public, and that the table was not refused "
    "are public"
)
DIGESTED = 16
AT_ONCE, _PARTS = 2_048, 64
"""How many records are encoded at a time: this number, or one of so many parts."""


@dataclass(frozen=True)
class LearningPlan:
    """What will be spent on what: the survey, the steps, the calibration of probabilities, the held-out figures."""

    budget: Budget
    survey: Survey
    settings: FitSettings
    step_noise: float
    calibration_noise: float | None
    figures_noise: float | None

    def events(self) -> list[tuple[DpEvent, int]]:
        """Return all events, in the order in which they happen."""
        last = [noise for noise in (self.calibration_noise, self.figures_noise) if noise is not None]
        steps: list[tuple[DpEvent, int]] = [(GaussianDpEvent(self.step_noise), self.settings.steps)]
        return [*self.survey.events(), *steps, *((GaussianDpEvent(noise), 1) for noise in last)]

    def fingerprint(self) -> str:
        """Return a name for this plan in the ledger."""
        text = json.dumps([repr(self.survey), repr(self.settings), self.step_noise], sort_keys=True)
        return "table-" + hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Learned:
    """A model of a table: `model` maps `encoder.encode(table)` to scores, and all of it is public.

    The scores are one log-odds for two classes, K logits for more, and for a regression the target in spreads around
    its center. `figures` are measured on the held-out records, None without any. `cautions` are worth reading.
    """

    model: nn.Module
    encoder: Encoder
    guarantee: Guarantee
    plan: LearningPlan
    figures: Figures | None = None
    cautions: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        return self.encoder.task

    def predict_proba(self, table: Table) -> Floats:
        """Return [N, classes]: the probability of every class."""
        return to_chances(self.score(table), self.encoder)

    def predict(self, table: Table) -> NDArray[np.object_] | Floats:
        """Predict the likeliest class by name, or the value, within the released range of the target."""
        return decide(self.score(table), self.encoder)

    def score(self, table: Table) -> Floats:
        """Return [N, K]: the model's scores, in float64."""
        return score(self.model, self.encoder, table)


@torch.no_grad()
def score(model: nn.Module, encoder: Encoder, table: Table) -> Floats:
    """Return [N, K]: the scores of every record by `model`, some thousand at a time."""
    dtype = next(model.parameters()).dtype
    parts = (encoder.encode(part) for part in split_rows(table))
    found = [model(torch.from_numpy(part).to(dtype)).double().numpy() for part in parts]
    return np.concatenate(found) if found else np.zeros((0, max(1, len(encoder.classes))))


def split_rows(table: Table) -> Iterator[Table]:
    """Split the table into parts of some thousand records, so that encoded records take little memory."""
    size = max(AT_ONCE, len(table) // _PARTS)
    return (
        Table(table.name, {name: cells[start : start + size] for name, cells in table.columns.items()})
        for start in range(0, len(table), size)
    )


def to_chances(scores: Floats, encoder: Encoder) -> Floats:
    """Turn a classifier's scores into probabilities [N, classes]."""
    if not encoder.classes:
        raise InvalidInput("a regression has no probabilities: use predict")
    if scores.shape[1] > 1:
        return to_probabilities(scores)
    chance = to_probability(scores[:, 0])
    return np.stack([1.0 - chance, chance], 1)


def decide(scores: Floats, encoder: Encoder) -> NDArray[np.object_] | Floats:
    """Choose the likeliest class by name, or the value within the range of the target."""
    if encoder.classes:
        names: NDArray[np.object_] = np.array(encoder.classes, np.object_)[to_chances(scores, encoder).argmax(1)]
        return names
    return np.asarray(np.clip(encoder.center + encoder.spread * scores[:, 0], encoder.low, encoder.high))


# -- planning ---------------------------------------------------------------------------------------------------------


def plan_learning(
    columns: Mapping[str, Column | None],
    target: str,
    task: str,
    budget: Budget,
    records: int,
    *,
    classes: tuple[str, ...] | None = None,
    bounds: tuple[float, float] | None = None,
    metrics_epsilon: float | None = None,
    rows_per_unit: int = 1,
    unlisted: float = UNLISTED_SHARE,
) -> LearningPlan:
    """Plan how the budget will be spent, from public numbers alone; refuse a plan that would be lost in the noise."""
    if task not in TASKS:
        raise InvalidInput(f"task={task!r} must be classification or regression")
    if records < 1:
        raise InvalidInput(f"records={records} must be >= 1: nothing can be learnt from none")
    if rows_per_unit < 1:
        raise InvalidInput(f"rows_per_unit={rows_per_unit} must be >= 1: one unit has at most so many records")
    columns = read_codes(columns)
    reach = find_precision(budget) * records / rows_per_unit
    coarse, fine = len(list_coarse(columns, target, task)), count_fine(columns)
    first = _choose_share(COARSE * math.sqrt(1.25 * coarse) / reach, LEAST[0]) if coarse else 0.0
    second = _choose_share(FINE * find_fine_reach(fine) / reach, LEAST[1])
    last = CALIBRATION_SHARE if task == "classification" else 0.0
    settings = choose_settings(reach)
    steps_share = 1.0 - first - second - last
    shown = None if metrics_epsilon is None else _find_figures_noise(budget, metrics_epsilon)
    empty = Survey(
        *(target, task, columns, classes, bounds, records, (1.0, 1.0), unlisted * budget.delta),
        rows=rows_per_unit,
        reach=reach,
    )

    def build(noise: float) -> LearningPlan:
        surveyed = replace(empty, noise=(noise / math.sqrt(first) if coarse else 1.0, noise / math.sqrt(second)))
        step = noise * math.sqrt(settings.steps / steps_share)
        return LearningPlan(budget, surveyed, settings, step, noise / math.sqrt(last) if last else None, shown)

    found = noise_for(budget, lambda noise: build(noise).events(), start=1.01 / find_precision(budget))
    plan = build(found.noise_multiplier)
    _require_enough(plan.survey)
    return plan


def find_precision(budget: Budget) -> float:
    """Find about the 1/σ of one Gaussian release of sensitivity 1 that the budget pays for (Balle and Wang 2018)."""

    def excess(precision: float) -> float:
        high, low = precision / 2 - budget.epsilon / precision, -precision / 2 - budget.epsilon / precision
        return float(norm.cdf(high) - math.exp(budget.epsilon + norm.logcdf(low)) - budget.delta)

    return MOST_PRECISE if excess(MOST_PRECISE) < 0 else float(brentq(excess, 1e-6, MOST_PRECISE))


def _choose_share(root: float, least: float) -> float:
    return min(MOST, max(least, root**2))


def _find_figures_noise(budget: Budget, metrics_epsilon: float) -> float:
    if not 0 < metrics_epsilon < budget.epsilon:
        raise InvalidInput(
            f"metrics_epsilon={metrics_epsilon} must be > 0 and below epsilon={budget.epsilon:g}, which pays for it too"
        )
    part = replace(budget, epsilon=metrics_epsilon)
    return noise_for(part, lambda noise: [(GaussianDpEvent(noise), 1)], start=5.0).noise_multiplier


def _require_enough(plan: Survey) -> None:
    """Refuse, before anything is spent, a survey that says nothing."""
    for deviation in (plan.coarse_deviation if plan.coarse else 0.0, plan.fine_deviation):
        if plan.records < CERTAIN * deviation:
            raise InvalidInput(
                f"records={plan.records:,} are too few for {len(plan.columns)} columns at this epsilon: it takes about "
                f"{math.ceil(CERTAIN * deviation):,}: use a larger epsilon, or fewer columns"
            )
    least = plan.find_threshold(plan.target_deviation)
    if plan.task == "classification" and plan.classes is None and plan.records < 2 * least:
        raise InvalidInput(
            f"records={plan.records:,} are too few to release the names of the classes with noise, it takes about "
            f"{math.ceil(2 * least):,}: give the classes, or a larger epsilon"
        )


# -- learning ---------------------------------------------------------------------------------------------------------


def learn(
    table: Table,
    target: str,
    budget: Budget,
    *,
    task: str | None = None,
    schema: Schema | None = None,
    bounds: tuple[float, float] | None = None,
    held_out: Table | None = None,
    metrics_epsilon: float | None = None,
    rows_per_unit: int = 1,
    unit: str = "record",
    folder: Path | None = None,
    ledger: Ledger | None = None,
    resumed: bool = False,
    seed: int | None = None,
    tell: Callable[[int, int], None] = lambda done, steps: None,
    vault: DatasetBudget | None = None,
) -> Learned:
    """Learn a model of `target` from the records of `table`, all of it within `budget`.

    - `task` is "classification" or "regression". Without it a class is learnt, and a target that reads as many
      different numbers is refused.
    - `schema` holds what is public about the columns and the classes; everything else is released with noise. `bounds`
      are public bounds of a regression's target.
    - `held_out` are other records to measure on. They are not protected, unless `metrics_epsilon` releases the figures
      with noise, out of the same budget.
    - `rows_per_unit` is how many records one `unit` has at most: then the guarantee is about units.
    - The ledger is in `folder`, which must not hold a run yet, or it is `ledger`, or one in memory. `resumed` says that
      `ledger` belongs to a run that was killed, and that `budget` has room beside it
      (`sordino.tables.preparing.Reserving`).
    - `seed` makes the noise repeatable. `tell` is called after each step with the number of steps that are done.
    - `vault` is the budget of the dataset (`sordino.vault.open_budget`): the whole plan is reserved there before
      anything is released.

    Guarantees: only what the plan announced is released, and it costs at most the budget; nothing is spent if this
    raises before its first release. If the releases are too little to continue with, the error (`LostInNoise`) says
    what they cost.
    Edge cases: the survey alone learns from records whose target is missing or not among the classes.
    """
    schema = schema or Schema()
    columns = _choose_columns(table, target, schema)
    task = require_task(table, target, task, schema)
    plan = plan_learning(
        *(columns, target, task, budget, len(table)),
        classes=schema.classes if task == "classification" else None,
        bounds=bounds,
        metrics_epsilon=None if held_out is None else metrics_epsilon,
        rows_per_unit=rows_per_unit,
        unlisted=UNLISTED_SHARE if vault is None else SHARED_UNLISTED,
    )
    claim = None
    if vault is not None:
        basis = weaken("proven", require_accountant(budget.accountant).basis)
        claim = vault.over(lambda: digest_table(table), "table").claim(
            unit=unit, basis=basis, repeatable=seed is not None
        )
        if ledger is None:
            claim.preview(plan.events(), budget.adjacency)  # refuse before there is a folder
    require_classes_in_sight(table, plan.survey)
    book = _open_ledger(plan, unit, folder, ledger, resumed=resumed)
    try:
        if claim is None:
            require_untied(book)
        else:
            claim.cover(book)
        return follow(table, plan, held_out, book, _choose_source(seed, book), unit, tell)
    except LostInNoise as lost:
        raise tell_spent(lost, book, plan.budget) from None
    finally:
        if claim is not None:
            claim.settle(book)
        if ledger is None:
            book.close()


def digest_table(table: Table) -> str:
    """Digest the names of the columns and a few records: for a key to sign, never to be shown."""
    places = np.unique(np.linspace(0, len(table) - 1, DIGESTED).astype(int))
    cells = [[name, *(str(column[place]) for place in places)] for name, column in sorted(table.columns.items())]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def _choose_columns(table: Table, target: str, schema: Schema) -> dict[str, Column | None]:
    if target not in table.columns:
        raise InvalidInput(f"the data has no column {target!r}: it has {', '.join(list(table.columns)[:20])}")
    if not len(table):
        raise InvalidInput(f"{table.name} has 0 records: nothing can be learnt from it")
    if unknown := next((name for name in schema.columns if name not in table.columns), None):
        raise InvalidInput(f"the schema has a column {unknown!r}, the data has not")
    columns = {name: schema.columns.get(name) for name in table.columns if name != target}
    if all(isinstance(column, Skip) for column in columns.values()):
        raise InvalidInput(f"the data has no column besides {target!r} to learn from")
    return columns


def require_task(table: Table, target: str, task: str | None, schema: Schema) -> str:
    """Return the task; refuse to learn classes if the target is a number, before anything is released.

    An error is for the holder of the records: it says that they have many values, but shows no value.
    """
    if task not in (None, *TASKS):
        raise InvalidInput(f"task={task!r} must be classification or regression")
    cells = table.columns[target]
    missing = find_missing(cells)
    if missing.all():
        raise InvalidInput(f"every record's target {target!r} is missing: nothing can be learnt")
    values, known = parse_numbers(cells), ~missing
    numeric = 2 * int(np.sum(~np.isnan(values))) > int(known.sum())
    if task == "regression":
        if not numeric:
            raise InvalidInput(
                f"most values of target {target!r} are not numbers, as a regression needs: use classification"
            )
        return task
    many = len(np.unique(values[~np.isnan(values)])) > MANY_VALUES
    if numeric and many and schema.classes is None:
        raise InvalidInput(
            f"target {target!r} reads as a number with more than {MANY_VALUES} different values, which make no "
            "classes: use task regression, or give the classes if they are some"
        )
    return "classification"


def _open_ledger(plan: LearningPlan, unit: str, folder: Path | None, ledger: Ledger | None, *, resumed: bool) -> Ledger:
    """Open the ledger and declare the whole plan in it, before anything is released (law 5).

    A run that was killed begins again on its own ledger: what it spent and the new plan replace its plan.
    """
    budget = plan.budget
    if resumed and ledger is not None:
        whole = Budget(budget.epsilon, budget.delta, budget.accountant, budget.adjacency)
        plans.announce(ledger, ledger.header.get("recipe", ""), plan.events(), budget=whole, resumed=True)
        return ledger
    if ledger is None:
        header = {
            "recipe": plan.fingerprint(),
            "unit": unit,
            "adjacency": budget.adjacency,
            "basis": weaken("proven", require_accountant(budget.accountant).basis),
        }
        if folder is None:
            ledger = Ledger.in_memory(header=header)
        else:
            require_fresh(folder)
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidInput(f"cannot create run directory {folder}: {error.strerror}") from None
            ledger = Ledger.create(folder / LEDGER, header=header)
    events: Events = plan.events()
    plans.declare(ledger, plans.Plan(tuple(events), len(ledger), plan.fingerprint(), 0, budget))
    return ledger


def _choose_source(seed: int | None, ledger: Ledger) -> Source:
    return Secure() if seed is None else Matched(seed, ledger.incarnation, len(ledger), ledger.next_stream())


def follow(
    table: Table,
    plan: LearningPlan,
    held_out: Table | None,
    ledger: Ledger,
    source: Source,
    unit: str,
    tell: Callable[[int, int], None] = lambda done, steps: None,
) -> Learned:
    """Make the releases of `plan`, each charged to `ledger` before its noise is drawn from `source`."""
    # With noise, figures are released even about no records: leaving them out would reveal the first one.
    measured = held_out is not None and (len(held_out) > 0 or plan.figures_noise is not None)
    for text in (source.assumption, FIXED_IN_ADVANCE, FLOATING_POINT, PUBLIC):
        ledger.declare(ASSUMPTION, text)
    if measured and plan.figures_noise is None:
        ledger.declare(UNPROTECTED, HELD_OUT)
    encoder = survey(table, plan.survey, ledger, source)
    fitted = fit_encoded(table, encoder, plan, ledger, source, tell)
    model = build_model(fitted)
    found = None
    if measured:
        assert held_out is not None
        found = _measure(model, encoder, held_out, plan, ledger, source)
    guarantee = make_guarantee(ledger, plan.budget, unit)
    cautions = (*_judge_classes(encoder), *(found.cautions if found else ()))
    return Learned(model, encoder, guarantee, plan, found, cautions)


def _judge_classes(encoder: Encoder) -> tuple[str, ...]:
    """Say what looks doubtful about the released names of the classes, and about their shares."""
    found, spelled = [], {name.casefold(): name for name in reversed(encoder.classes)}
    if twin := next((name for name in encoder.classes if spelled[name.casefold()] != name), None):
        found.append(
            f"the classes {spelled[twin.casefold()]!r} and {twin!r} differ in capitals alone and were learnt as two: "
            "spell them alike if they are one"
        )
    if encoder.classes and encoder.unnamed >= UNNAMED:
        found.append(
            f"about {encoder.unnamed:.0%} of the records have none of the {len(encoder.classes)} classes that were "
            "named: give the classes if you know their names, or a larger epsilon"
        )
    return tuple(found)


def fit_encoded(
    table: Table, encoder: Encoder, plan: LearningPlan, ledger: Ledger, source: Source, tell: Callable[[int, int], None]
) -> Additive:
    """Take the steps of `plan`, and calibrate, on records that were surveyed."""
    rows = EncodedRows(encoder, table, plan.settings.constant)
    targets, known = encode_target(table, encoder)
    link: Callable[[Floats], Floats] = lambda scores: scores  # noqa: E731
    start, curvature = np.zeros(1), 1.0
    if encoder.classes:
        start, curvature = choose_start(encoder.class_shares)
        link = to_probability if len(encoder.classes) == 2 else to_probabilities
    event = GaussianDpEvent(plan.step_noise)
    fitted = fit(
        *(rows, targets, known, start, curvature, plan.step_noise, plan.settings, plan.survey.records),
        *(lambda: ledger.charge(event), source),
        link=link,
        per_unit=plan.survey.rows,
        tell=tell,
    )
    if plan.calibration_noise is None:
        return fitted
    receipt = ledger.charge(GaussianDpEvent(plan.calibration_noise), "scores by class")
    deviation = plan.calibration_noise * plan.survey.rows
    if len(encoder.classes) > 2:
        said = np.zeros(len(encoder.classes))
        for at in rows.split():
            said += known[at] @ to_probabilities(rows.multiply(fitted.weights, at) + fitted.offsets)
        sums = torch.from_numpy(np.stack([targets[known].sum(0, dtype=np.float64), said]) / math.sqrt(2.0))
        noised = add_matched_noise(source, receipt, sums, deviation, "scores", [("", sums.numel())]).numpy()
        return Additive(fitted.weights, fitted.offsets + balance(noised, deviation))
    scores = rows.multiply(fitted.weights)[:, 0] + fitted.offsets[0]
    counts = torch.from_numpy(count_scores(scores, targets[:, 0], known))
    noised = add_matched_noise(source, receipt, counts, deviation, "scores", [("", counts.numel())]).numpy()
    slope, offset = calibrate(noised, deviation)
    return Additive(slope * fitted.weights, slope * fitted.offsets + offset)


def encode_target(table: Table, encoder: Encoder) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Encode [N, K] targets and which records have one: 0 or 1, one of K, or the value in spreads around the center."""
    cells = table.columns[encoder.target]
    if not encoder.classes:
        values = parse_numbers(cells)
        known = ~np.isnan(values)
        inside = np.clip(np.where(known, values, encoder.center), encoder.low, encoder.high)
        return ((inside - encoder.center) / encoder.spread)[:, None], known
    numbers = encode_labels(cells, encoder.classes)
    known = numbers != NO_CLASS
    if len(encoder.classes) == 2:
        return (numbers == 1).astype(np.uint8)[:, None], known
    return np.eye(len(encoder.classes), dtype=np.uint8)[np.where(known, numbers, 0)], known


def build_model(fitted: Additive) -> nn.Linear:
    """Build the plain module: one linear layer."""
    width, outputs = fitted.weights.shape
    model = nn.Linear(width, outputs)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(fitted.weights.T))
        model.bias.copy_(torch.from_numpy(fitted.offsets))
    return model.eval()


def _measure(
    model: nn.Module, encoder: Encoder, held_out: Table, plan: LearningPlan, ledger: Ledger, source: Source
) -> Figures | None:
    scores = score(model, encoder, held_out)
    targets, known = encode_target(held_out, encoder)
    if plan.figures_noise is None:
        return evaluation.measure(scores[known], targets[known], encoder)
    receipt = ledger.charge(GaussianDpEvent(plan.figures_noise), "held-out figures")
    return evaluation.release(
        scores[known], targets[known], encoder, plan.figures_noise, plan.survey.rows, receipt, source
    )


def make_guarantee(ledger: Ledger, budget: Budget, unit: str) -> Guarantee:
    """Return what is promised: a pure function of the ledger."""
    bill = plans.bill_ledger(ledger)
    return assemble(
        bill,
        delta=budget.delta,
        accountant=budget.accountant,
        adjacency=budget.adjacency,
        unit=unit,
        basis="proven",
        assumptions=(*ledger.declared(ASSUMPTION), *bill.notes),
        unprotected=ledger.declared(UNPROTECTED),
        conditions=(),
    )
