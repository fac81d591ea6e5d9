"""Invented scenes, and whitening by their statistics over channels and over cells apart."""

from __future__ import annotations

import torch
from torch import Tensor

from sordino.lab.features.scenes import draw_scenes
from sordino.lab.features.synthetic import fit_cells


def test_cells_are_whitened_over_channels_and_places() -> None:
    generator = torch.Generator().manual_seed(0)
    channels, cells = torch.diag(torch.tensor([1.0, 2.0, 5.0])), torch.tensor([[1.0, 0.9], [0.0, 0.5]])
    rows = cells @ torch.randn(4000, 2, 3, generator=generator) @ channels + 7.0
    white = fit_cells(rows, kept=3)(rows)
    torch.testing.assert_close(white.norm(dim=1), torch.ones(4000))

    def spread(each: Tensor) -> float:
        variances = torch.linalg.eigvalsh(each.flatten(1).T.cov())
        return float(variances[-1] / variances[0])

    assert spread(white) < 0.1 * spread(rows)
    assert fit_cells(rows, kept=2)(rows).shape == (4000, 4)


def test_scenes_are_a_function_of_their_arguments() -> None:
    first = draw_scenes(3, 12, 3, 7)
    assert first.shape == (3, 3, 12, 12)
    assert 0 <= first.min() <= first.max() <= 1
    assert torch.equal(first, draw_scenes(3, 12, 3, 7))
    assert not torch.equal(first, draw_scenes(3, 12, 3, 8))
    assert draw_scenes(2, 12, 1, 7).shape == (2, 1, 12, 12)
