"""The Accelerate loop, with the real Accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR

from sordino import Budget, InvalidInput, Private, SordinoError, recipes
from sordino.recipe import Recipe

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make test-integrations")
from sordino.integrations.accelerate import load, prepare  # noqa: E402

RECORDS = 64


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Accelerate keeps its settings in shared state."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def records() -> tuple[Tensor, Tensor]:
    x = torch.randn(RECORDS, 6, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def recipe() -> Recipe:
    return recipes.dpadam(batch_size=16, epochs=3).calibrate(Budget(epsilon=3, delta=1e-5), records=RECORDS)


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def loop(model: nn.Module, optimizer: Any, scheduler: Any, private: Private) -> None:
    for batch in private.loader():
        optimizer.zero_grad()
        private.backward(loss(model, batch))
        optimizer.step()
        scheduler.step()


def test_it_gives_the_model_that_a_plain_loop_gives() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, private = prepare(accelerator, *fresh(), records(), loss, recipe(), seed=7)
    loop(model, optimizer, accelerator.prepare(StepLR(optimizer.optimizer, 5, 0.5)), private)

    twin, plain = fresh()
    theirs = Private(twin, plain, records(), loss, recipe(), seed=7)
    loop(twin, plain, StepLR(plain, 5, 0.5), theirs)

    assert private.position == theirs.position == 12
    assert private.guarantee().epsilon == theirs.guarantee().epsilon <= 3
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.equal(model[0].weight, fresh()[0][0].weight)


def test_accelerates_own_backward_would_be_unprotected_and_is_refused() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, private = prepare(accelerator, *fresh(), records(), loss, recipe())
    batch = next(private.loader())
    accelerator.backward(loss(model, batch).mean())
    with pytest.raises(SordinoError, match="unprotected gradient"):
        optimizer.step()
    assert torch.equal(model[0].weight, fresh()[0][0].weight)


@pytest.mark.parametrize("parts", [1, 3])
def test_accumulation_cuts_draws_and_changes_no_numbers(parts: int) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=parts)
    model, optimizer, private = prepare(accelerator, *fresh(), records(), loss, recipe(), seed=7)
    private.attach(StepLR(optimizer.optimizer, 5, 0.5))
    sizes = []
    for batch in load(accelerator, private):
        sizes.append(len(batch[0]))
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            private.backward(loss(model, batch))
            optimizer.step()
    twin, plain = fresh()
    theirs = Private(twin, plain, records(), loss, recipe(), seed=7)
    theirs.attach(StepLR(plain, 5, 0.5))
    for _ in theirs.steps():
        pass
    assert private.position == theirs.position == 12
    assert (max(sizes) <= 6) == (parts == 3)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_bf16_runs_without_loss_scaling() -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    small = recipes.dpsgd(batch_size=RECORDS, steps=1, noise_multiplier=1e-9).for_records(RECORDS)
    model, optimizer, private = prepare(accelerator, *fresh(), records(), loss, small)
    assert accelerator.scaler is None
    for batch in load(accelerator, private):
        optimizer.zero_grad()
        private.backward(loss(model, batch))
        optimizer.step()
    twin, plain = fresh()
    for _ in Private(twin, plain, records(), loss, small).steps():
        pass
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=5e-3)


def test_an_optimizer_that_lacks_a_trainable_parameter_is_refused() -> None:
    model, _ = fresh()
    optimizer = torch.optim.SGD(list(model.parameters())[:2], lr=0.1)
    with pytest.raises(InvalidInput, match=r"does not hold 2\.weight, 2\.bias"):
        prepare(accelerate.Accelerator(cpu=True), model, optimizer, records(), loss, recipe())


def test_loss_scaling_is_refused() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state._mixed_precision = "fp16"  # which a machine without a GPU does not let one ask for
    with pytest.raises(InvalidInput, match="mixed_precision='fp16' scales the loss"):
        prepare(accelerator, *fresh(), records(), loss, recipe())
