"""Learning from a table: what every release can be moved by, what it is charged, and that the model is worth having."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from sordino.accounting import Budget, Ledger
from sordino.accounting.events import GaussianDpEvent
from sordino.accounting.ledger import Receipt
from sordino.accounting.pricing import epsilon
from sordino.errors import InvalidInput, LedgerError, LostInNoise
from sordino.noise import Seeded, Settling
from sordino.tables import additive, evaluation, surveying
from sordino.tables.additive import Additive, EncodedRows, FitSettings, choose_settings, fit
from sordino.tables.encoder import ALONE, Binned, Encoder, Named
from sordino.tables.learning import Learned, build_model, encode_target, find_precision, learn, plan_learning
from sordino.tables.matching import Matched, add_matched_noise
from sordino.tables.schema import Category, Number, Schema
from sordino.tables.surveying import Survey, count_in_cells, make_bins
from sordino.tables.table import Table

BUDGET = Budget(epsilon=2.0, delta=1e-5)
RECORDS = 1500


class Watching(Seeded, Settling):
    """A source that keeps every value before its noise and after it; `quiet` releases the value itself."""

    def __init__(self, seed: int = 0, *, quiet: bool = False) -> None:
        super().__init__(seed)
        self.quiet, self.seen = quiet, []  # type: tuple[bool, list[tuple[Receipt, Tensor, Tensor]]]

    def settle(self, receipt: Receipt, value: Tensor, released: Tensor) -> Tensor:
        self.seen.append((receipt, value.clone(), released.clone()))
        return value if self.quiet else released


def patients(records: int = RECORDS, seed: int = 3) -> Table:
    source = np.random.default_rng(seed)
    age = source.normal(50, 15, records).clip(0, 100)
    dose = np.where(source.random(records) < 0.6, 0.0, source.exponential(200.0, records))
    town = source.integers(0, 3, records)
    risk = (age - 50) / 15 + np.where(dose > 100, 1.5, 0.0) + np.array([0.0, 0.8, -0.8])[town]
    sick = risk + source.logistic(0, 0.5, records) > 0.5
    return Table(
        "patients",
        {
            "age": [
                f"{value:.0f}" if chance > 0.02 else ""
                for value, chance in zip(age, source.random(records), strict=True)
            ],
            "dose": [f"{value:.2f}" for value in dose],
            "town": [("Bern", "Rome", "Oslo")[i] for i in town],
            "outcome": [("no", "yes")[int(s)] for s in sick],
            "cost": [f"{100 + 30 * r + 10 * e:.1f}" for r, e in zip(risk, source.normal(size=records), strict=True)],
        },
    )


def without(table: Table, *names: str) -> Table:
    return Table(table.name, {name: cells for name, cells in table.columns.items() if name not in names})


def leave_out(table: Table, record: int) -> Table:
    kept = np.arange(len(table)) != record
    return Table(
        table.name, {name: [c for c, k in zip(cells, kept, strict=True) if k] for name, cells in table.columns.items()}
    )


@pytest.fixture(scope="module")
def learned() -> tuple[Learned, Ledger, Watching]:
    """One whole run, watched."""
    table, ledger, source = without(patients(), "cost"), Ledger.in_memory(), Watching()
    plan = _plan(table)
    return _run(table, plan, ledger, source), ledger, source


def _plan(table: Table, task: str = "classification", target: str = "outcome", **more: object):
    columns = dict.fromkeys(name for name in table.columns if name != target)
    return plan_learning(columns, target, task, BUDGET, len(table), **more)  # type: ignore[arg-type]


def _run(table: Table, plan: object, ledger: Ledger, source: Watching) -> Learned:
    from sordino.tables.learning import follow

    return follow(table, plan, None, ledger, source, "record", lambda done, steps: None)  # type: ignore[arg-type]


# -- what is charged --------------------------------------------------------------------------------------------------


def test_every_release_has_a_charge_of_its_own_and_together_they_cost_the_budget(learned) -> None:
    model, ledger, source = learned
    receipts = [receipt.sequence for receipt, _, _ in source.seen]
    assert receipts == sorted(set(receipts)) == list(range(1, len(ledger) + 1))
    spent = epsilon(ledger.events(), BUDGET.delta)
    assert spent <= BUDGET.epsilon
    assert spent >= 0.98 * BUDGET.epsilon
    planned = model.plan.events()
    assert [event for event, _ in planned] == [event for event, _ in ledger.events()]
    assert [times for _, times in planned] == [times for _, times in ledger.events()]


def test_the_noise_of_every_release_is_what_was_charged(learned) -> None:
    """Each multiplier times how far one record can move the sum, by a test of the noise itself."""
    model, _, source = learned
    plan, rows = model.plan, EncodedRows(model.encoder, without(patients(), "cost"), model.plan.settings.constant)
    noises = [(released - value).flatten().numpy() for _, value, released in source.seen]
    reach = plan.settings.residual * rows.bound
    expected = [
        plan.survey.noise[0] * math.sqrt(1.25 * 3),
        plan.survey.noise[1] * math.sqrt(4),
        *[plan.step_noise * reach] * plan.settings.steps,
        plan.calibration_noise,
    ]
    assert len(noises) == len(expected)
    for noise, deviation in zip([noises[0], noises[1]], expected[:2], strict=True):
        assert stats.kstest(noise / deviation, "norm").pvalue > 1e-3
    steps = np.concatenate([n / d for n, d in zip(noises[2:-1], expected[2:-1], strict=True)])
    assert stats.kstest(steps, "norm").pvalue > 1e-3
    assert stats.kstest(steps * 0.8, "norm").pvalue < 1e-3  # a fifth less noise would be seen
    assert stats.kstest(noises[-1] / expected[-1], "norm").pvalue > 1e-3


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_one_record_moves_no_release_by_more_than_its_noise_is_made_for(task: str) -> None:
    """Whole runs on neighbouring tables that release the same noised values: only what is summed may differ."""
    target = "outcome" if task == "classification" else "cost"
    table = without(patients(300), "cost" if task == "classification" else "outcome")
    extreme = {"age": "1e9", "dose": "-1e9", "town": "Atlantis", "outcome": "maybe", "cost": "1e12"}
    table = Table("t", {name: [*cells, extreme[name]] for name, cells in table.columns.items()})
    columns = dict.fromkeys(name for name in table.columns if name != target)
    plan = plan_learning(columns, target, task, Budget(20.0, 1e-5), len(table))
    survey, first = plan.survey, Watching()
    from sordino.tables.surveying import survey as look

    encoder = look(table, survey, Ledger.in_memory(), first)
    for record in (0, 1, 2, len(table) - 1):
        fewer = leave_out(table, record)
        source = Watching()
        look(fewer, survey, Ledger.in_memory(), source)
        coarse = (first.seen[0][1] - source.seen[0][1]).norm()
        assert coarse <= math.sqrt(1.25 * len(survey.coarse)) + 1e-9
        before, after = first.seen[1][1], source.seen[1][1]
        if record < 3:  # the last one brings names of its own, which the threshold is for
            assert (before - after).norm() <= surveying.find_fine_reach(survey.fine) + 1e-9
        rows, others = EncodedRows(encoder, table, 0.3), EncodedRows(encoder, fewer, 0.3)
        for weights in _weights(rows.width):
            moved = _pull(table, encoder, rows, weights) - _pull(fewer, encoder, others, weights)
            assert np.linalg.norm(moved) <= 0.5 * rows.bound + 1e-9
            assert rows.bound == others.bound


def _weights(width: int) -> list[np.ndarray]:
    source = np.random.default_rng(0)
    return [scale * source.normal(size=(width, 1)) for scale in (0.0, 1.0, 100.0)]


def _pull(table: Table, encoder: Encoder, rows: EncodedRows, weights: np.ndarray) -> np.ndarray:
    """The sum that one step releases, before its noise."""
    source = Watching(quiet=True)
    targets, known = encode_target(table, encoder)
    link = additive.to_probability if encoder.classes else (lambda scores: scores)
    start = np.zeros(1)
    seen: list[np.ndarray] = []

    def linked(scores: np.ndarray) -> np.ndarray:
        seen.append(scores)
        return link(rows.multiply(weights))

    ledger = Ledger.in_memory()
    one = replace(FitSettings(), steps=1, residual=0.5)
    charge = lambda: ledger.charge(GaussianDpEvent(1.0))  # noqa: E731
    fit(rows, targets, known, start, 0.2, 1.0, one, len(table), charge, source, link=linked)
    return source.seen[0][1].numpy()


def test_the_model_is_the_mean_of_the_later_iterates_of_which_the_last_counts_more() -> None:
    table = without(patients(400), "cost")
    plan = _plan(table)
    encoder = surveying.survey(table, plan.survey, Ledger.in_memory(), Watching())
    rows, (targets, known) = EncodedRows(encoder, table), encode_target(table, encoder)
    ledger, even = Ledger.in_memory(), FitSettings(first=1.0, adapted=0.0)

    def learn_for(settings: FitSettings) -> np.ndarray:
        quiet, charge = Watching(quiet=True), lambda: ledger.charge(GaussianDpEvent(1.0))
        given = (rows, targets, known, np.zeros(1), 0.2, 1e-9, settings, len(table), charge, quiet)
        return fit(*given, link=additive.to_probability).weights

    iterates = [learn_for(replace(even, steps=steps)) for steps in range(1, 7)]  # each the last of its run
    mean = (sum(iterates[2:]) + (additive.LAST - 1) * iterates[-1]) / (3 + additive.LAST)
    np.testing.assert_allclose(learn_for(replace(even, steps=6, first=0.3)), mean, rtol=1e-6, atol=1e-9)


def test_a_sum_without_its_bounds_would_be_caught() -> None:
    """The check above has teeth: residuals that are not kept, or alike for long and short rows, move it by more."""
    table = without(patients(300), "outcome")
    table = Table("t", {name: [*cells, "1e12"] for name, cells in table.columns.items()})
    plan = plan_learning(
        {"age": None, "dose": None, "town": None}, "cost", "regression", Budget(20.0, 1e-5), len(table)
    )
    encoder = surveying.survey(table, plan.survey, Ledger.in_memory(), Watching())
    rows = EncodedRows(encoder, table)
    targets, _ = encode_target(table, encoder)
    lengths = np.linalg.norm(encoder.encode(table), axis=1)
    assert (np.abs(targets[:, 0]) * lengths).max() > 0.5 * rows.bound
    alike = additive.shorten(targets, np.full(len(table), 0.5))
    assert (np.abs(alike[:, 0]) * lengths).max() > 0.5 * rows.bound
    kept = np.abs(additive.shorten(targets, 0.5 * rows.room)[:, 0]) * lengths
    assert kept.max() <= 0.5 * rows.bound + 1e-6
    assert np.isclose(kept, 0.5 * rows.bound, rtol=1e-5).mean() > 0.1  # and what is allowed is used


def test_counts_of_scores_and_sums_of_errors_move_by_one() -> None:
    source = np.random.default_rng(1)
    scores, positive = 20 * source.normal(size=50), (source.random(50) > 0.5).astype(float)
    known = np.ones(50, np.bool_)
    whole = additive.count_scores(scores, positive, known)
    assert whole.sum() == 50
    for record in range(50):
        less = np.arange(50) != record
        assert np.linalg.norm(whole - additive.count_scores(scores[less], positive[less], known[less])) <= 1
        values = np.stack([scores, 5 * scores]), np.stack([scores[less], 5 * scores[less]])
        moved = evaluation.sum_errors(values[0].T[:, :1], values[0].T[:, 1:]) - evaluation.sum_errors(
            values[1].T[:, :1], values[1].T[:, 1:]
        )
        assert np.linalg.norm(moved) <= 1 + 1e-9


def test_a_name_that_one_record_has_is_released_no_more_often_than_charged() -> None:
    """Of 1,500 releases with a value of its own in each of two columns, as many show one as δ' says, not more."""
    plan = Survey(
        *("y", "classification", {"a": Category(), "b": Category()}, ("0", "1"), None, 60, (1.0, 2.0), 0.02), bins=4
    )
    values = ["common"] * 59 + ["mine"]
    counts = np.array([59.0, 1.0, 0.0])
    deviation, least = plan.fine_deviation, plan.find_threshold(plan.fine_deviation)
    source = np.random.default_rng(0)
    shown = 0
    for _ in range(1500):
        names = [
            surveying.name_values(
                ["common", "mine"], counts + deviation * source.normal(size=3), 60, least, public=False
            )
            for _ in range(2)
        ]
        shown += any("mine" in found for found, _ in names)
    assert shown <= stats.binom.isf(1e-4, 1500, plan.unlisted)
    assert shown > 0
    assert values.count("mine") == 1


