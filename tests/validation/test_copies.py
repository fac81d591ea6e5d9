"""What the probe copies: all that a run may change, and no more; also models that hold what they computed."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from sordino.gradients.engine import Objective
from sordino.validation.probing import Prober, preserve_model, preserve_randomness
from tests.validation.probes import CLASSES, around, cross_entropy, findings, kinds, vectors


def pruned() -> nn.Module:
    model = around(nn.LayerNorm(8))
    prune.l1_unstructured(model[0], "weight", 0.4)
    return model


def weight_normed() -> nn.Module:
    model = around(nn.LayerNorm(8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model[0])
    model(torch.randn(2, 6))
    return model


def cached() -> nn.Module:
    model = around(nn.LayerNorm(8))
    model.cache = model(torch.zeros(2, 6))
    return model


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.ReLU())), nn.Linear(8, CLASSES))


@pytest.mark.parametrize("build", [pruned, weight_normed, cached, scripted])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_models_that_hold_what_they_computed(build: Any) -> None:
    assert findings(build(), vectors()) == []


def test_a_model_that_cannot_be_copied_is_told_why() -> None:
    model = around(nn.LayerNorm(8))
    model.lock = threading.Lock()
    (finding,) = findings(model, vectors())
    assert finding.kind == "copy"
    assert "locks" in finding.message


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(self.body, x.requires_grad_(), use_reentrant=True)
        return self.head(hidden)


def test_reentrant_checkpoints_are_refused_with_the_way_out() -> None:
    (finding,) = findings(Reentrant(), vectors())
    assert (finding.kind, finding.where) == ("checkpoint", "model")
    assert "use_reentrant=False" in finding.message
    assert "\n" not in finding.message


def count_copies(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Copies of parameters that the probe makes, and its runs."""
    copies, runs = [0], [0]
    copy_parameter, run = nn.Parameter.__deepcopy__, Prober._run

    def counted(self: nn.Parameter, memo: dict[int, Any]) -> Any:
        copies[0] += id(self) not in memo
        return copy_parameter(self, memo)

    def noted(self: Prober, *args: Any) -> Any:
        runs[0] += 1
        return run(self, *args)

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", counted)
    monkeypatch.setattr(Prober, "_run", noted)
    assert findings(model, vectors()) == []
    return copies[0], runs[0]


def test_parameters_are_copied_twice_however_many_runs_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to have them again in the end, once for the first run, which shows that the loss leaves them alone."""
    model = around(nn.LayerNorm(8))
    model[0].requires_grad_(False)
    copies, runs = count_copies(model, monkeypatch)
    assert runs > 10
    assert copies == 2 * len(list(model.parameters()))


class Writes(nn.Module):
    """Writes into its weight: always, or only where a feature of the batch is large."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always, self.inner = always, around(nn.LayerNorm(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.always or float(x.detach().max()) > 3:
            with torch.no_grad():
                self.inner[0].weight.mul_(0.5).add_(x.mean() if self.always else 0.1)
        output: Tensor = self.inner(x)
        return output


@pytest.mark.parametrize("always", [True, False])
def test_a_loss_that_writes_into_parameters_is_noticed(always: bool) -> None:
    dataset = vectors()
    dataset.tensors[0].clamp_(-2, 2)
    dataset.tensors[0][-1, 0] = 5
    assert "state" in kinds(Writes(always), dataset)


def test_a_later_run_that_writes_leaves_nothing_behind() -> None:
    """The parameters that all copies had in common are put back, and the run is taken again with its own."""
    model = Writes(always=False)
    objective = Objective(model, cross_entropy)
    x, y = torch.zeros(2, 6), torch.zeros(2, dtype=torch.long)
    with preserve_randomness(objective) as seed, preserve_model(objective) as pristine:
        prober = Prober(pristine, [], seed, spare=objective)
        assert prober.run((x, y), 2).state
        assert prober.sharing
        written = prober.run((x + 5, y), 2)
        assert prober.sharing is False
        assert not torch.equal(written.state["model.inner.0.weight"], model.inner[0].weight)
        for mine, theirs in zip(pristine.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
