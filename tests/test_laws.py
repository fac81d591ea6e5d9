"""The ten laws of the design: each test fails when its law is broken in `step.py` or in a part."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from torch import Tensor, nn

from sordino import BudgetExhausted, Private, recipes
from sordino.accounting import events, pricing
from sordino.accounting.ledger import Ledger, Receipt
from sordino.noise import Seeded
from sordino.parts import Foreign, Selector, Snapshot
from sordino.step import Attempt
from tests.helpers import budgeted, calibrated, classification, cross_entropy, mlp, private


class Silent(Seeded):
    """A source whose Gaussians are zero and which counts how many were asked for, to look under the noise."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        self.requests: list[tuple[Receipt, int, float]] = []

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        self.requests.append((receipt, size, std))
        return torch.zeros(size, dtype=torch.float64)


def movement(dataset: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    """How far one noiseless step with learning rate 1 moves the model."""
    model = mlp()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    recipe = calibrated(len(dataset[0]), **options)
    private(recipe, model=model, dataset=dataset, source=Silent(), lr=1.0).step()
    return before - nn.utils.parameters_to_vector(model.parameters()).detach()


def test_law_1_sum_then_divide_by_a_public_constant() -> None:
    x, y = classification(64)
    x, y = x[:1].repeat(64, 1), y[:1].repeat(64)  # equal records: the clipped sum is proportional to the draw's size
    sizes, lengths = [], []
    for n in (64, 40):
        sizes.append(int((Seeded(1).uniform(n) < 32 / n).sum()))
        lengths.append(movement((x[:n], y[:n]), batch_size=32, clip=1e-3).norm().item())
    assert sizes[0] != sizes[1]
    divisors = [size * 1e-3 / length for size, length in zip(sizes, lengths, strict=True)]
    assert divisors == pytest.approx([32, 32], rel=1e-3)


def test_law_2_only_our_sampler_amplifies() -> None:
    data = classification(64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=16, shuffle=True)
    recipe = calibrated(sampler=Foreign(), steps=4)
    run = private(recipe, dataset=data)
    for batch in run.loader(loader):
        run.bench.optimizer.zero_grad()
        run.backward(cross_entropy(run.bench.objective.model, batch))
        run.bench.optimizer.step()
    assert run.bench.ledger.events() == [(GaussianDpEvent(0.5), 4)]
    assert run.guarantee(delta=1e-5).epsilon > private_epsilon(4)
    assert any("foreign" in said for said in run.guarantee().assumptions)
    with pytest.raises(ValueError, match=r"sampler=Foreign\(\)"):
        next(private().loader(loader))


def private_epsilon(steps: int) -> float:
    return pricing.epsilon([(PoissonSampledDpEvent(0.25, GaussianDpEvent(1.0)), steps)], 1e-5)


def test_law_3_one_draw_one_event() -> None:
    run = private()
    for step in run.steps():
        assert len(run.bench.ledger) == step.number
    merged = events.merge(GaussianDpEvent(1.2), GaussianDpEvent(5.0))
    together = pricing.epsilon([(PoissonSampledDpEvent(0.01, merged), 500)], 1e-5)
    apart = pricing.epsilon([(PoissonSampledDpEvent(0.01, GaussianDpEvent(s)), 500) for s in (1.2, 5.0)], 1e-5)
    assert together == pytest.approx(0.967, abs=1e-3)
    assert apart == pytest.approx(0.934, abs=1e-3)


class Never(Selector):
    """Rejects every proposal."""

    def event(self, proposal: DpEvent) -> DpEvent:
        return proposal

    def snapshot(self, attempt: Attempt) -> Snapshot | None:
        model = attempt.bench.objective.model
        state = copy.deepcopy(model.state_dict())

        class Before:
            def restore(self) -> None:
                model.load_state_dict(state)

        return Before()

    def accepts(self, attempt: Attempt, before: Snapshot | None) -> bool:
        return False


def test_law_4_every_attempt_is_charged() -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    run = private(replace(calibrated(steps=5), selection=Never()), model=model)
    assert len(list(run.steps())) == 5
    assert len(run.bench.ledger) == 5
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_law_5_the_ledger_is_written_first(tmp_path: Path) -> None:
    path = tmp_path / "run"
    seen: list[tuple[int, int]] = []

    class Watching(Seeded):
        def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
            seen.append((receipt.sequence, len(Ledger.read(path / "ledger.sqlite"))))
            return super().gaussian(receipt, size, std)

    run = private(run=path, source=Watching(1))
    list(run.steps())
    assert seen == [(n, n) for n in range(1, 11)], "another process must see the event before the noise is drawn"


def test_law_5_a_budget_refuses_a_step_before_it_runs() -> None:
    source = Silent()
    recipe = budgeted(steps=10)
    run = private(replace(recipe, steps=13), source=source)
    model = run.bench.objective.model
    list(run.steps())
    assert len(run.bench.ledger) == len(source.requests) == 10
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BudgetExhausted, match="would exceed epsilon=2"):
        run.step()
    assert len(run.bench.ledger) == len(source.requests) == 10
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert run.guarantee().epsilon <= 2.0


