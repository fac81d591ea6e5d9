"""The pictures of the documentation, of real runs: `make screenshots` takes them, no other test run does."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.report.server import Server
from tests import page_checks
from tests.browser import Browser

ASKED = os.environ.get("SORDINO_SCREENSHOTS")
TARGET = Path(ASKED or "").resolve()
pytestmark = [
    pytest.mark.skipif(ASKED is None, reason="pictures are taken when SORDINO_SCREENSHOTS names a directory"),
    pytest.mark.slow,
]


def sordino(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def take(browser: Browser, address: str, name: str, width: int, height: int, *, dark: bool = False) -> None:
    TARGET.mkdir(parents=True, exist_ok=True)
    page = browser.page(address, width=width, height=height, dark=dark)
    page.wait_for("!document.body.innerText.includes('is being priced')")  # the list of runs asks for news by itself
    assert page_checks.everything(page) == []
    page.screenshot(TARGET / f"{name}.png")
    page.close()


def test_a_report_by_day_by_night_and_on_a_phone(browser: Browser, tmp_path: Path):
    run = tmp_path / "runs" / "digits-at-epsilon-3"
    (tmp_path / "outcome.json").write_text(sordino("demo", "--run", run, "--json"))
    (run / "audit.json").write_text(sordino("audit", run, "--trials", 500, "--seed", 1, "--json"))
    sordino("report", run, "--outcome", tmp_path / "outcome.json")
    address = (run / "report.html").as_uri()
    take(browser, address, "report-light", 1200, 1750)
    take(browser, address, "report-dark", 1200, 1750, dark=True)
    take(browser, address, "report-phone", 360, 1500)


def test_the_list_of_runs(browser: Browser, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    folder = tempfile.TemporaryDirectory(prefix="digits-")  # a short name: the page shows it
    request.addfinalizer(folder.cleanup)
    monkeypatch.chdir(folder.name)
    for epsilon in (1, 3, 8):
        sordino("train", "--epsilon", epsilon, "--run", f"runs/digits-at-epsilon-{epsilon}", "--json")
    with Server(Path("runs")) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        take(browser, server.url, "serve", 1200, 520)
        server.shutdown()
        thread.join()


def test_a_comparison(browser: Browser, tmp_path: Path):
    methods = [part for name in ("dpsgd", "dpsur") for part in ("--method", name)]
    budgets = [part for epsilon in (1, 3) for part in ("--epsilon", epsilon)]
    said = sordino(
        "compare", "--dataset", "digits", *methods, *budgets, "--seeds", 2, "--workers", 1, "--out", tmp_path, "--json"
    )
    page = next(path for path in json.loads(said)["files"] if path.endswith("comparison.html"))
    take(browser, Path(page).as_uri(), "comparison", 1200, 1500)
