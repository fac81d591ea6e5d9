"""Products by the other library: the same numbers as MKL's, and no more rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sordino.gradients.rules import kernels
from sordino.gradients.rules.kernels import TERMS, find_kernel, is_wide, multiply, multiply_each

EPS = torch.finfo(torch.float32).eps

needs_kernel = pytest.mark.skipif(find_kernel() is None, reason="torch's two libraries are as fast on this processor")


def count_uses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many terms each product of the other library adds up, as it is called."""
    real, terms = find_kernel(), list[int]()

    def noting(one: Tensor, *rest: object) -> Tensor:
        terms.append(one.shape[1])
        product: Tensor = real(one, *rest)
        return product

    monkeypatch.setattr(kernels, "find_kernel", lambda: noting)
    return terms


@needs_kernel
@pytest.mark.parametrize("rows", [1, TERMS, TERMS + 1, 5 * TERMS + 3])
def test_large_products_are_exact_and_a_run_at_a_time(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terms = count_uses(monkeypatch)
    left, right = torch.randn(rows, 1100), torch.randn(rows, 1000)
    found = multiply(left, right)
    assert sum(terms) == rows
    assert max(terms) <= TERMS
    torch.testing.assert_close(found, (left.double().T @ right.double()).float(), rtol=1e-5, atol=1e-4)


@needs_kernel
@pytest.mark.parametrize("rows", [16, TERMS + 1])
def test_each_examples_product(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terms = count_uses(monkeypatch)
    left, right = torch.randn(3, rows, 700), torch.randn(3, rows, 600)
    found = multiply_each(left, right)
    assert sum(terms) == 3 * rows
    torch.testing.assert_close(found, (left.double().mT @ right.double()).float(), rtol=1e-5, atol=1e-4)


@needs_kernel
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x[:, :64],
        lambda x: x.repeat_interleave(2, 1)[:, ::2],
        lambda x: torch.nn.Parameter(x),
    ],
    ids=["doubles", "small", "gaps", "a parameter"],
)
def test_all_else_is_left_to_torch(change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    terms = count_uses(monkeypatch)
    x = change(torch.randn(2 * TERMS, 128))
    with torch.no_grad():
        torch.testing.assert_close(multiply(x, x), x.T @ x)
    assert not terms


def test_rows_with_gaps_are_not_wide() -> None:
    """The other library copies them number by number, a thousand times slower."""
    assert not is_wide(torch.randn(2 * TERMS, 8).T.contiguous().T)


@needs_kernel
@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 0.013])
def test_equal_terms_drift_no_further_than_in_torchs_product(value: float) -> None:
    x = torch.full((8192, 256), value)
    exact = 8192 * float(x[0, 0].double()) ** 2

    def drift(product: Tensor) -> float:
        return float((product.double() - exact).abs().max()) / exact / EPS

    ours, torchs = drift(multiply(x, x)), drift(x.T @ x)
    assert ours <= max(2 * torchs, TERMS / 8 + 8)
    together = drift(find_kernel()(x.T, x.T, None, "none", [], ""))
    assert together > 2 * ours or together < 20  # why a run at a time
