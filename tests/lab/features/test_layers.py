"""Two layers of patches and the scenes they are fitted to: a formula, one record at a time, kept on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sordino.errors import InvalidInput
from sordino.lab.features import layers
from sordino.lab.features.layers import Layers, describe_layers, fit_layers
from sordino.lab.features.patches import make_filters
from sordino.lab.features.scenes import draw_scenes
from sordino.lab.features.synthetic import fit_cells

SMALL = Layers(filters=4, second=5, side=3, grid=2, threshold=0.1, channels=6, kept=5, kept_second=7, mirror=False)


@pytest.fixture(autouse=True)
def few_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_FITTED", 20)
    monkeypatch.setattr(layers, "_EXAMPLES", 40)


def images(count: int = 5) -> Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def test_both_layers_are_those_of_a_loop_over_patches() -> None:
    kernels = make_filters(SMALL.filters, SMALL.side, draw_scenes(20, 16, 3, 1))
    first = layers._FirstLayer(kernels, SMALL)
    responses = first.respond(images(2)).unflatten(1, (14, 14))
    image = images(2)[1]
    for row, column in ((0, 0), (5, 9), (13, 13)):
        patch = image[:, row : row + 3, column : column + 3]
        normal = (patch - patch.mean()) / (patch.var(correction=0) + 0.01).sqrt()
        by_hand = (normal * kernels).sum((1, 2, 3))
        both = torch.cat([by_hand, -by_hand]) - SMALL.threshold
        torch.testing.assert_close(responses[1, row, column], both.clamp(min=0), atol=1e-5, rtol=1e-4)
    shrunk = first.shrink(responses.flatten(1, 2))
    assert shrunk.shape == (2, 6, 6, 8)
    roots = responses[1, 4:7, 2:5].mean((0, 1)).sqrt()
    torch.testing.assert_close(shrunk[1, 2, 1], roots / (roots.norm() + 0.01 * 8**0.5), atol=1e-5, rtol=1e-4)
    assert layers._fit_second(first, draw_scenes(20, 16, 3, 2), SMALL)(shrunk).shape == (2, 16, 10)


def test_a_record_alone_has_the_same_features() -> None:
    features = fit_layers(SMALL, 16, 3)
    together = features(images())
    assert together.shape == (5, SMALL.width)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(5))
    torch.testing.assert_close(together[:, : 4 * SMALL.kept].square().sum(1), torch.full((5,), 1 - SMALL.share))
    changed = images()
    changed[0] = 0.3
    assert not torch.allclose(features(changed)[0], together[0])
    torch.testing.assert_close(features(changed)[1:], together[1:])
    torch.testing.assert_close(features(images()[2:3])[0], together[2], atol=1e-5, rtol=1e-4)
    assert features(torch.zeros(1, 3, 16, 16)).isfinite().all()


def test_mirror_images_have_the_same_features_if_asked_for() -> None:
    chosen = {"filters": 4, "second": 5, "side": 3, "grid": 2, "channels": 6, "kept": 5, "kept_second": 7}
    plain, mirrored = (fit_layers(Layers(**chosen, mirror=mirror), 16, 3) for mirror in (False, True))
    x = images()
    torch.testing.assert_close(mirrored(x), mirrored(x.flip(3)), atol=1e-4, rtol=1e-3)
    assert not torch.allclose(plain(x), plain(x.flip(3)), atol=1e-2)


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


def test_second_call_reads_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = describe_layers(images(), SMALL, folder=tmp_path, quiet=True)
    torch.testing.assert_close(first, fit_layers(SMALL, 16, 3)(images()), atol=1e-5, rtol=1e-4)
    monkeypatch.setattr(layers, "fit_layers", lambda *_: pytest.fail("computed again"))
    torch.testing.assert_close(describe_layers(images(), SMALL, folder=tmp_path), first)


def test_refusals_name_the_value(tmp_path: Path) -> None:
    for options, said in (
        ({"filters": 0}, "filters=0"),
        ({"kept": 500}, "kept=500"),
        ({"threshold": -1.0}, "threshold=-1.0"),
        ({"share": 1.0}, "share=1.0"),
    ):
        with pytest.raises(InvalidInput, match=said):
            Layers(**options)
    with pytest.raises(InvalidInput, match="H >= 11"):
        describe_layers(torch.zeros(2, 3, 10, 10), SMALL, folder=tmp_path)
