"""The vault of a team, on a real PostgreSQL server: rights are the database's, and no fault of it loses anything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sordino import Budget
from sordino.accounting.chain import Key
from sordino.accounting.events import count_alike
from sordino.errors import BudgetExhausted, InvalidInput, VaultError, VaultForged
from sordino.vault import DatasetBudget, Vault, open_vault
from tests.vault.ledgers import SMALL, begin, claim, draw
from tests.vault.server import Server, explain_absence

pytestmark = pytest.mark.skipif(bool(explain_absence()), reason=explain_absence())

SECRET = bytes.fromhex("00112233445566778899aabbccddeeff")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    try:
        made = Server()
    except OSError as error:
        pytest.skip(f"no PostgreSQL server can be started here: {error}")
    yield made
    made.remove()


@pytest.fixture(scope="module")
def vaults(server: Server) -> Callable[[str], Vault]:
    """The vault as a few people see it: anna owns, bob and carol train, dora audits, eve was granted nothing."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SORDINO_LEDGER_KEY", SECRET.hex())
    open_vault(server.address(), create=True)
    patch.undo()
    with connect(server) as connection:
        for name, role in (("anna", "owner"), ("bob", "trainer"), ("carol", "trainer"), ("dora", "auditor")):
            connection.execute(f"CREATE ROLE {name} LOGIN IN ROLE sordino_{role}")
        connection.execute("CREATE ROLE eve LOGIN IN ROLE sordino_trainer")
        connection.execute("CREATE ROLE mallory LOGIN")
    found = {name: open_vault(server.address(name)) for name in ("anna", "bob", "carol", "dora", "eve")}
    return found.__getitem__


def connect(server: Server, role: str = "postgres") -> Any:
    import psycopg

    return psycopg.connect(server.address(role), autocommit=True)


@pytest.fixture
def dataset(vaults: Callable[[str], Vault], request: pytest.FixtureRequest) -> str:
    name = request.node.name.split("[")[0][:90]
    vaults("anna").create(name, Budget(3, 1e-5))
    for person in ("bob", "carol"):
        vaults("anna").grant(name, person)
    return str(name)


def test_people_train_on_one_budget_and_see_the_same_total(vaults: Callable[[str], Vault], dataset: str) -> None:
    for person in ("bob", "carol"):
        ledger = begin(None, 20)
        held = claim(vaults(person), ledger, dataset)
        draw(held, ledger, 15)
        held.settle(ledger)
    states = [vaults(person).state(dataset) for person in ("anna", "bob", "dora")]
    assert {state.total for state in states} == {states[0].rule.price(count_alike([(SMALL, 30)]))}
    assert {run.person for run in states[0].runs.values()} == {"bob", "carol"}
    with pytest.raises(BudgetExhausted, match="nothing was released"):
        claim(vaults("bob"), begin(None, 10_000), dataset)
    assert "every signature is right" in vaults("dora").verify(dataset)


def test_who_was_granted_nothing_sees_nothing(vaults: Callable[[str], Vault], dataset: str, server: Server) -> None:
    assert dataset not in vaults("eve").names()
    with pytest.raises(VaultError, match="that you may see"):
        claim(vaults("eve"), begin(None, 1), dataset)
    with connect(server, "eve") as connection:
        assert connection.execute("SELECT COUNT(*) FROM sordino.entries").fetchone() == (0,)
    with pytest.raises(VaultError, match="permission denied"):
        open_vault(server.address("mallory"))


