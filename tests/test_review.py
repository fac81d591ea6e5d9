"""What a hostile review broke once: each of these printed an ε that did not hold, or let a private value out."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest
import torch
from dp_accounting import GaussianDpEvent
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from sordino import Budget, BudgetExhausted, InvalidInput, SordinoError, UnsupportedModel, recipes
from sordino.accounting.ledger import Ledger
from sordino.noise import Secure
from sordino.parts import Foreign
from tests.helpers import budgeted, calibrated, classification, cross_entropy, mlp, private


def test_a_limit_theorem_is_never_printed_as_proven() -> None:
    run = private()
    run.step()
    assert run.guarantee(accountant="pld").basis == "proven"
    assert run.guarantee(accountant="gdp").basis == "asymptotic"
    assert "caution" in str(run.guarantee(accountant="gdp")).lower()
    recipe = recipes.dpsgd(batch_size=16, steps=5).calibrate(Budget(3, 1e-4, accountant="gdp"), records=64)
    assert private(recipe).guarantee().basis == "asymptotic"
    assert private(recipe).bench.ledger.header["basis"] == "asymptotic"


def test_a_draw_is_released_once_even_when_the_optimizer_is_interrupted() -> None:
    run = private()
    optimizer, model = run.bench.optimizer, run.bench.objective.model
    batches = run.loader()
    batch = next(batches)
    run.backward(cross_entropy(model, batch))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    hook.remove()
    with pytest.raises(SordinoError, match="released already"):
        optimizer.step()


def test_loading_a_run_does_not_forget_what_was_spent_before(tmp_path: Path) -> None:
    private(run=tmp_path / "killed").close()
    run = private()
    run.step()
    with pytest.raises(SordinoError, match="1 events were charged to another ledger"):
        run.load(tmp_path / "killed")
    statistics = Ledger.in_memory()
    statistics.charge(GaussianDpEvent(1.0))
    with pytest.raises(SordinoError, match="would be forgotten"):
        private(ledger=statistics).load(tmp_path / "killed")


def test_a_foreign_batch_is_charged_for_two_changed_records() -> None:
    recipe = calibrated(sampler=Foreign())
    assert recipe.terms(0).event == GaussianDpEvent(0.5)


def test_a_loader_that_draws_with_replacement_is_refused() -> None:
    data = TensorDataset(*classification())
    loader = DataLoader(data, batch_size=16, sampler=WeightedRandomSampler([1.0] * 64, 64))
    with pytest.raises(InvalidInput, match="with replacement"):
        next(private(calibrated(sampler=Foreign()), dataset=data).loader(loader))


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6), nn.InstanceNorm1d(6, track_running_stats=True)]
)
def test_a_mode_switched_inside_the_loop_is_probed(layer: nn.Module) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = layer, nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            folded = x.unsqueeze(-1).repeat(1, 1, 2) if isinstance(self.norm, nn.InstanceNorm1d) else x
            return self.head(self.norm(folded).reshape(len(x), 6, -1).mean(-1))

    model = Net().eval()
    run = private(model=model)
    batches = run.loader()
    batch = next(batches)
    model.train()
    with pytest.raises(UnsupportedModel):
        run.backward(cross_entropy(model, batch))


def test_a_frozen_embedding_that_rewrites_itself_is_refused() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 4, max_norm=1.0), nn.Linear(4, 3)
            self.embedding.requires_grad_(False)
            self.embedding.weight[:40] *= 0.01  # the records that are probed need no renormalising

        def forward(self, words: Tensor) -> Tensor:
            return self.head(self.embedding(words).mean(1))

    words = torch.arange(64).remainder(35).view(-1, 1).repeat(1, 2)
    words[50] = 45
    model = Words()
    run = private(calibrated(batch_size=64), model=model, dataset=(words, classification()[1]))
    with pytest.raises(UnsupportedModel):
        run.step()


def test_a_forked_or_copied_noise_stream_is_refused() -> None:
    source = Secure()
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidInput, match="cannot be copied"):
            copying(source)
    child = os.fork()
    if child == 0:
        try:
            source.uniform(1)
        except InvalidInput:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(source.uniform(3)) == 3


def test_two_runs_on_one_ledger_share_one_budget() -> None:
    ledger = Ledger.in_memory()
    first, second = (private(budgeted(), ledger=ledger, model=mlp(seed=seed)) for seed in (1, 2))
    first.step()
    with pytest.raises(BudgetExhausted):
        second.step()  # the first run has announced all that the budget pays for
    assert len(list(first.steps())) > 2
    assert list(second.steps()) == []
    assert first.guarantee().epsilon == second.guarantee().epsilon <= 2.0


def test_a_loss_divided_by_the_batch_size_is_refused_in_a_users_loop() -> None:
    run = private()
    model = run.bench.objective.model
    batches = run.loader()
    batch = next(batches)
    with pytest.raises(InvalidInput, match="not those of the loss that Private was given"):
        run.backward(cross_entropy(model, batch) / len(batch[0]))


def test_no_message_tells_the_size_of_a_draw() -> None:
    run = private(calibrated(batch_size=30))
    model = run.bench.objective.model
    batches = run.loader()
    batch = next(batches)
    for wrong in (cross_entropy(model, batch).mean(), cross_entropy(model, batch)[:-1], model(batch[0])):
        with pytest.raises(InvalidInput) as caught:
            run.backward(wrong)
        assert not any(character.isdigit() and character != "2" for character in str(caught.value))


def test_the_guarantee_says_what_a_users_loop_is_trusted_with() -> None:
    run = private()
    model, seen = run.bench.objective.model, 0
    for batch in run.loader():
        run.backward(cross_entropy(model, batch))
        run.bench.optimizer.step()
        seen += 1
    assert seen == 10
    assert any("private.backward" in said for said in run.guarantee().assumptions)


def test_a_loop_that_was_given_up_records_nothing_more() -> None:
    abandoned = private().loader()
    next(abandoned)
    run = private()
    batches = run.loader()
    batch = next(batches)
    abandoned.close()  # its recording lies below the other one by now
    run.backward(cross_entropy(run.bench.objective.model, batch))
    run.bench.optimizer.step()
    batches.close()
    assert not _get_current_function_mode_stack()
