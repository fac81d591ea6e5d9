"""A rejected proposal leaves everything as it was, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino import Private, Recipe
from sordino.selection import Selector, Snapshot
from sordino.selection.rollback import Rollback
from sordino.step import Attempt
from tests.helpers import calibrated, cross_entropy, mlp, private


@dataclass(frozen=True, eq=False)
class Scripted(Selector):
    """Keeps or rejects as told, with the real rollback."""

    verdicts: list[bool] = field(default_factory=list)

    def event(self, proposal: Any) -> Any:
        return proposal

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        return Rollback(attempt.bench)

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        return self.verdicts[attempt.terms.step]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw with a tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


class Counting(nn.Module):
    """A model whose forward pass changes a buffer, and replaces another by one of a different size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("history", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.history = torch.cat([self.history, torch.ones(1)])
        out: Tensor = self.inner(x)
        return out


def everything(run: Private) -> list[Any]:
    """All state that a step may change, flattened to comparable values."""
    optimizer = run.bench.optimizer
    return copy.deepcopy(
        [
            dict(run.bench.objective.model.state_dict()),
            [dict(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]],
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            [scheduler.state_dict() for scheduler in run.bench.schedulers],
        ]
    )


def identical(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    return bool(a == b)


def scripted(*verdicts: bool) -> Recipe:
    return replace(calibrated(steps=len(verdicts)), selection=Scripted(list(verdicts)))


def start(
    recipe: Recipe, kind: str, model: nn.Module | None = None, scheduled: bool = False, **options: Any
) -> Private:
    model = model or mlp()
    optimizer = OPTIMIZERS[kind](model.parameters())
    run = private(recipe, model=model, optimizer=optimizer, **options)
    if scheduled:
        run.attach(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10))
    return run


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("kept_before", [0, 2])
def test_a_rejection_restores_every_bit(kind: str, kept_before: int) -> None:
    run = start(scripted(*[True] * kept_before, False, True), kind, scheduled=True)
    for _ in range(kept_before):
        run.step()
    before = everything(run)
    run.step()
    assert identical(everything(run), before)
    run.step()
    assert not identical(everything(run), before), "the comparison must notice a step"


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_with_rejections_equals_the_run_without_them(kind: str) -> None:
    """Train with the rejected attempts' noise drawn but unused: the future must not know of them."""
    rejected = start(scripted(True, False, False, True), kind, scheduled=True)
    for _ in range(4):
        rejected.step()
    plain = start(scripted(True, True, True, True), kind, scheduled=True)
    plain.step()
    saved = Rollback(plain.bench)
    plain.step()
    plain.step()
    saved.restore()
    plain.step()
    assert identical(everything(rejected), everything(plain))


def test_buffers_go_back_even_where_their_size_changed() -> None:
    run = start(scripted(False, True), "adam", Counting(), validate=False, engine="loop")
    before = everything(run)
    run.step()
    assert identical(everything(run), before)
    run.step()
    assert run.bench.objective.model.calls.item() > 0


def test_tensors_stay_where_they_are() -> None:
    run = start(scripted(False), "momentum")
    held = list(run.bench.objective.model.parameters())
    run.step()
    assert all(a is b for a, b in zip(held, run.bench.objective.model.parameters(), strict=True))
    assert all(p.grad is None for p in held), "the rejected gradient must be gone"


def test_a_scheduler_that_was_not_passed_is_the_users() -> None:
    run = start(scripted(False), "sgd")
    scheduler = torch.optim.lr_scheduler.StepLR(run.bench.optimizer, 1, gamma=0.5)
    run.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.05]


def test_a_rejection_in_the_users_own_loop_restores_too() -> None:
    run = start(scripted(True, False), "adam")
    states = []
    for batch in run.loader():
        run.backward(cross_entropy(run.bench.objective.model, batch))
        run.bench.optimizer.step()
        states.append(everything(run))
    assert identical(states[0], states[1])


def test_the_old_model_is_seen_in_place_and_the_proposal_comes_back() -> None:
    run = start(scripted(True, True), "sgd")
    before = Rollback(run.bench)
    old = everything(run)[0]
    run.step()
    new = everything(run)[0]
    with before.in_place():
        assert identical(everything(run)[0], old)
    assert identical(everything(run)[0], new)
    assert not identical(old, new)
