"""Clipping by blocks: norms and sums are those of a plain loop, the bound holds, votes are paid for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from torch import Tensor, nn

from sordino import InvalidInput, Recipe, recipes
from sordino.audit import AuditFailed, Instance, audit_recipe, conformance
from sordino.gradients import BookKeeping, Looped, Objective, Vmapped
from sordino.gradients.engine import Groups
from sordino.mechanisms.blockwise import Bounds, PerBlock, QuantileBlocks, sort_names
from sordino.mechanisms.dynamic import SensitivityDecay
from sordino.parts import Draw
from tests.helpers import (
    batch_of,
    calibrated,
    classification,
    cross_entropy,
    loop_oracle,
    mlp,
    private,
    train_in_both_loops,
)

COMMON: dict[str, Any] = {"batch_size": 16, "steps": 6, "noise_multiplier": 1.0}
WAYS = ("layer", "parameter", "block")


class Tied(nn.Module):
    """A weight that is used twice, once transposed, one that is never used, an embedding and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.LayerNorm(4)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x).mean(1)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        hidden = hidden @ self.blocks[0].weight
        return self.norm(hidden) @ self.table.weight.T


def make(kind: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    if kind == "mlp":
        return mlp(), classification(7)
    if kind == "conv":
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 9, 3))
        return model, (torch.randn(7, 1, 5, 5), torch.arange(7) % 3)
    return Tied(), (torch.randint(0, 5, (7, 3)), torch.arange(7) % 5)


