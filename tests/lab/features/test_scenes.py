"""Invented scenes, and whitening by their statistics over channels and over cells apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sordino.lab.features.scenes import draw_scenes
from sordino.lab.features.synthetic import fit_cells


def stretched_cells() -> Tensor:
    """Rows [4000, 2, 3] whose channels and cells are correlated and of unlike variance, about 7."""
    generator = torch.Generator().manual_seed(0)
    channels, cells = torch.diag(torch.tensor([1.0, 2.0, 5.0])), torch.tensor([[1.0, 0.9], [0.0, 0.5]])
    return cells @ torch.randn(4000, 2, 3, generator=generator) @ channels + 7.0


def spread(rows: Tensor) -> float:
    """The largest variance of any direction over the smallest."""
    variances = torch.linalg.eigvalsh(rows.flatten(1).T.cov())
    return float(variances[-1] / variances[0])


def test_cells_are_whitened_over_channels_and_places() -> None:
    rows = stretched_cells()
    white = fit_cells(rows, kept=3)(rows)
    torch.testing.assert_close(white.norm(dim=1), torch.ones(4000))
    assert spread(white) < 1.2
    assert fit_cells(rows, kept=2)(rows).shape == (4000, 4)


def test_a_tilt_takes_a_power_of_the_variances() -> None:
    rows = stretched_cells()
    plain, half = (fit_cells(rows, kept=3, tilt=tilt)(rows) for tilt in (0.0, 0.5))
    unit = rows - rows.mean(0)
    unit = unit / unit.flatten(1).norm(dim=1)[:, None, None]
    assert spread(plain) == pytest.approx(spread(unit), rel=1e-3), "a turn changes no variance"
    assert 2 < spread(half) < spread(plain) / 2


def test_scenes_are_a_function_of_their_arguments() -> None:
    first = draw_scenes(3, 12, 3, 7)
    assert first.shape == (3, 3, 12, 12)
    assert 0 <= first.min() <= first.max() <= 1
    assert torch.equal(first, draw_scenes(3, 12, 3, 7))
    assert not torch.equal(first, draw_scenes(3, 12, 3, 8))
    assert draw_scenes(2, 12, 1, 7).shape == (2, 1, 12, 12)
