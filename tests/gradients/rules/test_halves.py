"""Products of bfloat16 factors: what is rounded, what is not, and that the bound holds for the gradients summed.

Every test runs as on a processor that multiplies bfloat16 numbers and as on one that does not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.engine import Objective
from sordino.gradients.rules import halves
from sordino.gradients.rules.conv import Convolved, Geometry
from sordino.gradients.rules.halves import HALF, list_pieces, multiplying_halves, sum_halves
from sordino.gradients.rules.kernels import multiply
from sordino.gradients.rules.linear import Outer, Way
from tests.gradients.oracle import batch_of

SIZE, ROWS, INPUTS, OUTPUTS = 5, 48, 24, 20
UNIT = 2**-8
"""Between a bfloat16 number and the next."""


@pytest.fixture(autouse=True, params=[True, False], ids=["with instructions", "without"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(halves, "has_instructions", lambda: request.param)
    return bool(request.param)


def plain() -> tuple[Tensor, Tensor]:
    return torch.randn(SIZE, ROWS, INPUTS), torch.randn(SIZE, ROWS, OUTPUTS)


def cancelling() -> tuple[Tensor, Tensor]:
    """Rows of one direction and of alternating signs: a hundredth of the terms is left."""
    x = torch.randn(SIZE, 1, INPUTS) + torch.randn(SIZE, ROWS, INPUTS) / 64
    return x, torch.tensor([1.0, -1.0]).repeat(ROWS // 2)[:, None].expand(SIZE, ROWS, OUTPUTS).contiguous()


def of_all_sizes() -> tuple[Tensor, Tensor]:
    x, g = plain()
    sizes = 10.0 ** torch.linspace(-9, 9, SIZE)
    return x * sizes[:, None, None], g * 10.0 ** torch.linspace(-3, 3, ROWS)[:, None]


def below_the_middle() -> tuple[Tensor, Tensor]:
    """Every entry is 257 - 1/64, just under the middle between two numbers: all of it is rounded down."""
    x = torch.zeros(SIZE, ROWS, INPUTS)
    x[:, :3] = torch.tensor([256.0, 1.0, -1 / 64])[:, None]
    return x, torch.ones(SIZE, ROWS, OUTPUTS)


FACTORS = {"plain": plain, "cancelling": cancelling, "of all sizes": of_all_sizes, "below the middle": below_the_middle}


def factors(kind: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, g = FACTORS[kind]()
    return x.to(HALF), g.to(HALF)


def contributions(kept: Outer, norms: Tensor) -> Tensor:
    """What each record alone adds to the sum, its weight one over its measured norm."""
    alone = torch.eye(kept.size) / norms.clamp_min(1e-30)
    return torch.stack([kept.weighted_sum(weights).double().norm() for weights in alone])


@pytest.mark.parametrize("way", list(Way), ids=lambda way: way.name)
@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_gradient_that_is_measured_is_summed(kind: str, way: Way, transposed: bool, processor: bool) -> None:
    """No contribution is longer than its norm said, and norms and sums are those of a float64 loop."""
    x, g = factors(kind)
    kept = Outer(x, g, transposed)
    kept.stand_alone()
    kept.way = way
    assert kept.rounded is (processor and way is not Way.GRAM)
    exact = (x.double().mT @ g.double()) if transposed else (g.double().mT @ x.double())
    norms = kept.squared_norms().sqrt()
    lengths, mass = exact.flatten(1).norm(dim=1), x.double().flatten(1).norm(dim=1) * g.double().flatten(1).norm(dim=1)
    assert norms.dtype == torch.float32
    assert float(contributions(kept, norms).max()) <= 1 + 2e-6
    floored = torch.maximum(lengths, mass / 256)
    assert bool((norms.double() <= floored * (1 + 1.5 * UNIT)).all())
    assert bool((norms.double() >= lengths * (1 - UNIT)).all())
    weights = torch.rand(SIZE) / lengths.float()
    total = torch.einsum("b,bij->ij", weights.double(), exact)
    allowed = UNIT * lengths if kept.rounded else 1e-6 * mass
    assert float((kept.weighted_sum(weights).double() - total).norm()) <= float((weights.double() * allowed).sum())


def test_a_rounded_norm_of_a_sum_that_is_not_is_caught(processor: bool) -> None:
    """Twin of the test above: rounding may shorten a norm by more than any weight allows for."""
    x, g = factors("below the middle")
    short = halves.form_rounded(g, x).flatten(1).norm(dim=1)
    assert float(contributions(Outer(x, g), short).max()) > 1.003


@pytest.mark.parametrize("way", list(Way), ids=lambda way: way.name)
def test_a_bad_record_leaves_nothing(way: Way) -> None:
    x, g = factors("plain")
    x[2] = torch.nan
    kept = Outer(x, g)
    kept.stand_alone()
    kept.way = way
    bad = ~torch.isfinite(kept.squared_norms())
    assert bad.tolist() == [False, False, True, False, False]
    total = kept.without(bad).weighted_sum(torch.ones(SIZE))
    x[2] = 0
    torch.testing.assert_close(total.double(), (g.double().mT @ x.double()).sum(0), rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("rows", [2, 7, 64])
def test_company_changes_no_digit(rows: int) -> None:
    """What is formed for a record is the same, bit for bit, whoever is beside it."""
    torch.manual_seed(rows)
    x, g = torch.randn(33, rows, 40).to(HALF), torch.randn(33, rows, 72).to(HALF)
    every = halves.form_rounded(g, x)
    for size in (1, 2, 3, 8, 17, 32):
        assert torch.equal(halves.form_rounded(g[-size:], x[-size:]), every[-size:])


SHAPES = {
    "side by side": (Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1), (8, 4, 3, 3), 16),
    "patches": (Geometry((3, 3), (2, 2), (1, 1), (1, 1), 1), (16, 40, 3, 3), 16),
    "groups": (Geometry((3, 3), (1, 1), (1, 1), (1, 1), 2), (8, 8, 3, 3), 12),
}


def convolved(kind: str) -> tuple[Convolved, Tensor]:
    """Gradients of a convolution of bfloat16 maps, and the same by torch in float64, record by record."""
    torch.manual_seed(0)
    geometry, shape, width = SHAPES[kind]
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    x = torch.randn(17, shape[1] * geometry.groups, width, width).to(HALF)
    options = geometry.stride, geometry.padding, geometry.dilation, geometry.groups
    output = F.conv2d(x.double(), weight, None, *options)
    g = torch.randn_like(output).to(HALF)
    exact = []
    for i in range(len(x)):
        (one,) = torch.autograd.grad(output[i], weight, g[i].double(), retain_graph=True)
        exact.append(one)
    kept = Convolved(x.unsqueeze(1), g.unsqueeze(1), torch.Size(shape), geometry)
    kept.stand_alone()
    return kept, torch.stack(exact)


@pytest.mark.parametrize("kind", SHAPES)
def test_convolutions(kind: str, processor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formed in bfloat16 for each record: within a unit of it, and summed as measured."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    kept, exact = convolved(kind)
    assert kept.rounded is processor
    norms = kept.squared_norms().sqrt()
    lengths = exact.flatten(1).norm(dim=1)
    torch.testing.assert_close(norms.double(), lengths, rtol=UNIT if processor else 1e-5, atol=0)
    alone = torch.eye(kept.size) / norms
    sums = torch.stack([kept.weighted_sum(weights).double() for weights in alone])
    assert float(sums.flatten(1).norm(dim=1).max()) <= 1 + 2e-6
    apart = (sums * norms.double().reshape(-1, 1, 1, 1, 1) - exact).flatten(1).norm(dim=1)
    assert bool((apart <= UNIT * lengths).all())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", SHAPES)
def test_company_changes_no_digit_of_a_convolution(
    kind: str, threads: int, processor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 may differ in its last digits, of which a sum takes no notice; what is rounded to 8 digits may not."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    every, _ = convolved(kind)
    assert every.rounded is (processor and (threads == 1 or not every.side_by_side))
    formed = every.form(0, every.size)
    for start, stop in ((0, 1), (3, 5), (8, 17), (1, 17)):
        torch.testing.assert_close(
            every.form(start, stop), formed[start:stop], rtol=0, atol=0 if every.rounded else 1e-4
        )


class Mirrored(nn.Module):
    """One matrix used in both directions: its two gradients may cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(INPUTS, INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) - x @ self.weight


