"""After a kill, a full disk or a torn file, ledger and model never disagree in the dangerous direction.

Dangerous is a model that holds a release which the ledger does not. A ledger that knows of more than the model is safe.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from dp_accounting import GaussianDpEvent

from sordino import checkpoint
from sordino.accounting import store
from sordino.accounting.ledger import Ledger
from sordino.errors import CheckpointError, LedgerError, LedgerForked, LedgerRolledBack, SordinoError
from tests.helpers import calibrated, private

resource = pytest.importorskip("resource", reason="limits of the size of files are POSIX's")


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may grow beyond `room` bytes: the kernel refuses the write in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def parameters(run: object) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.bench.objective.parameters()]  # type: ignore[attr-defined]


SAID = {"run_id": "r", "events": 3, "head": "ab" * 32, "position": 2}

# -- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_in_the_middle_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 1, {**SAID, "tensor": torch.ones(10)})
    with full_disk(10_000), pytest.raises(CheckpointError, match="earlier checkpoint stands"):
        checkpoint.write(tmp_path, 2, {**SAID, "tensor": torch.ones(10_000)})
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-000000001.pt"]
    found = checkpoint.read_newest(tmp_path)
    assert found is not None
    assert torch.equal(found["tensor"], torch.ones(10))


def test_what_a_kill_left_half_written_is_not_read_and_goes_away(tmp_path: Path) -> None:
    whole = checkpoint.write(tmp_path, 1, {**SAID, "number": 1})
    half = tmp_path / "checkpoint-000000002.pt.partial"
    half.write_bytes(whole.read_bytes()[:100])
    assert checkpoint.read_newest(tmp_path) == {**SAID, "number": 1}
    checkpoint.write(tmp_path, 3, {**SAID, "number": 3})
    assert not half.exists()


WRITER = """
import sys, torch
from pathlib import Path
from sordino import checkpoint
for step in range(1, 10**6):
    said = {"run_id": "r", "events": step, "head": "00", "position": step}
    checkpoint.write(Path(sys.argv[1]), step, {**said, "step": step, "tensor": torch.full((200_000,), float(step))})
    print(step, flush=True)
