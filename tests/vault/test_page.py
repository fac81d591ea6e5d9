"""The vault in `sordino serve`, and the budget of the users of a federated training."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sordino import Budget
from sordino.errors import InvalidInput
from sordino.report.server import find_page
from sordino.report.shelf import Shelf
from sordino.report.vault_page import render_page
from sordino.vault import open_budget, open_vault
from tests.vault.ledgers import begin, claim, draw, make_vault


def test_the_server_shows_the_vault_where_there_is_one(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    shelf, vault = Shelf(runs), make_vault(tmp_path)
    vault.create("patients", Budget(3, 1e-5))
    ledger = begin(None, 10)
    draw(claim(vault, ledger), ledger, 4)
    assert find_page(shelf, "vault") is None
    front = find_page(shelf, "", vault)
    assert front is not None
    assert 'href="vault"' in front.html
    pages: list[str] = []

    def look() -> None:
        found = find_page(shelf, "vault", vault)
        assert found is not None
        pages.append(found.html)

    threads = [threading.Thread(target=look) for _ in range(4)]  # as the server does, a thread for each look
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pages) == 4
    for words in ("patients", "of the budget is spent or reserved", "reserved 10 events", "Left"):
        assert words in pages[0]
    (tmp_path / "vault.sqlite").write_bytes(b"gone" * 2000)
    broken = find_page(shelf, "vault", vault)
    assert broken is not None
    assert "Caution" in broken.html


def test_a_vault_that_was_put_back_is_noticed_by_the_receipts_of_runs(tmp_path: Path) -> None:
    vault = make_vault(tmp_path)
    vault.create("patients", Budget(3, 1e-5))
    backup = (tmp_path / "vault.sqlite").read_bytes()
    ledger = begin(None, 10)
    claim(vault, ledger)
    receipt = vault.state("patients").runs[ledger.run_id].receipt
    receipts = [("first", "patients", receipt), ("elsewhere", "others", receipt)]
    assert "is not in this history" not in render_page(vault, receipts=receipts, live=True).html
    (tmp_path / "vault.sqlite").write_bytes(backup)
    page = render_page(open_vault(tmp_path / "vault.sqlite"), receipts=[*receipts, ("b<d", "patients", "x")], live=True)
    assert "Run first keeps a receipt" in page.html
    assert "Run b&lt;d keeps a receipt" in page.html
    assert "Run elsewhere" not in page.html


def test_users_have_a_budget_too(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from sordino.federated.client import InProcessGrid
    from tests.federated.common import honest_app, mlp, rounds, strategy

    vault = make_vault(tmp_path)
    vault.create("users", Budget(60, 1e-3), unit="user")
    vault.create("records", Budget(60, 1e-3))
    with strategy(rounds(steps=2), mlp(seed=1), vault=open_budget("users", vault.store.place)) as run:
        grid = InProcessGrid(honest_app(), 8)
        run.start(grid, num_rounds=1)
        assert sum(vault.state("users").held.values()) == 2
    assert sum(vault.state("users").held.values()) == 1
    with pytest.raises(InvalidInput, match="cannot be added up"):
        strategy(rounds(steps=2), vault=open_budget("records", vault.store.place), run=tmp_path / "run")
