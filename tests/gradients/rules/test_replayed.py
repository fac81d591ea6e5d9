"""Operations without a rule: what belongs to an example is decided by where it came from, never by a length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.engine import Objective
from tests.gradients.oracle import assert_matches, batch_of, singles

B = 5
"""The batch, every other dimension, every constant and every parameter have this length."""

Forward = Callable[[Any, Tensor], Tensor]


class Square(nn.Module):
    """A model of parameters p, q and constants c, r that are all as long as the batch is."""

    def __init__(self, forward: Forward, zero: bool) -> None:
        super().__init__()
        self._run = forward
        self.p, self.q = nn.Parameter(torch.randn(B)), nn.Parameter(torch.randn(B, B))
        self.register_buffer("c", torch.randn(B))
        self.register_buffer("r", torch.rand(B, B) + 0.5)
        self.register_buffer("m", torch.rand(B) > 0.4)
        if zero:
            nn.init.zeros_(self.p)
            nn.init.zeros_(self.q)

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


OPERATIONS: dict[str, Forward] = {
    "addcmul": lambda m, x: torch.addcmul(x, m.p, m.c),
    "addcmul of data": lambda m, x: torch.addcmul(x, m.p, x),
    "addcmul of a matrix": lambda m, x: torch.addcmul(x, m.p, m.r[0]),
    "addcdiv": lambda m, x: torch.addcdiv(x, m.p, m.r[1]),
    "lerp": lambda m, x: torch.lerp(x, m.p, m.c),
    "lerp by a parameter": lambda m, x: torch.lerp(x, m.c, m.p),
    "where": lambda m, x: torch.where(m.m, m.p, x),
    "where by data": lambda m, x: torch.where(x > 0, m.p, m.c),
    "maximum": lambda m, x: torch.maximum(x, m.p),
    "atan2": lambda m, x: torch.atan2(m.p, x),
    "hypot": lambda m, x: torch.hypot(m.p + 1, x),
    "xlogy": lambda m, x: torch.xlogy(m.p, x.abs() + 1),
    "einsum of constants": lambda m, x: torch.einsum("bi,ij,j->bj", x, m.q, m.c),
    "einsum, transposed": lambda m, x: torch.einsum("ib,ij->bj", x.t(), m.q),
    "einsum, quadratic": lambda m, x: torch.einsum("bi,ij,bj->b", x, m.q, x).unsqueeze(1),
    "einsum, outer": lambda m, x: torch.einsum("bi,j->bij", x, m.p),
    "baddbmm": lambda m, x: torch.baddbmm(x.unsqueeze(1), m.r.expand(B, B, B)[: len(x)], m.q.expand(len(x), B, B)),
    "addmv": lambda m, x: torch.addmv(m.c[: len(x)] * 0, x, m.p).unsqueeze(1),
    "bilinear": lambda m, x: F.bilinear(x, x, m.q.unsqueeze(0)),
    "kron": lambda m, x: torch.stack([torch.kron(row, m.p) for row in x]),
    "cdist": lambda m, x: torch.cdist(x, m.q + m.r).square(),
    "cosine_similarity": lambda m, x: F.cosine_similarity(x, m.p + m.r[2], dim=-1).unsqueeze(1),
    "prelu": lambda m, x: F.prelu(x, m.p),
    "outer": lambda m, x: torch.stack([torch.outer(row, m.p) for row in x]),
    "tensordot": lambda m, x: torch.tensordot(x, m.q, dims=([1], [0])),
    "index of a parameter": lambda m, x: m.q[x.abs().long() % B].sum(2),
    "gather of a parameter": lambda m, x: m.p.expand_as(x).gather(1, x.abs().long() % B),
    "scatter": lambda m, x: torch.scatter_add(x, 1, x.abs().long() % B, m.q[: len(x)] * 0 + m.p),
    "cumsum": lambda m, x: (x * m.p).cumsum(1) + torch.cumsum(m.p, 0),
    "softmax attention": lambda m, x: F.scaled_dot_product_attention(x[:, None], m.q[None], m.r[None])[:, 0],
    "cross": lambda m, x: torch.linalg.cross(x[:, :3], (m.p + m.c)[None, :3]),
    "dist": lambda m, x: (x - m.p).norm(dim=1, keepdim=True) * (1 + m.c),
    "clamp": lambda m, x: torch.clamp(x, m.p - 1, m.p + m.r[0]),
    "fmod of data": lambda m, x: torch.addcmul(m.p, x, m.c),
    "pow": lambda m, x: torch.pow(x.abs() + 1, m.p),
    "copysign": lambda m, x: torch.copysign(m.p + 1, x),
    "sequence first": lambda m, x: torch.addcmul(x.t(), m.p[:, None], m.c[:, None]).t(),
    "folded": lambda m, x: torch.addcmul(x.reshape(-1, 1), m.p[:1], m.c[:1]).reshape(len(x), -1),
}
"""Every one works on a single example, too: that is the oracle."""


def cube(model: nn.Module, x: Tensor) -> Tensor:
    """Gradients that differ between examples, positions and signs."""
    output = model(x).flatten(1)
    return (output * torch.linspace(-1, 2, output.shape[1], dtype=x.dtype)).sum(1) + output.pow(2).sum(1) / 2


@pytest.mark.parametrize("zero", [True, False], ids=["zero", "random"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_lengths_that_coincide(name: str, zero: bool) -> None:
    torch.manual_seed(3)
    model = Square(OPERATIONS[name], zero).double()
    engine, parameters = BookKeeping(), list(model.parameters())
    for size in (B, 1, 2, B):
        batch = batch_of(torch.randn(size, B, dtype=torch.float64), size)
        found = engine.differentiate(Objective(model, cube), parameters, batch)
        assert_matches(found, singles(model, cube, batch), 1e-9)
