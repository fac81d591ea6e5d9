"""The scikit-learn estimators: its own checks, pipelines, frames and arrays, and the guarantee that a fit has."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

import sordino
from sordino import PrivateClassifier, PrivateRegressor
from sordino.accounting import Ledger
from sordino.errors import InvalidInput

FEW = "names of classes are released with noise, and a check with a handful of records per class has none to name"
HANDFUL = ("check_n_features_in_after_fitting", "check_fit2d_1feature")
LOST = "columns are looked at through noise, and in a check with a handful of records none can be told from it"
EXPECTED = {
    PrivateClassifier: dict.fromkeys(HANDFUL, FEW),
    PrivateRegressor: {"check_regressors_no_decision_function": LOST},
}
"""What privacy does not allow, by the name of scikit-learn's check."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", EXPECTED)
def test_scikit_learn_takes_them_for_its_own(kind: type) -> None:
    """At an ε that protects nobody, because its checks want a hundred records to be learnt by heart."""
    checked = check_estimator(
        kind(epsilon=1e4, delta=1e-3, random_state=0), expected_failed_checks=EXPECTED[kind], on_skip=None
    )
    assert sum(check["status"] == "passed" for check in checked) > 40
    assert {check["check_name"] for check in checked if check["status"] == "xfail"} == set(EXPECTED[kind])


@pytest.fixture(scope="module")
def records() -> tuple[dict[str, list[object]], np.ndarray]:
    source = np.random.default_rng(0)
    age, town = source.normal(50, 15, 2500), np.array(["Bern", "Rome"])[source.integers(0, 2, 2500)]
    bought = age + 12 * (town == "Rome") + source.normal(0, 5, 2500) > 55
    aged = [None if i % 9 == 0 else float(value) for i, value in enumerate(age)]
    return {"patient_id": list(range(2500)), "age": aged, "town": town.tolist()}, bought


def test_a_frame_in_a_pipeline(records, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame, bought = pandas.DataFrame(records[0]), records[1]
    model = make_pipeline(FunctionTransformer(), PrivateClassifier(epsilon=2.0, run=tmp_path / "run"))
    model.fit(frame, bought)
    last = model[-1]
    assert model.score(frame, bought) > 0.8
    assert last.classes_.tolist() == [False, True]
    assert last.guarantee_.epsilon <= 2
    assert last.guarantee_.unit == "record"
    assert "patient_id" in last.left_out_
    shuffled = frame[["town", "age", "patient_id"]].assign(town=["Oslo", *frame["town"][1:]])
    with pytest.raises(ValueError, match="feature names"):
        model.predict(shuffled)
    chances = model.predict_proba(shuffled[frame.columns])
    np.testing.assert_allclose(chances.sum(1), 1)
    with Ledger.read(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert len(ledger) > 10
    loaded = sordino.load(tmp_path / "run")
    np.testing.assert_array_equal(loaded.predict_proba(frame), model.predict_proba(frame))
    twin = pickle.loads(pickle.dumps(last))
    np.testing.assert_array_equal(twin.predict(frame), last.predict(frame))
    with pytest.raises(sordino.SordinoError, match="holds a run already"):
        model.fit(frame, bought)


def test_parameters_are_scikit_learns() -> None:
    model = PrivateClassifier(epsilon=3.0, bounds={"age": (0.0, 120.0)}, classes=[0, 1])
    assert clone(model).get_params() == model.get_params()
    known = {"epsilon", "delta", "classes", "schema", "bounds", "unit", "per_unit", "run", "random_state", "vault"}
    assert known == set(model.get_params())
    with pytest.raises(InvalidInput, match="epsilon=-1"):
        PrivateClassifier(epsilon=-1).fit(np.zeros((50, 2)), np.arange(50) % 2)


def test_words_as_classes_and_a_public_schema(records) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(records[0])
    labels = np.where(records[1], "yes", "no")
    schema = {"columns": {"town": {"kind": "category", "values": ["Bern", "Rome"]}}}
    model = PrivateClassifier(
        2.0, classes=["no", "yes"], schema=schema, bounds={"age": (0.0, 120.0)}, unit="patient_id"
    )
    model.fit(frame, labels)
    assert set(model.predict(frame)) == {"no", "yes"}
    assert "patient_id" in model.guarantee_.unit


def test_a_regression_on_an_array() -> None:
    source = np.random.default_rng(1)
    x = source.normal(size=(2000, 3))
    y = 3 * x[:, 0] - x[:, 1] + source.normal(0, 0.3, 2000)
    model = PrivateRegressor(epsilon=4.0, target_bounds=(-12.0, 12.0)).fit(x, y)
    assert model.score(x, y) > 0.5
    found = model.predict(x)
    assert found.min() >= -12
    assert found.max() <= 12
    assert model.guarantee_.epsilon <= 4


@pytest.mark.parametrize(
    ("pair", "kind"), [((0, 1), "i"), ((0.0, 1.0), "i"), (("no", "yes"), "U"), ((False, True), "b"), ((0, "a"), "U")]
)
def test_the_kind_of_the_classes_is_that_of_the_released_names(pair: tuple[object, object], kind: str) -> None:
    source = np.random.default_rng(2)
    x = source.normal(size=(1500, 2))
    y: list[object] = [pair[int(value > 0)] for value in x[:, 0]]
    for labels in (y, [*y[:-1], "diagnosis: a rare disease"]):
        model = PrivateClassifier(4.0, delta=1e-5, bounds=(-5.0, 5.0), random_state=0).fit(x, labels)
        assert model.classes_.dtype == np.array(list(map(str, pair)) if kind == "U" else model.classes_.tolist()).dtype
        assert model.classes_.dtype.kind == kind
        if kind != "U" or isinstance(pair[0], str):
            assert np.mean(model.predict(x)[:-1] == np.array(y[:-1])) > 0.8


def test_given_classes_keep_their_kind() -> None:
    x = np.random.default_rng(3).normal(size=(400, 2))
    labels = np.where(x[:, 0] > 0, "1", "0")
    model = PrivateClassifier(4.0, delta=1e-4, bounds=(-5.0, 5.0), classes=["0", "1"]).fit(x, labels)
    assert model.classes_.tolist() == ["0", "1"]


def test_columns_of_one_name_are_told_apart_and_no_error_holds_a_cell(records) -> None:
    pandas = pytest.importorskip("pandas")
    twice = pandas.DataFrame(records[0])[["age", "town"]].set_axis(["a", "a"], axis=1)
    model = PrivateClassifier(epsilon=4.0, random_state=0).fit(twice, records[1])
    assert list(model.encoder_.blocks) == ["a", "a_2"]
    assert model.score(twice, records[1]) > 0.8
    with pytest.raises(InvalidInput, match="y must hold numbers") as refused:
        PrivateRegressor().fit(twice, records[0]["town"])
    assert "Bern" not in str(refused.value)
    assert "Rome" not in str(refused.value)
