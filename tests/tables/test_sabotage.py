"""Every place where tables add noise: its deviation is what the charge and the reach of one record make, exactly.

The reach is worked out here from what docs/tables.md says, not by the code under test; and whole runs are replayed on
neighbouring tables, whose extra record is as far out as one can be. The twins break one place each, and are found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from torch import Tensor

from sordino.accounting import Budget, Ledger
from sordino.accounting.events import ComposedDpEvent, GaussianDpEvent
from sordino.accounting.ledger import Receipt
from sordino.accounting.unlisted import Unlisted
from sordino.audit import conformance
from sordino.audit.conformance import Neighbours, Tape
from sordino.noise import Seeded
from sordino.tables import additive, evaluation, learning, surveying
from sordino.tables.encoder import Binned, Encoder, Worded
from sordino.tables.learning import LearningPlan, follow, plan_learning
from sordino.tables.schema import Column, Number, Text
from sordino.tables.table import Table

Patch = pytest.MonkeyPatch
BUDGET = Budget(12.0, 1e-4)
RECORDS, HELD_OUT, STEPS = 400, 120, 4


@dataclass(frozen=True)
class Asked:
    """A way to learn: what of, with how many records of one unit, and what is public."""

    target: str
    task: str = "classification"
    rows: int = 1
    public: tuple[tuple[str, Column], ...] = ()


ASKED = {
    "two classes": Asked("outcome"),
    "three classes": Asked("town"),
    "a number": Asked("cost", "regression"),
    "two classes of units": Asked("outcome", rows=3),
    "a number of units": Asked("cost", "regression", rows=2),
    "public bounds and a text": Asked("outcome", public=(("age", Number(0.0, 200.0)), ("notes", Text(64)))),
}
FAR = {"age": "1e9", "town": "Rome", "notes": "of words that nobody else has", "outcome": "yes", "cost": "-1e12"}


@pytest.fixture(autouse=True)
def few_intervals(monkeypatch: Patch) -> None:
    """What is worked out of released values takes long, and nothing here looks at it."""
    monkeypatch.setattr(evaluation, "AGAIN", 2)


def people(records: int, seed: int, *more: dict[str, str]) -> Table:
    source = np.random.default_rng(seed)
    age, town = source.normal(50, 15, records), source.integers(0, 3, records)
    risk = (age - 50) / 15 + np.array([0.0, 0.8, -0.8])[town] + source.normal(size=records)
    columns = {
        "age": [f"{value:.0f}" for value in age],
        "town": [("Bern", "Rome", "Oslo")[i] for i in town],
        "notes": [("a visit as usual", "fever for two days", "came for a second time")[i] for i in town[::-1]],
        "outcome": [("no", "yes")[int(one > 1.2)] for one in risk],
        "cost": [f"{100 + 30 * one:.1f}" for one in risk],
    }
    return Table("people", {name: [*cells, *(row[name] for row in more)] for name, cells in columns.items()})


@cache
def plan_for(asked: Asked) -> LearningPlan:
    columns = {name: dict(asked.public).get(name) for name in FAR if name != asked.target}
    plan = plan_learning(
        *(columns, asked.target, asked.task, BUDGET, RECORDS), metrics_epsilon=4.0, rows_per_unit=asked.rows
    )
    return replace(plan, settings=replace(plan.settings, steps=STEPS))  # each is like the others


@dataclass(frozen=True)
class Noise:
    """One release: the multiplier that was charged for it, and the deviation that was drawn."""

    charged: float
    deviation: float
    unlisted: float | None = None


class Listening(Seeded):
    """A source that notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__(5)
        self.heard: list[Noise] = []

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        events = receipt.event.events if isinstance(receipt.event, ComposedDpEvent) else [receipt.event]
        charged = [event.noise_multiplier for event in events if isinstance(event, GaussianDpEvent)]
        unlisted = [event.delta for event in events if isinstance(event, Unlisted)]
        self.heard.append(Noise(charged[0], std, *unlisted))
        return super().gaussian(receipt, size, std)