# -- the engines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("kind", ["mlp", "conv", "tied"])
@pytest.mark.parametrize("engine", [BookKeeping, Vmapped, Looped])
def test_norms_of_blocks_and_their_sums_are_those_of_a_loop(engine: Any, kind: str, by: str) -> None:
    model, data = make(kind)
    objective, batch = Objective(model, cross_entropy), batch_of(*data)
    names, parameters = zip(*model.named_parameters(), strict=True)
    blocks = sort_names(names, by)
    rows = loop_oracle(objective, list(parameters), batch)
    squares = torch.zeros(max(blocks) + 1, batch.size, dtype=torch.float64)
    for i, row in enumerate(rows):
        for block, gradient in zip(blocks, row, strict=True):
            squares[block, i] += gradient.double().square().sum()
    found = engine().differentiate_blocks(objective, list(parameters), batch, blocks)
    torch.testing.assert_close(found.block_norms.double(), squares.sqrt(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.norms.double(), squares.sum(0).sqrt(), rtol=1e-5, atol=1e-7)
    weights = torch.rand(max(blocks) + 1, batch.size)
    for k, total in enumerate(found.weighted_sum(weights)):
        plain = sum(float(weights[blocks[k], i]) * row[k].double() for i, row in enumerate(rows))
        torch.testing.assert_close(total.double(), plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", [BookKeeping, Vmapped])
def test_a_bad_example_and_units_of_several_records(engine: Any) -> None:
    model, (x, y) = make("mlp")
    x[2] = math.nan
    objective, parameters = Objective(model, cross_entropy), list(model.parameters())
    whole = batch_of(x, y)
    found = engine().differentiate_blocks(objective, parameters, whole, [0, 0, 1, 1])
    weights = PerBlock().weigh(found.block_norms, 1.0, Draw(torch.arange(7)), None)
    assert bool((weights[:, 2] == 0).all())
    assert all(bool(torch.isfinite(total).all()) for total in found.weighted_sum(weights))
    x[2] = 0.5
    owners = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    grouped = replace(batch_of(x, y), groups=Groups(owners, 4))
    found = engine().differentiate_blocks(objective, parameters, grouped, [0, 0, 1, 1])
    rows = loop_oracle(objective, parameters, batch_of(x, y))
    for unit in range(4):
        mine = [row for row, owner in zip(rows, owners.tolist(), strict=True) if owner == unit]
        means = [sum(parts) / len(mine) for parts in zip(*mine, strict=True)]
        lengths = [math.hypot(*(float(m.norm()) for m in means[:2])), math.hypot(*(float(m.norm()) for m in means[2:]))]
        assert found.block_norms[:, unit].tolist() == pytest.approx(lengths, rel=1e-5)


def test_names_are_sorted_into_blocks_as_they_stand_in_a_model() -> None:
    names = ["wte.weight", "h.0.attn.weight", "h.0.mlp.bias", "h.1.attn.weight", "ln.weight", "ln.bias", "scale"]
    assert sort_names(names, "parameter") == list(range(7))
    assert sort_names(names, "layer") == [0, 1, 2, 3, 4, 4, 5]
    assert sort_names(names, "block") == [0, 1, 1, 2, 3, 3, 4]


# -- the step ---------------------------------------------------------------------------------------------------------


def released_sum(recipe: Recipe, model: nn.Module) -> list[Tensor]:
    """What one step without noise to speak of moves the model by, as a sum over records."""
    quiet = replace(recipe, noise_multiplier=1e-9, steps=1, batch_size=64).for_records(64)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with private(quiet, model=model, optimizer=optimizer) as run:
        list(run.steps())
    return [(old - p.detach()).double() * 64 for old, p in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("by", ["layer", "parameter"])
def test_every_block_of_every_record_is_clipped_to_its_own_bound(by: str) -> None:
    model, clip = mlp(), 0.05
    data = classification()
    rows = loop_oracle(Objective(model, cross_entropy), list(model.parameters()), batch_of(*data))
    blocks = sort_names([name for name, _ in model.named_parameters()], by)
    bound = clip / math.sqrt(max(blocks) + 1)
    expected = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
    for row in rows:
        for block in set(blocks):
            mine = [k for k, owner in enumerate(blocks) if owner == block]
            length = math.hypot(*(float(row[k].double().norm()) for k in mine))
            for k in mine:
                expected[k] += row[k].double() * min(1.0, bound / length)
    found = released_sum(recipes.blockwise(by=by, clip=clip, batch_size=64, steps=1), model)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


def test_a_loop_of_the_users_own_clips_the_same() -> None:
    torch.testing.assert_close(
        *train_in_both_loops(recipes.blockwise(adaptive=True, **COMMON).for_records(64)), rtol=1e-5, atol=1e-6
    )


def test_the_price_is_that_of_flat_clipping_adaptive_or_not() -> None:
    flat = calibrated(steps=6).price(1e-5)
    for adaptive in (False, True):
        recipe = recipes.blockwise(adaptive=adaptive, **COMMON).for_records(64)
        with private(recipe) as run:
            list(run.steps())
            charged = [event for _, event, *_ in run.run.ledger.history()]
            assert charged == [PoissonSampledDpEvent(0.25, GaussianDpEvent(1.0))] * 6
            assert run.guarantee(1e-5).epsilon == pytest.approx(flat)


# -- bounds that follow a quantile ------------------------------------------------------------------------------------


def test_votes_and_gradient_together_are_the_gaussian_that_is_charged() -> None:
    recipe = recipes.blockwise(adaptive=True, **COMMON).for_records(64)
    weighing = recipe.weighing
    assert isinstance(weighing, QuantileBlocks)
    states = recipe.start()
    weighing.find_blocks(["a.w", "b.w", "c.w"], states.weighing)
    terms = recipe.terms(0, states)
    noise = weighing.deviate(replace(terms, noise_multiplier=1.0), 3)
    together = terms.noise_multiplier**-2 + (math.sqrt(3) / 2 / noise) ** 2
    assert together == pytest.approx(1.0)
    assert 1 < terms.noise_multiplier < 1.04
    assert terms.clip == pytest.approx(recipe.clip)
    states.weighing.bounds = Bounds((0.3, 0.4, 1.2))
    assert recipe.terms(0, states).clip == pytest.approx(1.3 * recipe.clip)


def test_bounds_find_the_quantile_of_their_blocks() -> None:
    model = mlp()
    data = classification(2000, seed=3)
    rows = loop_oracle(Objective(model, cross_entropy), list(model.parameters()), batch_of(*(d[:300] for d in data)))
    blocks = [0, 0, 1, 1]
    lengths = np.array(
        [
            [math.hypot(float(r[0].norm()), float(r[1].norm())), math.hypot(float(r[2].norm()), float(r[3].norm()))]
            for r in rows
        ]
    )
    recipe = recipes.blockwise(
        adaptive=True, target=0.7, batch_size=500, steps=60, noise_multiplier=1.0, clip=0.05
    ).for_records(2000)
    frozen = torch.optim.SGD(model.parameters(), lr=1e-9)
    with private(recipe, model=model, optimizer=frozen, dataset=data) as run:
        list(run.steps())
        bounds = run.bench.states.weighing.bounds
    assert blocks == sort_names([name for name, _ in model.named_parameters()], "layer")
    shares = (lengths <= np.array(bounds.shares) * 0.05).mean(axis=0)
    assert shares == pytest.approx([0.7, 0.7], abs=0.1)


def test_bounds_are_saved_and_restored_and_nothing_else_of_them(tmp_path: Path) -> None:
    recipe = recipes.blockwise(adaptive=True, **COMMON).for_records(64)
    with private(recipe, run=tmp_path / "run") as first:
        for step in first.steps():
            if step.number == 4:
                break
        first.save()
        bounds = first.bench.states.weighing.bounds
        assert first.state_dict()["released"] == {"weighing": {"shares": bounds.shares}}
        assert bounds.shares[0] != bounds.shares[1]
    with private(recipe) as second:
        second.load(tmp_path / "run")
        assert second.bench.states.weighing.bounds == bounds
        list(second.steps())


def test_conformance_on_a_network_of_several_layers_and_a_vote_too_many_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, data = mlp(), classification(14)
    recipe = recipes.blockwise(adaptive=True, by="parameter", **COMMON)

    def check() -> Any:
        return conformance.check(
            recipe, model=model, data=data, loss=cross_entropy, price=False, thorough=False, steps=3
        )

    found = check()
    assert found.passed, found.findings
    healthy = QuantileBlocks.weigh

    def twice(self: Any, norms: Tensor, clip: float, draw: Draw, state: Any) -> Tensor:
        healthy(self, norms, clip, draw, state)
        state.votes *= 3
        return healthy(self, norms, clip, draw, state)

    monkeypatch.setattr(QuantileBlocks, "weigh", twice)
    assert "is paid for" in str(check().findings)


def test_attacks_find_no_more_than_is_charged_and_a_bound_for_each_block_is_found() -> None:
    recipe = recipes.blockwise(batch_size=4, steps=4, noise_multiplier=1.0)
    alone = (Instance("all records", lanes=128),)
    assert audit_recipe(recipe, trials=600, instances=alone, seed=1).passed

    class Whole(PerBlock):
        def weigh(self, norms: Tensor, clip: float, draw: Draw, state: Any) -> Tensor:
            return super().weigh(norms, 3 * clip, draw, state)

    with pytest.raises(AuditFailed):
        audit_recipe(replace(recipe, weighing=Whole()), trials=600, instances=alone, seed=1)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_has_no_proof_or_no_meaning_is_refused_in_one_line() -> None:
    fixed, adaptive = (recipes.blockwise(adaptive=each, **COMMON).for_records(64) for each in (False, True))
    for recipe, change, said in (
        (fixed, {"norms": recipes.jl(projections=24).norms}, r"norms=Exact\(\)"),
        (adaptive, {"selection": recipes.dpsur().selection}, "use Always"),
        (adaptive, {"clip_schedule": SensitivityDecay(2.0)}, "move by themselves"),
        (adaptive, {"noise": recipes.banded(bands=1).noise}, "no proof"),
    ):
        with pytest.raises(InvalidInput, match=said):
            replace(recipe, **change)
    for wrong, said in (
        ({"by": "row"}, "by='row' must be one of"),
        ({"adaptive": True, "target": 1.0}, "target=1.0 must lie"),
        ({"adaptive": True, "rate": 0.0}, "rate=0.0 must be > 0"),
        ({"adaptive": True, "vote_noise": -1.0}, "vote_noise=-1.0 must be > 0"),
    ):
        with pytest.raises(InvalidInput, match=said):
            recipes.blockwise(**wrong)
    with pytest.raises(InvalidInput, match="cannot be used by a server"):
        fixed.require("federated")
    with pytest.raises(InvalidInput, match="needs the norms of blocks"):
        fixed.weighing.weights(torch.ones(3), 1.0, Draw(torch.arange(3)))
    loud = recipes.blockwise(adaptive=True, vote_noise=0.1, **COMMON).for_records(64)
    with private(loud) as run:
        with pytest.raises(InvalidInput, match="would spend the budget"):
            run.step()
        assert len(run.run.ledger) == 0
