"""Deformed digits are a function of (seed, index) alone, keep the digit, and really differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from sordino.errors import InvalidInput
from sordino.lab import data
from sordino.lab.data.infinite_mnist import Deformation, InfiniteMnist, draw_affine_maps, smoothing_matrix

STILL = Deformation(rotation=0, shear=0, scale=0, shift=0, strength=0)


def blobs() -> Tensor:
    images = torch.zeros(3, 1, 28, 28)
    images[0, 0, 8:20, 12:16] = 1
    images[1, 0, 12:16, 8:20] = 1
    images[2, 0, 9:18, 9:18] = 1
    return images


def digits(records: int = 1000, seed: int = 0, deformation: Deformation | None = None) -> InfiniteMnist:
    return InfiniteMnist(blobs(), torch.arange(3), records, seed, deformation)


def test_a_record_does_not_depend_on_what_else_is_asked() -> None:
    alone = [digits()[i][0] for i in (999, 5, 77)]
    together, classes = digits().batch([5, 77, 0, 999, 5])
    assert torch.equal(together[[3, 0, 1]], torch.stack(alone))
    assert torch.equal(together[0], together[4])
    assert classes.tolist() == [2, 2, 0, 0, 2]
    loaded = next(iter(DataLoader(digits(), batch_size=4, sampler=[77, 5, 1, 2])))[0]
    assert torch.equal(loaded[0], alone[2])


def test_the_first_round_is_the_digits_themselves_and_later_rounds_all_differ() -> None:
    images, _ = digits().batch(range(30))
    assert torch.equal(images[:3], blobs())
    rounds = images.reshape(10, 3, -1)
    for i in range(10):
        for j in range(i):
            assert (rounds[i] - rounds[j]).abs().amax(dim=1).min() > 0.1
    assert not torch.equal(digits(seed=1).batch([40])[0], digits().batch([40])[0])


def test_without_deformation_nothing_moves() -> None:
    """The twin of the test above: all strengths at zero give back the digit, so what moves it is the strengths."""
    images, _ = digits(deformation=STILL).batch(range(30))
    torch.testing.assert_close(images, blobs().repeat(10, 1, 1, 1), atol=1e-5, rtol=0)


def test_a_pure_shift_moves_by_pixels() -> None:
    maps = draw_affine_maps(torch.tensor([[0.0, 0, 0, 0, 1, 0]], dtype=torch.float64), Deformation(shift=2.0), side=28)
    assert maps[0].tolist() == [[1, 0, 2 * 2 / 28], [0, 1, 0]]


def test_smoothing_keeps_constants_and_shrinks_noise() -> None:
    smooth = smoothing_matrix(28, 4.0)
    constant = torch.full((28, 28), 3.0, dtype=torch.float64)
    torch.testing.assert_close(smooth @ constant @ smooth.T, constant)
    noise = torch.randn(28, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert (smooth @ noise @ smooth.T).std() < 0.2 * noise.std()


def test_all_records_as_tensors() -> None:
    whole = data.Data("small", digits(50), digits(10), ("a", "b", "c")).train
    for made, asked in zip(whole, digits().batch(range(50)), strict=True):
        assert torch.equal(made, asked)


def test_bounds() -> None:
    with pytest.raises(IndexError, match=r"record 1000 must be in 0\.\.999"):
        digits()[1000]
    with pytest.raises(InvalidInput, match="records=0 must be >= 1"):
        digits(records=0)
    for seed in (-1, 2**64):
        with pytest.raises(InvalidInput, match=rf"seed={seed} must be in 0\.\."):
            digits(seed=seed)
    assert digits(seed=2**64 - 1)[999][0].shape == (1, 28, 28)


def test_infinite_mnist_from_mnist(benchmark_folder: Path) -> None:
    loaded = data.load("infinite-mnist", records=10**9)
    assert isinstance(loaded.train_set, InfiniteMnist)
    images, classes = loaded.train_set.batch(range(10**9 - 64, 10**9))
    assert tuple(images.shape) == (64, 1, 28, 28)
    assert images.min() >= 0
    assert images.max() <= 1
    assert "the guarantee covers one deformation" in loaded.caveats[0]
    mnist = data.load("mnist").train[0]
    ink = images.mean() / mnist.mean()
    assert 0.8 < ink < 1.2, "deformation keeps the ink"
    assert data.load("infinite-mnist", records=1000).caveats == ()
    assert len(classes.unique()) == 10