def test_gradients_that_are_combined_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gradients that cancel, what is left is no longer than the rounding of each would be."""
    formed: list[Tensor] = []
    monkeypatch.setattr(halves, "form_rounded", lambda *factors: formed.append(factors[0]))
    torch.manual_seed(0)
    model, x = Mirrored().to(HALF), torch.randn(4, ROWS, INPUTS).to(HALF)
    objective = Objective(model, lambda m, b: (m(b).float() * b.float()).sum((1, 2)) + b.float().mean((1, 2)))
    found = BookKeeping().differentiate(objective, list(model.parameters()), batch_of(x, 4))
    weights = 1 / found.norms
    for i in range(4):
        (alone,) = found.weighted_sum(weights.where(torch.arange(4) == i, 0))
        assert float(alone.norm()) <= 1
    assert not formed


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_a_library_is_allowed_to_round_halves_alone() -> None:
    """Inside, products of halves lose nothing; of anything else they are float32; the setting is as it was after."""
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    x, g = factors("plain")
    exact = x.double() @ x.double().mT
    with multiplying_halves(x, g):
        allowed = setting.fp32_precision
        product = x.float() @ x.float().mT
    assert allowed == ("bf16" if halves.has_instructions() else before)
    assert setting.fp32_precision == before
    torch.testing.assert_close(product.double(), exact, rtol=0, atol=1e-6 * float(exact.abs().max()))
    with multiplying_halves(x, g.float()):
        assert setting.fp32_precision == before
    with pytest.raises(KeyError), multiplying_halves(x, g):
        raise KeyError
    assert setting.fp32_precision == before


@pytest.mark.parametrize("rows", [3, 16, 700])
def test_other_factors_are_multiplied_in_float32(rows: int) -> None:
    """The product for sums rounds nothing to bfloat16: its factors have 24 digits, and it shows."""
    torch.manual_seed(0)
    left, right = torch.randn(rows, 33), torch.randn(rows, 70)
    exact = left.double().mT @ right.double()
    error = float((multiply(left, right).double() - exact).norm() / exact.norm())
    coarse = float(((left.to(HALF).double().mT @ right.to(HALF).double()) - exact).norm() / exact.norm())
    assert error < 1e-6 < 1e-3 < coarse


@pytest.mark.parametrize("swapped", [False, True])
def test_sums_are_added_up_piece_by_piece(swapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "CONVERTED", 2 * ROWS * (INPUTS + OUTPUTS))
    x, g = factors("plain")[:: -1 if swapped else 1]
    assert list_pieces(x, g) == ([(0, 2), (2, 4), (4, 5)] if halves.has_instructions() else [(0, 5)])
    weights = torch.rand(SIZE)
    exact = torch.einsum("b,bti,btj->ij", weights.double(), x.double(), g.double())
    found = sum_halves(x, g, weights)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-6 * float(exact.abs().max()) * ROWS)


# -- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", [lambda m, x: F.linear(x, m.weight, m.bias), lambda m, x: x @ m.weight.T])
def test_autocast_casts_a_factor_once(use: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Kept is what was multiplied, in half of the room; the gradient is that of torch, of the same rounded factors."""
    torch.manual_seed(0)
    model, x = nn.Linear(INPUTS, OUTPUTS), torch.randn(3, ROWS, INPUTS)

    def loss(m: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", HALF):
            return use(m, batch).float().square().sum((1, 2))

    held: list[torch.dtype] = []
    engine, objective = BookKeeping(), Objective(model, loss)
    engine.watch(objective, [model.weight], batch_of(x, 3), lambda use, parameter, kept: held.append(dtype_of(kept)))
    assert HALF in held
    found = engine.differentiate(objective, [model.weight], batch_of(x, 3))
    loss(model, x).sum().backward()  # type: ignore[no-untyped-call]
    assert model.weight.grad is not None
    (total,) = found.weighted_sum(torch.ones(3))
    torch.testing.assert_close(total, model.weight.grad, rtol=UNIT, atol=UNIT * float(total.abs().max()))


def dtype_of(kept: object) -> torch.dtype:
    return kept.held_x.dtype if isinstance(kept, Outer) else torch.float32
