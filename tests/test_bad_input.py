"""Bad input is one line that names the thing, and spends nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sordino import Budget, InvalidInput, Private, Recipe, SordinoError, recipes
from sordino.accounting.ledger import Ledger
from sordino.parts import Foreign
from sordino.recipe import LEAST_CLIP
from tests.helpers import calibrated, classification, cross_entropy, mlp, private

X, Y = classification()
NAN = float("nan")


class Growing(torch.utils.data.Dataset[Any]):
    """A data set that gains a record after it was handed over."""

    def __init__(self) -> None:
        self.length = 64

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index % 64], Y[index % 64]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def with_model(model: nn.Module) -> Any:
    return private(model=model)


def scalar(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch).mean()


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    losses = cross_entropy(model, batch)
    return losses - losses.mean()


def infinite(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch) * float("inf")


def constant(model: nn.Module, batch: Any) -> Tensor:
    return torch.zeros(len(batch[0]))


def stranger() -> Private:
    model = mlp()
    return private(model=model, optimizer=torch.optim.SGD(mlp(seed=4).parameters(), lr=0.1))


def lbfgs() -> Private:
    model = mlp()
    return private(model=model, optimizer=torch.optim.LBFGS(model.parameters()))


def all_frozen() -> Private:
    return private(model=mlp().requires_grad_(False), optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1))


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "every input NaN": (lambda: private(dataset=(X * NAN, Y)), "finite"),
    "labels out of range": (lambda: private(dataset=(X, Y + 7)), "."),
    "negative labels": (lambda: private(dataset=(X, Y - 200)), "."),
    "empty tensors": (lambda: private(dataset=(X[:0], Y[:0])), "0 records"),
    "empty list": (lambda: private(dataset=[]), "."),
    "iterable dataset": (lambda: private(dataset=Stream()), "IterableDataset|Stream"),
    "tensors of different lengths": (lambda: private(dataset=(X, Y[:10])), r"lengths \[10, 64\]"),
    "a tenth of the records": (lambda: private(calibrated(640)), "calibrated for 640"),
    "batch larger than the data": (lambda: calibrated(8), "batch_size=16 must be <= records=8"),
    "delta above 1/N": (
        lambda: recipes.dpsgd(epochs=1).calibrate(Budget(3, 1e-3), records=10_000),
        "must be < 1/records",
    ),
    "negative epsilon": (lambda: Budget(-1.0, 1e-5), "epsilon=-1.0"),
    "zero epsilon": (lambda: Budget(0.0, 1e-5), "epsilon=0.0"),
    "NaN epsilon": (lambda: Budget(NAN, 1e-5), "epsilon=nan"),
    "delta of one": (lambda: Budget(1.0, 1.0), "delta=1.0"),
    "negative delta": (lambda: Budget(1.0, -1e-5), "delta=-1e-05"),
    "unknown accountant": (lambda: Budget(1.0, 1e-5, accountant="magic"), "magic"),
    "unknown adjacency": (lambda: Budget(1.0, 1e-5, adjacency="swap"), "swap"),
    "zero clip": (lambda: recipes.dpsgd(clip=0.0), "clip=0.0 must be > 0"),
    "NaN clip": (lambda: recipes.dpsgd(clip=NAN), "clip=nan must be > 0"),
    "no noise": (lambda: recipes.dpsgd(noise_multiplier=0.0), "without noise there is no privacy"),
    "infinite noise": (lambda: recipes.dpsgd(noise_multiplier=float("inf")), "finite"),
    "no steps": (lambda: recipes.dpsgd(steps=0), "steps=0 must be >= 1"),
    "no epochs": (lambda: recipes.dpsgd(epochs=0), "epochs=0 must be > 0"),
    "no batch": (lambda: recipes.dpsgd(batch_size=0), "batch_size=0 must be >= 1"),
    "no length at all": (lambda: recipes.dpsgd().calibrate(Budget(1, 1e-5), records=1000), "length of training"),
    "not calibrated": (lambda: private(recipes.dpsgd(batch_size=8, steps=2)), "is not calibrated"),
    "more noise than steps allow": (
        lambda: recipes.dpsgd(batch_size=16, steps=1000, noise_multiplier=0.5).calibrate(Budget(0.1, 1e-5), records=64),
        "above the budget of 0.1",
    ),
    "scalar loss": (lambda: private(loss=scalar), "reduction='none'"),
    "loss that mixes examples": (lambda: private(loss=contrastive), "."),
    "non-finite loss": (lambda: private(loss=infinite), "finite"),
    "loss without parameters": (lambda: private(loss=constant), "."),
    "batch norm": (lambda: with_model(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))), "BatchNorm"),
    "model on another dtype": (lambda: with_model(mlp().double()), "dtype|float64|double"),
    "model of another shape": (lambda: with_model(mlp(features=5)), "."),
    "optimizer of another model": (stranger, "are not in the model"),
    "LBFGS": (lbfgs, "LBFGS"),
    "everything frozen": (all_frozen, "."),
    "unknown engine": (lambda: private(engine="warp"), "engine='warp'"),
    "microbatch of zero": (lambda: private(microbatch=0), "microbatch=0 must be >= 1"),
    "foreign sampler without its loader": (
        lambda: list(private(calibrated(sampler=Foreign())).steps()),
        "pass your loader",
    ),
    "save without a directory": (lambda: private().save(), "save needs a directory"),
    "resume of nothing": (lambda: private().load("/nonexistent/run"), "."),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[object] = []
    charge = Ledger.charge
    monkeypatch.setattr(Ledger, "charge", lambda self, *a, **k: (charged.append(a), charge(self, *a, **k))[1])
    attempt, message = CASES[case]
    with pytest.raises(SordinoError, match=message) as caught:
        attempt()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not charged


def test_a_dataset_that_changes_length_is_refused_before_the_charge() -> None:
    dataset = Growing()
    run = private(dataset=dataset)
    run.step()
    dataset.length = 63
    with pytest.raises(InvalidInput, match="dataset length is 63, was 64"):
        run.step()
    assert len(run.bench.ledger) == 1


def test_a_file_where_the_run_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SordinoError) as caught:
        private(run=tmp_path / "file" / "run")
    assert "\n" not in str(caught.value)


def test_a_corrupt_ledger_and_a_corrupt_checkpoint(tmp_path: Path) -> None:
    run = private(run=tmp_path / "run")
    run.step()
    run.save()
    run.close()
    checkpoint = next((tmp_path / "run").glob("checkpoint-*"))
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    with pytest.raises(SordinoError, match="damaged"):
        private().load(tmp_path / "run")
    (tmp_path / "run" / "ledger.sqlite").write_bytes(b"not a ledger" * 100)
    with pytest.raises(SordinoError) as caught:
        private().load(tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_two_writers_on_one_run_are_refused(tmp_path: Path) -> None:
    run = private(run=tmp_path / "run")
    with pytest.raises(SordinoError) as caught:
        private().load(tmp_path / "run")
    assert "\n" not in str(caught.value)
    run.close()
    private().load(tmp_path / "run")


@given(
    batch_size=st.integers(-3, 300),
    records=st.integers(-3, 300),
    clip=st.floats(),
    sigma=st.floats(),
    steps=st.integers(-2, 9),
)
def test_numeric_edges_give_a_finite_recipe_or_one_line(
    batch_size: int, records: int, clip: float, sigma: float, steps: int
) -> None:
    def build() -> Recipe:
        recipe = recipes.dpsgd(batch_size=batch_size, steps=steps, clip=clip, noise_multiplier=sigma)
        return recipe.for_records(records)

    possible = 1 <= batch_size <= records and LEAST_CLIP <= clip < math.inf and 0 < sigma < math.inf and steps >= 1
    if possible:
        terms = build().terms(0)
        assert (terms.clip, terms.noise_multiplier, terms.divisor) == (clip, sigma, batch_size)
    else:
        with pytest.raises(InvalidInput) as caught:
            build()
        assert "\n" not in str(caught.value)


def test_a_recipe_of_unknown_length_has_no_price() -> None:
    """Its plan is empty until the records are known: the price of nothing, 0, would be shown for any noise at all."""
    recipe = recipes.dpsgd(batch_size=50, epochs=1, noise_multiplier=0.01)
    with pytest.raises(InvalidInput, match="steps are not known yet"):
        recipe.price(1e-4)
    assert recipe.for_records(500).price(1e-4) > 1e4


def test_the_budget_is_checked_when_noise_and_steps_are_given() -> None:
    recipe = recipes.dpsgd(batch_size=16, steps=10, noise_multiplier=4.0).calibrate(Budget(3.0, 1e-5), records=64)
    assert recipe == replace(recipe, noise_multiplier=4.0, steps=10)
