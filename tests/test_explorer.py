"""The explorer's JavaScript computes what Python does, and its ε is never below the proven one."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant

from sordino.accounting import epsilon

SCRIPT = Path(__file__).parent.parent / "docs" / "assets" / "explorer.js"
RUNS = [
    (0.001, 0.7, 3000, 1e-6),
    (0.01, 1.0, 1000, 1e-5),
    (0.017, 2.5, 1200, 1e-5),
    (0.2, 5.0, 60, 1e-4),
    (1.0, 20.0, 40, 1e-5),
]
PLANS = [
    {"budget": 3, "records": 60_000, "batch": 1024, "epochs": 20, "parameters": 25_000},
    {"budget": 0.5, "records": 2_000, "batch": 256, "epochs": 5, "parameters": 100},
    {"budget": 8, "records": 1_000_000, "batch": 65_536, "epochs": 2, "parameters": 10**8},
    {"budget": 1, "records": 1_000, "batch": 65_536, "epochs": 3, "parameters": 10},
]


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine, which runs the explorer's script")
    program = (
        f"const e = require({json.dumps(str(SCRIPT))});"
        f"const runs = {json.dumps(RUNS)}; const plans = {json.dumps(PLANS)};"
        "console.log(JSON.stringify({ orders: e.ORDERS, epsilons: runs.map((r) => e.epsilon(...r)),"
        "plans: plans.map(e.plan), delta: [50, 999, 60000, 1e7].map(e.chooseDelta) }));"
    )
    done = subprocess.run([node, "-e", program], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def price(orders: list[int], rate: float, noise: float, steps: int, delta: float) -> float:
    """By Google's accountant at the same orders."""
    accountant = RdpAccountant([float(order) for order in orders])
    accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps))
    return accountant.get_epsilon(delta)


def test_prices_are_those_of_the_accountant_at_the_same_orders(answers: dict[str, Any]) -> None:
    for run, found in zip(RUNS, answers["epsilons"], strict=True):
        assert found == pytest.approx(price(answers["orders"], *run), rel=1e-9)


def test_prices_are_upper_bounds_and_within_twice_the_tightest(answers: dict[str, Any]) -> None:
    for (rate, noise, steps, delta), found in list(zip(RUNS, answers["epsilons"], strict=True))[1:4:2]:
        tight = epsilon([(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)], delta=delta)
        assert tight <= found <= 2 * tight


def test_the_noise_of_a_plan_is_the_least_that_the_budget_pays_for(answers: dict[str, Any]) -> None:
    for asked, plan in zip(PLANS, answers["plans"], strict=True):
        size = min(asked["batch"], asked["records"])
        assert plan["q"] == pytest.approx(size / asked["records"])
        assert plan["steps"] == max(1, round(asked["epochs"] / plan["q"]))
        costs = [
            price(answers["orders"], plan["q"], plan["sigma"] * f, plan["steps"], plan["delta"]) for f in (1, 0.999)
        ]
        assert costs[0] <= asked["budget"] * (1 + 1e-9) < costs[1]
        assert plan["perRecord"] == pytest.approx(plan["sigma"] / size)
        assert plan["length"] == pytest.approx(plan["perRecord"] * math.sqrt(asked["parameters"]))


def test_delta_is_the_one_that_the_command_takes(answers: dict[str, Any]) -> None:
    from sordino.cli.options import choose_delta

    assert answers["delta"] == pytest.approx([choose_delta(None, int(n)) for n in (50, 999, 60_000, 1e7)])


def test_a_wrong_exponent_would_be_seen(answers: dict[str, Any]) -> None:
    """k² in the place of k (k - 1), a common slip, moves the price by far more than the test allows."""
    rate, noise, steps, delta = RUNS[1]
    wrong = min(
        steps
        * math.log(
            sum(
                math.comb(a, k) * (1 - rate) ** (a - k) * rate**k * math.exp(k * k / (2 * noise**2))
                for k in range(a + 1)
            )
        )
        / (a - 1)
        + math.log((a - 1) / a)
        - (math.log(delta) + math.log(a)) / (a - 1)
        for a in range(2, 12)
    )
    assert abs(wrong / answers["epsilons"][1] - 1) > 1e-3
