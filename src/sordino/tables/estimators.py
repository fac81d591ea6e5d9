"""`PrivateClassifier` and `PrivateRegressor`: training on a table within a budget, in scikit-learn's way.

::

    model = PrivateClassifier(epsilon=1.0).fit(frame.drop(columns="outcome"), frame["outcome"])
    model.predict_proba(new)
    model.guarantee_

They call the same code as `sordino train` (`sordino.tables.training`): data frames keep their kinds of columns, and
arrays become columns x0, x1, .... Every `fit` spends its ε again, on whatever records it gets: a grid search of a
hundred fits costs a hundred times as much. The other steps of a pipeline must not look at the records without noise.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from sordino.accounting import Guarantee
from sordino.errors import InvalidInput
from sordino.tables.delimited import name_columns
from sordino.tables.files import to_array, to_cells, to_table
from sordino.tables.schema import Column, Number, Schema, parse_schema
from sordino.tables.table import Cells, Table
from sordino.tables.training import Fitted, Wishes, prepare_table, train_table
from sordino.vault import DatasetBudget, open_budget

Bounds = tuple[float, float]
TARGET = "target"


@dataclass(eq=False, repr=False)
class _Private(BaseEstimator):
    """What both estimators share: the parameters, and the way from records to a model.

    scikit-learn reads the parameters of an estimator from the signature of its constructor. It is written here once for
    both of them.
    """

    epsilon: float = 1.0
    _: KW_ONLY
    delta: float | None = None
    schema: Schema | dict[str, Any] | None = None
    bounds: Bounds | dict[str, Bounds] | None = None
    unit: str | None = None
    per_unit: int | None = None
    run: str | Path | None = None
    random_state: int | None = None
    vault: DatasetBudget | str | None = None

    guarantee_: Guarantee = field(init=False)
    n_features_in_: int = field(init=False)

    def _fit(self, X: Any, labels: Cells, task: str, classes: tuple[str, ...] | None, within: Bounds | None) -> Fitted:
        table = self._take(X, reset=True)
        if len(table) == 1:
            raise InvalidInput("n_samples=1 is too few: nothing can be learnt from one record alone")
        if len(table) != len(labels):
            raise InvalidInput(f"X has {len(table)} records and y has {len(labels)}: they must be equal in number")
        target = TARGET
        while target in table.columns:
            target += "_"
        schema, common = self._describe()
        wishes = Wishes(
            target=target,
            epsilon=self.epsilon,
            delta=self.delta,
            task=task,
            schema=Schema(schema.columns, classes),
            bounds=common,
            target_bounds=within,
            held_out=0.0,
            unit=self.unit,
            per_unit=self.per_unit,
            seed=_to_seed(self.random_state),
        )
        whole = Table(table.name, {**table.columns, target: labels}, named=table.named)
        vault = open_budget(self.vault) if isinstance(self.vault, str) else self.vault
        folder = None if self.run is None else Path(self.run)
        fitted = train_table(prepare_table(whole, wishes), folder, vault=vault)
        self.guarantee_ = fitted.learned.guarantee
        self.encoder_ = fitted.learned.encoder
        self.model_ = fitted.learned.model
        self.left_out_ = dict(fitted.learned.encoder.left_out or {})
        self._trained = fitted.trained
        return fitted

    def _describe(self) -> tuple[Schema, Bounds | None]:
        given = self.schema if isinstance(self.schema, Schema) else parse_schema(self.schema or {})
        if isinstance(self.bounds, dict):
            numbers: dict[str, Column] = {str(name): Number(*pair) for name, pair in self.bounds.items()}
            return given.with_columns(numbers), None
        return given, self.bounds

    def _take(self, X: Any, *, reset: bool) -> Table:
        """Take the records as a table, after scikit-learn's own checks of names and widths."""
        plain = not hasattr(X, "columns") and not isinstance(X, Table)
        X = _require_array(X) if plain else _tell_apart(X)
        validate_data(self, X, reset=reset, skip_check_array=True)
        if plain:
            if not reset and X.shape[1] != self.n_features_in_:
                raise ValueError(
                    f"X has {X.shape[1]} features, but {type(self).__name__} is expecting {self.n_features_in_} "
                    "features as input"
                )
            if reset:
                self.n_features_in_ = X.shape[1]
        return to_table(X, "X")

    def _score_records(self, X: Any) -> Table:
        check_is_fitted(self)
        table = self._take(X, reset=False)
        if not len(table):
            raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required.")
        return table

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        tags.non_deterministic = True
        return tags


