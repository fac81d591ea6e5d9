"""Parts of the networks for pixels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sordino.models.images import SlidingMax


@pytest.mark.parametrize("shape", [(2, 3, 14, 14), (1, 1, 2, 2), (3, 2, 5, 7)])
def test_sliding_max_is_torchs_pooling(shape: tuple[int, ...]) -> None:
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    pooled, wanted = SlidingMax()(images), nn.MaxPool2d(2, stride=1)(images)
    torch.testing.assert_close(pooled, wanted)
    weights = torch.linspace(1, 2, wanted.numel(), dtype=torch.float64).reshape(wanted.shape)
    gradients = [torch.autograd.grad((output * weights).sum(), images)[0] for output in (pooled, wanted)]
    torch.testing.assert_close(*gradients)
