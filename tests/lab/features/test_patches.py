"""Patch features and the synthetic pictures they are fitted to: a formula, one record at a time, kept on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sordino.errors import InvalidInput
from sordino.lab.features import patches
from sordino.lab.features.patches import Patches, describe_patches, fit_description, make_filters
from sordino.lab.features.scenes import draw_scenes
from sordino.lab.features.synthetic import draw_centred_leaves, draw_dead_leaves

SMALL = Patches(filters=3, side=4, grid=2, threshold=0.1)
BY_SCENES = Patches(filters=3, side=4, grid=2, threshold=0.1, kept=5)


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_EXAMPLES", 200)
    monkeypatch.setattr(patches, "_PICTURES", 20)
    monkeypatch.setattr(patches, "_SCENES", 20)
    monkeypatch.setattr(patches, "_DESCRIBED", 60)


def images(count: int = 5, channels: int = 1) -> torch.Tensor:
    return torch.rand(count, channels, 12, 12, generator=torch.Generator().manual_seed(1))


def by_hand(image: torch.Tensor, kernels: torch.Tensor, choice: Patches) -> torch.Tensor:
    """The pooled roots of one image, patch by patch, where the cells of the grid do not overlap."""
    side, places = choice.side, image.shape[-1] - choice.side + 1
    cell = places // choice.grid
    sums = torch.zeros(2 * choice.filters, choice.grid, choice.grid)
    for row in range(places):
        for column in range(places):
            patch = image[:, row : row + side, column : column + side]
            contrast = (patch.var(correction=0) + 0.01).sqrt()
            response = ((patch - patch.mean()) * kernels).sum((1, 2, 3)) / contrast
            both = torch.cat([response, -response]) - choice.threshold
            sums[:, row // cell, column // cell] += both.clamp(min=0) / cell**2
    roots = sums.flatten().sqrt()
    centred: torch.Tensor = roots - roots.mean()
    unit: torch.Tensor = centred / centred.norm()
    return unit


def test_pooled_responses_are_those_of_a_loop_over_patches() -> None:
    choice = Patches(filters=3, side=3, grid=2, threshold=0.1)
    for channels in (1, 3):
        kernels = make_filters(3, 3, draw_dead_leaves(20, 32, channels, 1))
        found = patches._pool(images(2, channels), kernels, choice)
        for row, image in zip(found, images(2, channels), strict=True):
            torch.testing.assert_close(row, by_hand(image, kernels, choice), atol=1e-5, rtol=1e-4)


def test_by_scenes_a_response_is_the_cosine_of_two_whitened_patches() -> None:
    scenes = draw_scenes(20, 12, 3, 1)
    respond = patches._make_sphere(BY_SCENES, scenes)
    cut = patches._cut_patches(3, 4, 2, scenes)
    variances, directions = torch.linalg.eigh((cut.T @ cut / len(cut)).double())
    white = (directions @ torch.diag((variances + 0.1).rsqrt()) @ directions.T).float()
    image = images(2, 3)[1]
    found = respond(images(2, 3))[1]
    assert found.shape == (3, 9, 9)
    for row, column in ((0, 0), (8, 8), (2, 7)):
        patch = image[:, row : row + 4, column : column + 4].flatten()
        seen = white @ ((patch - patch.mean()) / (patch.var(correction=0) + 0.01).sqrt())
        for each, other in zip(found[:, row, column], cut @ white, strict=False):
            expected = seen @ other / other.norm() / (seen.norm() + 0.3)
            torch.testing.assert_close(each, expected, atol=1e-5, rtol=1e-4)


def test_by_scenes_cells_keep_so_many_channels_of_norm_1() -> None:
    features = fit_description(BY_SCENES, 12, 12, 3)(images(5, 3))
    assert features.shape == (5, BY_SCENES.width) == (5, 20)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(5))


def test_by_scenes_responses_are_pooled_by_cell_both_signs_apart() -> None:
    """A picture whose left half alone is not blank responds in the cells on the left alone."""
    respond = patches._make_sphere(BY_SCENES, draw_scenes(20, 12, 1, 1))
    image = images(1)
    image[:, :, :, 4:] = 0.5
    cosines = respond(image)
    pooled = patches._pool_signs(cosines, patches._lay_grid(9, 9, 2), 0.1)
    assert pooled.shape == (1, 4, 6)
    assert (pooled[0, 1::2] == 0).all()
    upper_left = torch.cat([cosines[0, :, :5, :5], -cosines[0, :, :5, :5]])
    torch.testing.assert_close(pooled[0, 0], (upper_left - 0.1).clamp(min=0).mean((1, 2)))


def test_half_precision_changes_responses_little() -> None:
    scenes = draw_scenes(20, 12, 3, 1)
    exact, rounded = (patches._make_sphere(BY_SCENES, scenes, half=half)(images(2, 3)) for half in (False, True))
    assert rounded.dtype is torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, atol=0.02, rtol=0)


@pytest.mark.parametrize("choice", [SMALL, BY_SCENES])
def test_a_record_alone_has_the_same_features(choice: Patches) -> None:
    features = fit_description(choice, 12, 12, 1)
    together = features(images())
    changed = images()
    changed[0] = 0.3
    assert not torch.allclose(features(changed)[0], together[0])
    torch.testing.assert_close(features(changed)[1:], together[1:])
    torch.testing.assert_close(features(images()[2:3])[0], together[2], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("choice", [SMALL, BY_SCENES])
def test_mirror_images_have_the_same_features_if_asked_for(choice: Patches) -> None:
    plain, mirrored = (fit_description(replace(choice, mirror=each), 12, 12, 1) for each in (False, True))
    x = images()
    torch.testing.assert_close(mirrored(x), mirrored(x.flip(3)), atol=1e-4, rtol=1e-3)
    assert not torch.allclose(plain(x), plain(x.flip(3)), atol=1e-2)


def test_whitening_makes_synthetic_pictures_rounder() -> None:
    kernels = make_filters(SMALL.filters, SMALL.side, draw_dead_leaves(20, 32, 1, 1))
    pictures = draw_centred_leaves(200, 12, 1, 5)
    before = patches._pool(pictures, kernels, SMALL)
    after = fit_description(SMALL, 12, 12, 1)(pictures[before.norm(dim=1) > 0])

    def share_of_largest(rows: torch.Tensor) -> float:
        variances = torch.linalg.eigvalsh((rows - rows.mean(0)).T @ (rows - rows.mean(0)))
        return float(variances[-1] / variances.sum())

    assert share_of_largest(after) < 0.7 * share_of_largest(before)
    torch.testing.assert_close(after.norm(dim=1), torch.ones(len(after)))


@pytest.mark.parametrize("choice", [SMALL, BY_SCENES])
def test_blank_image_is_finite(choice: Patches) -> None:
    assert fit_description(choice, 12, 12, 1)(torch.zeros(1, 1, 12, 12)).isfinite().all()


def test_pictures_are_a_function_of_their_arguments() -> None:
    for make in (draw_dead_leaves, draw_centred_leaves):
        first = make(3, 12, 3, 7)
        assert first.shape == (3, 3, 12, 12)
        assert first.min() >= 0
        assert first.max() <= 1
        assert torch.equal(first, make(3, 12, 3, 7))
        assert not torch.equal(first, make(3, 12, 3, 8))
    assert (draw_centred_leaves(20, 12, 1, 7)[:, :, 0, 0] == 0).all(), "the corners are black"


def test_second_call_reads_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = describe_patches(images(), SMALL, folder=tmp_path)
    torch.testing.assert_close(first, fit_description(SMALL, 12, 12, 1)(images()), atol=1e-5, rtol=1e-4)
    first += 1.0  # reaches no file
    monkeypatch.setattr(patches, "_fill_patches", lambda *_: pytest.fail("computed again"))
    torch.testing.assert_close(describe_patches(images(), SMALL, folder=tmp_path), first - 1.0)


def test_other_images_or_choices_are_another_file(tmp_path: Path) -> None:
    describe_patches(images(), SMALL, folder=tmp_path)
    describe_patches(images() * 0.5, SMALL, folder=tmp_path)
    describe_patches(images(), Patches(filters=3, side=4, grid=2, threshold=0.2), folder=tmp_path)
    assert len(list(tmp_path.glob("*.npy"))) == 3


def test_refusals_name_the_value(tmp_path: Path) -> None:
    for options, said in (
        ({"filters": 0}, "filters=0"),
        ({"ridge": 0.0}, "ridge=0.0"),
        ({"threshold": -1.0}, "-1.0"),
        ({"kept": 101}, "kept=101"),
        ({"tilt": 1.5}, "tilt=1.5"),
    ):
        with pytest.raises(InvalidInput, match=said):
            Patches(**options)
    with pytest.raises(InvalidInput, match="sides >= 5"):
        describe_patches(torch.zeros(2, 1, 4, 4), SMALL, folder=tmp_path)
    with pytest.raises(InvalidInput, match=r"filters=1000000"):
        make_filters(1_000_000, 6, draw_dead_leaves(2, 32, 1, 1))
