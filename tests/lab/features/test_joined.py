"""Whitened scattering and joined features: a formula, one record at a time, kept on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sordino.errors import InvalidInput
from sordino.lab.experiments import Case
from sordino.lab.experiments.problem import join_features, problem_of
from sordino.lab.features import scatter, scattering
from sordino.lab.features.scattering import WhiteScattering
from sordino.lab.features.scenes import draw_scenes
from sordino.lab.features.synthetic import fit_cells, fit_whitening, scale_to_unit

pytest.importorskip("kymatio")
SMALL = WhiteScattering(groups=9)


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scattering, "_EXAMPLES", 40)


def images(count: int = 5) -> Tensor:
    return torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("count", [30, 8])
def test_whitening_is_the_inverse_root_of_the_covariance_plus_ridge(count: int) -> None:
    """In full, and through the few directions that fewer examples than dimensions span."""
    examples = torch.randn(count, 12, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 13)
    white = fit_whitening(examples, 0.01)
    centred = (examples - examples.mean(0)).double()
    covariance = centred.T @ centred / count
    ridged = covariance + 0.01 * torch.linalg.eigvalsh(covariance)[-1] * torch.eye(12)
    root = white(torch.eye(12) + examples.mean(0)).double()
    torch.testing.assert_close(root @ ridged @ root.T, torch.eye(12).double(), atol=1e-3, rtol=0)


def test_white_scattering_is_that_of_the_formula(tmp_path: Path) -> None:
    found = scattering.scatter_white(images(), SMALL, folder=tmp_path)
    white = scattering.fit_white_scattering(SMALL, 1, 16, 16, tmp_path)
    plain = scale_to_unit(scatter(images(), groups=9, folder=tmp_path, quiet=True).flatten(1))
    torch.testing.assert_close(found, scale_to_unit(white(plain)), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(5))


def test_with_kept_scattering_is_whitened_over_channels_and_cells_by_scenes(tmp_path: Path) -> None:
    found = scattering.scatter_white(images(), WhiteScattering(groups=9, kept=7), folder=tmp_path)

    def cells(x: Tensor) -> Tensor:
        plain = scatter(x, groups=9, folder=tmp_path, quiet=True)
        return scale_to_unit(plain.flatten(1)).reshape(plain.shape).flatten(2).transpose(1, 2)

    white = fit_cells(cells(draw_scenes(40, 16, 1, 5)), 7)
    assert found.shape == (5, 16 * 7)
    torch.testing.assert_close(found, white(cells(images())), atol=1e-4, rtol=1e-3)
    with pytest.raises(InvalidInput, match="kept=82 must be <= 81"):
        scattering.scatter_white(images(), WhiteScattering(groups=9, kept=82), folder=tmp_path)


def test_a_record_alone_has_the_same_features(tmp_path: Path) -> None:
    together = scattering.scatter_white(images(), SMALL, folder=tmp_path)
    alone = scattering.scatter_white(images()[2:3], SMALL, folder=tmp_path)
    torch.testing.assert_close(alone[0], together[2], atol=1e-5, rtol=1e-4)


def test_mirror_images_have_the_same_features_if_asked_for(tmp_path: Path) -> None:
    def of(x: Tensor, mirror: bool) -> Tensor:
        return scattering.scatter_white(x, WhiteScattering(groups=9, mirror=mirror), folder=tmp_path)

    torch.testing.assert_close(of(images(), True), of(images().flip(3), True), atol=1e-4, rtol=1e-3)
    assert not torch.allclose(of(images(), False), of(images().flip(3), False), atol=1e-2)


def test_gray_is_the_scattering_of_brightness(tmp_path: Path) -> None:
    colours = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    gray = torch.einsum("nchw,c->nhw", colours, torch.tensor([0.299, 0.587, 0.114]))[:, None]
    found = scattering.scatter_white(colours, WhiteScattering(groups=9, gray=True), folder=tmp_path)
    expected = scattering.scatter_white(gray, SMALL, folder=tmp_path)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    with pytest.raises(InvalidInput, match="leave gray out"):
        scattering.scatter_white(images(), WhiteScattering(gray=True), folder=tmp_path)


def test_joined_features_have_the_mean_of_the_kernels(tmp_path: Path) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    parts = [lambda rows: rows.reshape(-1, 2, 2), lambda rows: rows[:, :3] * 7]
    found = join_features(x, parts, named="two", folder=tmp_path)
    first, second = scale_to_unit(x), scale_to_unit(x[:, :3])
    assert found.shape == (6, 7)
    torch.testing.assert_close(found @ found.T, (first @ first.T + second @ second.T) / 2)
    shared = join_features(x, parts, [3, 1], named="two", folder=tmp_path)
    torch.testing.assert_close(shared @ shared.T, 0.75 * first @ first.T + 0.25 * second @ second.T)


def test_joined_features_are_computed_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def part(rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return rows

    x = torch.ones(3, 2)
    for named, count in (("a", 1), ("a", 1), ("b", 2)):
        join_features(x, [part], named=named, folder=tmp_path)
        assert len(calls) == count


def case(**options: Any) -> Case:
    return Case("digits", "best", 1.0, model={"name": "linear"}, recipe={"name": "dpsgd"}, **options)


def test_a_case_can_join_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path))
    parts = [{"kind": "patches", "filters": 2, "side": 3, "grid": 2}, {"kind": "white-scatter", "groups": 9}]
    options = {"kind": "joined", "parts": parts, "shares": [0.7, 0.3]}
    problem = problem_of(case(features=options, records=20))
    assert problem.train[0].shape == (20, 2 * 2 * 4 + 81 * 4)
    torch.testing.assert_close(problem.train[0].norm(dim=1), torch.ones(20))


def test_refusals_name_the_value(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"ridge=0\.0"):
        WhiteScattering(ridge=0.0)
    with pytest.raises(InvalidInput, match="kept=-1"):
        WhiteScattering(kept=-1)
    with pytest.raises(InvalidInput, match="no parts"):
        join_features(torch.ones(2, 2), [], named="none", folder=tmp_path)
    for shares in ([1.0], [1.0, 0.0]):
        with pytest.raises(InvalidInput, match="must be 2 positive numbers"):
            join_features(torch.ones(2, 2), [torch.clone] * 2, shares, named="none", folder=tmp_path)
    with pytest.raises(InvalidInput, match="kind='cubes'"):
        problem_of(case(features={"kind": "joined", "parts": [{"kind": "cubes"}]}))
    with pytest.raises(InvalidInput, match="a part with noise"):
        problem_of(case(features={"kind": "joined", "parts": [{"kind": "scatter", "noise": 8.0}]}))
    with pytest.raises(InvalidInput, match="joined have other options"):
        problem_of(case(features={"kind": "joined", "sizes": [1]}))
