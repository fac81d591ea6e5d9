"""`fix` replaces what mixes examples or remembers data, and leaves everything else alone."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sordino.errors import UnsupportedModel
from sordino.gradients.engine import Batch, Objective
from sordino.validation import check
from sordino.validation.fixing import fix, plan


def network(layer: nn.Module, channels: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, channels, 3), layer, nn.Flatten(), nn.Linear(16 * channels, 3))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def objections(model: nn.Module) -> int:
    x, y = torch.randn(6, 2, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 3

    def fetch(indices: Any) -> Batch:
        rows = list(indices)
        return Batch((x[rows], y[rows]), len(rows), lambda i: (x[[rows[i]]], y[[rows[i]]]))

    return len(check(Objective(model, loss), list(model.parameters()), fetch, 6))


BROKEN = {
    "batchnorm": nn.BatchNorm2d(8),
    "without affine": nn.BatchNorm2d(8, affine=False),
    "without statistics": nn.BatchNorm2d(8, track_running_stats=False),
    "synchronised": nn.SyncBatchNorm(8),
    "instance norm with statistics": nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "nested": nn.Sequential(nn.Sequential(nn.BatchNorm2d(8)), nn.ReLU()),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_the_check_refuses_passes_after_the_fix(name: str) -> None:
    model = network(copy.deepcopy(BROKEN[name]))
    before = copy.deepcopy(model.state_dict())
    assert objections(model) > 0
    fixed = fix(model)
    assert objections(fixed) == 0
    assert objections(model) > 0, "the original was changed"
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("layer", "groups"),
    [
        (nn.BatchNorm2d(64), 32),
        (nn.BatchNorm2d(8), 8),
        (nn.BatchNorm2d(48), 24),
        (nn.BatchNorm2d(37), 1),
        (nn.BatchNorm3d(31), 31),
        (nn.BatchNorm1d(64), 8),
        (nn.BatchNorm1d(512), 32),
        (nn.BatchNorm1d(10), 1),
        (nn.SyncBatchNorm(4), 1),
    ],
)
def test_groups_divide_the_channels(layer: nn.Module, groups: int) -> None:
    norm = fix(layer)
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == groups


@pytest.mark.parametrize("channels", range(2, 40))
def test_a_fixed_batchnorm1d_keeps_information_without_space(channels: int) -> None:
    """A group of one value would always be zero, and the layers before would learn nothing."""
    x = torch.randn(5, channels, generator=torch.Generator().manual_seed(channels))
    assert fix(nn.BatchNorm1d(channels))(x).abs().max() > 0.5


def test_affine_weights_dtype_flags_and_epsilon_survive() -> None:
    layer = nn.BatchNorm2d(8, eps=1e-3, dtype=torch.float64).eval()
    with torch.no_grad():
        layer.weight.uniform_(1, 2)
        layer.bias.uniform_(1, 2)
    layer.bias.requires_grad_(False)
    norm = fix(layer)
    assert isinstance(norm, nn.GroupNorm)
    assert torch.equal(norm.weight, layer.weight)
    assert torch.equal(norm.bias, layer.bias)
    assert norm.weight is not layer.weight
    assert (norm.weight.requires_grad, norm.bias.requires_grad, norm.training, norm.eps) == (True, False, False, 1e-3)


def test_a_shared_layer_stays_shared_and_tied_weights_stay_tied() -> None:
    shared, other = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
    other.weight = shared.weight
    fixed = fix(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": other}))
    assert isinstance(fixed, nn.ModuleDict)
    assert isinstance(fixed["a"], nn.GroupNorm)
    assert fixed["b"][0] is fixed["a"]
    assert fixed["c"].weight is fixed["a"].weight


def test_what_is_fine_is_left_alone() -> None:
    model = network(nn.Sequential(nn.GroupNorm(4, 8), nn.InstanceNorm2d(8), nn.Dropout(), nn.LayerNorm(4)))
    assert plan(model) == []
    assert str(fix(model)) == str(model)


def test_a_batchnorm_frozen_inside_a_training_model_stays() -> None:
    model = network(nn.BatchNorm2d(8))
    model[1].eval()
    assert plan(model) == []
    assert objections(model) == 0
    assert len(plan(model.eval())) == 1, "a model that is wholly in eval mode will be trained later"


def test_changes_are_planned_and_logged_line_by_line(caplog: pytest.LogCaptureFixture) -> None:
    model = network(nn.Sequential(nn.BatchNorm2d(8), nn.InstanceNorm2d(8, track_running_stats=True)))
    assert [change.where for change in plan(model)] == ["1.0", "1.1"]
    with caplog.at_level(logging.INFO, logger="sordino"):
        fix(model)
    assert [record.message for record in caplog.records] == [str(change) for change in plan(model)]
    assert "BatchNorm2d" in caplog.records[0].message
    assert "GroupNorm(8, 8" in caplog.records[0].message


def test_gradients_reach_the_fixed_copy_only() -> None:
    model = network(nn.BatchNorm2d(8))
    fixed = fix(model)
    loss(fixed, (torch.randn(3, 2, 6, 6), torch.zeros(3).long())).sum().backward()
    assert all(p.grad is not None for p in fixed.parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("layer", [nn.LazyBatchNorm2d(), nn.BatchNorm1d(1)])
def test_what_cannot_be_fixed_says_so(layer: nn.Module) -> None:
    with pytest.raises(UnsupportedModel, match="BatchNorm"):
        fix(nn.Sequential(layer))


class Fused(nn.BatchNorm2d):
    """BatchNorm and an activation as one module."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.act(self.drop(super().forward(x)))
        return output


class Doubled(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("seen", [True, False], ids=["statistics", "no statistics"])
def test_a_fused_activation_stays(seen: bool) -> None:
    layer = Fused(8)
    if not seen:
        layer.running_mean = layer.running_var = None
    model = network(layer)
    state = torch.get_rng_state()
    fixed = fix(model)
    assert torch.equal(state, torch.get_rng_state())
    assert objections(fixed) == 0
    x = torch.randn(2, 8, 5, 5)
    bare = nn.GroupNorm(8, 8)
    torch.testing.assert_close(fixed[1](x), functional.silu(bare(x)))
    assert fixed[1].weight.shape == (8,)
    assert set(fixed.state_dict()) == {
        name for name in model.state_dict() if "running" not in name and "num_" not in name
    }


def test_a_batchnorm_that_does_more_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Doubled '1' does more than BatchNorm"):
        fix(network(Doubled(8)))
