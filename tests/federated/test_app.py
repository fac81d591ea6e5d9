"""The ready-made app: in this process, in Flower's simulation, and as SuperLink and SuperNodes with hostile users."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from sordino.accounting import Ledger
from sordino.federated import QUIET, InProcessGrid

APP = Path(__file__).parent.parent.parent / "examples" / "federated"
NAMES = ("task", "client_app", "server_app")

HOSTILE = '''
"""Users 0 to 2 attack: not a number, a huge update, and a crash. The others are honest."""

from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from private_digits.task import losses, network, records_of
from sordino.federated import client_app
from sordino.federated.client import reply

honest = client_app(network, losses, lambda c: records_of(int(c.node_config["partition-id"]), 4))
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    place = int(context.node_config["partition-id"])
    Path("MARKS", f"was-asked-{place}").touch()
    if place == 2:
        raise RuntimeError("out of battery")
    if place == 3:
        return honest(message, context)
    value = (float("nan"), 1e30)[place]
    return reply(message, {name: torch.full_like(p, value) for name, p in network().named_parameters()}, True)
'''


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    import sys

    monkeypatch.syspath_prepend(str(APP))
    yield {name: importlib.import_module(f"private_digits.{name}") for name in NAMES}
    for name in [n for n in sys.modules if n.startswith("private_digits")]:
        del sys.modules[name]


def launcher() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loopback", APP / "loopback.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configuration(**changes: Any) -> dict[str, Any]:
    written = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    return {**written, "patience": 0.0, **changes}


def promised(run: Path, rounds: int) -> dict[str, Any]:
    """What the run says at its end, after a look into its ledger."""
    with Ledger.read(run / "ledger.sqlite") as ledger:
        assert len(ledger) == rounds
        assert ledger.header["unit"] == "user"
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    assert result["guarantee"]["unit"] == "user"
    assert 7.0 < result["guarantee"]["epsilon"] <= 8.0
    return result


@pytest.mark.parametrize("method", ["dpsgd", "sensitivity_decay"])
def test_the_app_learns_in_this_process(parts: dict[str, ModuleType], tmp_path: Path, method: str) -> None:
    config = configuration(rounds=4, method=method, adaptive=method == "dpsgd", run=str(tmp_path / "run"))
    context = Context(1, 0, {}, RecordDict(), config)
    parts["server_app"].app(grid=InProcessGrid(parts["client_app"].app, 100), context=context)
    assert promised(tmp_path / "run", 4)["accuracy"] > 0.3


def test_the_app_goes_on_with_a_run_that_stopped(parts: dict[str, ModuleType], tmp_path: Path) -> None:
    config = configuration(rounds=2, run=str(tmp_path / "run"))
    for _ in range(2):
        context = Context(1, 0, {}, RecordDict(), config)
        parts["server_app"].app(grid=InProcessGrid(parts["client_app"].app, 100), context=context)
    promised(tmp_path / "run", 2)


def test_flower_reads_the_variables_that_keep_it_quiet() -> None:
    from flwr.supercore import constant, telemetry

    assert constant.FLWR_DISABLE_UPDATE_CHECK in QUIET
    assert "FLWR_TELEMETRY_ENABLED" in QUIET
    assert hasattr(telemetry, "FLWR_TELEMETRY_ENABLED")


@pytest.mark.slow
def test_superlink_and_supernodes_complete_rounds_with_hostile_users(tmp_path: Path) -> None:
    app = shutil.copytree(APP, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
    (app / "private_digits" / "client_app.py").write_text(HOSTILE.replace("MARKS", str(tmp_path)))
    wishes = ["users-per-round=4", "rounds=2", "patience=400.0", "timeout=400.0", f'run="{tmp_path / "run"}"']
    assert launcher().main("deployment", 4, wishes, tmp_path / "logs", app) == 0
    promised(tmp_path / "run", 2)
    assert len(list(tmp_path.glob("was-asked-*"))) == 4, "all took part, the attackers too"


@pytest.mark.slow
def test_flowers_simulation_runs_the_app(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    wishes = ["rounds=2", "timeout=400.0", f'run="{tmp_path / "run"}"']
    assert launcher().main("simulation", 20, wishes, tmp_path / "logs") == 0
    promised(tmp_path / "run", 2)
