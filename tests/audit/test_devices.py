"""The self-test passes on this machine's processor, and fails where gradients, clipping or noise are wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sordino.audit import devices
from sordino.bits import Normals
from sordino.errors import InvalidInput
from sordino.gradients.bookkeeping.book import Book

CPU = torch.device("cpu")


def spoil_noise(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """All normals of secure sources are so much longer than they were paid for."""
    plain = Normals.draw
    monkeypatch.setattr(Normals, "draw", lambda self, out, std=1.0: plain(self, out, factor * std))


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    from typer.testing import CliRunner

    from sordino.cli import app

    done = CliRunner().invoke(app, ["selftest", "--device", "cpu", "--no-speed", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_sound_machine_passes(printed: dict[str, Any]) -> None:
    assert printed["passed"]
    assert [row["question"] for row in printed["findings"]] == ["oracle", "noise", "power", "fresh"]
    assert printed["device"].startswith("cpu")
    assert printed["timings"] == []


@pytest.mark.parametrize("factor", devices.OFF)
def test_noise_that_is_five_percent_off_fails(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_noise(monkeypatch, factor)
    noise, power, _ = devices.examine_noise(CPU)
    assert not noise.passed
    assert not power.passed  # it cannot be told from the very deviation that it should be told from


def test_noise_that_is_drawn_twice_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a generator that every run begins anew."""

    def repeat(self: Normals, out: NDArray[np.float64], std: float = 1.0) -> None:
        out[:] = std * torch.randn(len(out), generator=torch.Generator().manual_seed(len(out))).double().numpy()

    monkeypatch.setattr(Normals, "draw", repeat)
    _, _, fresh = devices.examine_noise(CPU)
    assert not fresh.passed


def test_the_command_exits_with_one_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from sordino.cli import app

    def spoiled(device: torch.device, timed: bool, tell: Callable[[object], object]) -> devices.SelfTest:
        found = devices.examine_noise(device)
        for each in found:
            tell(each)
        return devices.SelfTest("cpu", tuple(found), ())

    spoil_noise(monkeypatch, 0.95)
    monkeypatch.setattr(devices, "examine_device", spoiled)
    done = CliRunner().invoke(app, ["selftest", "--device", "cpu"])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[1].startswith("✗ noise: ")
    assert done.stdout.splitlines()[-1].endswith(" | FAILED")


def test_norms_that_are_a_thousandth_short_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Book.close

    def close(self: Book) -> Book:
        closed = plain(self)
        closed.squares *= 0.998
        return closed

    monkeypatch.setattr(Book, "close", close)
    found = devices.compare_engines(CPU, ("auto",))
    assert not found.passed
    assert "by auto" in found.words


def test_a_sum_that_forgets_one_weight_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Book.weighted_sum

    def weighted_sum(self: Book, weights: torch.Tensor) -> Any:
        return plain(self, torch.cat([weights[:-1], torch.ones(1)]))

    monkeypatch.setattr(Book, "weighted_sum", weighted_sum)
    assert not devices.compare_engines(CPU, ("auto",)).passed


def test_an_engine_that_breaks_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: Book) -> Book:
        raise RuntimeError("expected all tensors to be on the same device")

    monkeypatch.setattr(Book, "close", close)
    assert devices.compare_engines(CPU, ("auto",)).figure == "inf"


def test_a_device_that_is_not_there_is_refused() -> None:
    missing = "mps" if not torch.backends.mps.is_available() else "cuda"
    with pytest.raises(InvalidInput, match=f"device='{missing}' is not on this machine"):
        devices.choose_device(missing)
    with pytest.raises(InvalidInput, match="device='warp' is not on this machine"):
        devices.choose_device("warp")


def test_a_slow_machine_is_timed_by_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "PATIENCE", 1.0)
    taken = []
    devices._time((taken.append(time.sleep(0.002)) for _ in range(100)), CPU)
    assert len(taken) == 2
    monkeypatch.setattr(devices, "PATIENCE", 10_000.0)
    devices._time((taken.append(None) for _ in range(100)), CPU)
    assert len(taken) == 2 + 2 * devices.TIMED


@pytest.mark.slow
def test_speed_beside_the_peers() -> None:
    for timing in devices.time_steps(CPU, batch=32):
        assert timing.sgd > 0
        assert timing.sordino > 0
        assert str(timing).startswith(f"{timing.network} sgd ")