def listen(asked: Asked) -> tuple[LearningPlan, Encoder, list[Noise]]:
    plan, source = plan_for(asked), Listening()
    learned = follow(people(RECORDS, 1), plan, people(HELD_OUT, 2), Ledger.in_memory(), source, "unit")
    return plan, learned.encoder, source.heard


def list_reaches(asked: Asked, plan: LearningPlan, encoder: Encoder) -> list[float]:
    """How far one unit can move each release: docs/tables.md, in its order."""
    open_columns = [name for name in FAR if name != asked.target and not isinstance(dict(asked.public).get(name), Text)]
    coarse = len(open_columns) + (asked.task == "regression")
    counted = 1 + len(open_columns)
    weight = max(1.0, (counted - 1) / 6)
    square = plan.settings.constant**2
    for block in encoder.blocks.values():
        square += 1.5**2 if isinstance(block, Worded) else 1.0 - sum(share**2 for share in block.shares)
        square += 0.4**2 if isinstance(block, Binned) else 0.0
    residual = plan.settings.residual * (math.sqrt(2.0) if len(encoder.classes) > 2 else 1.0)
    first = [math.sqrt(1.25 * coarse), math.sqrt(counted - 1 + weight)]
    last = [1.0] * (2 if encoder.classes else 1)
    return [asked.rows * one for one in (*first, *[residual * math.sqrt(square)] * plan.settings.steps, *last)]


def find_wrong(asked: Asked) -> list[str]:
    """The releases whose noise is not what was charged times how far a unit can move them."""
    plan, encoder, heard = listen(asked)
    reaches = list_reaches(asked, plan, encoder)
    assert len(heard) == len(reaches)
    return [
        f"release {place}: {noise.deviation} is not {noise.charged} times {reach}"
        for place, (noise, reach) in enumerate(zip(heard, reaches, strict=True))
        if not math.isclose(noise.deviation, noise.charged * reach, rel_tol=1e-9)
    ]


@pytest.mark.parametrize("name", ASKED)
def test_every_deviation_is_what_was_charged_times_the_reach_of_a_unit(name: str) -> None:
    assert find_wrong(ASKED[name]) == []


def reveal(asked: Asked) -> tuple[float, float]:
    """How likely a name shows that one unit alone has, in whichever column, and how likely it may be as charged.

    Each of a unit's records can bring a value of its own to every column that is counted, and all of them the same one.
    """
    plan, _, heard = listen(asked)
    noise, counted = heard[1], len([name for name in FAR if not isinstance(dict(asked.public).get(name), Text)])
    assert noise.unlisted is not None
    shown = norm.sf((plan.survey.find_threshold(noise.deviation) - asked.rows) / noise.deviation)
    return counted * asked.rows * float(shown), noise.unlisted


@pytest.mark.parametrize("name", ["two classes", "two classes of units", "public bounds and a text"])
def test_a_name_of_one_unit_alone_shows_as_rarely_as_was_charged(name: str) -> None:
    shown, charged = reveal(ASKED[name])
    assert shown <= charged * (1 + 1e-6)
    assert shown >= 0.99 * charged


LOWERED: dict[str, Callable[[Any, float], float]] = {
    "without a unit's own records": lambda survey, deviation: survey.healthy(deviation) - survey.rows,
    "for one column alone": lambda survey, deviation: survey.rows + deviation * float(norm.isf(survey.unlisted)),
    "at half the deviation": lambda survey, deviation: survey.healthy(deviation / 2),
}


