"""Every way of measuring agrees with the gradients themselves, also where the terms of a Gram norm cancel."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sordino.gradients.rules.conv import Convolved, Geometry
from sordino.gradients.rules.embedding import Looked
from sordino.gradients.rules.linear import CANCELLED, FORM_BYTES, Outer, Way, choose_way, gram_norms


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("transposed", [False, True])
def test_outer(way: Way, transposed: bool) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(6, 5, 3), torch.randn(6, 5, 4)
    wanted = torch.einsum("btd,bto->bdo" if transposed else "btd,bto->bod", x, g)
    outer = Outer(x, g, transposed)
    outer.way = way
    torch.testing.assert_close(outer.squared_norms(), wanted.square().sum((1, 2)), rtol=1e-5, atol=0)
    weights = torch.rand(6)
    torch.testing.assert_close(outer.weighted_sum(weights), torch.tensordot(weights, wanted, 1))
    torch.testing.assert_close(outer.form(2, 4), wanted[2:4])


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("same", [False, True], ids=["a gradient each", "one gradient for all"])
def test_looked(length: int, same: bool) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 5, (6, length))
    g = torch.randn(6, 1, 3).expand(6, length, 3) if same else torch.randn(6, length, 3)
    looked = Looked(tokens, g, 5)
    assert looked.same is (same and length > 1)
    wanted = torch.einsum("btv,btd->bvd", F.one_hot(tokens, 5).float(), g)
    torch.testing.assert_close(looked.squared_norms(), wanted.square().sum((1, 2)), rtol=1e-5, atol=0)
    weights = torch.rand(6)
    torch.testing.assert_close(looked.weighted_sum(weights), torch.tensordot(weights, wanted, 1))
    torch.testing.assert_close(looked.form(2, 4), wanted[2:4])
    torch.testing.assert_close(looked.sum_sorted(weights), torch.tensordot(weights, wanted, 1))
    table = torch.randn(5, 3, dtype=torch.float64)
    added = looked.add_to(table.clone(), weights) - table
    torch.testing.assert_close(added.float(), torch.tensordot(weights, wanted, 1))
    empty = looked.without(torch.ones(6, dtype=torch.bool))
    assert torch.count_nonzero(empty.weighted_sum(weights)) == 0


@pytest.mark.parametrize("way", Way)
@settings(max_examples=20)
@given(
    channels=st.integers(1, 3),
    outputs=st.integers(1, 3),
    groups=st.integers(1, 2),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    side=st.integers(5, 14),
    items=st.integers(1, 2),
    channels_last=st.booleans(),
)
def test_convolved(
    way: Way,
    channels: int,
    outputs: int,
    groups: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    side: int,
    items: int,
    channels_last: bool,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, items, channels * groups, side, side)
    weight = torch.randn(outputs * groups, channels, kernel, kernel, requires_grad=True)
    geometry = Geometry((kernel,) * 2, (stride,) * 2, (padding,) * 2, (dilation,) * 2, groups)

    def convolve(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, None, stride, padding, dilation, groups)

    g = torch.randn_like(convolve(x[0])).unsqueeze(0).repeat(4, 1, 1, 1, 1) * torch.rand(4, items, 1, 1, 1)
    wanted = torch.stack([torch.autograd.grad(convolve(one), weight, back)[0] for one, back in zip(x, g, strict=True)])
    kept = Convolved(x, g, weight.shape, geometry)
    kept.way, kept.channels_last = way, channels_last and groups == 1
    torch.testing.assert_close(kept.form(1, 3), wanted[1:3], rtol=1e-3, atol=1e-4)
    exact, measured = wanted.square().sum((1, 2, 3, 4)), kept.squared_norms()
    most = CANCELLED if way is Way.GRAM else 0.0  # what rounding may have taken is added
    assert (measured >= exact * (1 - 1e-5) - 1e-6).all()
    assert (measured <= exact * (1 + most + 1e-3) + 1e-4).all()
    weights = torch.rand(4)
    torch.testing.assert_close(kept.weighted_sum(weights), torch.tensordot(weights, wanted, 1), rtol=1e-3, atol=1e-4)


def test_many_channels_on_a_small_map_lie_innermost() -> None:
    """The second layer of a small network does, the first one (one channel, a large map) does not."""
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    second = Convolved(torch.randn(5, 1, 81, 4, 4), torch.randn(5, 1, 16, 4, 4), torch.Size((16, 81, 3, 3)), geometry)
    first = Convolved(torch.randn(5, 1, 1, 28, 28), torch.randn(5, 1, 16, 28, 28), torch.Size((16, 1, 3, 3)), geometry)
    assert (second.channels_last, first.channels_last) == (True, False)


@pytest.mark.parametrize("space", [1, 2, 3])
def test_rows_are_patches_with_channels_innermost(space: int) -> None:
    torch.manual_seed(0)
    geometry = Geometry((2, 3, 2)[:space], (2, 1, 2)[:space], (1, 2, 0)[:space], (1, 2, 1)[:space], 1)
    x = torch.randn(3, 5, *(6, 7, 8)[:space])
    convolve = (F.conv1d, F.conv2d, F.conv3d)[space - 1]
    weight = torch.randn(1, 5, *geometry.kernel)
    positions = convolve(x, weight, None, geometry.stride, geometry.padding, geometry.dilation).shape[2:]
    patches = geometry.patches(x, positions)[:, 0].unflatten(1, (5, -1))
    rows = geometry.rows(x, positions)[:, 0].unflatten(2, (-1, 5))
    assert torch.equal(rows.permute(0, 3, 2, 1), patches)


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_convolution_forms_the_same(groups: int) -> None:
    torch.manual_seed(0)
    channels = 3 if groups == 1 else 16
    x, g = torch.randn(5, 1, channels, 16, 16), torch.randn(5, 1, 4, 16, 16)
    shape = torch.Size((4, channels // groups, 3, 3))
    kept = Convolved(x, g, shape, Geometry((3, 3), (1, 1), (1, 1), (1, 1), groups))
    torch.testing.assert_close(kept.form_all(), kept.form(0, 5), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("items", [1, 2])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 3, 1), (2, 1, 1), (3, 0, 2), (2, 2, 3)])
@pytest.mark.parametrize("space", [1, 2, 3])
def test_depthwise_is_a_convolution_of_maps_by_maps(
    space: int, stride: int, padding: int, dilation: int, items: int
) -> None:
    """Also where a stride leaves entries out, on maps smaller than the kernel, and when it is too long to be kept."""
    torch.manual_seed(0)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[space - 1]
    weight = torch.randn(4, 1, *(3, 2, 3)[:space], requires_grad=True)
    x = torch.randn(3, items, 4, *(8, 7, 9)[:space])
    options = (None, stride, padding, dilation, 4)
    g = torch.randn(3, items, *convolve(x[0], weight, *options).shape[1:])
    each = zip(x, g, strict=True)
    wanted = torch.stack([torch.autograd.grad(convolve(one, weight, *options), weight, back)[0] for one, back in each])
    geometry = Geometry(tuple(weight.shape[2:]), *((each,) * space for each in (stride, padding, dilation)), 4)
    for way in (Way.FORM, Way.PASS):
        kept = Convolved(x, g, weight.shape, geometry)
        assert kept.way is Way.FORM
        kept.way = way
        torch.testing.assert_close(kept.form(1, 3), wanted[1:3], rtol=1e-4, atol=1e-4)
        exact, measured = wanted.flatten(1).square().sum(1), kept.squared_norms()
        assert (exact * (1 - 1e-5) <= measured).all()
        assert (measured <= exact * (1 + 1e-3)).all()  # what is summed anew later may round anew
        weights = torch.rand(3)
        torch.testing.assert_close(
            kept.weighted_sum(weights), torch.tensordot(weights, wanted, 1), rtol=1e-4, atol=1e-4
        )


def test_the_shorter_factor_is_scaled() -> None:
    """No second tensor as large as the gradient of a vocabulary's scores is made for the weighted sum."""
    x, g = torch.randn(4, 6, 3), torch.randn(4, 6, 5000)
    made: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if not any(result.data_ptr() == tensor.data_ptr() for tensor in (x, g)):
                made.append(result.numel())
            return result

    outer, weights = Outer(x, g), torch.rand(4)
    with Sizes():
        total = outer.weighted_sum(weights)
    assert max(made) <= total.numel() < g.numel()
    torch.testing.assert_close(total, torch.einsum("b,bto,btd->od", weights, g, x), rtol=1e-4, atol=1e-4)


