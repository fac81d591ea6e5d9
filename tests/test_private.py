"""Private through its public face: training, existing loops, optimizers, freezing, saving."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import GaussianDpEvent
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from sordino import InvalidInput, Private, SordinoError, UnsupportedModel, recipes
from sordino.accounting.ledger import Ledger
from sordino.errors import CheckpointError, LedgerError, LedgerForked
from sordino.gradients.bookkeeping_book import Book
from tests.helpers import budgeted, calibrated, classification, cross_entropy, mlp, private

OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    lambda p: torch.optim.Adam(p, lr=0.01),
    lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    lambda p: torch.optim.RMSprop(p, lr=0.01),
    lambda p: torch.optim.Adagrad(p, lr=0.01),
]


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def own_loop(run: Private, **options: Any) -> None:
    model, optimizer = run.bench.objective.model, run.bench.optimizer
    for batch in run.loader(**options):
        optimizer.zero_grad()
        run.backward(cross_entropy(model, batch))
        optimizer.step()


@pytest.mark.parametrize("build", OPTIMIZERS)
def test_an_existing_loop_does_exactly_what_steps_does(build: Any) -> None:
    models = [mlp(), mlp()]
    runs = [private(model=m, optimizer=build(m.parameters())) for m in models]
    list(runs[0].steps())
    own_loop(runs[1])
    assert torch.allclose(vector(models[0]), vector(models[1]), rtol=1e-5, atol=1e-6)
    assert runs[0].bench.ledger.events() == runs[1].bench.ledger.events()
    assert not torch.allclose(vector(models[0]), vector(mlp()))


@pytest.mark.parametrize("microbatch", [1, 3])
def test_a_loader_in_parts_gives_the_same_model(microbatch: int) -> None:
    models = [mlp(), mlp()]
    runs = [private(model=m, optimizer=torch.optim.Adam(m.parameters(), lr=0.1)) for m in models]
    list(runs[0].steps())
    own_loop(runs[1], microbatch=microbatch)
    assert torch.allclose(vector(models[0]), vector(models[1]), rtol=1e-4, atol=1e-5)
    assert runs[1].position == len(runs[1].bench.ledger) == 10


def test_a_loader_with_workers_takes_the_same_steps() -> None:
    run = private()
    before = vector(run.bench.objective.model)
    own_loop(run, num_workers=1)
    assert run.position == len(run.bench.ledger) == 10
    assert not torch.equal(vector(run.bench.objective.model), before)


def test_empty_draws_in_an_existing_loop_are_steps_of_noise() -> None:
    run = private(calibrated(batch_size=1, steps=40))
    seen = 0
    model, optimizer = run.bench.objective.model, run.bench.optimizer
    for batch in run.loader():
        seen += 1
        assert len(batch[0]) > 0
        run.backward(cross_entropy(model, batch))
        optimizer.step()
    assert seen < 40
    assert run.position == len(run.bench.ledger) == 40


def test_a_closure_style_loop_works() -> None:
    models = [mlp(), mlp()]
    runs = [private(model=m) for m in models]
    list(runs[0].steps())
    optimizer = runs[1].bench.optimizer
    for batch in runs[1].loader():

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            losses = cross_entropy(models[1], batch)
            runs[1].backward(losses)
            return losses.detach().mean()

        assert isinstance(optimizer.step(closure), Tensor)
    assert torch.allclose(vector(models[0]), vector(models[1]), rtol=1e-5, atol=1e-6)


def test_an_unprotected_gradient_is_refused() -> None:
    run = private()
    model, optimizer = run.bench.objective.model, run.bench.optimizer
    cross_entropy(model, classification()).mean().backward()
    with pytest.raises(SordinoError, match="unprotected gradient"):
        optimizer.step()
    batches = run.loader()
    batch = next(batches)
    with pytest.raises(SordinoError, match=r"call private.backward\(losses\) instead"):
        cross_entropy(model, batch).mean().backward()
    with pytest.raises(SordinoError, match="unprotected gradient"):
        optimizer.step()
    with pytest.raises(SordinoError, match=r"no private.backward"):
        next(batches)


def test_a_batch_that_failed_halfway_is_never_added_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parameters have its gradients already: a second time, and one record would count for two bounds."""
    run, whole, formed = private(), Book.weighted_sum, []

    def failing(book: Book, weights: Tensor) -> Iterator[Tensor]:
        for place, one in enumerate(whole(book, weights)):
            formed.append(place)
            yield one
            raise MemoryError

    monkeypatch.setattr(Book, "weighted_sum", failing)
    model, batches = run.bench.objective.model, iter(run.loader())
    batch = next(batches)
    with pytest.raises(MemoryError):
        run.backward(cross_entropy(model, batch))
    monkeypatch.undo()
    with pytest.raises(SordinoError, match="needs a batch from private"):
        run.backward(cross_entropy(model, batch))
    assert formed == [0]
    run.bench.optimizer.step()  # what was added is within the bound, and paid for
    run.backward(cross_entropy(model, next(batches)))


