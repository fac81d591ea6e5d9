"""Norms by random projections: their law, their two ways, what must hold of the sum, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.errors import InvalidInput, UnsupportedModel
from sordino.gradients import projected
from sordino.gradients.engine import Batch, Objective
from sordino.gradients.projected import Coins, ProjectedEngine
from sordino.lab import networks
from sordino.noise import Seeded
from tests.helpers import batch_of, classification, cross_entropy, loop_oracle, mlp, oracle_norms, oracle_sum

WAYS = ["jvp", "double_vjp"]


def engine(projections: int, *, way: str = "auto", seed: int = 0) -> ProjectedEngine:
    made = ProjectedEngine(projections, Seeded(seed), way)
    made.renew()
    return made


def setting(model: nn.Module | None = None, records: int = 6) -> tuple[Objective, list[nn.Parameter], Batch]:
    model = model or mlp()
    objective = Objective(model, cross_entropy)
    return objective, [p for p in model.parameters() if p.requires_grad], batch_of(*classification(records))


def length(tensors: list[Tensor]) -> float:
    return float(torch.sqrt(sum(t.double().square().sum() for t in tensors)))


def relative_squares(projections: int, draws: int) -> list[float]:
    """r·M²/‖g‖² of one record, over fresh projections."""
    objective, parameters, batch = setting(records=1)
    exact = oracle_norms(loop_oracle(objective, parameters, batch))
    made = ProjectedEngine(projections, Seeded(7), "jvp")
    found = []
    for _ in range(draws):
        made.renew()
        estimate = made.differentiate(objective, parameters, batch).norms
        found.append(float(projections * (estimate / exact).square()))
    return found


def test_the_estimate_follows_chi_square() -> None:
    """DP-SGD-JL, Prop. 2.1; and the test notices one degree of freedom more or less."""
    found = relative_squares(projections=4, draws=500)
    assert stats.kstest(found, stats.chi2(4).cdf).pvalue > 0.01
    for wrong in (3, 5):
        assert stats.kstest(found, stats.chi2(wrong).cdf).pvalue < 1e-6


def test_estimates_approach_exact_norms_as_projections_grow() -> None:
    objective, parameters, batch = setting(records=8)
    exact = oracle_norms(loop_oracle(objective, parameters, batch))
    errors = []
    for projections in (4, 64, 1024):
        norms = engine(projections, way="double_vjp").differentiate(objective, parameters, batch).norms
        errors.append(float((norms / exact - 1).abs().max()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 4 / (2 * 1024) ** 0.5


def test_clipping_approaches_exact_clipping() -> None:
    objective, parameters, batch = setting(records=8)
    rows = loop_oracle(objective, parameters, batch)
    exact = oracle_sum(rows, (0.5 / oracle_norms(rows)).clamp(max=1))
    found = engine(4000, way="double_vjp").differentiate(objective, parameters, batch)
    clipped = found.weighted_sum((0.5 / found.norms).clamp(max=1))
    assert length([a - b for a, b in zip(clipped, exact, strict=True)]) < 0.03 * length(exact)


@pytest.mark.parametrize(
    "model", [mlp, lambda: networks.digits_cnn(), lambda: networks.transformer(50, 8, 16, 2, 1, classes=3)]
)
def test_both_ways_use_the_same_projections(model: Any) -> None:
    torch.manual_seed(0)
    built = model()
    x, y = classification(5)
    inputs = {"Transformer": torch.randint(1, 50, (5, 8))}.get(type(built).__name__, x)
    if len(built._modules) > 5:
        inputs = torch.randn(5, 1, 8, 8)
    objective, parameters = Objective(built, cross_entropy), list(built.parameters())
    norms = [engine(3, way=way).differentiate(objective, parameters, batch_of(inputs, y)).norms for way in WAYS]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-6)
    other = engine(3, way="jvp", seed=1).differentiate(objective, parameters, batch_of(inputs, y)).norms
    assert (other / norms[0] - 1).abs().max() > 0.01


@pytest.mark.parametrize("way", WAYS)
def test_the_sum_is_that_of_the_loop(way: str) -> None:
    objective, parameters, batch = setting()
    weights = torch.tensor([0.3, 1.0, 0.0, 0.7, 0.0, 0.1])
    found = engine(2, way=way).differentiate(objective, parameters, batch).weighted_sum(weights)
    wanted = oracle_sum(loop_oracle(objective, parameters, batch), weights)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-7)


def test_a_draw_has_one_set_of_projections_whatever_its_microbatches() -> None:
    objective, parameters, (x, y) = *setting()[:2], classification(6)
    made = engine(3)
    whole = made.differentiate(objective, parameters, batch_of(x, y)).norms
    parts = [made.differentiate(objective, parameters, batch_of(x[i : i + 2], y[i : i + 2])).norms for i in (0, 2, 4)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=0)
    made.renew()
    fresh = made.differentiate(objective, parameters, batch_of(x, y)).norms
    assert (fresh / whole - 1).abs().min() > 1e-4


def test_projections_that_are_too_large_to_keep_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, parameters, batch = setting()
    kept = engine(3).differentiate(objective, parameters, batch).norms
    monkeypatch.setattr(projected, "MEMORY_TARGET", 0)
    made = engine(3)
    for _ in range(2):
        assert torch.equal(made.differentiate(objective, parameters, batch).norms, kept)


# -- dropout --------------------------------------------------------------------------------------------------------


def dropping() -> tuple[Objective, list[nn.Parameter], Batch]:
    model = nn.Sequential(mlp()[0], nn.Tanh(), nn.Dropout(0.5), mlp()[2])
    return setting(model)


def gap_between_norm_and_sum(way: str) -> float:
    """How far the estimated norm of a record is from the length of what it contributes."""
    objective, parameters, batch = dropping()
    torch.manual_seed(3)
    found = engine(600, way=way).differentiate(objective, parameters, batch)
    found.weighted_sum(torch.ones(batch.size))  # refuses a model whose records all disagree
    lengths = torch.tensor([length(found.weighted_sum(row)) for row in torch.eye(batch.size)])
    return float((found.norms / lengths - 1).abs().max())


@pytest.mark.parametrize("way", WAYS)
def test_norm_and_sum_are_of_the_same_gradient_under_dropout(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gap_between_norm_and_sum(way) < 0.1
    monkeypatch.setattr(Coins, "rewind", lambda self: None)
    with pytest.raises(UnsupportedModel, match="not those of the summed gradients"):
        gap_between_norm_and_sum(way)


def test_a_row_that_is_left_out_does_not_move_the_masks_of_others() -> None:
    objective, parameters, batch = dropping()
    torch.manual_seed(3)
    found = engine(2).differentiate(objective, parameters, batch)
    alone = found.weighted_sum(torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0]))
    both = found.weighted_sum(torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0]))
    first = found.weighted_sum(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    for a, b, c in zip(alone, first, both, strict=True):
        torch.testing.assert_close(a + b, c)


def test_the_next_batch_drops_other_units() -> None:
    objective, parameters, batch = dropping()
    torch.manual_seed(3)
    made = engine(2)
    sums = [made.differentiate(objective, parameters, batch).weighted_sum(torch.ones(6)) for _ in range(2)]
    assert length([a - b for a, b in zip(*sums, strict=True)]) > 0.01


# -- law 6: total functions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_record_has_no_finite_norm_and_weight_zero_removes_it(way: str, bad: float) -> None:
    objective, parameters, (x, y) = *setting()[:2], classification(6)
    x[2] = bad
    found = engine(3, way=way).differentiate(objective, parameters, batch_of(x, y))
    assert torch.isfinite(found.norms).tolist() == [True, True, False, True, True, True]
    weights = torch.isfinite(found.norms).float()
    kept = [0, 1, 3, 4, 5]
    wanted = oracle_sum(loop_oracle(objective, parameters, batch_of(x[kept], y[kept])), torch.ones(5))
    for a, b in zip(found.weighted_sum(weights), wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-7)


def test_only_bad_records_sum_to_zero() -> None:
    objective, parameters, (x, y) = *setting()[:2], classification(2)
    found = engine(3).differentiate(objective, parameters, batch_of(x * float("nan"), y))
    assert all(not g.any() for g in found.weighted_sum(torch.zeros(2)))


class NaNBackwards(nn.Module):
    """Finite in forward mode; the backward pass multiplies an infinite slope by a zero where the input is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        return torch.where(x > 0, scaled.sqrt(), torch.zeros(()))


