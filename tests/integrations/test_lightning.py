"""The Lightning callback, inside the real Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino import Budget, InvalidInput, Private, SordinoError, recipes
from sordino.accounting.ledger import Ledger
from sordino.recipe import Recipe

lightning = pytest.importorskip("lightning", reason="lightning is not installed: make test-integrations")
from sordino.integrations.lightning import PrivateTraining  # noqa: E402

RECORDS = 64
BUDGET = Budget(epsilon=3, delta=1e-5)


def records() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, 6, generator=generator)
    return x, (x.sum(1) > 0).long()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def recipe(**settings: Any) -> Recipe:
    return recipes.dpsgd(**{"batch_size": 16, "epochs": 3, **settings}).calibrate(BUDGET, records=RECORDS)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(6, 2)
        self.batches = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.batches += 1
        return loss(self, batch)

    def backward(self, losses: Tensor) -> None:
        PrivateTraining.of(self.trainer).backward(losses)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def trainer(*callbacks: Any, **settings: Any) -> Any:
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "accelerator": "cpu",
        "max_epochs": -1,
    }
    return lightning.Trainer(**{**quiet, **settings}, callbacks=list(callbacks))


def fit(module: Module, privacy: PrivateTraining, **settings: Any) -> int:
    """Returns how many epochs there were."""
    runs = trainer(privacy, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs.fit(module, privacy.loader())
    return int(runs.current_epoch)


def test_it_gives_the_model_that_an_ordinary_loop_gives() -> None:
    module = Module()
    privacy = PrivateTraining(records(), loss, recipe(), seed=7)
    fit(module, privacy)

    twin = Module()
    optimizer = twin.configure_optimizers()
    private = Private(twin, optimizer, records(), loss, recipe(), seed=7)
    for batch in private.loader():
        optimizer.zero_grad()
        private.backward(loss(twin, batch))
        optimizer.step()

    assert privacy.private is not None
    assert privacy.private.position == private.position == private.total == 12
    assert privacy.private.guarantee().epsilon == private.guarantee().epsilon <= BUDGET.epsilon
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    untouched = Module()
    assert not torch.equal(module.net.weight, untouched.net.weight)


def test_validation_and_a_scheduler_between_the_epochs() -> None:
    class Validated(Module):
        def __init__(self) -> None:
            super().__init__()
            self.modes: list[bool] = []
            self.net = nn.Sequential(nn.Linear(6, 2), nn.Dropout(0.2))

        def validation_step(self, batch: Any, index: int) -> None:
            self.modes.append(self.net.training)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)]

    module, privacy = Validated(), PrivateTraining(records(), loss, recipe())
    held_out = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*records()), batch_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(privacy).fit(module, privacy.loader(), held_out)
    assert privacy.private is not None
    assert privacy.private.position == 12
    assert module.modes
    assert not any(module.modes)
    assert privacy.private.bench.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.1**3)


def test_every_draw_is_one_event_and_one_batch() -> None:
    module = Module()
    privacy = PrivateTraining(records(), loss, recipe())
    fit(module, privacy)
    assert privacy.private is not None
    assert len(privacy.private.bench.ledger) == 12
    assert module.batches <= 12  # an empty draw has no batch


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = PrivateTraining(records(), loss, recipe(), run=tmp_path / "run")
    fit(Module(), first, max_epochs=1)
    assert first.private is not None
    first.private.close()
    privacy = PrivateTraining(records(), loss, recipe(), run=tmp_path / "run", resume=True)
    module = Module()
    fit(module, privacy)
    assert privacy.private is not None
    assert len(privacy.private.bench.ledger) == privacy.private.position == 12
    assert 0 < module.batches <= 8


def test_an_interrupted_run_is_saved(tmp_path: Path) -> None:
    class Stops(Module):
        def training_step(self, batch: Any, index: int) -> Tensor:
            if index == 2:
                raise RuntimeError("power cut")
            return super().training_step(batch, index)

    first = PrivateTraining(records(), loss, recipe(), run=tmp_path / "run")
    with pytest.raises(RuntimeError, match="power cut"):
        fit(Stops(), first)
    assert first.private is not None
    first.private.close()
    privacy = PrivateTraining(records(), loss, recipe(), run=tmp_path / "run", resume=True)
    fit(Module(), privacy)
    assert privacy.private is not None
    assert len(privacy.private.bench.ledger) >= 12  # the draw that was lost stays paid for
    assert privacy.private.guarantee().epsilon <= BUDGET.epsilon


def test_it_stops_where_the_budget_ends() -> None:
    spent = Ledger.in_memory()
    spent.charge(recipe().terms(0).event)  # by somebody else: a stage of its own, which takes more than its share
    privacy = PrivateTraining(records(), loss, recipe(), ledger=spent)
    epochs = fit(Module(), privacy, max_epochs=20)
    assert privacy.private is not None
    assert 0 < privacy.private.position < privacy.private.total
    assert privacy.private.guarantee().epsilon <= BUDGET.epsilon
    assert epochs < 20


def test_without_the_modules_backward_nothing_is_applied() -> None:
    class Plain(Module):
        def backward(self, losses: Tensor) -> None:
            losses.mean().backward()

    module = Plain()
    with pytest.raises(SordinoError, match=r"call private\.backward"):
        fit(module, PrivateTraining(records(), loss, recipe()))
    assert torch.equal(module.net.weight, Module().net.weight)


@pytest.mark.parametrize(
    "settings",
    [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}, {"precision": "bf16-true"}],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_change_what_is_released_are_refused(settings: dict[str, Any]) -> None:
    privacy = PrivateTraining(records(), loss, recipe())
    with pytest.raises(InvalidInput, match=next(iter(settings))):
        fit(Module(), privacy, **settings)
    assert privacy.private is None


def test_several_processes_are_refused_before_anything_is_spent() -> None:
    """What the Trainer asks before it fits, in each of its processes."""
    privacy = PrivateTraining(records(), loss, recipe())
    with pytest.raises(InvalidInput, match="world_size=2 must be 1: processes share each draw"):
        privacy.on_fit_start(trainer(privacy, devices=2, strategy="ddp"), Module())
    assert privacy.private is None


def test_a_trainer_without_the_callback_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no PrivateTraining"):
        PrivateTraining.of(trainer())


def test_bf16_mixed_is_near_float32() -> None:
    small = recipes.dpsgd(batch_size=RECORDS, steps=2, noise_multiplier=1e-9).for_records(RECORDS)
    found = []
    for precision in ("32-true", "bf16-mixed"):
        module, privacy = Module(), PrivateTraining(records(), loss, small)
        fit(module, privacy, precision=precision)
        assert privacy.private is not None
        assert privacy.private.position == 2
        found.append(module.net.weight.detach())
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-2)
    assert not torch.equal(found[0], found[1])


def test_an_optimizer_that_lacks_a_trainable_parameter_is_refused() -> None:
    class Partial(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([self.net.weight], lr=0.5)

    with pytest.raises(InvalidInput, match=r"does not hold net\.bias"):
        fit(Partial(), PrivateTraining(records(), loss, recipe()))
