"""PrivateTrainer killed and resumed, and in two processes as in one."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sordino import SordinoError
from sordino.accounting.ledger import Ledger
from sordino.errors import CheckpointError, LedgerError

pytestmark = pytest.mark.slow  # beside test_transformers.py, which resumes a run that was stopped

pytest.importorskip("transformers", reason="transformers is not installed: make test-integrations")
pytest.importorskip("peft", reason="peft is not installed: make test-integrations")
from tests.finetuning.models import KINDS  # noqa: E402
from tests.integrations import crew  # noqa: E402


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes left behind."""
    folder = tmp_path_factory.mktemp("crew")
    program = [sys.executable, "-W", "ignore", "-m", "tests.integrations.crew", str(folder)]
    ran = subprocess.run(program, capture_output=True, text=True, check=False)
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("error-*")))
    assert not errors, errors
    assert ran.returncode == 0, ran.stderr
    return folder


def count(folder: Path) -> int:
    with Ledger.read(folder / "sordino" / "ledger.sqlite") as ledger:
        return len(ledger)


def copied(done: Path, work: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done / work / "1", tmp_path / "out"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_goes_on_from_its_checkpoint_with_its_whole_ledger(done: Path, tmp_path: Path, kind: str) -> None:
    folder = copied(done, f"killed_{kind}", tmp_path)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2"]
    spent = count(folder)
    assert spent >= 4  # every step was charged before it was taken, saved or not
    trainer = crew.make_budgeted(folder, kind=kind)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train(resume_from_checkpoint=True)
    assert trainer.private is not None
    assert spent < count(folder) <= spent + crew.STEPS - 2
    assert trainer.state.global_step == trainer.private.position <= crew.STEPS
    assert trainer.private.position > 2
    assert crew.BUDGET.epsilon * 0.99 < trainer.guarantee().epsilon <= crew.BUDGET.epsilon
    assert any(not torch.equal(before[name], p) for name, p in trainer.model.named_parameters())


def test_a_run_killed_before_its_first_checkpoint_starts_over_on_what_is_left(done: Path, tmp_path: Path) -> None:
    folder = copied(done, "killed_before_any_checkpoint", tmp_path)
    spent = count(folder)
    assert spent >= 1
    with pytest.raises(LedgerError, match="holds a run already"):
        crew.make_budgeted(folder).train()
    assert count(folder) == spent
    trainer = crew.make_budgeted(folder)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.private is not None
    assert trainer.private.position < crew.STEPS  # the step that was lost is not given back
    assert trainer.guarantee().epsilon <= crew.BUDGET.epsilon


def test_a_checkpoint_without_its_ledger_is_refused(done: Path, tmp_path: Path) -> None:
    folder = copied(done, "killed_gpt2", tmp_path)
    shutil.rmtree(folder / "sordino")
    with pytest.raises(SordinoError):
        crew.make_budgeted(folder).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_another_ledger_is_refused(done: Path, tmp_path: Path) -> None:
    folder = copied(done, "killed_gpt2", tmp_path)
    shutil.rmtree(folder / "sordino")
    shutil.copytree(done / "killed_before_any_checkpoint" / "1" / "sordino", folder / "sordino")
    with pytest.raises(CheckpointError, match="belongs to run"):
        crew.make_budgeted(folder).train(resume_from_checkpoint=True)


def test_a_torn_checkpoint_is_passed_over(done: Path, tmp_path: Path) -> None:
    folder = copied(done, "killed_gpt2", tmp_path)
    shutil.copytree(folder / "checkpoint-2", folder / "checkpoint-4")
    (folder / "checkpoint-4" / "trainer_state.json").write_text('{"global_st')
    assert str(crew.make_budgeted(folder)._find_newest_whole()).endswith("checkpoint-2")
    (folder / "checkpoint-2" / "checkpoint-000000002.pt").unlink()
    assert crew.make_budgeted(folder)._find_newest_whole() is None


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    with pytest.raises(SordinoError, match="no run to resume"):
        crew.make_budgeted(tmp_path / "empty").train(resume_from_checkpoint=True)


def load(done: Path, name: str) -> Any:
    return pickle.loads((done / name).read_bytes())


def test_two_processes_equal_one(done: Path) -> None:
    alone, first, second = (load(done, f"trained-{name}") for name in ("1-0", "2-0", "2-1"))
    assert len(alone) == 2 * len(KINDS)
    for (weights, price, charged), *others in zip(alone, first, second, strict=True):
        assert charged == 2
        for their_weights, their_price, their_charged in others:
            assert (their_price, their_charged) == (price, charged)
            for name, weight in weights.items():
                torch.testing.assert_close(their_weights[name], weight, rtol=1e-5, atol=1e-5)


def test_two_processes_equal_one_in_a_loop_of_accelerate(done: Path) -> None:
    alone, *others = (load(done, f"accelerated-{name}") for name in ("1-0", "2-0", "2-1"))
    for weights, kind, position in others:
        assert kind == "Sequential"  # not wrapped: averaging would be a second way for gradients to leave
        assert position == alone[2] == 4
        for weight, expected in zip(weights, alone[0], strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-5)
