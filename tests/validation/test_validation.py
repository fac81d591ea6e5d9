"""`check` and `require_valid` refuse in one line, touch nothing and say nothing of single records (laws 6 and 7)."""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from sordino.errors import UnsupportedModel
from sordino.gradients.engine import Batch, Objective
from sordino.validation import check, check_optimizer, require_valid, tell_if_slow
from tests.validation.probes import (
    CLASSES,
    Augmented,
    around,
    cross_entropy,
    fetcher,
    findings,
    kinds,
    tokens,
    vectors,
)


def test_a_batchnorm_finding_offers_the_fix_and_is_raised_in_one_line() -> None:
    model, dataset = around(nn.BatchNorm1d(8)), vectors()
    with pytest.raises(UnsupportedModel, match=r"^BatchNorm1d '1' mixes examples.*sordino\.fix\(model\)") as raised:
        require_valid(Objective(model, cross_entropy), list(model.parameters()), fetcher(dataset), len(dataset))
    assert "\n" not in str(raised.value)
    healthy = around(nn.GroupNorm(2, 8))
    require_valid(Objective(healthy, cross_entropy), list(healthy.parameters()), fetcher(dataset), len(dataset))


def test_labels_out_of_range() -> None:
    dataset = vectors()
    dataset.tensors[1].add_(CLASSES)
    (finding,) = findings(around(nn.LayerNorm(8)), dataset)
    assert finding.kind == "labels"
    assert "must lie in [0, size)" in finding.message


def test_tokens_out_of_range_name_the_layer() -> None:
    model = nn.Sequential(nn.Embedding(2, 4), nn.Flatten(), nn.Linear(20, CLASSES))
    (finding,) = findings(model, tokens())
    assert (finding.kind, finding.where) == ("labels", "Embedding '0'")


def test_one_hot_labels_out_of_range() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.mse_loss(
            model(batch[0]), functional.one_hot(batch[1] + 1, CLASSES).float(), reduction="none"
        ).mean(1)

    assert kinds(around(nn.LayerNorm(8)), vectors(), loss) == {"labels"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_dtype_mismatch_names_both(dtype: torch.dtype) -> None:
    x, y = vectors().tensors
    (finding,) = findings(around(nn.LayerNorm(8)), TensorDataset(x.to(dtype), y))
    assert (finding.kind, finding.where) == ("dtype", "Linear '0'")
    assert "float32" in finding.message
    assert str(dtype).removeprefix("torch.") in finding.message


def test_wrong_width_names_the_layer_and_chains_the_cause() -> None:
    model, dataset = around(nn.LayerNorm(8)), vectors(width=5)
    with pytest.raises(
        UnsupportedModel, match=r"^Linear '0' failed on a batch \(RuntimeError in .*kept back"
    ) as raised:
        require_valid(Objective(model, cross_entropy), list(model.parameters()), fetcher(dataset), len(dataset))
    assert "mat1" not in str(raised.value)
    assert "mat1" in str(raised.value.__cause__ or raised.value.__context__)


def test_no_trainable_parameter() -> None:
    model = around(nn.LayerNorm(8)).requires_grad_(False)
    assert kinds(model, vectors()) == {"parameters"}


@pytest.mark.parametrize("layer", [nn.LazyLinear(8), nn.LazyBatchNorm1d()])
def test_lazy_layers_are_told_to_run_once(layer: nn.Module) -> None:
    (finding,) = findings(around(layer), vectors())
    assert "run it once" in finding.message


def test_foreign_parameters() -> None:
    model, stranger = around(nn.LayerNorm(8)), nn.Linear(2, 2)
    (finding,) = check(Objective(model, cross_entropy), list(stranger.parameters()), fetcher(vectors()), 9)
    assert finding.kind == "parameters"


class Spectral(nn.Module):
    """A filter of frequencies, as one complex parameter or as a real one that is viewed as complex."""

    def __init__(self, is_complex: bool) -> None:
        super().__init__()
        filters = torch.randn(4, 2)
        self.filters = nn.Parameter(torch.view_as_complex(filters) if is_complex else filters)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        filters = self.filters if self.filters.is_complex() else torch.view_as_complex(self.filters)
        output: Tensor = self.head(torch.fft.irfft(torch.fft.rfft(x) * filters, n=6))
        return output


def test_complex_parameters_are_refused_by_name_also_without_the_probe() -> None:
    """Norms of real numbers alone would leave the imaginary part unclipped."""
    model = Spectral(is_complex=True)
    (finding,) = findings(model, vectors())
    assert finding.message.startswith("parameter filters is complex: ")
    with pytest.raises(UnsupportedModel, match=r"^parameter filters is complex: .*view_as_complex"):
        check_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    way_out = Spectral(is_complex=False)
    assert findings(way_out, vectors()) == []
    check_optimizer(way_out, torch.optim.SGD(way_out.parameters(), lr=0.1))


# Nothing is touched.


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "state": copy.deepcopy(model.state_dict()),
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "flags": [m.training for m in model.modules()],
        "identities": [id(t) for t in (*model.parameters(), *model.buffers())],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1],  # noqa: NPY002 - the generator that must not move
        "grad mode": torch.is_grad_enabled(),
    }


