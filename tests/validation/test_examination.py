"""The probe objects to every way of mixing examples or remembering data, and to nothing else (laws 6 and 7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.validation.probes import (
    CLASSES,
    Attending,
    Centred,
    CentredQuietly,
    FunctionalDropout,
    GradientMixer,
    Recurrent,
    Running,
    Tokenwise,
    around,
    convolutional,
    cross_entropy,
    eval_batchnorm,
    findings,
    images,
    kinds,
    tokens,
    vectors,
    zero_head,
)

HEALTHY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "linear": (lambda: around(nn.Identity()), vectors),
    "group norm": (lambda: convolutional(nn.GroupNorm(4, 8)), images),
    "layer norm": (lambda: around(nn.LayerNorm(8)), vectors),
    "instance norm": (lambda: convolutional(nn.InstanceNorm2d(8, affine=True)), images),
    "dropout": (lambda: around(nn.Dropout(0.5)), vectors),
    "dropout2d": (lambda: convolutional(nn.Dropout2d(0.5)), images),
    "dropout beside functional dropout": (lambda: around(nn.Sequential(nn.Dropout(), FunctionalDropout())), vectors),
    "lstm": (lambda: Recurrent(nn.LSTM), tokens),
    "gru": (lambda: Recurrent(nn.GRU), tokens),
    "attention": (Attending, tokens),
    "transformer": (lambda: around(Tokenwise(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))), vectors),
    "batchnorm in eval mode": (eval_batchnorm, vectors),
    "step counter": (lambda: around(Running(lambda seen, x: seen + 1)), vectors),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, CLASSES)), vectors),
    "embedding": (lambda: nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(20, CLASSES)), tokens),
    "sparse embedding": (
        lambda: nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Flatten(), nn.Linear(20, CLASSES)),
        tokens,
    ),
    "zero head": (lambda: zero_head(nn.LayerNorm(8)), vectors),
    "float64": (lambda: around(nn.LayerNorm(8)).double(), lambda: vectors(dtype=torch.float64)),
    "bfloat16": (lambda: around(nn.LayerNorm(8)).bfloat16(), lambda: vectors(dtype=torch.bfloat16)),
    "one record": (lambda: around(nn.LayerNorm(8)), lambda: vectors(1)),
    "two records": (lambda: around(nn.LayerNorm(8)), lambda: vectors(2)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_private_models_pass(name: str) -> None:
    model, dataset = HEALTHY[name]
    torch.manual_seed(1)
    assert findings(model(), dataset()) == []


def frozen_batchnorm() -> nn.Module:
    model = around(nn.BatchNorm1d(8))
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    return model


MIXING: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "batchnorm1d": (lambda: around(nn.BatchNorm1d(8)), vectors, "BatchNorm1d '1'"),
    "batchnorm2d": (lambda: convolutional(nn.BatchNorm2d(8)), images, "BatchNorm2d '1'"),
    "without affine": (lambda: around(nn.BatchNorm1d(8, affine=False)), vectors, "BatchNorm1d '1'"),
    "frozen in train mode": (frozen_batchnorm, vectors, "BatchNorm1d '1'"),
    "without running statistics": (
        lambda: around(nn.BatchNorm1d(8, track_running_stats=False)).eval(),
        vectors,
        "BatchNorm1d '1'",
    ),
    "synchronised": (lambda: convolutional(nn.SyncBatchNorm(8)), images, "SyncBatchNorm '1'"),
    "batch centring": (lambda: around(Centred()), vectors, "Centred '1'"),
    "batch centring under no_grad": (lambda: around(CentredQuietly()), vectors, "CentredQuietly '1'"),
    "behind dropout": (lambda: around(nn.Sequential(nn.Dropout(), nn.BatchNorm1d(8))), vectors, "BatchNorm1d '1.1'"),
    "behind a zero head": (lambda: zero_head(nn.BatchNorm1d(8)), vectors, "BatchNorm1d '1'"),
    "backward only": (lambda: around(GradientMixer()), vectors, ""),
    "cumulative over the batch": (lambda: around(Applied(lambda x: x.cumsum(0))), vectors, "Applied '1'"),
    "cumulative backwards": (lambda: around(Applied(lambda x: x.flip(0).cumsum(0).flip(0))), vectors, "Applied '1'"),
    "between children": (lambda: CentresBetween(), vectors, "model CentresBetween"),
    "in float64": (lambda: around(nn.BatchNorm1d(8)).double(), lambda: vectors(dtype=torch.float64), "BatchNorm1d '1'"),
    "with two records": (lambda: around(Centred()), lambda: vectors(2), "Centred '1'"),
    "with one record": (lambda: around(Centred()), lambda: vectors(1), "Centred '1'"),
    "equal records": (
        lambda: around(Centred()),
        lambda: TensorDataset(torch.ones(8, 6), torch.ones(8).long()),
        "Centred '1'",
    ),
    "attention over the batch": (
        lambda: around(Tokenwise(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0))),
        vectors,
        "",
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_found_and_located_in_a_costly_model_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.validation.examination.COSTLY", 0)
    test_mixing_is_found_and_located(name)


@pytest.mark.parametrize("name", HEALTHY)
def test_private_models_pass_if_they_are_costly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.validation.examination.COSTLY", 0)
    test_private_models_pass(name)


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class FirstOutput(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[None])[0][0]  # time first: one step


class CentresBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x / x.norm(dim=0))


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_found_and_located(name: str) -> None:
    model, dataset, where = MIXING[name]
    found = findings(model(), dataset())
    assert found, "mixing was not seen"
    assert found[0].kind == "mixing"
    assert where in found[0].where
    assert "\n" not in found[0].message


REMEMBERING: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "instance norm with statistics": (
        lambda: convolutional(nn.InstanceNorm2d(8, track_running_stats=True)),
        images,
        "running_mean, running_var",
    ),
    "slow average": (lambda: around(Running(lambda seen, x: seen + 1e-5 * (x.mean() - seen))), vectors, "seen"),
    "running maximum": (lambda: around(Running(lambda seen, x: torch.maximum(seen, x.abs().max()))), vectors, "seen"),
    "count of examples": (lambda: around(Running(lambda seen, x: seen + len(x))), vectors, "seen"),
    "embedding with max_norm": (
        lambda: nn.Sequential(nn.Embedding(11, 4, max_norm=0.5), nn.Flatten(), nn.Linear(20, CLASSES)),
        tokens,
        "weight",
    ),
}


@pytest.mark.parametrize("name", REMEMBERING)
def test_state_that_keeps_data_is_found(name: str) -> None:
    model, dataset, what = REMEMBERING[name]
    torch.manual_seed(0)
    found = findings(model(), dataset())
    assert {finding.kind for finding in found} == {"state"}
    assert what in found[0].message


def test_hidden_state_carried_between_batches_is_found() -> None:
    class Fixed(Recurrent):
        """Carries the mean over the batch, so that batches of any size run."""

        def forward(self, x: Tensor) -> Tensor:
            out, hidden = self.recurrent(self.embedding(x), self._start(len(x)))
            self.hidden = tuple(h.detach().mean(1, keepdim=True) for h in hidden)
            return self.head(out[:, -1])

        def _start(self, size: int) -> Any:
            return self.hidden and tuple(h.expand(-1, size, -1).contiguous() for h in self.hidden)

    torch.manual_seed(0)
    assert kinds(Fixed(), tokens()) == {"memory"}
    assert kinds(Recurrent(stateful=True), tokens()) == {"memory"}
    assert kinds(Recurrent(stateful=False), tokens()) == set()


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    z = functional.normalize(model(batch[0]), dim=1)
    return functional.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none")


def per_class_share(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    counts = torch.bincount(y, minlength=CLASSES)
    return functional.cross_entropy(model(x), y, reduction="none") / counts[y]


LOSSES: dict[str, tuple[Any, str]] = {
    "contrastive": (contrastive, "mixing"),
    "weighted by counts of the batch": (per_class_share, "mixing"),
    "divided by the batch size": (lambda m, b: cross_entropy(m, b) / len(b[1]), "batch-size"),
    "plus the batch mean": (lambda m, b: cross_entropy(m, b) + cross_entropy(m, b).mean(), "mixing"),
    "scalar": (lambda m, b: functional.cross_entropy(m(b[0]), b[1]), "shape"),
    "matrix": (
        lambda m, b: functional.mse_loss(m(b[0]), functional.one_hot(b[1], CLASSES).float(), reduction="none"),
        "shape",
    ),
    "number": (lambda m, b: functional.cross_entropy(m(b[0]), b[1]).item(), "shape"),
    "column": (lambda m, b: cross_entropy(m, b)[:, None], "shape"),
    "one short": (lambda m, b: cross_entropy(m, b)[1:], "shape"),
    "squeezed": (lambda m, b: cross_entropy(m, b).squeeze(), "batch-size"),
    "detached": (lambda m, b: cross_entropy(m, b).detach(), "detached"),
    "of the labels": (lambda m, b: b[1].float(), "detached"),
    "never finite": (lambda m, b: cross_entropy(m, b) * float("nan"), "non-finite"),
    "raising": (lambda m, b: b["x"], "error"),
    "with a broken backward": (lambda m, b: torch.linalg.vector_norm(BreaksBackward.apply(m(b[0])), dim=1), "error"),
}


class BreaksBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("no backward here\nat all")


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_not_per_example_are_found(name: str) -> None:
    loss, kind = LOSSES[name]
    found = findings(around(nn.LayerNorm(8)), vectors(), loss)
    assert {finding.kind for finding in found} == {kind}
    assert all("\n" not in finding.message for finding in found)


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.LSTM(8, 8, 2, dropout=0.5), FunctionalDropout()])
def test_dropout_does_not_hide_a_division_by_the_batch_size(layer: nn.Module) -> None:
    model = around(FirstOutput(layer) if isinstance(layer, nn.LSTM) else layer)
    assert kinds(model, vectors(), LOSSES["divided by the batch size"][0]) == {"batch-size"}
    assert kinds(model, vectors()) == set()


def test_a_scalar_loss_is_told_about_reduction() -> None:
    (finding,) = findings(around(nn.LayerNorm(8)), vectors(), LOSSES["scalar"][0])
    assert "reduction='none'" in finding.message


@pytest.mark.parametrize("bad", [0, 2, 8])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_one_bad_record_is_not_reported(bad: int, value: float) -> None:
    """Law 6: it contributes zero; law 7: that it exists is private."""
    dataset = vectors()
    dataset.tensors[0][bad] = value
    assert findings(around(nn.LayerNorm(8)), dataset) == []
    assert findings(around(nn.Identity()), dataset) == []


def test_one_bad_record_does_not_hide_a_batchnorm() -> None:
    dataset = vectors()
    dataset.tensors[0][0] = float("nan")
    assert "mixing" in kinds(around(nn.BatchNorm1d(8)), dataset)


@pytest.mark.parametrize("bad", [0, 2, 8])
def test_one_bad_record_does_not_hide_mixing_that_only_gradients_show(bad: int) -> None:
    dataset = vectors()
    dataset.tensors[0][bad] = float("nan")
    assert kinds(around(GradientMixer()), dataset) == {"mixing"}


def test_a_bad_record_that_spreads_is_mixing_not_bad_data() -> None:
    dataset = vectors()
    dataset.tensors[0][2] = float("inf")
    assert "non-finite" not in kinds(around(nn.BatchNorm1d(8)), dataset)