def test_a_unit_of_several_records_has_as_much_more_noise() -> None:
    table = without(patients(), "cost")
    single, fourfold = _plan(table), _plan(table, rows_per_unit=4)
    assert fourfold.survey.coarse_deviation / fourfold.survey.noise[0] == pytest.approx(
        4 * single.survey.coarse_deviation / single.survey.noise[0]
    )
    assert fourfold.survey.find_threshold(1.0) > single.survey.find_threshold(1.0)
    source, ledger = Watching(), Ledger.in_memory()
    model = _run(table, fourfold, ledger, source)
    rows = EncodedRows(model.encoder, table, fourfold.settings.constant)
    noises = [(released - value).flatten().numpy() for _, value, released in source.seen[2:-1]]
    deviation = 4 * fourfold.step_noise * fourfold.settings.residual * rows.bound
    assert stats.kstest(np.concatenate(noises) / deviation, "norm").pvalue > 1e-3


def test_nothing_tells_a_tiny_table_from_its_neighbour_better_than_its_epsilon() -> None:
    """An audit of the whole: a record whose every cell is its own, in or out; the guess is by the model alone.

    The score is the model's own answer about the record, which the record has pulled at in every step.
    """
    budget, runs = Budget(1.0, 1e-2), 40
    source = np.random.default_rng(0)
    cells = [f"{v:.2f}" for v in source.normal(size=120)]
    others = {"x": cells, "y": [("a", "b")[int(i)] for i in source.integers(0, 2, 120)]}
    table = Table("t", {"x": [*others["x"], "3.9"], "y": [*others["y"], "b"]})
    probe = Table("p", {"x": ["3.9"], "y": ["b"]})
    given = {"x": Number(-4.0, 4.0)}
    inside, outside = (
        [_run(one, plan, Ledger.in_memory(), Watching(start + seed)).score(probe)[0, 0] for seed in range(runs)]
        for one, start in ((table, 0), (leave_out(table, 120), runs))
        for plan in [plan_learning(given, "y", "classification", budget, 121, classes=("a", "b"))]
    )
    best = 0.0
    for threshold in np.quantile([*inside, *outside], np.linspace(0.05, 0.95, 19)):
        true, false = np.sum(np.array(inside) > threshold), np.sum(np.array(outside) > threshold)
        low = stats.beta.ppf(0.025 / 19, true, runs - true + 1) if true else 0.0
        high = stats.beta.ppf(1 - 0.025 / 19, false + 1, runs - false) if false < runs else 1.0
        best = max(best, math.log(max(low - budget.delta, 1e-9) / high))
    assert best <= budget.epsilon


