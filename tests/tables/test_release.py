"""The release of kinds, ranges and classes: its noise, its price, and that it comes after its charge."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sordino.accounting import Budget, Ledger
from sordino.accounting.events import GaussianDpEvent, from_json, to_json
from sordino.accounting.pricing import delta, epsilon
from sordino.accounting.unlisted import Unlisted
from sordino.errors import InvalidInput, LedgerError, LostInNoise
from sordino.noise import Seeded
from sordino.tables import labels
from sordino.tables.encoding import encode, scale
from sordino.tables.release import (
    BINS,
    DISTINCT_WEIGHT,
    ReleasePlan,
    count_cells,
    plan_release,
    release,
    release_counts,
)
from sordino.tables.schema import Category, Number, Schema, Skip, Text, describe_header
from sordino.tables.table import Table, parse_numbers

BUDGET = Budget(epsilon=2.0, delta=1e-5)
RECORDS = 3000


def patients(records: int = RECORDS) -> Table:
    source = np.random.default_rng(3)
    age = source.normal(50, 15, records).clip(0, 100)
    sick = (age + source.normal(0, 10, records) > 55).astype(int)
    return Table(
        "patients",
        {
            "age": [f"{value:.0f}" for value in age],
            "dose": [f"{value:.6f}" if value < 0.02 else "" for value in source.exponential(0.01, records)],
            "town": [("Bern", "Rome", "Oslo")[i] for i in source.integers(0, 3, records)],
            "code": [f"P{i}" for i in range(records)],
            "notes": ["the patient is quite " + ("ill", "well")[1 - s] for s in sick],
            "outcome": [("no", "yes")[s] for s in sick],
        },
    )


def open_schema(table: Table) -> Schema:
    return describe_header(Schema(), list(table.columns), "outcome", None)


class Watching(Seeded):
    """Notes what was asked of it, and refuses to draw before the ledger holds the receipt's event."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(5)
        self.ledger, self.asked = ledger, []

    def gaussian(self, receipt, size, std):
        held = list(self.ledger.history())
        assert held[receipt.sequence - 1] == (receipt.sequence, receipt.event), "law 5"
        self.asked.append((receipt.event, size, std))
        return super().gaussian(receipt, size, std)


def test_kinds_ranges_and_classes_of_a_table():
    table, ledger = patients(), Ledger.in_memory()
    chosen = plan_release(open_schema(table), RECORDS, BUDGET, 0.3)
    schema = release(table, "outcome", open_schema(table), chosen, ledger, Seeded(1))
    kinds = {name: type(column) for name, column in schema.columns.items()}
    assert kinds == {"age": Number, "dose": Number, "town": Category, "code": Skip, "notes": Text}
    assert schema.columns["town"].buckets == 16
    age, dose = schema.columns["age"], schema.columns["dose"]
    assert age.low <= 20
    assert age.high >= 90
    assert abs(age.center - 50) < 10
    assert 5 < age.spread < 40
    assert dose.high < 1
    assert dose.missing
    assert schema.classes == ("no", "yes")
    assert schema.complete


def test_every_event_is_in_the_ledger_before_its_noise_and_costs_its_share():
    table, ledger = patients(), Ledger.in_memory()
    chosen = plan_release(open_schema(table), RECORDS, BUDGET, 0.3)
    source = Watching(ledger)
    release(table, "outcome", open_schema(table), chosen, ledger, source)
    assert [event for event, _, _ in source.asked] == [event for _, event in ledger.history()]
    assert ledger.events() == chosen.events(), "what was planned is what was charged"
    price = epsilon(ledger.events(), BUDGET.delta)
    assert 0.3 * BUDGET.epsilon * 0.998 <= price <= 0.3 * BUDGET.epsilon
    size, std = source.asked[0][1:]
    assert size == 5 * (BINS + 1)
    assert std == pytest.approx(chosen.noise_multiplier * math.sqrt(5 * 1.25))


def test_without_a_charge_there_is_no_release(tmp_path):
    table = patients(200)
    chosen = ReleasePlan(("age",), True, 200, 1.0, 1e-6)
    Ledger.create(tmp_path / "ledger.sqlite").close()
    with Ledger.read(tmp_path / "ledger.sqlite") as closed, pytest.raises(LedgerError):
        release(table, "outcome", Schema({"age": None}), chosen, closed, Watching(closed))


@pytest.mark.parametrize(("factor", "accepted"), [(1.0, True), (1.1, False), (1 / math.sqrt(5), False)])
def test_the_noise_has_the_deviation_that_was_charged(factor, accepted):
    """Kolmogorov-Smirnov on the residuals; a deviation that is 10 % off, or forgets the number of columns, fails."""
    table = patients(300)
    chosen = ReleasePlan(tuple(open_schema(table).columns), False, 300, 7.0, 1e-6)
    truth = np.stack([count_cells(table.columns[name]) for name in chosen.columns])
    source, ledger = Seeded(11), Ledger.in_memory()
    residuals = [release_counts(table, chosen, ledger, source) - truth for _ in range(60)]
    charged = 7.0 * math.sqrt(len(chosen.columns) * (1 + DISTINCT_WEIGHT**2))
    p_value = stats.kstest(np.concatenate(residuals).ravel() / (factor * charged), "norm").pvalue
    assert (p_value > 0.01) == accepted, p_value


CELL = st.sampled_from(["", "NA", "x", "y z", "one two three four", "0", "5", "-7e5", "1e300", "inf", "nan", "\x00"])