def test_law_6_a_bad_record_changes_at_most_its_own_contribution() -> None:
    x, y = classification(64)
    for bad in (float("nan"), float("inf"), 3e38):
        spoilt = x.clone()
        spoilt[5] = bad
        without = x.clone()
        without[5] = 0
        difference = movement((spoilt, y), batch_size=64) - movement((without, y), batch_size=64)
        assert torch.isfinite(difference).all()
        assert difference.norm().item() <= 2.0 / 64 * 1.001  # one contribution of at most C = 1 for another


def test_law_6_empty_draws_frozen_unused_and_tied_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused, self.frozen = (nn.Linear(6, 6) for _ in range(4))
            self.b.weight = self.a.weight
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.b(torch.tanh(self.a(x))))

    model = Odd()
    run = private(calibrated(batch_size=1, steps=30), model=model, source=Silent())
    frozen = model.frozen.weight.clone()
    list(run.steps())
    assert len(run.bench.ledger) == 30
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert torch.equal(model.frozen.weight, frozen)
    assert model.b.weight is model.a.weight


def test_law_7_private_values_reach_no_log_and_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    data = classification(64)
    other = (data[0].flip(0) * 3 + 1, data[1].flip(0))
    said = []
    for dataset in (data, other):
        caplog.clear()
        with caplog.at_level(logging.DEBUG):
            run = private(dataset=dataset, run=tmp_path / str(len(said)))
            public = [(step.number, step.steps) for step in run.steps()]
            run.save()
            guarantee = str(run.guarantee())
        captured = capsys.readouterr()
        messages = [r.getMessage().replace(str(tmp_path / str(len(said))), "") for r in caplog.records]
        keys = sorted(torch.load(io.BytesIO(_body(tmp_path / str(len(said)))), weights_only=True))
        said.append((public, guarantee, messages, captured.out, captured.err, keys))
    assert said[0] == said[1], "what is said in public must not depend on the records"
    assert said[0][5] == ["events", "extra", "head", "model", "optimizer", "position", "released", "run_id"]


def _body(run: Path) -> bytes:
    return next(iter(sorted(run.glob("checkpoint-*.pt")))).read_bytes().partition(b"\n")[2]


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("microbatch", [None, 1, 3, 1000])
def test_law_8_performance_knobs_change_no_numbers(engine: str, microbatch: int | None) -> None:
    def trained(**options: Any) -> Tensor:
        model = mlp()
        list(private(calibrated(steps=3), model=model, **options).steps())
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    assert torch.allclose(trained(engine=engine, microbatch=microbatch), trained(), rtol=1e-5, atol=1e-6)


def test_law_9_a_guarantee_states_its_basis() -> None:
    proven = private(calibrated()).guarantee()
    assert proven.basis == "proven"
    assert "caution" not in str(proven).lower()
    for basis in ("asymptotic", "published"):
        text = str(private(replace(calibrated(), basis=basis)).guarantee())
        assert basis in text
        assert "caution" in text.lower()


def test_law_10_no_noise_is_drawn_twice(tmp_path: Path) -> None:
    def noises(resume: bool) -> list[np.ndarray]:
        drawn: list[np.ndarray] = []
        run = private(calibrated(steps=6), run=None if resume else tmp_path / "run", seed=3)
        if resume:
            run.load(tmp_path / "run")
        draw: Callable[[Receipt, int, float], Tensor] = run.bench.source.gaussian

        def recording(receipt: Receipt, size: int, std: float) -> Tensor:
            drawn.append(draw(receipt, size, std).numpy().copy())
            return torch.from_numpy(drawn[-1])

        run.bench.source.gaussian = recording  # type: ignore[method-assign]
        for _ in range(3):
            run.step()
        run.save()
        run.close()
        return drawn

    first, second = noises(resume=False), noises(resume=True)
    every = np.stack(first + second)
    assert len(np.unique(every)) == every.size


def test_a_seeded_run_says_so() -> None:
    assert "SEEDED" in str(private(seed=1).guarantee())
    assert "SEEDED" not in str(private(seed=None).guarantee())


def test_recipe_is_refused_before_it_is_calibrated() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="is not calibrated"):
        Private(model, optimizer, classification(), cross_entropy, recipes.dpsgd(batch_size=16, epochs=1))


def masked_out(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of a record without a label is the constant zero, which no parameter has a part in."""
    losses = torch.zeros(len(x))
    some = x[:, 0] < 100
    if some.any():
        losses[some] = model(x[some]).squeeze(1)
    return losses


@pytest.mark.parametrize(
    ("engine", "loop"), [("auto", False), ("auto", True), ("loop", False), ("loop", True), ("jl", False)]
)
def test_law_6_a_record_without_a_gradient_ends_no_run(engine: str, loop: bool) -> None:
    """Whether a draw holds it, or nothing else, is private."""
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    x[1:19, 0] = 200.0
    given = {"batch_size": 2, "steps": 12, "noise_multiplier": 1.0}
    made = recipes.jl(projections=20, **given) if engine == "jl" else recipes.dpsgd(**given)
    model = nn.Linear(3, 1)
    options = {} if engine == "jl" else {"engine": engine}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = Private(model, optimizer, x, masked_out, made.for_records(20), seed=1, microbatch=1, **options)
    if loop:
        for batch in private.loader(microbatch=1):
            optimizer.zero_grad()
            private.backward(masked_out(model, batch))
            optimizer.step()
    else:
        list(private.steps())
    assert private.position == 12
    private.close()