def unchanged(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor):
        return torch.equal(before, after)
    if isinstance(before, np.ndarray):
        return np.array_equal(before, after)
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(unchanged(before[k], after[k]) for k in before)
    if isinstance(before, list | tuple):
        return len(before) == len(after) and all(unchanged(a, b) for a, b in zip(before, after, strict=True))
    return bool(before == after)


def raising(model: nn.Module, batch: Any) -> Tensor:
    model(batch[0])
    raise ArithmeticError


def scalar(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch).mean()


def prepared(layer: nn.Module) -> nn.Sequential:
    model = around(nn.Sequential(layer, nn.Dropout()))
    model[0].eval()
    cross_entropy(model, (torch.randn(4, 6), torch.zeros(4).long())).sum().backward()
    return model


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), nn.LayerNorm(8)], ids=["broken", "healthy"])
@pytest.mark.parametrize("loss", [cross_entropy, raising, scalar], ids=["fine", "raising", "scalar"])
@pytest.mark.parametrize("no_grad", [False, True])
def test_the_check_leaves_no_trace(layer: nn.Module, loss: Any, no_grad: bool) -> None:
    model = prepared(copy.deepcopy(layer))
    random.seed(11)
    np.random.seed(11)  # noqa: NPY002 - the generator that must not move
    trained = list(model.parameters())
    with torch.set_grad_enabled(not no_grad):
        before = snapshot(model)
        found = check(Objective(model, loss), trained, fetcher(Augmented(random.random)), 9)
        assert unchanged(before, snapshot(model))
    assert bool(found) == (isinstance(layer, nn.BatchNorm1d) or loss is not cross_entropy)


def test_a_loss_that_runs_another_model_than_given_is_found_and_undone() -> None:
    model = prepared(nn.BatchNorm1d(8))
    before = snapshot(model)
    assert kinds(model, vectors(), lambda _, batch: cross_entropy(model.train(), batch)) == {"detached"}
    assert unchanged(before, snapshot(model))


def test_snapshots_notice_a_plain_forward_pass() -> None:
    """The twin of the two tests above: their instrument sees what a careless check would do."""
    model = prepared(nn.BatchNorm1d(8))
    before = snapshot(model)
    model(torch.randn(4, 6))
    assert not unchanged(before["state"], snapshot(model)["state"])
    assert not unchanged(before["torch"], snapshot(model)["torch"])


def test_at_most_four_records_are_read_and_always_the_same() -> None:
    dataset, seen = vectors(100), []

    def fetch(indices: Sequence[int]) -> Batch:
        seen.append(tuple(indices))
        return fetcher(dataset)(indices)

    model = around(nn.LayerNorm(8))
    check(Objective(model, cross_entropy), list(model.parameters()), fetch, 100)
    assert {i for indices in seen for i in indices} == {0, 33, 66, 99}
    assert all(len(indices) <= 4 for indices in seen)


def test_whoever_waits_long_for_the_probe_is_told_what_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a terminal, and only after a while: a script's output stays as it was."""
    for terminal, seconds, told in ((True, 0.0, True), (False, 0.0, False), (True, 60.0, False)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with tell_if_slow(seconds):
            time.sleep(0.2)
        assert ("probing whether model and loss mix examples" in capsys.readouterr().err) == told