def test_a_record_that_is_bad_only_backwards_harms_nobody_else() -> None:
    model = NaNBackwards()
    objective = Objective(model, lambda m, batch: m(batch[0]).sum(1))
    parameters = list(model.parameters())
    x = torch.tensor([[1.0, 4.0, 9.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    found = engine(3, way="jvp").differentiate(objective, parameters, batch_of(x, torch.zeros(3)))
    assert torch.isfinite(found.norms).all()  # where() takes no tangent from the branch that it does not use
    (total,) = found.weighted_sum(torch.ones(3))
    torch.testing.assert_close(total, x[[0, 2]].sqrt().sum(0) / 2)


def test_unused_frozen_and_tied_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.unused = nn.Linear(6, 6), nn.Linear(2, 2)
            self.out = nn.Linear(6, 3)
            self.tied = nn.Linear(6, 6)
            self.tied.weight = self.inside.weight
            self.out.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.tied(self.inside(x).tanh()))

    torch.manual_seed(0)
    objective, parameters, batch = setting(Odd())
    rows = loop_oracle(objective, parameters, batch)
    for way in WAYS:
        found = engine(800, way=way).differentiate(objective, parameters, batch)
        torch.testing.assert_close(found.norms.double(), oracle_norms(rows), rtol=0.1, atol=0)
        for a, b in zip(found.weighted_sum(torch.ones(6)), oracle_sum(rows, torch.ones(6)), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def test_batches_that_cannot_be_sliced_are_taken_one_by_one() -> None:
    objective, parameters, (x, y) = *setting()[:2], classification(4)
    ragged = Objective(
        objective.model, lambda m, data: cross_entropy(m, (torch.stack(data["x"]), torch.stack(data["y"])))
    )
    odd = Batch({"x": list(x), "y": list(y), "note": "text"}, 4, lambda i: {"x": [x[i]], "y": [y[i]]})
    assert not odd.sliceable
    made = engine(3)
    plain, found = (
        made.differentiate(objective, parameters, batch_of(x, y)),
        made.differentiate(ragged, parameters, odd),
    )
    torch.testing.assert_close(found.norms, plain.norms)
    weights = torch.tensor([1.0, 0.0, 0.5, 0.2])
    for a, b in zip(found.weighted_sum(weights), plain.weighted_sum(weights), strict=True):
        torch.testing.assert_close(a, b)


def test_a_recurrent_network_goes_by_double_vjp_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = networks.names_lstm(vocabulary=30, classes=3)
    objective, parameters = Objective(model, cross_entropy), list(model.parameters())
    batch = batch_of(torch.randint(1, 30, (4, 5)), torch.randint(0, 3, (4,)))
    made = engine(2)
    with caplog.at_level(logging.INFO, logger="sordino"):
        for _ in range(2):
            automatic = made.differentiate(objective, parameters, batch).norms
    assert len(caplog.records) == 1
    assert "double_vjp" in caplog.text
    chosen = engine(2, way="double_vjp").differentiate(objective, parameters, batch).norms
    assert torch.equal(automatic, chosen)


def test_fused_attention_is_switched_off_inside_and_restored() -> None:
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.inputs(x).view(4, 1, 3, 24).chunk(3, dim=-1)
            return F.scaled_dot_product_attention(q, k, v).mean((1, 2))

    torch.manual_seed(0)
    model = Attention()
    objective = Objective(model, cross_entropy)
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    found = engine(2, way="jvp").differentiate(objective, list(model.parameters()), batch_of(x, torch.arange(4)))
    found.weighted_sum(torch.ones(4))
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()) == before
    assert before == (True, True)


def test_a_model_without_either_rule_is_refused() -> None:
    model = nn.Sequential(nn.EmbeddingBag(30, 6), nn.Linear(6, 3))
    batch = batch_of(torch.randint(0, 30, (4, 5)), torch.randint(0, 3, (4,)))
    with pytest.raises(UnsupportedModel, match="use exact norms"):
        engine(2).differentiate(Objective(model, cross_entropy), list(model.parameters()), batch)


def test_refusals() -> None:
    objective, parameters, batch = setting()
    with pytest.raises(InvalidInput, match="renew"):
        ProjectedEngine(3, Seeded(0)).differentiate(objective, parameters, batch)
    with pytest.raises(InvalidInput, match="vmap"):
        ProjectedEngine(3, Seeded(0), "vmap")
    with pytest.raises(UnsupportedModel, match="bfloat16"):
        engine(3).differentiate(objective, list(mlp().bfloat16().parameters()), batch)
    mean = Objective(mlp(), lambda m, data: cross_entropy(m, data).mean())
    with pytest.raises(UnsupportedModel, match="reduction"):
        engine(3, way="jvp").differentiate(mean, list(mean.model.parameters()), batch)
    loose = Objective(mlp(), lambda m, data: data[0].sum(1))
    for way in ("jvp", "double_vjp"):
        found = engine(3, way=way).differentiate(loose, list(loose.model.parameters()), batch)
        assert torch.equal(found.norms, torch.zeros(6)), "a record that is masked out has a zero gradient"
        assert all(not total.any() for total in found.weighted_sum(torch.ones(6)))
