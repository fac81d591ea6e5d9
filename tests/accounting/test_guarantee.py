"""Guarantees speak plainly: basis, unit and adjacency always, a caution unless proven (law 9), infinity as itself."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.accounting.guarantee import Guarantee
from sordino.errors import InvalidInput


def _guarantee(**changes: Any) -> Guarantee:
    fields = {
        "epsilon": 2.5,
        "delta": 1e-5,
        "basis": "proven",
        "unit": "record",
        "adjacency": "add-or-remove-one",
        "accountant": "pld",
        "assumptions": ("noise is secure", "hyperparameters were fixed in advance"),
    }
    return Guarantee(**{**fields, **changes})


def test_says_everything_that_is_needed_to_read_it() -> None:
    text = str(_guarantee())
    for word in ("2.5", "1e-05", "record", "adding or removing one", "proven", "pld", "noise is secure", "in advance"):
        assert word in text
    assert "\n" not in text
    assert "replacing one user by any other" in str(_guarantee(adjacency="replace-one", unit="user"))


def test_law_9_only_proven_goes_without_a_caution() -> None:
    assert "CAUTION" not in str(_guarantee())
    for basis in ("asymptotic", "published"):
        assert "CAUTION" in str(_guarantee(basis=basis))
        assert basis in str(_guarantee(basis=basis))


def test_infinite_epsilon_is_said_to_protect_nobody() -> None:
    text = str(_guarantee(epsilon=math.inf))
    assert "No differential privacy" in text
    assert "infinite" in text
    assert "at most a factor" not in text


@given(st.floats(1e-6, 1e6))
def test_the_printed_epsilon_is_never_below_the_true_one(epsilon: float) -> None:
    printed = float(str(_guarantee(epsilon=epsilon)).split(",")[0].lstrip("("))
    assert epsilon * (1 - 1e-9) <= printed <= epsilon * 1.0011


@pytest.mark.parametrize("epsilon", [0.0, 2.5, 1e-300, 1e5, math.inf])
def test_reads_back_through_json(epsilon: float) -> None:
    guarantee = _guarantee(epsilon=epsilon)
    text = json.dumps(guarantee.to_dict(), allow_nan=False)
    assert Guarantee.from_dict(json.loads(text)) == guarantee
    assert str(guarantee)


@pytest.mark.parametrize(
    "bad",
    [{"epsilon": -1.0}, {"epsilon": math.nan}, {"delta": 1.5}, {"basis": "hoped"}, {"adjacency": "none"}],
)
def test_refuses_what_is_no_guarantee(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        _guarantee(**bad)


def test_refuses_dictionaries_it_did_not_write() -> None:
    plain = _guarantee().to_dict()
    for wrong in ({**plain, "more": 1}, {key: plain[key] for key in plain if key != "unit"}):
        with pytest.raises(InvalidInput, match="fields"):
            Guarantee.from_dict(wrong)


@given(st.floats(1e-12, 0.5))
def test_the_printed_delta_is_never_below_the_true_one(delta: float) -> None:
    printed = float(str(_guarantee(delta=delta)).split(", ")[1].split(")")[0])
    assert delta <= printed <= delta * 1.011


def test_round_numbers_stay_round() -> None:
    assert str(_guarantee(epsilon=3.0, delta=1e-5)).startswith("(3, 1e-05)-differential privacy for every record.")


def test_the_headline_names_who_is_not_protected_and_what_nobody_checked() -> None:
    told = _guarantee(unprotected=("the held-out records",), conditions=("your weighing Mine keeps its bound",))
    assert "for every training record, but the held-out records are NOT protected." in str(told)
    assert "Basis: proven provided that your weighing Mine keeps its bound, which nobody checked" in str(told)
    assert "every record." not in str(told)
    assert Guarantee.from_dict(json.loads(json.dumps(told.to_dict()))) == told
    old = {key: value for key, value in told.to_dict().items() if key not in ("unprotected", "conditions")}
    assert Guarantee.from_dict(old).unprotected == ()