@pytest.mark.parametrize("name", LOWERED)
def test_a_lower_threshold_of_names_is_found(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(surveying.Survey, "healthy", surveying.Survey.find_threshold, raising=False)
    monkeypatch.setattr(surveying.Survey, "find_threshold", LOWERED[name])
    shown, charged = reveal(ASKED["two classes of units"])
    assert shown > 1.5 * charged


# -- movements --------------------------------------------------------------------------------------------------------

Pair = tuple[Table, Table]


def replay(asked: Asked, held_out: int = HELD_OUT) -> list[str]:
    """What a unit more to train on, and one more to measure on, move by more than was paid for."""
    plan = plan_for(asked)

    def program(data: Pair, tape: Tape) -> Any:
        ledger = Ledger.in_memory()
        tape.watch(ledger)
        learned = follow(data[0], plan, data[1], ledger, tape, "unit")
        return repr(learned.encoder.to_plain()), learned.model.weight.tolist(), str(learned.figures)

    more = [FAR] * asked.rows
    measured = people(held_out, 2), people(held_out, 2, *more)
    data = (people(RECORDS, 1), measured[0]), (people(RECORDS, 1, *more), measured[1])
    pair = Neighbours("a unit", *data, count=lambda both: len(both[0]))
    return list(conformance.replay(program, pair).findings)


@pytest.mark.parametrize("name", ASKED)
def test_no_unit_moves_a_release_by_more_than_was_paid_for(name: str) -> None:
    assert replay(ASKED[name]) == []


@pytest.mark.parametrize("name", ["two classes", "three classes", "a number"])
def test_the_first_record_to_measure_on_is_no_event_of_its_own(name: str) -> None:
    """Figures that are only released about somebody would tell that there is somebody."""
    assert replay(ASKED[name], held_out=0) == []


# -- twins: what is broken is found -----------------------------------------------------------------------------------


def halve(module: Any) -> Callable[[Patch], None]:
    name = "add_matched_noise" if hasattr(module, "add_matched_noise") else "add_noise"
    healthy = getattr(module, name)
    return lambda patch: patch.setattr(module, name, lambda s, r, value, std, *by: healthy(s, r, value, std / 2, *by))


HALVED: dict[str, tuple[Any, str, set[int]]] = {
    "the survey": (surveying, "two classes", {0, 1}),
    "the steps": (additive, "a number", set(range(2, 2 + STEPS))),
    "scores of two classes": (learning, "two classes", {2 + STEPS}),
    "sums of three classes": (learning, "three classes", {2 + STEPS}),
    "figures of two classes": (evaluation, "two classes", {3 + STEPS}),
    "figures of three classes": (evaluation, "three classes", {3 + STEPS}),
    "figures of a number": (evaluation, "a number", {2 + STEPS}),
}


@pytest.mark.parametrize("name", HALVED)
def test_half_the_noise_is_found_where_it_is(name: str, monkeypatch: Patch) -> None:
    module, asked, places = HALVED[name]
    halve(module)(monkeypatch)
    wrong = find_wrong(ASKED[asked])
    assert {int(found.split()[1].rstrip(":")) for found in wrong} == places


def scale_result(owner: Any, name: str, by: float) -> Callable[[Patch], None]:
    healthy = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *given, **named: by * healthy(*given, **named))


def keep(owner: Any, name: str) -> Callable[[Patch], None]:
    """A bound that bounds nothing."""
    return lambda patch: patch.setattr(owner, name, lambda value, *bound: value)


def forget_lengths(patch: Patch) -> None:
    """Every residual is kept within what the shortest row allows."""
    healthy = additive.shorten
    patch.setattr(additive, "shorten", lambda values, limits: healthy(values, np.full_like(limits, limits.max())))


MOVED: dict[str, tuple[Callable[[Patch], None], str]] = {
    "cells counted twice": (scale_result(surveying.release, "count_cells", 2.0), "two classes"),
    "bins counted twice": (scale_result(surveying, "count_in_cells", 2.5), "a number"),
    "residuals that nothing bounds": (keep(additive, "shorten"), "a number"),
    "rows as long as they like": (forget_lengths, "a number"),
    "steps summed twice": (scale_result(additive.EncodedRows, "add_up", 2.0), "two classes"),
    "scores counted twice": (scale_result(learning, "count_scores", 2.0), "two classes"),
    "errors summed twice": (scale_result(evaluation, "sum_errors", 3.0), "a number"),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_release_that_moves_further_is_found(name: str, monkeypatch: Patch) -> None:
    sabotage, asked = MOVED[name]
    sabotage(monkeypatch)
    assert [found for found in replay(ASKED[asked]) if "ended with" not in found]
