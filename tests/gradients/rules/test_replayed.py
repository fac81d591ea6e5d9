"""Operations of all kinds on a parameter: what belongs to an example is never decided by a length."""

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
    """A model of parameters p, q and constants c, r that are all as long as the batch is, and of a number s."""

    def __init__(self, forward: Forward, zero: bool) -> None:
        super().__init__()
        self._run = forward
        self.p, self.q = nn.Parameter(torch.randn(B)), nn.Parameter(torch.randn(B, B))
        self.s = nn.Parameter(torch.tensor(0.4))
        self.register_buffer("c", torch.randn(B))
        self.register_buffer("r", torch.rand(B, B) + 0.5)
        self.register_buffer("m", torch.rand(B) > 0.4)
        if zero:
            nn.init.zeros_(self.p)
            nn.init.zeros_(self.q)
            nn.init.zeros_(self.s)

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
    "masked_fill by a number": lambda m, x: x.masked_fill(x > 0.3, m.s),
    "where a number": lambda m, x: torch.where(x > 0.3, m.s, x),
    "power by a number": lambda m, x: (x.abs() + 1).pow(m.s),
    "power of a number": lambda m, x: (m.s + 2) ** x,
    "clamp by a number": lambda m, x: torch.clamp(x, min=m.s),
    "lerp by a number": lambda m, x: torch.lerp(x, x.square(), m.s),
    "maximum with a number": lambda m, x: torch.max(x, m.s),
    "quotient of a number": lambda m, x: 1 / (m.s + x.square() + 1) + 2.0 / (x * 0 + m.s + 1),
    "lerp between parameters": lambda m, x: torch.lerp(m.p, m.q[0], x),
    "folded by a number": lambda m, x: (x.reshape(-1) * m.s).reshape(len(x), -1),
    "folded rows": lambda m, x: (x[:, :, None] * m.r).reshape(-1, B).mul(m.p).exp().pow(m.s).reshape(len(x), -1),
    "in place": lambda m, x: (x * m.p).mul_(m.q[0]).div_(m.p.exp()).sub_(m.c).add_(m.s).clamp_(min=m.q[1] - 9),
    "masked_fill in place": lambda m, x: (x * m.p).masked_fill_(x > 0, m.s),
    "in place on what was expanded": lambda m, x: (m.p.expand(len(x), B) * 1).add_(x).mul_(m.s),
    "one slope": lambda m, x: F.prelu(x, m.p[:1]),
    "repeated rows": lambda m, x: (x.reshape(-1, 1) * m.q.repeat(len(x), 1)).reshape(len(x), -1),
    "repeated columns": lambda m, x: x.repeat(1, 2) * m.p.repeat(2),
    "einsum, by entries": lambda m, x: torch.einsum("bi,ij->bij", x, m.q),
    "einsum, dots": lambda m, x: torch.einsum("...i,ij->...j", x, m.q),
    "einsum, examples last": lambda m, x: torch.einsum("ib,ij->jb", x.t(), m.q).t(),
    "einsum, twice the same": lambda m, x: torch.einsum("bi,ij,jk->bk", x, m.q, m.q),
    "einsum, diagonal": lambda m, x: torch.einsum("bi,ii->bi", x, m.q),
    "einsum, folded": lambda m, x: torch.einsum("ai,ij->aj", torch.cat([x, x + 1], 1).reshape(-1, B), m.q).reshape(
        len(x), -1
    ),
    "einsum, folded heads": lambda m, x: torch.einsum(
        "ahi,hij->ahj", torch.cat([x, x + 1, x, x], 1).reshape(-1, 2, B), torch.stack([m.q, m.q.t()])
    ).reshape(len(x), -1),
    "matmul from the left": lambda m, x: (m.q @ x[:, :, None]).squeeze(2),
    "matmul of heads": lambda m, x: (x[:, None, None] @ torch.stack([m.q, m.q * m.p])).flatten(1),
    "matmul of one head": lambda m, x: (x[:, None, None].expand(-1, 2, 1, B) @ m.q[None, None]).flatten(1),
    "bmm of one matrix": lambda m, x: torch.bmm(x[:, None], m.q.expand(len(x), B, B)).squeeze(1),
    "bilinear with bias": lambda m, x: F.bilinear(x, x.tanh(), torch.stack([m.q, m.q.t()]), m.p[:2]),
    "index by a number": lambda m, x: x * m.q[(x * 0).sum().long() + 2],
    "index from the end": lambda m, x: m.q[x.abs().long() % B - B].sum(2),
    "index_select": lambda m, x: torch.index_select(m.q, 0, x[:, 0].abs().long() % B),
    "dtype of data": lambda m, x: x * m.p.type_as(x) + m.s.to(x),
    "shape of data": lambda m, x: x * m.p.view_as(x[0]) + x.type_as(m.p) * m.q.reshape_as(m.r)[0],
    "learned positions": lambda m, x: F.scaled_dot_product_attention(
        x[:, :, None], 2 * x[:, :, None], x[:, :, None] + m.p[:, None], m.q
    ).flatten(1),
    "cosine to prototypes": lambda m, x: F.cosine_similarity(x[:, None], (m.q + m.r)[None], dim=2),
    "penalty": lambda m, x: x * m.p + m.q.square().sum() + (m.p * m.q).sum(),
    "penalty on a weight": lambda m, x: F.linear(x, m.q) + m.q.square().sum() + m.q.abs().mean() * x[:, :1],
    "penalty on a table": lambda m, x: F.embedding(x.abs().long() % B, m.q).sum(2) + m.q.pow(3).sum(),
    "weights of tasks": lambda m, x: (-m.p[0]).exp() * x + m.p[0] + (-m.p[1]).exp() * x.square() + m.p[1],
    "normalised weight": lambda m, x: F.linear(x, m.q / (m.q.norm(dim=1, keepdim=True) + 1)) * m.q.norm(),
    "standardised weight": lambda m, x: F.linear(x, F.batch_norm(m.q[None], None, None, training=True)[0]),
    "weight that a network makes": lambda m, x: F.linear(x, F.linear(m.r, m.q, m.p).tanh()),
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


def test_a_weight_that_is_made_goes_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one backward pass for each example."""
    torch.manual_seed(0)
    model, size = nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), 40
    engine, objective = BookKeeping(), Objective(model, cube)
    batch = batch_of(torch.randn(size, 6), size)
    passes: list[object] = []
    real = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kwargs: passes.append(args) or real(*args, **kwargs))
    found = engine.differentiate(objective, list(model.parameters()), batch)
    assert 1 <= len(passes) <= 4
    monkeypatch.undo()
    assert_matches(found, singles(model, cube, batch), 1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_example_does_not_reach_what_is_made(bad: float) -> None:
    torch.manual_seed(0)
    model = Square(lambda m, x: F.linear(x, m.q / (m.q.norm() + 1)) * m.s + m.q.square().sum(), False).double()
    x = torch.randn(B, B, dtype=torch.float64)
    x[2, 1] = bad
    batch = batch_of(x, B)
    parameters = list(model.parameters())
    found = BookKeeping().differentiate(Objective(model, cube), parameters, batch)
    expected = singles(model, cube, batch)
    good = [0, 1, 3, 4]
    norms = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in expected])
    torch.testing.assert_close(found.norms[good], norms[good])
    assert not torch.isfinite(found.norms[2])
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    for index, total in enumerate(found.weighted_sum(weights)):
        torch.testing.assert_close(total, sum(weights[i] * expected[i][index] for i in good))
