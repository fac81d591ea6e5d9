"""Sordino on a device: no tensor is left on the host by mistake, and the host waits only where it must.

No GPU is needed: `tests.devices.pretend` is a device that behaves like one and notes what crosses. docs/devices.md
has the same list in words.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXACT = 1e-4
"""Sums in float32 are added up in another order here and there."""

# How often one batch, or one step on one batch, may make the host wait or copy. Everything else fails.
ONCE = {
    "gradients/bookkeeping/book.py:Book.finite": 1,  # is everything finite?
}
BY_USE = {
    **ONCE,
    # For each use of a parameter by such an operation: the models have at most three.
    "gradients/rules/linear.py:remeasure_cancelled": 3,  # which examples' rows cancel
    "gradients/rules/embedding.py:Looked.squared_norms": 6,  # how many tokens are repeated
    "gradients/rules/embedding.py:Looked.repetitions": 6,
    "gradients/rules/embedding.py:split_bags": 3,  # how long the bags are
    "gradients/rules/rowwise.py:RowMap.shorten": 6,  # which rows of a weight that was made by rows have one value
    "gradients/rules/base.py:Owners.__init__": 3,  # how many entries the largest example has
    "gradients/rules/indexing.py:get_item.<locals>.<genexpr>": 3,  # a number in a tensor, for which torch waits too
}
PROOFS = ("gradients/bookkeeping/proof.py", "gradients/rules/generic.py", "gradients/bookkeeping/places.py")
"""Where an operation has no rule, or examples cannot be followed, backward passes prove what belongs to whom."""
OTHER_ENGINES = {
    "gradients/vmapped.py:Materialised.of": 1,  # is everything finite?
    # The engine of estimated norms checks every parameter's sum, and holds the sum against one projection.
    "gradients/projected.py:Estimated.weighted_sum": 1,
    "gradients/projected.py:Estimated._sum.<locals>.<genexpr>": 12,
    "gradients/projected.py:Estimated.agrees": 2,
    "gradients/projected.py:Estimated.agrees.<locals>.<genexpr>": 12,
}
TRIED_ON_RECORDS = ("dpagd", "dpsur", "screening")
"""Mechanisms that look at losses of other records after the proposal."""


def walk(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.devices.walk", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def judge_rules(lines: list[dict[str, Any]]) -> list[str]:
    """What is wrong with a walk over the rules or the engines."""
    wrong = []
    for line in lines:
        if "ended" in line:
            wrong.append(f"{line['case']}: torch ended the process")
            continue
        if "error" in line:
            wrong.append(f"{line['case']}: {line['error']}")
            continue
        if line["apart"] > EXACT or line["away"]:
            wrong.append(f"{line['case']}: apart by {line['apart']:.1e}, left on the host: {line['away']}")
        for kind in ("wait", "fetch", "send"):
            for place, times in line[kind].items():
                allowed = {**BY_USE, **OTHER_ENGINES}.get(place, 0)
                if times > allowed and not place.startswith(PROOFS) and not is_projection(kind, place):
                    wrong.append(f"{line['case']}: {times} times {kind} in {place}, allowed {allowed}")
    return wrong


def is_projection(kind: str, place: str) -> bool:
    """Random directions come from the host."""
    return kind == "send" and place.startswith("gradients/projected.py:Directions._make")


def judge_step(line: dict[str, Any]) -> list[str]:
    """What is wrong with one step of a mechanism."""
    if "error" in line or "ended" in line:
        return [f"{line['case']}: {line.get('error', 'torch ended the process')}"]
    allowed: dict[str, dict[str, int]] = {
        "wait": {**ONCE, **OTHER_ENGINES},
        "send": {"records.py:_move.<locals>.<genexpr>": 2, "noise.py:_send": 1},
        "fetch": {},
    }
    if line["case"] == "dpis":
        allowed["fetch"]["mechanisms/dpis.py:Importance.observe"] = 1  # norms, which it draws by
        allowed["send"]["mechanisms/dpis.py:ImportanceWeights.weights"] = 1  # thresholds of the draw
    if line["case"] == "blockwise":
        allowed["fetch"]["mechanisms/blockwise.py:Following.weigh"] = 1
    looks = line["case"] in TRIED_ON_RECORDS
    return [
        f"{line['case']}: {times} times {kind} in {place}"
        for kind, most in allowed.items()
        for place, times in line[kind].items()
        if times > most.get(place, 0) and not looks and not is_projection(kind, place)
    ]


@pytest.mark.slow
def test_a_few_networks_and_mechanisms() -> None:
    lines = walk("few")
    assert judge_rules(lines[:-2]) == []
    assert [wrong for line in lines[-2:] for wrong in judge_step(line)] == []


def test_a_few_on_a_device_without_double_precision() -> None:
    """The fast one of those below: training on MPS was broken for as long as only slow tests looked."""
    lines = walk("few", "--without-doubles")
    assert len(lines) > 5
    assert [line for line in lines if "error" in line or "ended" in line] == []


@pytest.mark.slow
def test_a_step_of_every_mechanism_waits_once_and_copies_records_and_noise_alone() -> None:
    from sordino import mechanisms

    steps = walk("steps")
    assert {line["case"] for line in steps} == set(mechanisms.list_names())
    assert [wrong for line in steps for wrong in judge_step(line)] == []


@pytest.mark.slow
def test_the_other_engines_leave_nothing_on_the_host() -> None:
    assert judge_rules(walk("engines")) == []


@pytest.mark.slow
def test_every_rule_leaves_nothing_on_the_host() -> None:
    *cases, summary = walk("rules")
    assert (summary["never"], summary["files"], summary["moves"]) == ([], [], [])
    assert judge_rules(cases) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", [("steps",), ("engines",), ("rules",)], ids=lambda part: part[0])
def test_a_device_without_double_precision(part: tuple[str, ...]) -> None:
    """MPS has none: making a tensor of doubles there is an error."""
    lines = walk(*part, "--without-doubles")
    assert [line for line in lines if "error" in line or "ended" in line] == []


def test_what_should_not_be_there_would_be_seen() -> None:
    good = {"case": "x", "apart": 0.0, "away": [], "wait": {}, "fetch": {}, "send": {}}
    assert judge_rules([good]) == []
    for change in (
        {"apart": 0.01},
        {"away": ["Tensor"]},
        {"wait": {"gradients/rules/linear.py:linear": 1}},
        {"send": {"gradients/rules/conv.py:conv": 1}},
        {"wait": {"gradients/bookkeeping/book.py:Book.weighted_sum": 2}},
        {"error": "RuntimeError: expected all tensors to be on the same device"},
        {"ended": True},
    ):
        assert len(judge_rules([{**good, **change}])) == 1
    assert judge_step({**good, "fetch": {"step.py:propose": 1}}) == ["x: 1 times fetch in step.py:propose"]
