"""`sordino verify`: intact, rolled back, forked or forged, by chain, key and receipt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from dp_accounting import GaussianDpEvent

from sordino.accounting import chain
from sordino.accounting.ledger import Ledger
from tests.accounting.test_signing import SECRET, rechain

Command = Callable[..., Result]


def _charge(run: Path, times: int, sigma: float = 1.0) -> None:
    run.mkdir(exist_ok=True)
    path = run / "ledger.sqlite"
    with Ledger.open(path) if path.exists() else Ledger.create(path, run_id="a run") as ledger:
        for _ in range(times):
            ledger.charge(GaussianDpEvent(sigma))


def _verify(sordino: Command, run: Path, *more: object) -> tuple[int, dict[str, str]]:
    done = sordino("verify", run, "--json", *more)
    return done.exit_code, json.loads(done.stdout)


def test_an_intact_run_gives_a_receipt_that_later_states_pass(sordino: Command, tmp_path: Path) -> None:
    run, receipt = tmp_path / "run", tmp_path / "receipt.txt"
    _charge(run, 3)
    shown = sordino("verify", run)
    assert shown.exit_code == 0
    assert "intact" in shown.stdout
    receipt.write_text(shown.stdout)
    code, first = _verify(sordino, run, "--head", receipt)
    assert (code, first["verdict"], first["events"]) == (0, "intact", 3)
    _charge(run, 2)
    for kept in (receipt, first["receipt"]):
        code, told = _verify(sordino, run, "--head", kept)
        assert (code, told["verdict"], told["events"]) == (0, "intact", 5)


def test_an_old_copy_put_back_is_rolled_back(sordino: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    _charge(run, 3)
    shutil.copytree(run, tmp_path / "copy")
    _charge(run, 2)
    receipt = _verify(sordino, run)[1]["receipt"]
    code, told = _verify(sordino, tmp_path / "copy", "--head", receipt)
    assert (code, told["verdict"]) == (1, "rolled back")
    assert _verify(sordino, tmp_path / "copy")[0] == 0, "without the receipt nothing can be seen"


def test_the_last_rows_dropped_with_the_counter_edited_is_rolled_back(sordino: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    _charge(run, 5)
    receipt = _verify(sordino, run)[1]["receipt"]
    rechain(run / "ledger.sqlite", "DELETE FROM charges WHERE sequence > 3")
    code, told = _verify(sordino, run, "--head", receipt)
    assert (code, told["verdict"]) == (1, "rolled back")


def test_two_copies_that_went_different_ways_are_forked(sordino: Command, tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    _charge(run, 3)
    shutil.copytree(run, copy)
    _charge(run, 2)
    _charge(copy, 3, sigma=5.0)
    receipt = _verify(sordino, run)[1]["receipt"]
    code, told = _verify(sordino, copy, "--head", receipt)
    assert (code, told["verdict"]) == (1, "forked")


def test_an_edit_is_forged_and_with_a_key_a_chain_computed_anew_too(
    sordino: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_text(SECRET.hex())
    monkeypatch.setenv(chain.KEY_FILE, str(key))
    run = tmp_path / "run"
    _charge(run, 3)
    assert _verify(sordino, run, "--key", key)[1]["signature"] == "checked"
    rechain(run / "ledger.sqlite", "UPDATE kinds SET event = replace(event, '1.0', '9.0')")
    code, told = _verify(sordino, run, "--key", key)
    assert (code, told["verdict"]) == (1, "forged")
    monkeypatch.delenv(chain.KEY_FILE)
    unchecked = sordino("verify", run)
    assert "signature not checked" in unchecked.stdout
    assert "signature not checked" in unchecked.stderr
    content = (run / "ledger.sqlite").read_bytes()
    (run / "ledger.sqlite").write_bytes(content.replace(b"noise_multiplier", b"noise_multiplicr"))
    code, told = _verify(sordino, run)
    assert (code, told["verdict"]) == (1, "forged")


def test_signatures_stripped_off_are_forged_for_who_has_the_key(sordino: Command, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(SECRET.hex())
    _charge(tmp_path / "run", 3)
    code, told = _verify(sordino, tmp_path / "run", "--key", key)
    assert (code, told["verdict"]) == (1, "forged")
    assert "is not signed" in told["reason"]


@pytest.mark.parametrize(
    "receipt", ["nonsense", "sordino-receipt-1 x", "sordino-receipt-1 3 " + "ab" * 32 + " another"]
)
def test_receipts_that_are_none_are_one_line(sordino: Command, tmp_path: Path, receipt: str) -> None:
    _charge(tmp_path / "run", 1)
    done = sordino("verify", tmp_path / "run", "--head", receipt)
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1


def test_a_folder_without_a_ledger_is_one_line(sordino: Command, tmp_path: Path) -> None:
    done = sordino("verify", tmp_path)
    assert done.exit_code == 2
    assert "no ledger" in done.stderr


def test_a_key_in_the_environment_misses_signatures_too(
    sordino: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    _charge(run, 3)
    monkeypatch.setenv(chain.KEY, SECRET.hex())
    code, told = _verify(sordino, run)
    assert (code, told["verdict"]) == (1, "forged")
    for command in ("account", "report"):
        assert "not signed, though a key is set" in sordino(command, run, "--delta", "1e-5").stderr