"""


def test_killed_while_writing_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(7):
        writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    acknowledged = max([7, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    writer.wait()
    writer.stdout.close()
    found = checkpoint.read_newest(tmp_path)
    assert found is not None
    assert found["step"] >= acknowledged
    assert torch.equal(found["tensor"], torch.full((200_000,), float(found["step"])))


# -- the birth of a ledger ------------------------------------------------------------------------------------------


def test_a_ledger_comes_into_being_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"

    def killed(connection: object) -> None:
        store.initialise(connection, {"run_id": "x", "format": store.FORMAT})  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.make(path, killed)
    assert not list(tmp_path.iterdir())
    with full_disk(1000), pytest.raises(LedgerError):
        Ledger.create(path)
    assert not path.exists()
    Ledger.create(path).close()


def test_a_run_killed_at_its_birth_begins_again(tmp_path: Path) -> None:
    """What SIGKILL leaves: a lock that nobody holds and half a ledger beside its name."""
    (tmp_path / "ledger.sqlite.lock").touch()
    (tmp_path / "ledger.sqlite.partial").write_bytes(b"SQLite format 3\0" + os.urandom(1000))
    run = private()
    assert run.resume(tmp_path) == {}
    run.step()
    run.close()
    assert not (tmp_path / "ledger.sqlite.partial").exists()
    with Ledger.read(tmp_path / "ledger.sqlite") as ledger:
        assert len(ledger) == 1


# -- together -------------------------------------------------------------------------------------------------------


def test_nothing_is_released_when_the_ledger_cannot_be_written(tmp_path: Path) -> None:
    run = private(run=tmp_path / "run")
    run.step()
    before = parameters(run)
    with full_disk(0), pytest.raises(LedgerError, match="cannot be used"):
        run.step()
    assert all(map(torch.equal, parameters(run), before))
    assert len(run.bench.ledger) == 1
    run.step()
    assert len(run.bench.ledger) == 2
    run.close()


def test_a_save_that_fails_has_the_ledger_on_disk_and_can_be_repeated(tmp_path: Path) -> None:
    run = private()
    run.step()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-000000001.pt.partial").mkdir()  # cannot be replaced by a file
    with pytest.raises(CheckpointError):
        run.save(tmp_path / "run")
    with Ledger.read(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert len(ledger) == 1
    (tmp_path / "run" / "checkpoint-000000001.pt.partial").rmdir()
    run.save(tmp_path / "run")
    run.close()


def saved_twice(directory: Path) -> Path:
    """A run with checkpoints after two and after four steps, and one step after that."""
    run = private(run=directory)
    for number in range(5):
        run.step()
        if number in (1, 3):
            run.save()
    run.close()
    return directory


def test_a_torn_checkpoint_costs_work_and_no_privacy(tmp_path: Path) -> None:
    newest = max(saved_twice(tmp_path / "run").glob("checkpoint-*.pt"))
    newest.write_bytes(newest.read_bytes()[:-1])
    run = private(model=None)
    run.resume(tmp_path / "run")
    assert run.position == 2
    assert len(run.bench.ledger) == 5, "what was charged stays charged"
    run.close()


def test_a_ledger_from_before_the_checkpoint_is_refused(tmp_path: Path) -> None:
    """The dangerous direction: the model holds releases that the ledger does not know."""
    old = private(run=tmp_path / "run")
    old.step()
    old.close()
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    again = private()
    again.load(tmp_path / "run")
    again.step()
    again.save()
    again.close()
    for path in (tmp_path / "run").glob("ledger.sqlite*"):
        path.unlink()
    shutil.copy(tmp_path / "backup" / "ledger.sqlite", tmp_path / "run")
    with pytest.raises(LedgerRolledBack, match=r"knows of 2 events, its ledger .* holds 1"):
        private().resume(tmp_path / "run")


def test_checkpoints_without_their_ledger_are_refused(tmp_path: Path) -> None:
    for path in saved_twice(tmp_path / "run").glob("ledger.sqlite*"):
        path.unlink()
    for begin in (lambda: private(run=tmp_path / "run"), lambda: private().resume(tmp_path / "run")):
        with pytest.raises(LedgerError, match="what they cost is unknown"):
            begin()


def test_a_ledger_of_another_run_is_refused(tmp_path: Path) -> None:
    saved_twice(tmp_path / "run")
    saved_twice(tmp_path / "other")
    for path in (tmp_path / "run").glob("ledger.sqlite*"):
        path.unlink()
    shutil.copy(tmp_path / "other" / "ledger.sqlite", tmp_path / "run")
    with pytest.raises(LedgerForked, match="saw another history"):
        private().resume(tmp_path / "run")


def test_a_model_that_does_not_fit_leaves_everything_as_it_was(tmp_path: Path) -> None:
    saved_twice(tmp_path / "run")
    other = private(model=torch.nn.Linear(6, 3))
    with pytest.raises(CheckpointError, match="does not fit this model"):
        other.load(tmp_path / "run")
    other.step()
    assert len(other.bench.ledger) == 1
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:  # nobody holds its lock
        assert len(ledger) == 5


def test_resuming_draws_other_noise_each_time(tmp_path: Path) -> None:
    """A seeded run started again from the same checkpoint, however often, repeats no noise (law 10)."""
    seen = []
    private(calibrated(), run=tmp_path / "run").close()
    for _ in range(3):
        run = private(calibrated(), seed=3)
        run.resume(tmp_path / "run")
        run.step()
        seen.append(parameters(run)[0])
        run.close()
    assert not any(torch.equal(one, other) for i, one in enumerate(seen) for other in seen[:i])


def test_a_charge_that_fails_leaves_no_row(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.sqlite") as ledger:
        ledger.charge(GaussianDpEvent(1.0))
        with full_disk(0), pytest.raises(SordinoError):
            ledger.charge(GaussianDpEvent(2.0))
        assert len(ledger) == 1
        assert ledger.charge(GaussianDpEvent(3.0)).sequence == 2
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        assert len(ledger) == 2