@dataclass(eq=False, repr=False)
class PrivateClassifier(ClassifierMixin, _Private):  # scikit-learn has no types
    """A classifier of tables with differential privacy for every record that it is fitted to.

    >>> import numpy as np
    >>> ages = np.random.default_rng(0).uniform(20, 80, size=(3000, 1))
    >>> model = PrivateClassifier(epsilon=1.0, bounds=(0, 100), classes=[0, 1]).fit(ages, (ages[:, 0] > 50).astype(int))
    >>> model.guarantee_.epsilon <= 1.0
    True

    - `epsilon` is what one `fit` may spend at `delta`. By default δ is at most a tenth of one over the records.
    - `schema` says what is public about the columns, as a `Schema` or its plain data. `bounds` is the public range of
      every number, or of some by name.
    - `classes` are the public names of the classes. Without them, the names that enough records have are released with
      noise; they become numbers or booleans if all of them look like that, whatever `y` is.
    - `unit` names the column that says whose record it is. At most `per_unit` records of each owner are used.
    - `run` is a folder for the ledger and the model.
    - `vault` is the dataset's budget, from `sordino.vault.open_budget` or by its name. Every `fit` reserves its ε
      there, so a search that would spend more than is left ends with `BudgetExhausted`.
    - `random_state` makes the noise repeatable, which protects no one.

    After `fit`: `classes_`, `guarantee_`, `model_` (a plain `torch.nn.Module`), `encoder_`, `left_out_`.
    """

    classes: Any = field(default=None, kw_only=True)

    def fit(self, X: Any, y: Any) -> Self:
        """Train on records `X` with classes `y`, spending `epsilon`."""
        labels = _require_labels(self, y)
        _refuse_continuous(labels)
        given = _spell_classes(self.classes)
        fitted = self._fit(X, to_cells(labels), "classification", given, None)
        self.classes_ = _name_classes(fitted.trained.classes, self.classes)
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return [N, classes]: the probability of every class, in the order of `classes_`."""
        table = self._score_records(X)
        return self._trained.predict_proba(table)

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict the likeliest class of every record."""
        chances = self.predict_proba(X)
        found: NDArray[Any] = self.classes_[chances.argmax(1)]
        return found


@dataclass(eq=False, repr=False)
class PrivateRegressor(RegressorMixin, _Private):  # scikit-learn has no types
    """A regression on tables with differential privacy for every record that it is fitted to.

    `target_bounds` is the public range of the target; without it a range is released with noise. The other parameters
    and attributes are those of `PrivateClassifier`.
    """

    target_bounds: Bounds | None = field(default=None, kw_only=True)

    def fit(self, X: Any, y: Any) -> Self:
        """Train on records `X` with values `y`, spending `epsilon`."""
        labels = _require_labels(self, y)
        try:
            values = labels.astype(np.float64)
        except (TypeError, ValueError):  # numpy's message would show a value
            raise InvalidInput("y must hold numbers: use PrivateClassifier for classes") from None
        if not np.isfinite(values).all():
            raise ValueError("Input y contains NaN or infinity: leave those records out")
        self._fit(X, to_cells(values), "regression", None, self.target_bounds)
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Predict the value of every record."""
        table = self._score_records(X)
        return np.asarray(self._trained.predict(table), np.float64)


def _tell_apart(X: Any) -> Any:
    """Give different names to columns of a frame that share a name, as for a file with such a header."""
    names = [str(name) for name in X.columns] if hasattr(X, "iloc") else []
    if len(set(names)) == len(names):
        return X
    return X.set_axis(name_columns("X", names), axis=1)


def _require_array(X: Any) -> Any:
    if hasattr(X, "toarray"):
        raise TypeError("Sparse data was passed for X, but dense data is required. Use '.toarray()' to convert.")
    array = to_array(X)
    if np.iscomplexobj(array):
        raise ValueError("Complex data not supported: X must hold real numbers or text")
    if array.ndim != 2:
        raise ValueError(
            f"Expected 2D array, got {array.ndim}D array instead. Reshape your data either using array.reshape(-1, 1) "
            "if it has a single feature or array.reshape(1, -1) if it is a single sample."
        )
    if array.shape[0] == 0:
        raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required.")
    if array.shape[1] == 0:
        raise ValueError(f"Found array with 0 feature(s) (shape={array.shape}) while a minimum of 1 is required.")
    return array


def _require_labels(estimator: Any, y: Any) -> NDArray[Any]:
    if y is None:
        raise ValueError(
            f"This {type(estimator).__name__} estimator requires y to be passed, but the target y is None."
        )
    return np.asarray(column_or_1d(to_array(y), warn=True))


def _refuse_continuous(labels: NDArray[Any]) -> None:
    """Refuse measurements as classes; among mixed cells, only the numbers are checked."""
    plain = labels.dtype.kind != "O"
    if len(asked := labels if plain else np.array([cell for cell in labels if isinstance(cell, float)])):
        check_classification_targets(asked)


def _spell_classes(classes: Any) -> tuple[str, ...] | None:
    return None if classes is None else tuple(to_cells(classes))


def _name_classes(names: tuple[str, ...], given: Any) -> NDArray[Any]:
    """Return the classes as `given`, else from their released names alone: booleans or numbers if all of them are.

    The type of y would reveal labels that were not released.
    """
    if given is not None:
        known = dict(zip(to_cells(given), given, strict=True))
        return np.array([known[name] for name in names])
    if set(names) <= {"true", "false"}:
        return np.array([name == "true" for name in names])
    for kind in (int, float):
        try:
            values = [kind(name) for name in names]
        except ValueError:
            continue
        if tuple(to_cells(values)) == names:
            return np.array(values)
    return np.array(names)


def _to_seed(random_state: Any) -> int | None:
    if random_state is None or isinstance(random_state, int | np.integer):
        return None if random_state is None else int(random_state)
    raise InvalidInput(f"random_state={random_state!r} must be None or a whole number")
