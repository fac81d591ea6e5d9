"""Which way projections are computed, and what is refused."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.errors import InvalidInput, UnsupportedModel
from sordino.gradients.engine import Objective
from sordino.gradients.projected import Projected
from sordino.lab import networks
from sordino.noise import Seeded
from tests.gradients.test_projected import engine, setting
from tests.helpers import batch_of, cross_entropy, mlp


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
        Projected(3, Seeded(0)).differentiate(objective, parameters, batch)
    with pytest.raises(InvalidInput, match="vmap"):
        Projected(3, Seeded(0), "vmap")
    with pytest.raises(UnsupportedModel, match="bfloat16"):
        engine(3).differentiate(objective, list(mlp().bfloat16().parameters()), batch)
    mean = Objective(mlp(), lambda m, data: cross_entropy(m, data).mean())
    with pytest.raises(UnsupportedModel, match="reduction"):
        engine(3, way="jvp").differentiate(mean, list(mean.model.parameters()), batch)
    loose = Objective(mlp(), lambda m, data: data[0].sum(1))
    found = engine(3).differentiate(loose, list(loose.model.parameters()), batch)
    with pytest.raises(UnsupportedModel, match="does not depend"):
        found.weighted_sum(torch.ones(6))