# -- nothing is spent in vain -----------------------------------------------------------------------------------------


def test_a_target_with_many_numbers_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    table = without(patients(), "outcome")
    with pytest.raises(InvalidInput, match="reads as a number with more than 20 different values"):
        learn(table, "cost", BUDGET, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(InvalidInput, match="are not numbers"):
        learn(patients(), "outcome", BUDGET, task="regression")
    with pytest.raises(InvalidInput, match="must be classification or regression"):
        learn(patients(), "outcome", BUDGET, task="ranking")


@pytest.mark.parametrize(
    ("table", "target", "words"),
    [
        (Table("t", {"a": [], "y": []}), "y", "0 records"),
        (Table("t", {"a": ["1"], "y": [""]}), "y", "every record's target 'y' is missing"),
        (Table("t", {"a": ["1"] * 9, "y": ["0", "1", "1"] * 3}), "y", "records=9 are too few"),
        (Table("t", {"a": ["1"], "y": ["1"]}), "z", "no column 'z'"),
        (Table("t", {"y": ["1", "0"]}), "y", "no column besides 'y'"),
    ],
)
def test_bad_tables_are_one_line_and_cost_nothing(table: Table, target: str, words: str) -> None:
    ledger = Ledger.in_memory()
    with pytest.raises(InvalidInput, match=words) as error:
        learn(table, target, BUDGET, ledger=ledger)
    assert "\n" not in str(error.value)
    assert len(ledger) == 0


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    table = without(patients(), "cost")
    learned = learn(table, "outcome", BUDGET, folder=tmp_path / "run", seed=0)
    with Ledger.read(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert epsilon(ledger.events(), BUDGET.delta) == pytest.approx(learned.guarantee.epsilon)
    with pytest.raises(LedgerError, match="holds a run already"):
        learn(table, "outcome", BUDGET, folder=tmp_path / "run")


# -- rows and encoder -------------------------------------------------------------------------------------------------

ENCODER = Encoder(
    "y",
    {
        "a": Binned((0.0, 1.0), 0.5, 2.0, (0.25, 0.5, 0.2, 0.05)),
        "b": Named(("x", "z"), (0.5, 0.25, 0.05, 0.2)),
    },
    ("no", "yes"),
    class_shares=(0.5, 0.5),
)
CELLS = st.lists(
    st.tuples(st.sampled_from(["-3", "0", "0.5", "7", "", "word", "1e400"]), st.sampled_from(["x", "z", "w", "", "?"])),
    min_size=1,
    max_size=12,
)


@given(CELLS, st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_rows_are_what_the_encoder_writes_out(cells: list[tuple[str, str]], outputs: int) -> None:
    table = Table("t", {"b": [b for _, b in cells], "a": [a for a, _ in cells], "more": ["?"] * len(cells)})
    dense, rows = ENCODER.encode(table).astype(np.float64), EncodedRows(ENCODER, table)
    source = np.random.default_rng(0)
    weights, residuals = source.normal(size=(ENCODER.width, outputs)), source.normal(size=(len(cells), outputs))
    np.testing.assert_allclose(rows.multiply(weights), dense @ weights, atol=1e-5)
    np.testing.assert_allclose(rows.add_up(residuals), dense.T @ residuals, atol=1e-5)
    np.testing.assert_allclose(rows.multiply(weights[:, 0]), dense @ weights[:, 0], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(dense, axis=1) * rows.room, rows.bound, rtol=1e-5)


def test_an_encoder_is_plain_data_and_survives_json() -> None:
    again = Encoder.from_plain(json.loads(json.dumps(ENCODER.to_plain())))
    assert again == replace(ENCODER, left_out={})
    with pytest.raises(InvalidInput, match="not an encoder"):
        Encoder.from_plain({"blocks": {"a": {"kind": "wild"}}})
    broken = ENCODER.to_plain()
    broken["blocks"]["b"]["shares"] = [0.5]
    with pytest.raises(InvalidInput, match="4 places has 1 shares"):
        Encoder.from_plain(broken)
    with pytest.raises(InvalidInput, match="no column 'b'"):
        ENCODER.encode(Table("t", {"a": ["1"]}))


def test_bins_keep_heavy_values_apart_and_few_records_together() -> None:
    cells = ["0"] * 900 + [str(value) for value in range(100, 200)]
    edges = np.array([-1.0, 0.5, *np.arange(100.0, 201.0, 10.0)])
    found = make_bins(edges, count_in_cells(cells, edges), 1.0, 12)
    assert found.edges[0] == 0.5
    assert len(found.edges) > 8
    assert sum(found.shares) == pytest.approx(1.0)
    noisy = make_bins(edges, count_in_cells(cells, edges), 200.0, 12)
    assert len(noisy.edges) <= 2


# -- what it is worth -------------------------------------------------------------------------------------------------


def test_a_classifier_learns_predicts_and_says_how_well() -> None:
    train, test = without(patients(4000), "cost"), without(patients(800, seed=9), "cost")
    learned = learn(train, "outcome", BUDGET, held_out=test, seed=0)
    assert learned.figures is not None
    assert learned.figures["auc"] > 0.85
    assert learned.figures["accuracy"] > learned.figures.baseline["accuracy"] + 0.1
    assert learned.figures["calibration_error"] < 0.1
    assert learned.guarantee.epsilon <= BUDGET.epsilon
    assert learned.guarantee.unprotected == ("the held-out records",)
    chances = learned.predict_proba(test)
    np.testing.assert_allclose(chances.sum(1), 1.0)
    assert set(learned.predict(test)) == {"no", "yes"}
    inputs = torch.from_numpy(learned.encoder.encode(test))
    np.testing.assert_allclose(learned.model(inputs).double().detach().numpy(), learned.score(test), atol=1e-6)
    again = learn(train, "outcome", BUDGET, seed=0)
    np.testing.assert_array_equal(again.score(test), learned.score(test))
    other = learn(train, "outcome", BUDGET)
    assert not np.array_equal(other.score(test), learned.score(test))


def test_a_regression_learns_within_the_range_that_was_released() -> None:
    train, test = without(patients(4000), "outcome"), without(patients(800, seed=9), "outcome")
    learned = learn(train, "cost", BUDGET, task="regression", held_out=test, seed=0)
    assert learned.figures is not None
    assert learned.figures["r2"] > 0.6
    assert learned.figures["rmse"] < 0.7 * learned.figures.baseline["rmse"]
    wild = Table("t", {"age": ["1e300"], "dose": ["-5"], "town": ["Nowhere"]})
    low, high = learned.encoder.low, learned.encoder.high
    assert low <= float(learned.predict(wild)[0]) <= high
    assert math.isfinite(low + high)
    public = learn(train, "cost", BUDGET, task="regression", bounds=(0.0, 300.0), held_out=test, seed=0)
    assert public.encoder.low >= 0.0
    assert public.figures is not None
    assert public.figures["r2"] > 0.6
    with pytest.raises(InvalidInput, match="no probabilities"):
        learned.predict_proba(test)


def test_three_classes_are_learnt_and_said_as_often_as_they_happen() -> None:
    table, test = without(patients(4000), "outcome", "cost"), without(patients(800, seed=9), "outcome", "cost")
    swap = {"Bern": "1", "Rome": "2", "Oslo": "3"}
    for part in (table, test):  # the class is the town, and a copy of it with errors is a column
        source = np.random.default_rng(len(part))
        wrong = source.random(len(part)) < 0.2
        part.columns["copy"] = [swap[c] if not w else "2" for c, w in zip(part.columns["town"], wrong, strict=True)]  # type: ignore[index]
    learned = learn(table, "town", BUDGET, held_out=test, seed=0)
    assert learned.encoder.classes == ("Bern", "Oslo", "Rome")
    assert learned.figures is not None
    assert learned.figures["accuracy"] > 0.8
    assert learned.figures["auc"] > 0.85
    assert len(learned.figures.confusion) == 3
    np.testing.assert_allclose(learned.predict_proba(test).mean(0), 1 / 3, atol=0.08)


def test_protected_figures_are_near_the_open_ones_and_paid_from_the_same_budget() -> None:
    train, test = without(patients(4000), "cost"), without(patients(2000, seed=9), "cost")
    learned = learn(train, "outcome", BUDGET, held_out=test, metrics_epsilon=1.0, seed=0)
    assert learned.figures is not None
    assert learned.figures.released
    assert learned.guarantee.unprotected == ()
    assert learned.guarantee.epsilon <= BUDGET.epsilon
    scores = learned.score(test)
    targets, known = encode_target(test, learned.encoder)
    exact = evaluation.measure(scores[known], targets[known], learned.encoder)
    assert exact is not None
    for name in ("auc", "accuracy", "recall"):
        said = learned.figures.values[name]
        assert said.low <= exact[name] <= said.high
        assert said.high - said.low < 0.2
    with pytest.raises(InvalidInput, match="must be > 0 and below epsilon"):
        learn(train, "outcome", BUDGET, held_out=test, metrics_epsilon=2.0)
    costs = without(patients(4000), "outcome"), without(patients(2000, seed=9), "outcome")
    valued = learn(costs[0], "cost", BUDGET, task="regression", held_out=costs[1], metrics_epsilon=0.5, seed=0)
    assert valued.figures is not None
    assert valued.figures["r2"] > 0.5


def test_a_public_schema_is_kept_and_no_worse() -> None:
    train, test = without(patients(3000), "cost"), without(patients(1500, seed=9), "cost")
    schema = Schema(
        {"age": Number(0.0, 1000.0), "dose": Number(0.0, 1e6), "town": Category(("Bern", "Oslo", "Rome"))},
        ("no", "yes"),
    )
    open_, public = (
        [learn(train, "outcome", Budget(1.0, 1e-5), schema=s, held_out=test, seed=seed).figures for seed in range(2)]
        for s in (None, schema)
    )
    means = [np.mean([f["auc"] for f in found if f is not None]) for found in (open_, public)]
    assert means[1] > means[0] - 0.01
    learned = learn(train, "outcome", Budget(1.0, 1e-5), schema=schema, seed=0)
    assert isinstance(learned.encoder.blocks["town"], Named)
    assert learned.encoder.blocks["town"].values == ("Bern", "Oslo", "Rome")
    assert all(0.0 <= edge <= 1000.0 for edge in learned.encoder.blocks["age"].edges)  # type: ignore[union-attr]


def test_public_bounds_take_cells_away_and_move_no_edge() -> None:
    """So that a schema can only save noise: what is between the bounds is cut as it would be without them."""
    counts = np.zeros(len(surveying.release.LINE) - 1)
    counts[38:42] = 40.0, 900.0, 2000.0, 700.0  # where 4 to 1,024 are
    open_ = surveying.lay_cells(counts, 5.0, None, 64)
    for bounds in ((0.0, 1e6), (5.0, 1000.0)):
        np.testing.assert_array_equal(surveying.lay_cells(counts, 5.0, bounds, 64), open_)
    for bounds in ((5.0, 1000.0), (open_[1], open_[-2])):
        within = open_[:-1][~surveying.find_outside(open_, bounds)]
        assert within[0] <= bounds[0]
        assert within[-1] <= bounds[1]
        assert {edge for edge in open_ if bounds[0] < edge < bounds[1]} <= set(within)
    assert within[-1] == bounds[1], "the highest public value is in a cell of its own"
    assert surveying.lay_cells(counts, 5.0, (1e7, 2e7), 64).tolist() == [1e7, 2e7]


def test_numbers_beyond_public_bounds_count_as_the_nearest() -> None:
    """What a schema promises may be wrong: such a record still has one cell, within the bounds."""
    edges = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    counts = surveying.count_in_cells(["-7", "0.5", "1.5", "9", "", "2.5"], edges, (1.0, 2.5))
    assert counts.tolist() == [0.0, 3.0, 2.0, 0.0, 1.0]


def test_one_seed_gives_what_two_runs_release_alike_the_same_noise() -> None:
    """A schema that says what the survey finds by itself changes nothing but what it saves: bins and names stay."""
    table = without(patients(), "cost")
    budget = Budget(20.0, 1e-5)
    found = learn(table, "outcome", budget, seed=3)
    public = learn(table, "outcome", budget, seed=3, schema=Schema({}, found.encoder.classes))
    assert repr(public.encoder.to_plain()) == repr(found.encoder.to_plain())
    np.testing.assert_array_equal(public.score(table), found.score(table))
    other = learn(table, "outcome", budget, seed=4)
    assert not np.array_equal(other.score(table), found.score(table))


def test_columns_get_the_variance_that_their_effects_have() -> None:
    """Effects of known size, noise as modelled: the true scale is found, drawn towards one by what the doubt says."""
    source = np.random.default_rng(0)
    steep, noise, variances = np.full(900, 200.0), 5_000.0, np.full(900, 0.05)
    true = np.array([0.3, 1.0, 3.0])
    answers = steep * source.normal(size=900) * np.sqrt(np.repeat(true, 300) * variances)
    answers = (answers + source.normal(size=900) * np.sqrt(noise + steep))[:, None]
    spans = [(0, 300), (300, 600), (600, 900)]
    found = additive.find_scales(spans, answers, noise, steep, variances)
    told = 300 * (2000.0 / (2000.0 + 5200.0)) ** 2  # what 300 entries say, in entries without noise
    wanted = (additive.DOUBT + told * true) / (additive.DOUBT + told)
    assert found[[0, 300, 600]] == pytest.approx(wanted, rel=0.25)
    wrong = additive.find_scales(spans, 2 * answers, noise, steep, variances)  # the twin: sums that are twice as large
    assert (wrong[[0, 300, 600]] > 1.5 * found[[0, 300, 600]]).all()
    few = additive.find_scales([(0, 1)], answers[:1] * 9, noise * 1e4, steep[:1], variances[:1])
    assert few == pytest.approx([1.0], abs=0.05), "one entry in much noise changes hardly anything"


def test_noised_figures_stay_in_their_range_and_say_when_they_say_nothing() -> None:
    counts = np.zeros((len(evaluation.CELLS) + 1, 2))
    counts[2:, 1], counts[:-2, 0] = 3.0, 0.5
    found = evaluation._widen_all(
        counts, 10.0, lambda held: evaluation.describe_counts(np.arange(len(held)) - 6.0, held[:, 0], held[:, 1], 0.5)
    )
    assert found is not None
    assert all(0.0 <= one.low <= one.high <= 1.0 for name, one in found.values.items() if name != "log_loss")
    assert evaluation.HIDES in found.cautions


def test_matched_noise_is_normal_and_never_repeated() -> None:
    """All of a run's noise together passes a test of the law, and no two parts of it are the same stream."""
    source, ledger = Matched(5), Ledger.in_memory()
    drawn = []
    for size in (7000, 7000, 3000):
        receipt = ledger.charge(GaussianDpEvent(2.0))
        parts = [("a", size), ("b", size), ("a", size)]
        zeros = torch.zeros(3 * size, dtype=torch.float64)
        drawn.append(add_matched_noise(source, receipt, zeros, 2.0, "step", parts).numpy())
    together = np.concatenate(drawn)
    assert stats.kstest(together / 2.0, "norm").pvalue > 1e-3
    assert stats.kstest(together / 1.9, "norm").pvalue < 1e-3  # the twin: a deviation that is off by 5 %
    assert len(np.unique(together)) == len(together)
    receipt, zeros = ledger.charge(GaussianDpEvent(2.0)), torch.zeros(7000, dtype=torch.float64)
    again = add_matched_noise(Matched(5), receipt, zeros, 2.0, "step", [("b", 7000)]).numpy()
    np.testing.assert_array_equal(again, drawn[0][7000:14000])  # whatever stands around it


def test_public_codes_are_learnt_as_the_numbers_that_they_are_without_a_schema() -> None:
    given = {"a": Category(("2", "0", "1")), "b": Category(("x", "1")), "c": Category(), "d": None}
    found = surveying.read_codes(given)
    assert found == {**given, "a": Number(0.0, 2.0)}
    many = Category(tuple(str(code) for code in range(surveying.MOST_CODES + 1)))
    assert surveying.read_codes({"a": many}) == {"a": many}
    table = without(patients(), "cost", "dose", "town")
    table.columns["level"] = [str(min(int(age or 0) // 45, 2)) for age in table.columns["age"]]  # type: ignore[index]
    schema = Schema({"level": Category(("0", "1", "2")), "age": Number(0.0, 100.0)}, ("no", "yes"))
    learned = learn(table, "outcome", BUDGET, schema=schema, seed=0)
    block = learned.encoder.blocks["level"]
    assert isinstance(block, Binned)
    assert len(set(block.find_places(["0", "1"])[0])) == 2  # of the last there are few


def blobs(records: int, columns: int, seed: int = 0) -> tuple[Table, Table]:
    """Four classes that whole numbers tell apart by their means."""
    source = np.random.default_rng(seed)
    classes = source.integers(0, 4, 2 * records)
    numbers = 6 * source.normal(size=(4, columns))[classes] + 6 * source.normal(size=(2 * records, columns))
    cells = {f"x{place}": [f"{value:.0f}" for value in column] for place, column in enumerate(numbers.T)}
    whole = Table("blobs", {**cells, "kind": ["abcd"[number] for number in classes]})
    first = np.arange(2 * records) < records
    return whole.select(first), whole.select(~first)


def test_few_records_of_many_columns_have_slopes_and_no_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = blobs(400, 20)
    schema, budget = Schema(classes=tuple("abcd")), Budget(1.5, 1e-5)

    def measure() -> tuple[Learned, float]:
        learned = learn(train, "kind", budget, schema=schema, held_out=test, seed=0)
        assert learned.figures is not None
        return learned, float(learned.figures["accuracy"])

    learned, accuracy = measure()
    numbers = [block for block in learned.encoder.blocks.values() if isinstance(block, Binned)]
    assert numbers
    assert all(not block.edges and block.slope == ALONE for block in numbers)
    assert all(block.shares == (1.0, 0.0) for block in numbers)  # missing cells that are none are not noise
    again = Encoder.from_plain(json.loads(json.dumps(learned.encoder.to_plain())))
    np.testing.assert_array_equal(again.encode(test), learned.encoder.encode(test))
    monkeypatch.setattr(surveying, "LEAST_SIGNAL", 0.0)
    binned, worse = measure()
    assert any(block.edges for block in binned.encoder.blocks.values() if isinstance(block, Binned))
    assert accuracy > worse + 0.05


def test_a_signal_is_less_of_more_columns_and_more_classes() -> None:
    assert surveying.find_signal(100.0, 4, (0.9, 0.1)) == surveying.find_signal(100.0, 4, ()) == 50.0
    assert surveying.find_signal(100.0, 4, (0.25,) * 4) == pytest.approx(50.0 * 0.75 / math.sqrt(2.0))
    assert [surveying.choose_bins(16, 3, signal) for signal in (59.0, 61.0)] == [1, 16]


def test_classes_that_differ_in_capitals_alone_are_doubted() -> None:
    table = without(patients(2000), "cost")
    shouted = [name.upper() if place % 3 else name for place, name in enumerate(table.columns["outcome"])]
    learned = learn(Table("t", {**table.columns, "outcome": shouted}), "outcome", BUDGET, seed=0)
    assert any("differ in capitals alone" in words for words in learned.cautions)
    assert not any("capitals" in words for words in learn(table, "outcome", BUDGET, seed=0).cautions)


def test_what_the_noise_takes_away_is_told_with_its_price() -> None:
    table = Table("t", {"a": [f"w{i}" for i in range(RECORDS)], "y": ["no", "yes"] * (RECORDS // 2)})
    ledger = Ledger.in_memory()
    with pytest.raises(LostInNoise, match=r"no column could be told .*; ε = 0\.\d\d of 2 was spent") as error:
        learn(table, "y", BUDGET, ledger=ledger)
    assert "\n" not in str(error.value)
    assert len(ledger) == 2
    rare = Table("t", {"a": ["1", "2"] * (RECORDS // 2), "y": ["no"] * (RECORDS - 5) + ["yes"] * 5})
    untouched = Ledger.in_memory()
    with pytest.raises(InvalidInput, match="fewer than 2 classes of more than"):
        learn(rare, "y", BUDGET, ledger=untouched)
    assert len(untouched) == 0


def test_a_model_that_says_nothing_is_called_so() -> None:
    source = np.random.default_rng(0)
    noise = {
        "x": [f"{v:.2f}" for v in source.normal(size=1200)],
        "y": ["yes" if v else "no" for v in source.random(1200) < 0.03],
    }
    table = Table("t", noise)
    learned = learn(table, "y", BUDGET, schema=Schema({"x": Number(-5.0, 5.0)}, ("no", "yes")), held_out=table, seed=0)
    assert learned.cautions
    assert "beat" in learned.cautions[0] or "guessing" in learned.cautions[0]
    assert learned.figures is not None
    assert learned.figures.baseline["accuracy"] > 0.95


def test_figures_agree_with_those_of_scikit_learn() -> None:
    from sklearn import metrics

    source = np.random.default_rng(0)
    scores = np.round(source.normal(size=400), 1)
    labels = (scores + source.normal(size=400) > 0.5).astype(float)
    found = evaluation.measure(scores[:, None], labels[:, None], ENCODER)
    assert found is not None
    chances = 1 / (1 + np.exp(-scores))
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(labels, scores))
    assert found["average_precision"] == pytest.approx(metrics.average_precision_score(labels, scores))
    assert found["log_loss"] == pytest.approx(metrics.log_loss(labels, chances))
    assert found["recall"] == pytest.approx(metrics.recall_score(labels, chances >= 0.5))
    assert found["precision"] == pytest.approx(metrics.precision_score(labels, chances >= 0.5))
    np.testing.assert_allclose(found.confusion, metrics.confusion_matrix(labels, chances >= 0.5))
    for value in found.values.values():
        assert value.low <= value.value <= value.high
    assert json.loads(json.dumps(found.to_plain()))["values"]["auc"]["value"] == found["auc"]
    with pytest.raises(InvalidInput, match="no figure 'mae'"):
        found["mae"]
    number = Encoder("y", ENCODER.blocks, (), 10.0, 4.0, -50.0, 50.0)
    errors = evaluation.measure(scores[:, None], labels[:, None], number)
    assert errors is not None
    truth, said = 10 + 4 * labels, 10 + 4 * scores
    assert errors["rmse"] == pytest.approx(metrics.root_mean_squared_error(truth, said))
    assert errors["mae"] == pytest.approx(metrics.mean_absolute_error(truth, said))
    assert errors["r2"] == pytest.approx(metrics.r2_score(truth, said))


def test_figures_without_an_error_have_an_interval_all_the_same() -> None:
    labels = np.arange(100) % 2.0
    found = evaluation.measure(labels[:, None] - 0.5, labels[:, None], ENCODER)
    assert found is not None
    for name in ("auc", "average_precision", "accuracy"):
        assert found[name] == 1.0
        assert 0.5 < found.values[name].low < 1.0


def test_intervals_hold_about_as_often_as_they_say() -> None:
    source = np.random.default_rng(0)
    held = {"auc": 0, "accuracy": 0}
    from scipy.stats import norm

    truth = {"auc": float(norm.cdf(1 / math.sqrt(2))), "accuracy": float(norm.cdf(0.5))}
    for _ in range(300):
        labels = (source.random(200) < 0.5).astype(float)
        scores = source.normal(size=200) + labels - 0.5
        found = evaluation.measure(scores[:, None], labels[:, None], ENCODER)
        assert found is not None
        for name in held:
            held[name] += found.values[name].low <= truth[name] <= found.values[name].high
    assert all(count >= 0.9 * 300 for count in held.values())


def test_the_plan_is_a_function_of_public_numbers() -> None:
    weak, strong = choose_settings(500.0), choose_settings(50_000.0)
    assert (weak.residual, weak.constant) == (additive.RESIDUAL, 0.0)
    assert strong.residual == 1.0
    assert strong.constant > 0
    assert find_precision(Budget(1.0, 1e-5)) == pytest.approx(1 / 3.73, rel=0.01)  # Balle and Wang's σ
    assert find_precision(Budget(4e5, 1e-5)) == pytest.approx(math.sqrt(2 * 4e5), rel=0.01)  # ε ≈ 1/(2σ²) for large ε
    assert find_precision(Budget(1e9, 1e-5)) == 1e3
    with pytest.raises(InvalidInput, match="rows_per_unit=0"):
        plan_learning({"a": None}, "y", "classification", BUDGET, 100, rows_per_unit=0)


def test_calibration_finds_the_slope_and_the_offset_that_are_missing() -> None:
    source = np.random.default_rng(0)
    scores = source.normal(size=20_000)
    labels = (source.random(20_000) < 1 / (1 + np.exp(-(2 * scores - 1)))).astype(float)
    counts = additive.count_scores(scores, labels, np.ones(20_000, np.bool_))
    slope, offset = additive.calibrate(counts, 1.0)
    assert (slope, offset) == (pytest.approx(2.0, abs=0.1), pytest.approx(-1.0, abs=0.1))
    assert additive.calibrate(np.zeros_like(counts), 50.0) == (1.0, 0.0)


def test_the_model_is_a_plain_linear_layer() -> None:
    model = build_model(Additive(np.arange(6.0).reshape(3, 2), np.array([1.0, 2.0])))
    assert type(model) is torch.nn.Linear
    assert model(torch.ones(1, 3)).tolist() == [[7.0, 11.0]]
