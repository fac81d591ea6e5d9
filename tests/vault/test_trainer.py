"""Hugging Face's Trainer on a dataset's budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from sordino import Budget
from sordino.errors import BudgetExhausted
from sordino.vault import open_budget
from tests.vault.ledgers import make_vault

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-integrations")
from sordino.integrations.transformers import PrivateTrainer  # noqa: E402
from tests.finetuning.models import Texts, build, collate  # noqa: E402


def make_trainer(folder: Path, place: str, epsilon: float) -> PrivateTrainer:
    plain = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "report_to": "none", "max_steps": 2}
    return PrivateTrainer(
        model=build("bert"),
        args=transformers.TrainingArguments(str(folder), **plain, per_device_train_batch_size=5),
        train_dataset=Texts("bert"),
        data_collator=collate,
        budget=Budget(epsilon, 1e-3),
        options={"vault": open_budget("texts", place)},
    )


def test_the_trainer_reserves_its_steps_and_is_refused_before_there_is_a_ledger(tmp_path: Path) -> None:
    vault = make_vault(tmp_path)
    vault.create("texts", Budget(5, 1e-3))
    trainer = make_trainer(tmp_path / "a", vault.store.place, 2.0)
    trainer.train()
    assert trainer.private is not None
    assert sum(vault.state("texts").held.values()) == len(trainer.private.run.ledger) == 2
    trainer.private.close()
    with pytest.raises(BudgetExhausted, match="nothing was released"):
        make_trainer(tmp_path / "b", vault.store.place, 5.0).train()
    assert not (tmp_path / "b" / "sordino").exists()
    assert "computed again" in vault.verify("texts")