def test_after_close_the_optimizer_is_ordinary_again() -> None:
    run = private()
    run.close()
    cross_entropy(run.bench.objective.model, classification()).mean().backward()
    run.bench.optimizer.step()


def test_a_nan_record_in_an_existing_loop_spares_the_others() -> None:
    x, y = classification()
    x[3] = float("nan")
    models = [mlp(), mlp()]
    runs = [private(calibrated(batch_size=64, steps=2), model=m, dataset=(x, y)) for m in models]
    list(runs[0].steps())
    own_loop(runs[1])
    assert torch.isfinite(vector(models[1])).all()
    assert torch.allclose(vector(models[0]), vector(models[1]), rtol=1e-4, atol=1e-5)


def test_frozen_and_thawed_between_steps() -> None:
    model = mlp()
    run = private(model=model)
    first = model[0].weight
    first.requires_grad_(False)
    before = first.clone()
    run.step()
    assert torch.equal(first, before)
    first.requires_grad_(True)
    run.step()
    assert not torch.equal(first, before)


def test_several_parameter_groups_and_a_scheduler() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}], lr=0.1
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run = private(model=model, optimizer=optimizer)
    before = copy.deepcopy(model.state_dict())
    for _ in run.steps():
        scheduler.step()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.1 * 0.5**10)


class Ragged(Dataset[Any]):
    """Sequences of different lengths, for a user's own collate function."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 9, (2 + index % 5,), generator=generator), index % 2


def padded(items: list[Any]) -> dict[str, Tensor]:
    words = nn.utils.rnn.pad_sequence([w for w, _ in items], batch_first=True)
    return {"words": words, "label": torch.tensor([label for _, label in items])}


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, padding_idx=0)
        self.head = nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        mask = (words > 0).unsqueeze(-1)
        return self.head((self.embedding(words) * mask).sum(1) / mask.sum(1))


def test_map_style_datasets_with_a_collate_function_of_the_user() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["words"]), batch["label"], reduction="none")

    model = Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = calibrated(records=40, batch_size=8, steps=4)
    before = vector(model)
    list(Private(model, optimizer, Ragged(), loss, recipe, collate=padded, seed=1).steps())
    assert not torch.equal(vector(model), before)


@pytest.mark.parametrize("dataset", ["tensors", "tensor_dataset", "list"])
def test_kinds_of_datasets_agree(dataset: str) -> None:
    data = classification()
    kinds = {
        "tensors": data,
        "tensor_dataset": TensorDataset(*data),
        "list": [(x, int(y)) for x, y in zip(*data, strict=True)],
    }
    models = [mlp(), mlp()]
    list(private(model=models[0], dataset=data).steps())
    list(private(model=models[1], dataset=kinds[dataset]).steps())
    assert torch.allclose(vector(models[0]), vector(models[1]), atol=1e-6)


def test_a_gru_falls_back_to_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(2, 4, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(x.view(-1, 3, 2))[0][:, -1])

    model = Recurrent()
    before = vector(model)
    with caplog.at_level("INFO", logger="sordino"):
        run = private(calibrated(steps=2), model=model)
        list(run.steps())
        own_loop(private(calibrated(steps=1), model=model))
    assert not torch.equal(vector(model), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_noise_and_sums_are_float32_or_better_whatever_the_model(dtype: torch.dtype) -> None:
    x, y = classification()
    model = mlp().to(dtype)
    run = private(calibrated(steps=2), model=model, dataset=(x.to(dtype), y))
    list(run.steps())
    assert all(p.dtype == dtype and torch.isfinite(p).all() for p in model.parameters())


def test_save_and_load_go_on_where_the_run_stopped(tmp_path: Path) -> None:
    first = mlp()
    run = private(budgeted(), model=first, optimizer=torch.optim.Adam(first.parameters(), lr=0.01), seed=None)
    for _ in range(4):
        run.step()
    run.save(tmp_path / "run", extra={"epoch": 2})
    run.close()
    second = mlp(seed=9)
    again = private(budgeted(), model=second, optimizer=torch.optim.Adam(second.parameters(), lr=0.01), seed=None)
    assert again.load(tmp_path / "run") == {"epoch": 2}
    assert torch.equal(vector(first), vector(second))
    assert again.position == len(again.bench.ledger) == 4
    assert len(list(again.steps())) == 6
    assert again.guarantee().epsilon <= 2.0


def test_work_lost_after_a_save_stays_paid_for(tmp_path: Path) -> None:
    run = private(budgeted(), run=tmp_path / "run", seed=None)
    for _ in range(4):
        run.step()
    run.save()
    run.step()
    run.step()
    run.close()
    again = private(budgeted(), seed=None)
    again.load(tmp_path / "run")
    assert again.position == 4
    assert len(again.bench.ledger) == 6
    assert len(list(again.steps())) == 4, "ten events were paid for: two of them by work that was lost"
    assert again.guarantee().epsilon <= 2.0


def test_a_run_directory_is_not_reused_by_accident(tmp_path: Path) -> None:
    private(run=tmp_path / "run").close()
    with pytest.raises(LedgerError, match="holds a run already"):
        private(run=tmp_path / "run")


def test_a_run_of_another_recipe_is_refused(tmp_path: Path) -> None:
    private(run=tmp_path / "run").close()
    with pytest.raises(CheckpointError, match="follows recipe"):
        private(calibrated(clip=2.0)).load(tmp_path / "run")
    private().load(tmp_path / "run")


def test_a_checkpoint_of_another_run_and_a_shorter_ledger_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run = private(run=tmp_path / name)
        run.step()
        run.save()
        run.close()
    (tmp_path / "mixed").mkdir()
    for source, suffix in (("a", "checkpoint-000000001.pt"), ("b", "ledger.sqlite")):
        (tmp_path / "mixed" / suffix).write_bytes((tmp_path / source / suffix).read_bytes())
    with pytest.raises(LedgerForked, match="saw another history"):
        private().load(tmp_path / "mixed")


def test_the_guarantee_is_a_pure_function_of_the_ledger() -> None:
    run = private(budgeted())
    list(run.steps())
    first = [run.guarantee() for _ in range(3)]
    assert first[0] == first[1] == first[2]
    assert len(run.bench.ledger) == 10
    assert 2.0 * 0.999 <= first[0].epsilon <= 2.0


def test_training_learns_something() -> None:
    x, y = classification(512)
    model = mlp()
    recipe = budgeted(512, epsilon=8.0, batch_size=128, steps=60)
    list(private(recipe, model=model, dataset=(x, y), lr=1.0).steps())
    assert (model(x).argmax(1) == y).float().mean() > 0.75


def test_automatic_weighing_costs_what_flat_clipping_costs() -> None:
    flat = private(calibrated())
    auto = private(recipes.automatic(batch_size=16, steps=10, noise_multiplier=1.0).for_records(64))
    list(flat.steps())
    list(auto.steps())
    assert flat.guarantee(1e-5).epsilon == auto.guarantee(1e-5).epsilon


def test_a_model_that_starts_to_mix_examples_is_refused_before_the_charge() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    run = private(model=model)
    run.step()
    model.train()
    with pytest.raises(UnsupportedModel, match="BatchNorm"):
        run.step()
    with pytest.raises(UnsupportedModel, match="BatchNorm"):
        next(run.loader())
    assert len(run.bench.ledger) == 1


def test_a_time_first_batch_is_never_sliced_along_time() -> None:
    def collate(items: list[Tensor]) -> Tensor:
        return torch.stack(items, dim=1)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().sum((0, 2))

    results = []
    for engine in ("auto", "loop"):
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        recipe = calibrated(records=16, batch_size=16, steps=1)
        data = [torch.full((16, 2), float(i)) for i in range(16)]  # as many time steps as records
        run = Private(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            data,
            loss,
            recipe,
            collate=collate,
            seed=1,
            engine=engine,
        )
        run.step()
        results.append(vector(model))
    assert torch.allclose(results[0], results[1], rtol=1e-4)


def test_what_was_released_before_training_is_part_of_the_price(tmp_path: Path) -> None:
    ledger = Ledger.in_memory(run_id="normalised", header={})
    ledger.charge(GaussianDpEvent(8.0))
    with_statistics = private(budgeted(), ledger=ledger)
    list(with_statistics.steps())
    assert len(ledger) < 11, "the statistics took a part of the budget"
    assert with_statistics.guarantee().epsilon <= 2.0
    with_statistics.save(tmp_path / "run")
    with_statistics.close()
    again = private(budgeted())
    again.load(tmp_path / "run")
    assert (GaussianDpEvent(8.0), 1) in again.bench.ledger.events()


class _Sequences(Dataset[Any]):
    """Forty steps each, so that a batch with the time first has more rows than a draw has records."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.linspace(0, index / 64, 40).unsqueeze(1), index % 2