@given(st.lists(st.tuples(CELL, CELL, CELL), min_size=1, max_size=9), st.data())
def test_one_record_moves_the_counts_by_at_most_the_sensitivity(rows, data):
    gone = data.draw(st.integers(0, len(rows) - 1))
    columns = [list(cells) for cells in zip(*rows, strict=True)]
    fewer = [cells[:gone] + cells[gone + 1 :] for cells in columns]
    moved = sum(np.sum((count_cells(a) - count_cells(b)) ** 2) for a, b in zip(columns, fewer, strict=True))
    assert moved <= 3 * (1 + DISTINCT_WEIGHT**2) + 1e-12


def test_the_sensitivity_is_attained_so_that_less_noise_would_be_wrong():
    moved = np.sum((count_cells(["a", "b"]) - count_cells(["a"])) ** 2)
    assert moved == 1 + DISTINCT_WEIGHT**2


@given(st.lists(CELL, min_size=1, max_size=9))
def test_numbers_that_are_averaged_lie_within_one(cells):
    values = scale(Number(-3.0, 9.0), parse_numbers(cells))
    assert (np.abs(values) <= 1).all()


def test_an_extreme_record_changes_no_encoding_of_the_others():
    """The same noise with and without a hostile record: it moves counts by one, which the noise hides."""
    table, target = patients(), "outcome"
    hostile = {"age": "-1e300", "dose": "1e308", "town": "\x1b[2J", "code": "P0", "notes": "9" * 999, target: "rare"}
    more = Table("more", {name: [*cells, hostile[name]] for name, cells in table.columns.items()})
    chosen = plan_release(open_schema(table), RECORDS, BUDGET, 0.3)
    schemas = [release(t, target, open_schema(t), chosen, Ledger.in_memory(), Seeded(2)) for t in (table, more)]
    assert schemas[0].classes == schemas[1].classes, "a class of one record is not named"
    for name, column in schemas[0].columns.items():
        other = schemas[1].columns[name]
        if isinstance(column, Number):
            assert replace(column, center=0.0, spread=1.0) == replace(other, center=0.0, spread=1.0)
            step = (column.high - column.low) / RECORDS
            assert abs(column.center - other.center) <= step
        else:
            assert column == other
    before, after = (encode(table, schema, target)[0] for schema in schemas)
    assert (before - after).abs().max() < 0.05


# -- classes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lowered", "accepted"), [(0.0, True), (1.0, False)])
def test_a_class_of_one_record_is_named_as_rarely_as_was_charged(lowered, accepted):
    """And a threshold that forgets the record's own count of one names it too often."""
    noise, unlisted, trials = 1.0, 0.05, 4000
    threshold = labels.find_threshold(noise, unlisted) - lowered
    receipt = Ledger.in_memory().charge(labels.build_event(noise, unlisted))
    shown = 1 + Seeded(4).gaussian(receipt, trials, noise).numpy() > threshold
    assert (stats.binomtest(int(shown.sum()), trials, unlisted, alternative="greater").pvalue > 0.001) == accepted


def test_rare_classes_are_not_named():
    cells = ["yes"] * 500 + ["no"] * 300 + ["only me"] + [""] * 50
    receipt = Ledger.in_memory().charge(labels.build_event(5.0, 1e-6))
    assert labels.release_classes(cells, 5.0, 1e-6, receipt, Seeded(1)) == ("no", "yes")
    assert labels.release_classes(["10"] * 99 + ["9"] * 99, 5.0, 1e-6, receipt, Seeded(2)) == ("9", "10")
    with pytest.raises(LostInNoise, match="has 1 classes"):
        labels.release_classes(["a"] * 500 + ["b"], 5.0, 1e-6, receipt, Seeded(1))


def test_the_price_of_an_unlisted_class():
    """An event that reveals with probability δ costs δ at every ε, and adds to a Gaussian's δ."""
    alone = Unlisted(1e-6)
    assert from_json(to_json(alone)) == alone
    for adjacency, cost in (("add-or-remove-one", 1e-6), ("replace-one", 2e-6)):
        for at in (0.0, 1.0, 5.0):
            assert delta([(alone, 1)], at, adjacency=adjacency) == pytest.approx(cost, rel=1e-6)
    gaussian = GaussianDpEvent(4.0)
    together = delta([(labels.build_event(4.0, 1e-6), 1)], 1.0)
    assert together == pytest.approx(delta([(gaussian, 1)], 1.0) + 1e-6, rel=0.02)
    with pytest.raises(InvalidInput, match="has no RDP price"):
        epsilon([(alone, 1)], 1e-5, accountant="rdp")


# -- plans ------------------------------------------------------------------------------------------------------


def test_what_is_public_needs_no_release():
    full = Schema({"age": Number(0, 120), "town": Category()}, ("no", "yes"))
    assert plan_release(full, 10, None, 0.3) is None
    part = plan_release(replace(full, classes=None), 1000, BUDGET, 0.3)
    assert (part.columns, part.classes) == ((), True)
    open_range = plan_release(full.with_columns({"age": Number()}), 1000, BUDGET, 0.3)
    assert open_range.columns == ("age",)
    assert not open_range.classes


@pytest.mark.parametrize(
    ("records", "budget", "share", "words"),
    [
        (1000, None, 0.3, "give --epsilon"),
        (1000, BUDGET, 0.0, "prepare=0.0 must be in"),
        (1000, BUDGET, 1.0, "prepare=1.0 must be in"),
        (30, BUDGET, 0.3, "records=30 are too few to release the ranges of 5 columns"),
    ],
)
def test_a_hopeless_release_is_refused_before_anything_is_spent(records, budget, share, words):
    with pytest.raises(InvalidInput) as refused:
        plan_release(open_schema(patients(10)), records, budget, share)
    assert words in str(refused.value)


def test_too_few_records_for_the_names_of_classes():
    with pytest.raises(InvalidInput, match="too few to release the names of the classes"):
        plan_release(Schema({"a": Text()}), 20, BUDGET, 0.3)