ATTEMPTS = {
    "erase": "DELETE FROM sordino.entries",
    "change": "UPDATE sordino.entries SET cost = '0'",
    "truncate": "TRUNCATE sordino.entries",
    "insert": "INSERT INTO sordino.header VALUES ('a', 'b')",
    "read the key": "SELECT * FROM sordino.secret",
    "sign": "SELECT sordino.sign('\\x00')",
    "drop": "DROP TABLE sordino.entries",
    "disable the trigger": "ALTER TABLE sordino.entries DISABLE TRIGGER append_only",
    "disable the policy": "ALTER TABLE sordino.entries DISABLE ROW LEVEL SECURITY",
    "replace the function": "CREATE OR REPLACE FUNCTION sordino.sign(c bytea) RETURNS bytea LANGUAGE sql AS 'SELECT c'",
    "become the owner": "SET ROLE anna",
}
CALLS = {
    "raise": ("raise", "", "0", '{"epsilon":99,"limit":99}'),
    "grant oneself": ("grant", "", "0", '{"person":"bob","epsilon":null}'),
    "close": ("close", "", "0", "{}"),
    "write off": ("write-off", "r", "0", "{}"),
    "overdraw": ("reserve", "r", "99", '{"events":[["x",1]]}'),
    "reserve for less than nothing": ("reserve", "r", "-1", '{"events":[["x",1]]}'),
    "reserve for NaN": ("reserve", "r", "NaN", '{"events":[["x",1]]}'),
    "return what is not held": ("settle", "r", "-1", '{"events":[]}'),
    "settle for NaN": ("settle", "r", "NaN", '{"events":[]}'),
    "settle for infinity": ("settle", "r", "-Infinity", '{"events":[]}'),
    "overdraw what is set aside": ("reserve", "r", "0", '{"events":[["x",1]],"failing":1e-5}'),
    "fail with less than nothing": ("reserve", "r", "0", '{"events":[["x",1]],"failing":-1e-9}'),
    "fail with NaN": ("reserve", "r", "0", '{"events":[["x",1]],"failing":"NaN"}'),
    "return of delta what is not held": ("settle", "r", "0", '{"events":[],"failing":-1e-9}'),
    "no JSON": ("reserve", "r", "0", "events"),
    "no number": ("reserve", "r", "0); DELETE FROM sordino.entries; --", '{"events":[]}'),
    "invent a kind": ("gift", "", "0", "{}"),
    "lines in a field": ("reserve", "a\nb", "0", '{"events":[]}'),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_trainer_cannot_touch_the_tables(vaults: Callable[[str], Vault], server: Server, attempt: str) -> None:
    import psycopg

    with connect(server, "bob") as connection, pytest.raises(psycopg.Error):
        connection.execute(ATTEMPTS[attempt].encode())
    assert vaults("anna").names() is not None


def test_a_trainer_cannot_call_what_is_not_theirs(vaults: Callable[[str], Vault], dataset: str, server: Server) -> None:
    import psycopg

    before = vaults("anna").history(dataset)
    with connect(server, "bob") as connection:
        call = "SELECT * FROM sordino.append(%s, %s, %s, %s, %s, %s)"
        for number, (kind, run, cost, said) in enumerate(CALLS.values()):
            with pytest.raises(psycopg.Error):
                connection.execute(call, (dataset, kind, run, cost, f"{dataset}{number}", said))
        with pytest.raises(psycopg.Error):
            connection.execute(
                "SELECT * FROM sordino.append('mine', 'create', '', '0', %s, '{}')", (f"{dataset} mine",)
            )
    assert vaults("anna").history(dataset) == before


def test_even_who_owns_the_tables_cannot_erase_by_accident(server: Server, vaults: Callable[[str], Vault]) -> None:
    import psycopg

    assert vaults("anna")
    with connect(server) as connection:
        for attempt in ("erase", "change", "truncate"):
            with pytest.raises(psycopg.Error, match="append-only"):
                connection.execute(ATTEMPTS[attempt].encode())


def test_a_price_that_a_trainer_invented_is_found(vaults: Callable[[str], Vault], dataset: str, server: Server) -> None:
    """The database adds up what it is told; only who recomputes it knows what an event costs."""
    ledger = begin(None, 2)
    claim(vaults("bob"), ledger, dataset)
    said = vaults("bob").history(dataset)[-1].content.replace(",2]", ",99999]")
    with connect(server, "bob") as connection:
        call = "SELECT * FROM sordino.append(%s, 'reserve', 'cheap', '0.0', %s, %s)"
        connection.execute(call, (dataset, f"{dataset} cheap", said))
    with pytest.raises(VaultForged, match="not priced by Sordino"):
        vaults("dora").verify(dataset)


def test_receipts_carry_the_key_of_the_trust_page(vaults: Callable[[str], Vault], dataset: str) -> None:
    ledger = begin(None, 2)
    claim(vaults("bob"), ledger, dataset)
    entry = vaults("anna").history(dataset)[-1]
    assert Key(SECRET).check(entry.chain, entry.signature)
    assert "1 receipts are in it" in vaults("anna").verify(dataset, {"bob": entry.receipt})
    forged = entry.receipt[:-64] + "0" * 64
    with pytest.raises(VaultForged):
        vaults("anna").verify(dataset, {"bob": forged})


def test_names_of_every_language_and_none_that_is_code(vaults: Callable[[str], Vault]) -> None:
    from tests.vault.test_vault import NAMES, NO_NAMES

    anna = vaults("anna")
    before = anna.names()
    for name in NO_NAMES:
        with pytest.raises(InvalidInput):
            anna.create(name, Budget(1, 1e-5))
    assert anna.names() == before
    for name in NAMES:
        anna.create(name, Budget(1, 1e-5))
        ledger = begin(None, 2)
        claim(anna, ledger, name)
        receipt = anna.state(name).runs[ledger.run_id].receipt
        assert "1 receipts are in it" in anna.verify(name, {"run": receipt})


def test_names_that_are_released_stay_within_what_is_set_aside(vaults: Callable[[str], Vault], dataset: str) -> None:
    from sordino.accounting.events import ComposedDpEvent, GaussianDpEvent
    from sordino.accounting.unlisted import Unlisted

    named = ComposedDpEvent([GaussianDpEvent(20.0), Unlisted(1e-6)])
    ledger = begin(None, 2, named)
    held = claim(vaults("bob"), ledger, dataset)
    draw(held, ledger, 1, named)
    with pytest.raises(BudgetExhausted, match="aside"):
        claim(vaults("carol"), begin(None, 1, named), dataset)
    held.settle(ledger)
    claim(vaults("carol"), begin(None, 1, named), dataset)
    assert "every price was computed again" in vaults("dora").verify(dataset)


def test_a_run_that_the_database_lost_is_counted_when_its_ledger_is_shown(
    vaults: Callable[[str], Vault], dataset: str
) -> None:
    from sordino.vault import settle

    ledger, claimed = begin(None, 3), DatasetBudget(vaults("bob"), dataset)
    claimed.claim()._ask(ledger, {}, lambda _: {})  # it is tied to the dataset, and the database knows nothing of it
    for _ in range(3):
        ledger.charge(SMALL)
    settle(claimed, ledger)
    assert vaults("anna").state(dataset).held == count_alike([(SMALL, 3)])
    assert "entries" in vaults("dora").verify(dataset)


def test_of_two_who_race_for_the_last_epsilon_one_gets_it(
    vaults: Callable[[str], Vault], dataset: str, server: Server
) -> None:
    rule = vaults("anna").state(dataset).rule
    steps = next(n for n in range(1, 10_000) if not rule.allows(count_alike([(SMALL, n)]))) - 1
    most = steps * 2 // 3
    outcomes: list[str] = []
    barrier = threading.Barrier(2)

    def race(person: str) -> None:
        vault, ledger = open_vault(server.address(person)), begin(None, most)
        barrier.wait()
        try:
            claim(vault, ledger, dataset)
            outcomes.append("got it")
        except BudgetExhausted:
            outcomes.append("refused")

    threads = [threading.Thread(target=race, args=(person,)) for person in ("bob", "carol")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["got it", "refused"]
    assert vaults("anna").state(dataset).held == count_alike([(SMALL, most)])


def test_a_restart_in_the_middle_of_a_transaction_loses_nothing_and_counts_nothing_twice(
    vaults: Callable[[str], Vault], dataset: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies after the entry was written and before it is committed; and, later, right after the commit."""
    vault = open_vault(server.address("bob"))
    from sordino.vault.postgres import PostgresTransaction

    append, died = PostgresTransaction.append, []

    def append_and_die(self: PostgresTransaction, draft: Any) -> Any:
        entry = append(self, draft)
        if not died:
            died.append(True)
            server.restart()
        return entry

    monkeypatch.setattr(PostgresTransaction, "append", append_and_die)
    ledger = begin(None, 3)
    held = claim(vault, ledger, dataset)
    draw(held, ledger, 3)
    assert vault.state(dataset).held == count_alike([(SMALL, 3)])
    monkeypatch.undo()

    from contextlib import contextmanager

    from sordino.vault.postgres import PostgresStore
    from sordino.vault.storing import ConnectionLost

    writing, lost = PostgresStore.writing, []

    @contextmanager
    def commit_and_lose(self: PostgresStore, name: str) -> Iterator[Any]:
        with writing(self, name) as transaction:
            yield transaction
        if not lost:  # committed, and the answer does not arrive
            lost.append(True)
            raise ConnectionLost("cut")

    monkeypatch.setattr(PostgresStore, "writing", commit_and_lose)
    again = begin(None, 4)
    draw(claim(vault, again, dataset), again, 4)
    state = vault.state(dataset)
    assert state.held == count_alike([(SMALL, 7)])
    assert len(state.runs) == 2
    assert "entries" in vault.verify(dataset)


def test_a_server_that_is_gone_refuses_in_one_line_and_the_run_goes_on_with_what_it_holds(
    vaults: Callable[[str], Vault], dataset: str, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    from sordino.vault import vault as module

    vault, ledger = open_vault(server.address("bob")), begin(None, 5)
    held = claim(vault, ledger, dataset)
    server.stop("fast")
    try:
        patch = pytest.MonkeyPatch()
        patch.setattr(module, "PAUSES", (0.0,))
        draw(held, ledger, 2)
        held.settle(ledger)
        assert "stays counted" in caplog.text
        with pytest.raises(VaultError, match="nothing was released"):
            claim(vault, begin(None, 1), dataset)
        with pytest.raises(VaultError, match="server runs"):
            open_vault(server.address("bob"))
        patch.undo()
    finally:
        server.start()
    assert vault.state(dataset).held == count_alike([(SMALL, 5)])
    from sordino.vault import settle

    settle(DatasetBudget(vault, dataset), ledger)
    assert vault.state(dataset).held == count_alike([(SMALL, 2)])


def test_what_an_owner_does_is_in_the_history(vaults: Callable[[str], Vault], dataset: str) -> None:
    anna = vaults("anna")
    anna.raise_to(dataset, 4.0)
    ledger = begin(None, 2)
    claim(vaults("bob"), ledger, dataset)
    anna.revoke(dataset, "bob")
    with pytest.raises(VaultError, match="may not draw"):
        claim(vaults("bob"), begin(None, 1), dataset)
    anna.write_off(dataset, ledger.run_id)
    anna.close(dataset)
    with pytest.raises(BudgetExhausted, match="closed"):
        claim(vaults("carol"), begin(None, 1), dataset)
    kinds = [entry.kind for entry in anna.history(dataset)]
    assert kinds == ["create", "grant", "grant", "raise", "reserve", "revoke", "write-off", "close"]
    assert "8 entries" in anna.verify(dataset)


@pytest.mark.parametrize("address", ["postgresql://127.0.0.1:1/none", "postgresql://[", "postgresql://a b=c"])
def test_bad_addresses_are_one_line_without_a_password(address: str) -> None:
    from sordino.errors import SordinoError

    with pytest.raises(SordinoError) as raised:
        open_vault(address.replace("//", "//bob:secret@") if "1" in address else address)
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)
