"""Attack the step on its worst case: the empirical lower bound on ε stays below the claim, and broken steps are caught.

One record whose gradient is a hundred times the clipping bound is present or absent; everything else is zero. The
attacker sees the released gradient of each step and guesses by a threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from scipy import stats
from torch import Tensor, nn

from sordino import Recipe
from sordino.accounting import pricing
from sordino.accounting.ledger import Receipt
from sordino.noise import Seeded
from sordino.parts import Draw
from tests.helpers import calibrated, private

TRIALS, DELTA, RECORDS, ERROR = 600, 1e-5, 2, 0.0005


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).squeeze(1)


def releases(present: bool, recipe: Recipe, source: Seeded) -> np.ndarray:
    """What `TRIALS` steps move a one-parameter model by, with the loud record or without."""
    data = torch.zeros(RECORDS, 1)
    data[0] = 100.0 if present else 0.0
    model = nn.Linear(1, 1, bias=False)
    run = private(recipe, model=model, dataset=data, loss=losses, source=source, lr=1.0, validate=False, engine="loop")
    out = []
    for _ in range(TRIALS):
        before = model.weight.item()
        run.step()
        out.append(before - model.weight.item())
    return np.array(out)


def lower_bound(absent: np.ndarray, present: np.ndarray) -> float:
    """ε at DELTA, from below with 99.9 % confidence, assuming that the mechanism is Gaussian.

    At the threshold halfway between the two means, Clopper-Pearson bounds the two error rates from above; they bound
    μ = Φ⁻¹(1 − false alarms) − Φ⁻¹(misses) from below (Nasr et al. 2023), and μ is a Gaussian mechanism with σ = 1/μ.
    """
    threshold = (np.median(absent) + np.median(present)) / 2
    alarms, misses = (_at_most(int(errors.sum())) for errors in (absent > threshold, present <= threshold))
    mu = stats.norm.isf(alarms) - stats.norm.ppf(misses)
    return pricing.epsilon([(GaussianDpEvent(1 / mu), 1)], DELTA) if mu > 0 else 0.0


def _at_most(errors: int) -> float:
    return float(stats.beta.ppf(1 - ERROR, errors + 1, TRIALS - errors)) if errors < TRIALS else 1.0


class Halved(Seeded):
    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        return super().gaussian(receipt, size, std / 2)


class Repeated(Seeded):
    """The same noise at every step: differences between releases are free of it."""

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        return torch.full((size,), 0.3 * std, dtype=torch.float64)


@dataclass(frozen=True)
class Unclipped:
    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return torch.ones_like(norms)


@dataclass(frozen=True)
class TwiceTheBound:
    def weights(self, norms: Tensor, clip: float, draw: Draw) -> Tensor:
        return (2 * clip / norms).clamp(max=1.0)


HONEST = calibrated(RECORDS, batch_size=RECORDS, steps=TRIALS, noise_multiplier=1.0)
BROKEN: dict[str, tuple[Recipe, Callable[[int], Seeded]]] = {
    "noise halved": (HONEST, Halved),
    "noise repeated": (HONEST, Repeated),
    "no clipping": (replace(HONEST, weighing=Unclipped()), Seeded),
    "twice the sensitivity": (replace(HONEST, weighing=TwiceTheBound()), Seeded),
}


def audited(recipe: Recipe, source: Callable[[int], Seeded]) -> float:
    return lower_bound(releases(False, recipe, source(1)), releases(True, recipe, source(2)))


def claim() -> float:
    return pricing.epsilon([(HONEST.terms(0).event, 1)], DELTA)


def test_the_honest_step_stays_below_its_claim_and_the_audit_has_power() -> None:
    assert 0.5 * claim() < audited(HONEST, Seeded) <= claim()


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_step_is_caught(name: str) -> None:
    recipe, source = BROKEN[name]
    assert audited(recipe, source) > claim()
