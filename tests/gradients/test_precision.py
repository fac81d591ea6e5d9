"""One record moves the computed sum by no more than the clipping bound, in whatever precision the model computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from sordino.errors import UnsupportedModel
from sordino.gradients.bookkeeping import BookKeeping
from sordino.gradients.engine import FullPrecision, Objective
from sordino.gradients.projected import ProjectedEngine
from sordino.gradients.rules.pulled import digits
from sordino.noise import Seeded
from tests.gradients.oracle import batch_of
from tests.gradients.precision import ENGINES, LAYERS, moves, steep
from tests.helpers import calibrated, mlp, private

DTYPES = ("bfloat16", "float16", "float32", "autocast")
NOT_OF_TORCH = {("lstm", "vmap"), ("gru", "vmap"), ("lstm", "loop"), ("lstm", "backpropagated")}
"""Torch itself cannot run these in every precision."""

COMBINATIONS = [each for each in itertools.product(ENGINES, LAYERS, DTYPES) if (each[1], each[0]) not in NOT_OF_TORCH]
FEW = [
    (engine, layer, dtype)
    for engine, layer, dtype in COMBINATIONS
    if (engine in ("bookkeeping", "one by one", "backpropagated") and dtype == "bfloat16")
    or (engine == "bookkeeping" and layer in ("rearranged", "cast", "weight norm", "replayed"))
    or layer == "linear"
]


@pytest.mark.parametrize(("engine", "layer", "dtype"), FEW)
def test_one_record_moves_the_sum_by_the_bound(engine: str, layer: str, dtype: str) -> None:
    assert list(moves(engine, layer, dtype, 1)) == pytest.approx([1.0], abs=2e-4)  # all of them are clipped


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "layer", "dtype"), COMBINATIONS)
def test_any_record_moves_the_sum_by_the_bound(engine: str, layer: str, dtype: str) -> None:
    assert list(moves(engine, layer, dtype, 6)) == pytest.approx([1.0] * 6, abs=2e-4)


def test_a_sum_rounded_to_bfloat16_moves_by_several_bounds() -> None:
    """What is at stake: a thousand equal records, and one that takes every coordinate over a rounding boundary."""
    record = torch.full((1024,), 1 / 32)  # of length 1
    sums = torch.stack([(count * record).bfloat16().double() for count in range(1024, 1034)])
    assert float(sums.diff(dim=0).norm(dim=1).max()) > 3


@pytest.mark.parametrize("engine", ["bookkeeping", "backpropagated"])
def test_many_equal_records(engine: str) -> None:
    """A bfloat16 model with parametrised weights: the sum of many does not wait for a boundary and then jump."""
    torch.manual_seed(0)
    model = weight_norm(nn.Linear(64, 4, bias=False)).bfloat16()
    objective, parameters = Objective(model, steep), list(model.parameters())
    x = torch.randn(64).bfloat16().expand(1029, 64)
    sums = []
    for count in range(1026, 1028):
        found = ENGINES[engine](objective, parameters, x[:count])
        sums.append(torch.cat([each.double().flatten() for each in found.weighted_sum((1 - 1e-4) / found.norms)]))
    assert all(float((more - less).norm()) <= 1.001 for less, more in itertools.pairwise(sums))


def test_a_long_direction_that_the_parametrisation_drops() -> None:
    """The gradient of a normalised weight has no part along the weight; pulling back a sum would round by it."""
    torch.manual_seed(0)
    layer = weight_norm(nn.Linear(6, 1, bias=False))
    direction = layer.weight.detach()[0]
    x = torch.randn(16, 6)
    x[0] = 1e9 * direction  # its gradient is along the weight but for rounding
    v = layer.parametrizations.weight.original1
    found = BookKeeping().differentiate(Objective(layer, lambda m, x: m(x)[:, 0]), [v], batch_of(x, 16))
    weights = torch.ones(16)
    weights[0] = 1 / found.norms[0].clamp_min(1)
    with_it, without = (next(iter(found.weighted_sum(weights * keep))).double() for keep in (1, torch.arange(16) > 0))
    assert float((with_it - without).norm()) <= 1.001


class Centred(nn.Linear):
    """Of a long input that is the same everywhere, nothing comes back to the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight - self.weight.mean(1, keepdim=True))


