"""A run folder from somebody else: it runs no code, blocks nothing, and is refused in one line."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import tomli_w

from sordino.cli import config
from sordino.cli.config import ModelChoice
from sordino.errors import InvalidInput


def refused(result, words: str) -> None:
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("caution: ")]
    assert len(lines) == 1, lines
    assert words in lines[0]


@pytest.fixture
def run(sordino, small, tmp_path: Path) -> Path:
    """A finished run on a small table."""
    assert sordino(*small, "--epsilon", 3, "--run", tmp_path / "run").exit_code == 0
    return tmp_path / "run"


def change(run: Path, table: str, **values: object) -> None:
    path = run / "config.toml"
    tables = config.tomllib.loads(path.read_text())
    tables[table] = {**tables.get(table, {}), **values}
    path.write_text(tomli_w.dumps(tables))


@pytest.mark.parametrize("command", ["resume", "audit", "report", "account", "train --config"])
def test_no_command_runs_code_that_a_folder_names(sordino, run: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "evil.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    for name in (f"{tmp_path / 'evil.py'}:build", "os:system", "os:abort"):
        change(run, "model", name=name)
        if command.startswith("train"):
            words = ("train", "--config", run / "config.toml", "--run", tmp_path / "again")
        else:
            words = (command, run)
        result = sordino(*words)
        if command not in ("report", "account"):
            refused(result, "--trust-code")
        assert "Traceback" not in result.stderr
        assert not (tmp_path / "ran").exists()


def test_code_of_ones_own_is_resumed_by_saying_so(sordino, small, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3, 2))\n"
    )
    own = ["--model", f"{tmp_path / 'mine.py'}:build"]
    from sordino.private import Private

    take = Private.step
    monkeypatch.setattr(Private, "step", lambda self: (take(self), os.kill(os.getpid(), signal.SIGINT))[0])
    result = sordino(*small, "--epsilon", 3, "--run", tmp_path / "run", *own)
    assert result.exit_code == 130, (result.stdout, result.stderr)
    assert f"sordino resume {tmp_path / 'run'} --trust-code" in result.stdout
    monkeypatch.undo()
    refused(sordino("resume", tmp_path / "run"), "--trust-code")
    assert sordino("resume", tmp_path / "run", "--trust-code").exit_code == 0


@pytest.mark.parametrize(
    ("table", "values", "words"),
    [
        ("model", {"name": "mlp", "hidden": 10**15}, "parameters, must have <="),
        ("model", {"name": "mlp", "hidden": 10**9}, "parameters, must have <="),
        ("model", {"name": "mlp", "hidden": -3}, "cannot be built"),
        ("model", {"name": "mlp", "hidden": "x"}, "cannot be built"),
        ("model", {"name": "mlp", "classes": "many"}, "classes"),
        ("model", {"name": "scatter-cnn", "norm": "os"}, "cannot be built"),
        ("model", {"name": ["mlp"]}, "must be of type str"),
        ("data", {"source": "/dev/zero"}, "is not a regular file"),
        ("data", {"source": "/dev/stdin"}, "data=/dev/stdin"),
        ("data", {"source": "pipe.csv"}, "is not a regular file"),
        ("data", {"source": "pipe.npz"}, "is not a regular file"),
        ("data", {"source": "zeros.csv"}, "it is not a table"),
        ("data", {"source": "link.csv"}, "is not a regular file"),
        ("data", {"source": "nul\0.csv"}, "data="),
        ("data", {"source": "x" * 5000 + ".csv"}, "data="),
        ("data", {"records": 10**30}, "training records"),
        ("data", {"classes": 10**18}, "must be 2 to"),
        ("run", {"seed": 10**30}, "must lie within 64 bits"),
        ("run", {"engine": "os:system"}, "engine"),
        ("run", {"microbatch": -1}, "microbatch=-1"),
        ("recipe", {"steps": 10**12}, "steps=1000000000000 must be <="),
    ],
)
def test_resume_refuses_hostile_settings_in_one_line(sordino, run: Path, table, values, words) -> None:
    os.mkfifo(run / "pipe.csv")
    os.mkfifo(run / "pipe.npz")
    (run / "link.csv").symlink_to("/dev/zero")
    with (run / "zeros.csv").open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    change(run, table, **values)
    refused(sordino("resume", run), words)


def test_a_configuration_that_is_a_link_or_a_pipe_is_not_read(sordino, run: Path) -> None:
    (run / "config.toml").rename(run / "elsewhere.toml")
    (run / "config.toml").symlink_to(run / "elsewhere.toml")
    refused(sordino("resume", run), "holds no config.toml")
    (run / "config.toml").unlink()
    os.mkfifo(run / "config.toml")
    refused(sordino("resume", run), "holds no config.toml")


def test_architectures_by_name_need_no_trust() -> None:
    from sordino.cli import lookup

    lookup.require_trusted(config.Config(model=ModelChoice("mlp")), trusted=False, where=Path("x"))
    with pytest.raises(InvalidInput, match="--trust-code"):
        lookup.require_trusted(config.Config(model=ModelChoice("a.py:b")), trusted=False, where=Path("x"))