def test_cancelling_rows_are_not_measured_too_short() -> None:
    """Two opposite rows of length 1000 and a small third: the plain Gram sum is off by more than the result."""
    x = torch.tensor([[[1000.0, 0.1], [1000.0, 0.1], [0.0, 0.01]]])
    g = torch.tensor([[[1000.0], [-1000.0], [1.0]]])
    outer = Outer(x, g)
    plain = ((x @ x.mT) * (g @ g.mT)).sum()
    exact = (g.double().mT @ x.double()).square().sum().float()
    assert not torch.isclose(plain, exact, rtol=0.1)
    measured = gram_norms(x, g, outer.form)
    assert exact <= measured
    assert float(measured.sqrt()) == pytest.approx(float(x.norm() * g.norm()) / 256)  # the least that a norm may be


def test_choice_follows_shapes() -> None:
    assert choose_way(64, 4, 512 * 9, 512) is Way.GRAM
    assert choose_way(64, 1024, 9 * 64, 64) is Way.FORM
    assert choose_way(64, 80, 65, 128) is Way.FORM
    for size, rows, inputs, outputs in product((1, 256), (2, 2000), (8, 512), (8, 8000)):
        kept = choose_way(size, rows, inputs, outputs) is Way.FORM
        assert not kept or 4 * size * inputs * outputs <= FORM_BYTES
