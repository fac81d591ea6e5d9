"""A key signs every row: without it nobody can write the ledger, and whoever computes the chain anew is found out."""

from __future__ import annotations

import base64
import shutil
import sqlite3
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent

from sordino.accounting import chain
from sordino.accounting.chain import Key, read_key
from sordino.accounting.ledger import Ledger
from sordino.errors import InvalidInput, LedgerError, LedgerForged

SECRET = bytes(range(32))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A signed ledger of three events."""
    monkeypatch.setenv(chain.KEY, SECRET.hex())
    with Ledger.create(tmp_path / "ledger.sqlite") as ledger:
        for _ in range(3):
            ledger.charge(GaussianDpEvent(1.0))
        ledger.declare("assumption", "a")
    return tmp_path / "ledger.sqlite"


def rechain(path: Path, *statements: str) -> None:
    """Edit the file as somebody would who knows everything about the format but not the key."""
    connection = sqlite3.connect(path, isolation_level=None)
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        connection.execute(statement)
    header = dict(connection.execute("SELECT key, value FROM header"))
    link = chain.Chain(connection, path, header)._root
    for after, number, first, second, *_ in connection.execute(chain._IN_ORDER).fetchall():
        kind = ["declaration", number, after] if number else ["charge", after]
        link = chain._link(link, [*kind, first, second])
        where = ("declarations", "number", number) if number else ("charges", "sequence", after)
        connection.execute(f"UPDATE {where[0]} SET chain = ? WHERE {where[1]} = ?", (link, where[2]))
    for table, column in (("charges", "sequence"), ("declarations", "number")):
        held = f"(SELECT COALESCE(MAX({column}), 0) FROM {table})"
        connection.execute(f"UPDATE sqlite_sequence SET seq = {held} WHERE name = '{table}'")
    for _, definition in triggers:
        connection.execute(definition)
    connection.close()


FORGERIES = [
    "UPDATE kinds SET event = replace(event, '1.0', '9.0')",
    "UPDATE declarations SET text = 'b' WHERE text = 'a'",
    "UPDATE header SET value = 'other' WHERE key = 'run_id'",
]


@pytest.mark.parametrize("statement", FORGERIES)
def test_a_chain_computed_anew_is_found_out_by_the_key(path: Path, statement: str) -> None:
    rechain(path, statement)
    for opening in (Ledger.read, Ledger.open):
        with pytest.raises(LedgerForged, match="signature of key"):
            opening(path)


@pytest.mark.parametrize("statement", FORGERIES)
def test_without_a_key_that_cannot_be_seen_and_says_so(
    path: Path, statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin, and what the documentation says plainly: the chain alone does not stop who can write the file."""
    rechain(path, statement)
    monkeypatch.delenv(chain.KEY)
    with Ledger.read(path) as ledger:
        assert ledger.signature == "unchecked"


def test_a_signed_ledger_is_gone_on_with_by_its_key_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger.open(path) as ledger:
        assert ledger.signature == "checked"
        assert ledger.charge(GaussianDpEvent(1.0)).sequence == 4
    for other in ("", "ff" * 32):
        monkeypatch.setenv(chain.KEY, other)
        with pytest.raises(LedgerError, match="is signed by key"):
            Ledger.open(path)
        with Ledger.read(path) as ledger:
            assert (len(ledger), ledger.signature) == (4, "unchecked")


def test_an_unsigned_ledger_is_not_taken_for_a_signed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger.create(tmp_path / "ledger.sqlite") as ledger:
        ledger.charge(GaussianDpEvent(1.0))
    monkeypatch.setenv(chain.KEY, SECRET.hex())
    with pytest.raises(LedgerError, match="is not signed, but a key is set"):
        Ledger.open(tmp_path / "ledger.sqlite")
    with Ledger.read(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.signature == "missing"


def test_a_ledger_in_memory_is_signed_from_its_first_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(chain.KEY, SECRET.hex())
    memory = Ledger.in_memory()
    memory.charge(GaussianDpEvent(1.0))
    with memory.copy_to(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.signature == "checked"


def test_keys_are_read_as_hexadecimal_or_base64_from_text_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    for text in (SECRET.hex(), base64.b64encode(SECRET).decode(), SECRET.hex().upper() + "\n"):
        file.write_text(text)
        assert read_key(file).name == Key(SECRET).name
    monkeypatch.setenv(chain.KEY_FILE, str(file))
    found = chain.find_key()
    assert found is not None
    assert found.name == Key(SECRET).name
    assert SECRET.hex() not in repr(found)
    monkeypatch.setenv(chain.KEY, SECRET.hex())
    with pytest.raises(InvalidInput, match="both set"):
        chain.find_key()


@pytest.mark.parametrize("text", ["", "abcd", "not a key at all, but long enough to be one", "z!" * 40])
def test_a_key_that_is_none_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(InvalidInput, match="at least 16 bytes") as caught:
        read_key(tmp_path / "key")
    assert not text or text not in str(caught.value)


def test_signatures_cannot_be_moved_to_another_ledger(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "ledger.sqlite"
    shutil.copy(path, other)
    rechain(other, "DELETE FROM charges WHERE sequence = 2", "UPDATE charges SET sequence = 2 WHERE sequence = 3",
            "UPDATE declarations SET after = 2 WHERE after = 3")  # fmt: skip
    with pytest.raises(LedgerForged):
        Ledger.read(other)