class Stretched(nn.Linear):
    """The same, and what comes back becomes longer on its way."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 2.0**14 * (self.weight - self.weight.mean(1, keepdim=True)))


class Subtracted(nn.Linear):
    """Two uses, summed one after the other, whose gradients cancel where both inputs are long and the same."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) - x.abs() @ self.weight.t()


def alternating(inputs: int) -> Tensor:
    return torch.tensor([-1.0, 1.0]).repeat(inputs // 2)


@pytest.mark.parametrize("kind", [Centred, Stretched, Subtracted])
def test_terms_that_cancel_do_not_swallow_those_of_other_records(kind: type[nn.Linear]) -> None:
    """One record's own sum is short, but its terms are so long that float32 has no digits left for anything beside."""
    torch.manual_seed(0)
    model = kind(300, 100, bias=False)
    x = 10 * alternating(300).expand(1025, 300).clone()
    x[0] = 1e12
    share = torch.full((1025,), 0.05)  # of the bound; small contributions are swallowed whole
    share[0] = 1
    sums = []
    for some in (slice(0, None), slice(1, None)):
        objective = Objective(model, lambda m, x: m(x).sum(1))
        found = BookKeeping().differentiate(objective, list(model.parameters()), batch_of(x[some], len(x[some])))
        (total,) = found.weighted_sum(share[some] / found.norms)
        sums.append(total.double())
    assert float(sums[1].norm()) == pytest.approx(1024 * 0.05, rel=1e-3)
    assert float((sums[0] - sums[1]).norm()) <= 1.01


class Tied(nn.Linear):
    """Two uses, one of them the other way round, compared by inner products."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + x @ self.weight


SHORT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one row": (lambda: nn.Linear(784, 10, bias=False), (784,)),
    "twice": (lambda: Tied(300, 300, bias=False), (300,)),
    "weight_norm": (lambda: weight_norm(nn.Linear(784, 10, bias=False)), (784,)),
}


@pytest.mark.parametrize("size", [1e-21, 1e-22, 4e-23, 1e-23])
@pytest.mark.parametrize("name", SHORT)
def test_squares_of_short_inputs_that_underflow_hide_no_long_gradients(name: str, size: float) -> None:
    """Float32 has no squares of such entries, but their products with long gradients are longer than many bounds."""
    torch.manual_seed(0)
    make, shape = SHORT[name]
    model = make()
    x, long = torch.full((3, *shape), size), torch.tensor([1e16, 1e17, 2e17])
    objective = Objective(model, lambda m, x: m(x).flatten(1).sum(1) * long)
    found = BookKeeping().differentiate(objective, list(model.parameters()), batch_of(x, 3))
    for i in range(3):
        sums = found.weighted_sum(torch.eye(3)[i])
        assert float(torch.cat([each.double().flatten() for each in sums]).norm()) <= 1.0001 * float(found.norms[i])


def test_a_bias_that_cancels_over_time_does_not_swallow_those_of_other_records() -> None:
    """With states of zero only the biases have gradients; the product that adds them up has one step after another."""
    torch.manual_seed(0)
    model = nn.RNN(64, 64, batch_first=True)
    for parameter in (model.bias_ih_l0, model.bias_hh_l0, model.weight_hh_l0):
        nn.init.zeros_(parameter)
    signs = torch.ones(257, 2)
    signs[0] = torch.tensor([1e8, -1e8])
    share = torch.full((257,), 0.05)
    share[0] = 1
    sums = []
    for some in (slice(0, None), slice(1, None)):
        objective = Objective(model, lambda m, s: (m(s.new_zeros(len(s), 2, 64))[0].sum(2) * s).sum(1))
        batch = batch_of(signs[some], len(signs[some]))
        found = BookKeeping().differentiate(objective, list(model.parameters()), batch)
        totals = found.weighted_sum(share[some] / found.norms.clamp_min(1e-6))
        sums.append(torch.cat([total.double().flatten() for total in totals]))
    assert float(sums[1].norm()) == pytest.approx(256 * 0.05, rel=1e-3)
    assert float((sums[0] - sums[1]).norm()) <= 1.01


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_autocast_around_the_step_does_not_reach_the_sum(engine: str) -> None:
    """A step inside of the user's autocast is the same sum as outside, where only the loss is under autocast."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mean_loss(model, batch)

    def first_gradient(around: bool) -> Tensor:
        model = mlp()
        run = private(calibrated(noise_multiplier=1e-6), model=model, loss=loss, engine=engine)
        before = [p.detach().clone() for p in model.parameters()]
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            next(iter(run.steps()))
        return torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), before, strict=True)]).detach()

    torch.testing.assert_close(first_gradient(True), first_gradient(False), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("engine", ["auto", "vmap"])
@pytest.mark.parametrize("around", [False, True])
def test_a_loop_of_ones_own_sums_what_it_measured(engine: str, around: bool) -> None:
    """In bfloat16, also when ``private.backward`` is called under autocast, nothing is rounded before the noise."""
    torch.manual_seed(0)
    model = weight_norm(nn.Linear(6, 3)).bfloat16()
    loss = lambda m, batch: mean_loss(m, (batch[0].bfloat16(), batch[1]))  # noqa: E731
    run = private(calibrated(noise_multiplier=1e-6), model=model, loss=loss, engine=engine)
    for batch in run.loader():
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            run.backward(loss(model, batch))
        attempt = run._loop._open.attempt
        assert all(total.dtype in (torch.float32, torch.float64) for total in attempt.total)
        low = torch.cat([total.flatten() for total in attempt.total])
        assert not torch.equal(low, low.bfloat16().to(low.dtype))
        break


def test_estimated_norms_refuse_half_precision() -> None:
    """One backward pass under autocast sums over the batch in bfloat16."""

    def half(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).square().sum(1)

    torch.manual_seed(0)
    model, x = nn.Linear(6, 3), torch.randn(8, 6)
    engine = ProjectedEngine(20, Seeded(0))
    engine.renew()
    found = engine.differentiate(Objective(model, half), list(model.parameters()), batch_of(x, 8))
    with pytest.raises(UnsupportedModel, match="half precision"):
        found.weighted_sum(torch.ones(8))
    stored = x.half()  # what is only stored so is another matter
    plain = Objective(model, lambda m, x: m(x[:, :6].float()).square().sum(1))
    found = engine.differentiate(plain, list(model.parameters()), batch_of(stored, 8))
    assert len(found.weighted_sum(torch.ones(8))) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_digits_lose_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(1000) * torch.logspace(-6, 6, 1000)
    pieces = digits(values, dtype)
    assert all(piece.dtype == dtype for piece, _ in pieces)
    again = sum(piece.double() * unit for piece, unit in pieces)
    assert float((again - values).abs().max()) <= 2**-30 * float(values.abs().max())


def test_full_precision_is_given_back() -> None:
    """Whatever precision the user chose for matrix products is back afterwards, nested or not."""
    slot = torch.backends.mkldnn.matmul
    before = slot.fp32_precision
    try:
        torch.set_float32_matmul_precision("medium")
        context = FullPrecision(torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16):
            with context, context:
                assert slot.fp32_precision == "ieee"
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
        slot.fp32_precision = before


def test_steep_losses_are_clipped() -> None:
    """The tests above are about clipped sums: without clipping one record moves them by far more."""
    torch.manual_seed(0)
    make, data = LAYERS["linear"]
    model, x = make(), data()
    found = ENGINES["bookkeeping"](Objective(model, steep), list(model.parameters()), x)
    assert float(found.norms.min()) > 10
