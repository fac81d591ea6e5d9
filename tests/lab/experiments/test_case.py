"""Equal cases are the same run; whatever is different makes another one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sordino.errors import InvalidInput
from sordino.experiments import Case
from tests.experiments.cases import small


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": 2.0},
        {"seed": 1},
        {"delta": 1e-6},
        {"accounting": "published"},
        {"records": 299},
        {"average": 0.4},
        {"optimizer": {"kind": "sgd", "lr": 1.1}},
        {"recipe": {"name": "dpsgd", "batch_size": 100, "steps": 9, "clip": 0.2}},
    ],
)
def test_labels_differ_where_anything_does(changes):
    assert replace(small(), **changes).label != small().label


def test_a_case_survives_json_and_keeps_its_label():
    case = small(average=0.3, features={"kind": "scatter", "groups": 27})
    again = Case.from_dict(json.loads(json.dumps(case.to_dict())))
    assert again == case
    assert again.label == case.label


def test_a_field_that_is_left_out_does_not_rename_old_results():
    """A version with one more optional field must find the results of this one."""
    assert small(published=None, average=0.0).label == small().label
    assert small(published="rdp").label != small().label


def test_shortened_cases_draw_less_and_leave_the_noise_open():
    case = small(
        recipe={
            "name": "dpsur",
            "batch_size": 512,
            "validation_size": 256,
            "noise_multiplier": 2.0,
            "validation_noise": 0.8,
        }
    )
    short = case.shortened(records=200, steps=3)
    assert short.recipe == {
        "name": "dpsur",
        "batch_size": 50,
        "validation_size": 50,
        "steps": 3,
        "validation_noise": 5.0,
    }
    assert short.records == 200
    assert case.shortened(steps=3).recipe["batch_size"] == 512


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"accounting": "hoped"}, "accounting"),
        ({"average": 1.0}, "average"),
        ({"model": {}}, "model"),
        ({"recipe": {}}, "recipe"),
    ],
)
def test_refusals_are_one_line(changes, word):
    with pytest.raises(InvalidInput, match=word) as refused:
        replace(small(), **changes)
    assert "\n" not in str(refused.value)