def _time_first(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in items], 1), torch.tensor([y for _, y in items])


def test_workers_leave_batches_whole_whose_first_dimension_is_time() -> None:
    model = nn.Linear(1, 2)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).mean(0), batch[1], reduction="none")

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = Private(model, optimizer, _Sequences(), loss, calibrated(64, steps=2), collate=_time_first, seed=1)
    for x, y in run.loader(num_workers=1):
        assert tuple(x.shape) == (40, len(y), 1)
        run.backward(loss(model, (x, y)))
        optimizer.step()
    assert run.position == 2


def test_an_attached_scheduler_steps_with_every_step() -> None:
    run = private(calibrated(steps=3))
    group = run.bench.optimizer.param_groups[0]
    start = group["lr"]
    run.attach(torch.optim.lr_scheduler.StepLR(run.bench.optimizer, 1, gamma=0.5))
    assert [group["lr"] / start for _ in run.steps()] == [0.5, 0.25, 0.125]


def test_a_scheduler_that_cannot_be_attached_is_refused() -> None:
    run = private()
    other = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(InvalidInput, match="follows a loss"):
        run.attach(torch.optim.lr_scheduler.ReduceLROnPlateau(run.bench.optimizer))
    with pytest.raises(InvalidInput, match="another optimizer"):
        run.attach(torch.optim.lr_scheduler.StepLR(other, 1))
