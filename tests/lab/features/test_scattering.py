"""Scattering: the right import, the right shapes, one computation, no coupling between records, a clear refusal."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sordino.errors import InvalidInput
from sordino.lab.features import MissingExtra, group_norm, scatter, scattering

needs_kymatio = pytest.mark.skipif(importlib.util.find_spec("kymatio") is None, reason="kymatio is not installed")


def digits(count: int = 6, channels: int = 1, side: int = 28) -> Tensor:
    return torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(0))


@needs_kymatio
def test_the_two_dimensional_front_end_needs_no_module_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kymatio's top-level torch module imports spherical harmonics that current SciPy no longer has."""
    for name in [name for name in sys.modules if name.split(".")[0] == "kymatio"]:
        monkeypatch.delitem(sys.modules, name)
    for broken in ("kymatio.torch", "kymatio.scattering3d.frontend.torch_frontend", "kymatio.scattering3d.filter_bank"):
        monkeypatch.setitem(sys.modules, broken, None)
    assert scattering.build_transform(28, 28)(torch.zeros(1, 28, 28)).shape == (1, 81, 7, 7)


@needs_kymatio
def test_shapes_of_the_papers(tmp_path: Path) -> None:
    assert scatter(digits(2), folder=tmp_path, quiet=True).shape == (2, 81, 7, 7)
    assert scatter(digits(2, 3, 32), folder=tmp_path, quiet=True).shape == (2, 243, 8, 8)


@needs_kymatio
def test_scattering_is_the_first_path_of_a_local_mean_and_contracts(tmp_path: Path) -> None:
    """A constant image has only the low-pass path; scattering never expands a distance (Mallat 2012)."""
    flat = scatter(torch.full((1, 1, 28, 28), 0.5), folder=tmp_path, quiet=True)
    torch.testing.assert_close(flat[0, 0], torch.full((7, 7), 0.5), atol=1e-4, rtol=0)
    assert flat[0, 1:].abs().max() < 1e-4
    x = digits(2)
    features = scatter(x, folder=tmp_path, quiet=True)
    # The maps are sampled at every fourth pixel in both directions, so each value stands for 16.
    assert 4 * (features[0] - features[1]).norm() <= 1.05 * (x[0] - x[1]).norm()


@needs_kymatio
def test_each_record_is_treated_alone_whatever_the_workers_and_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = scatter(digits(), folder=tmp_path / "a", groups=27, workers=1, quiet=True)
    monkeypatch.setattr(scattering, "CHUNK", 2)
    apart = scatter(digits(), folder=tmp_path / "b", groups=27, workers=3, quiet=True)
    torch.testing.assert_close(together, apart)
    alone = scatter(digits()[4:5], folder=tmp_path, groups=27, quiet=True)
    torch.testing.assert_close(together[4:5], alone)
    raw = scatter(digits(), folder=tmp_path, quiet=True)
    torch.testing.assert_close(together, group_norm(81)(raw))


@needs_kymatio
def test_features_are_computed_once_and_keyed_by_all_that_decides_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    original = scattering._fill_scattering

    def counted(images: Tensor, *rest: object) -> None:
        runs.append(len(images))
        original(images, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(scattering, "_fill_scattering", counted)
    first = scatter(digits(), folder=tmp_path, quiet=True)
    again = scatter(digits(), folder=tmp_path, quiet=True)
    assert len(runs) == 1
    assert torch.equal(first, again)
    changed = digits()
    changed[3, 0, 5, 5] += 1e-6
    scatter(changed, folder=tmp_path, quiet=True)
    scatter(digits(), folder=tmp_path, groups=27, quiet=True)
    half = scatter(digits(), folder=tmp_path, dtype=torch.float16, quiet=True)
    assert len(runs) == 4
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), first, atol=1e-3, rtol=1e-3)
    assert {path.suffix for path in tmp_path.iterdir()} == {".npy", ".lock"}


@needs_kymatio
def test_channels_last_is_a_layout_and_not_other_numbers(tmp_path: Path) -> None:
    plain = scatter(digits(2, 3, 32), folder=tmp_path, groups=27, quiet=True)
    last = scatter(digits(2, 3, 32), folder=tmp_path, groups=27, channels_last=True, quiet=True)
    assert torch.equal(last, plain)
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    chosen = last[torch.tensor([1, 0])]
    assert chosen.is_contiguous(memory_format=torch.channels_last), "a draw of records must keep the layout"


@needs_kymatio
def test_writing_into_the_features_does_not_reach_the_file(tmp_path: Path) -> None:
    features = scatter(digits(), folder=tmp_path, quiet=True)
    kept = features.clone()
    features.zero_()
    assert torch.equal(scatter(digits(), folder=tmp_path, quiet=True), kept)


@needs_kymatio
def test_a_computation_that_was_killed_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(height: int, width: int) -> object:
        def plane(images: Tensor) -> Tensor:
            raise KeyboardInterrupt

        return plane

    with monkeypatch.context() as patch:
        patch.setattr(scattering, "build_transform", killed)
        with pytest.raises(KeyboardInterrupt):
            scatter(digits(), folder=tmp_path, quiet=True)
    assert not list(tmp_path.glob("*.npy"))
    assert scatter(digits(), folder=tmp_path, quiet=True).abs().sum() > 0


def test_without_kymatio_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kymatio.scattering2d.frontend.torch_frontend", None)
    with pytest.raises(MissingExtra, match=r"pip install 'sordino\[features\]'") as caught:
        scatter(digits(), folder=tmp_path, quiet=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(28, 28), (2, 28, 28), (2, 1, 30, 28), (0, 1, 28, 28)])
def test_other_shapes_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="images have shape"):
        scatter(torch.zeros(shape), folder=tmp_path)


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"must be torch\.float32 or torch\.float16"):
        scatter(digits(), folder=tmp_path, dtype=torch.float64)
