"""A dataset's budget: reserved before anything is drawn, counted whole until shown, never overdrawn."""

from __future__ import annotations

import math
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sordino import Budget
from sordino.accounting.events import GaussianDpEvent, count_alike
from sordino.accounting.ledger import Ledger
from sordino.errors import BudgetExhausted, InvalidInput, LedgerForked, VaultError, VaultForged
from sordino.vault import DatasetBudget, Vault, open_vault, settle
from sordino.vault.history import Draft, parse_receipt
from tests.vault.ledgers import LARGE, SMALL, begin, claim, draw, make_vault, union

KEY = "00112233445566778899aabbccddeeff"
NAMES = ("données", "患者", "пациенты", "Jürgens kids 2.0")
NO_NAMES = (
    *("", "a\nb", "x" * 101, "a/b", "patients ", " patients", "a  b", "-v", "a\tb", "patients\u200b", "a\x00b"),
    *("donne\u0301es", "\uff50atients", "'; DROP TABLE entries; --", "a%20b", "<b>a</b>"),
)
"""The last lines: the same word spelled with an accent of its own, or in letters of another width, would be another."""


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    made = make_vault(tmp_path)
    made.create("patients", Budget(3, 1e-5))
    return made


def cost_of(vault: Vault) -> float:
    state = vault.state("patients")
    return state.rule.cost(state.held)


def test_a_plan_is_counted_whole_before_it_is_drawn_and_what_was_not_drawn_is_returned(vault: Vault) -> None:
    ledger = begin(None, 10)
    held = claim(vault, ledger)
    whole = cost_of(vault)
    draw(held, ledger, 4)
    assert cost_of(vault) == whole
    held.settle(ledger)
    state = vault.state("patients")
    assert state.held == count_alike([(SMALL, 4)])
    assert cost_of(vault) == pytest.approx(0.4 * whole)
    assert next(iter(state.runs.values())).status == "settled"


def test_nothing_passes_that_is_not_reserved(vault: Vault) -> None:
    ledger = begin(None, 2)
    held = claim(vault, ledger)
    draw(held, ledger, 2)
    with pytest.raises(BudgetExhausted, match="reserved for this run"):
        held.require(ledger, SMALL)
    with pytest.raises(BudgetExhausted, match="reserved for this run"):
        held.require(ledger, LARGE)


def test_the_run_that_does_not_fit_is_refused_and_changes_nothing(vault: Vault) -> None:
    before = vault.history("patients")
    ledger = begin(None, 10_000)
    with pytest.raises(BudgetExhausted, match=r"epsilon=3 at delta=1e-05.*nothing was released"):
        claim(vault, ledger)
    assert vault.history("patients") == before
    assert len(ledger) == 0


def test_the_total_is_one_composition_and_no_sum(vault: Vault) -> None:
    for _ in range(2):
        ledger = begin(None, 20)
        draw(claim(vault, ledger), ledger, 20)
    state = vault.state("patients")
    one = state.rule.price(count_alike([(SMALL, 20)]))
    assert one < state.total < 2 * one
    assert state.total == state.rule.price(count_alike([(SMALL, 40)]))
    assert state.rule.price_if_planned(state.held) < state.total


def test_a_planned_budget_composes_by_pld_and_has_no_place_for_a_filter(tmp_path: Path) -> None:
    from sordino.accounting.filtered import Filter

    vault = make_vault(tmp_path)
    vault.create("patients", Budget(2, 1e-5), composition="planned")
    ledger = begin(None, 20)
    claim(vault, ledger)
    state = vault.state("patients")
    assert state.total == Budget(2, 1e-5).price([(SMALL, 20)])
    with pytest.raises(InvalidInput, match="adaptive"):
        DatasetBudget(vault, "patients").claim(rdp_filter=Filter(8, 0.1)).cover(Ledger.in_memory())
    assert "every price was computed again" in vault.verify("patients")


def test_a_run_under_a_filter_reserves_its_limit_and_returns_what_it_did_not_use(vault: Vault) -> None:
    from sordino.accounting.filtered import Filter

    order = vault.state("patients").rule.order
    assert order is not None
    rdp_filter = Filter(order + 2, 0.5)
    ledger = Ledger.in_memory()
    held = DatasetBudget(vault, "patients").claim(rdp_filter=rdp_filter)
    held.cover(ledger)
    assert cost_of(vault) == 0.5
    event = rdp_filter.event(GaussianDpEvent(20.0))
    held.require(ledger, event)
    ledger.charge(event)
    held.note(ledger, event)
    held.settle(ledger)
    assert cost_of(vault) == pytest.approx(order / 2 / 20**2)
    again = DatasetBudget(vault, "patients").claim(rdp_filter=rdp_filter)
    again.cover(ledger)
    assert cost_of(vault) <= 0.5
    with pytest.raises(InvalidInput, match="order must be at least"):
        DatasetBudget(vault, "patients").claim(rdp_filter=Filter(order - 1, 0.1)).cover(Ledger.in_memory())
    assert "computed again" in vault.verify("patients")


def test_another_filter_on_the_ledger_of_a_killed_run_is_reserved_too(vault: Vault) -> None:
    from sordino.accounting.filtered import Filter

    order = vault.state("patients").rule.order
    assert order is not None
    ledger = Ledger.in_memory()
    for limit, reserved in ((0.1, 0.1), (0.1, 0.1), (0.3, 0.4)):
        DatasetBudget(vault, "patients").claim(rdp_filter=Filter(order, limit)).cover(ledger)
        assert cost_of(vault) == pytest.approx(reserved)


# -- whose it is ------------------------------------------------------------------------------------------------------


def test_people_need_a_grant_and_stay_within_theirs(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_PERSON", "bob")
    with pytest.raises(VaultError, match="bob may not draw"):
        claim(vault, begin(None, 2))
    for change in (
        lambda: vault.raise_to("patients", 9.0),
        lambda: vault.grant("patients", "bob"),
        lambda: vault.close("patients"),
    ):
        with pytest.raises(VaultError, match="bob may not change"):
            change()
    monkeypatch.delenv("SORDINO_PERSON")
    vault.grant("patients", "bob", epsilon=1.0)
    monkeypatch.setenv("SORDINO_PERSON", "bob")
    ledger = begin(None, 2)
    claim(vault, ledger)
    with pytest.raises(BudgetExhausted, match="bob may spend epsilon=1"):
        claim(vault, begin(None, 60))
    assert vault.state("patients").runs[ledger.run_id].person == "bob"


def test_units_and_adjacencies_are_not_mixed(vault: Vault) -> None:
    for header in ({"unit": "user"}, {"adjacency": "replace-one"}):
        with pytest.raises(InvalidInput, match="cannot be added up"):
            claim(vault, Ledger.in_memory(header=header))


def test_only_proven_prices_are_added_up(vault: Vault) -> None:
    with pytest.raises(InvalidInput, match="only proven prices"):
        DatasetBudget(vault, "patients").claim(basis="published")


def test_a_closed_budget_lets_runs_finish_and_none_begin(vault: Vault, tmp_path: Path) -> None:
    ledger = begin(tmp_path / "a.sqlite", 5)
    held = claim(vault, ledger)
    draw(held, ledger, 1)
    ledger.close()
    vault.close("patients")
    with Ledger.open(tmp_path / "a.sqlite") as again:
        draw(claim(vault, again), again, 4)
    with pytest.raises(BudgetExhausted, match="closed"):
        claim(vault, begin(None, 1))


@pytest.mark.parametrize("change", [{"epsilon": 2.0}, {"epsilon": float("nan")}])
def test_a_budget_is_only_ever_raised(vault: Vault, change: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        vault.raise_to("patients", **change)
    assert vault.raise_to("patients", 4.0).rule.budget.epsilon == 4.0


def test_a_raised_budget_keeps_its_order(vault: Vault) -> None:
    order = vault.state("patients").rule.order
    assert vault.raise_to("patients", 8.0).rule.order == order


@pytest.mark.parametrize("name", NO_NAMES)
def test_names_are_one_line_spelled_in_one_way(vault: Vault, name: str) -> None:
    with pytest.raises(InvalidInput):
        vault.create(name, Budget(1, 1e-5))
    with pytest.raises(VaultError, match="there is no budget"):
        vault.state(name)
    assert vault.names() == ["patients"]


def test_names_of_every_language_have_budgets_and_receipts(vault: Vault) -> None:
    for name in NAMES:
        vault.create(name, Budget(1, 1e-5))
        ledger = begin(None, 2)
        claim(vault, ledger, name)
        receipt = vault.state(name).runs[ledger.run_id].receipt
        assert "1 receipts are in it" in vault.verify(name, {"run": receipt})
    assert set(NAMES) <= set(vault.names())


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_no_number_that_is_no_epsilon_becomes_a_budget(vault: Vault, epsilon: float) -> None:
    for attempt in (
        lambda: vault.create("more", Budget(epsilon, 1e-5)),
        lambda: vault.raise_to("patients", epsilon),
        lambda: vault.grant("patients", "bob", epsilon),
    ):
        with pytest.raises(InvalidInput):
            attempt()
    assert len(vault.history("patients")) == 1


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_killed_run_stays_counted_until_its_ledger_is_shown(vault: Vault, tmp_path: Path) -> None:
    ledger = begin(tmp_path / "a.sqlite", 10)
    draw(claim(vault, ledger), ledger, 3)
    ledger.close()  # without a word to the vault
    assert vault.state("patients").held == count_alike([(SMALL, 10)])
    with Ledger.open(tmp_path / "a.sqlite") as shown:
        settle(DatasetBudget(vault, "patients"), shown)
    assert vault.state("patients").held == count_alike([(SMALL, 3)])


def test_a_live_run_cannot_be_settled_by_somebody_else(vault: Vault, tmp_path: Path) -> None:
    from sordino.errors import LedgerError

    ledger = begin(tmp_path / "a.sqlite", 10)
    claim(vault, ledger)
    with pytest.raises(LedgerError, match="another process"):
        Ledger.open(tmp_path / "a.sqlite")
    with (
        Ledger.read(tmp_path / "a.sqlite") as looked,
        pytest.raises(LedgerError, match="reading"),
    ):
        settle(DatasetBudget(vault, "patients"), looked)
    assert vault.state("patients").held == count_alike([(SMALL, 10)])


def test_the_owner_writes_off_what_is_lost(vault: Vault) -> None:
    ledger = begin(None, 10)
    held = claim(vault, ledger)
    vault.write_off("patients", ledger.run_id[:8])
    held.settle(ledger)  # too late: a warning, and it stays counted
    state = vault.state("patients")
    assert state.runs[ledger.run_id].status == "written off"
    assert state.held == count_alike([(SMALL, 10)])
    with pytest.raises(BudgetExhausted, match="written off"):
        claim(vault, ledger)
    with pytest.raises(VaultError, match="is not a run"):
        vault.write_off("patients", "nobody")


def test_a_copied_folder_cannot_be_continued(vault: Vault, tmp_path: Path) -> None:
    ledger = begin(tmp_path / "a.sqlite", 10)
    draw(claim(vault, ledger), ledger, 3)
    ledger.close()
    shutil.copyfile(tmp_path / "a.sqlite", tmp_path / "b.sqlite")
    with Ledger.open(tmp_path / "b.sqlite") as copied:
        with pytest.raises(LedgerForked, match="is a copy"):
            claim(vault, copied)
        with pytest.raises(LedgerForked, match="is a copy"):
            settle(DatasetBudget(vault, "patients"), copied)
    with Ledger.open(tmp_path / "a.sqlite") as original:
        draw(claim(vault, original), original, 7)


def test_an_older_state_of_the_same_file_cannot_be_continued(vault: Vault, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    ledger = begin(path, 10)
    draw(claim(vault, ledger), ledger, 3)
    ledger.close()
    older = path.read_bytes()
    with Ledger.open(path) as again:
        draw(claim(vault, again), again, 7)
    path.write_bytes(older)  # the same file, as after a backup is put back in place
    with Ledger.open(path) as back, pytest.raises(LedgerForked, match="set back"):
        claim(vault, back)


def test_a_vault_that_was_put_back_is_noticed_by_the_ledgers(vault: Vault, tmp_path: Path) -> None:
    older = (tmp_path / "vault.sqlite").read_bytes()
    ledger = begin(tmp_path / "a.sqlite", 10)
    held = claim(vault, ledger)
    (tmp_path / "vault.sqlite").write_bytes(older)
    with pytest.raises(VaultForged, match="lost entries"):
        vault.state("patients")
    fresh = open_vault(tmp_path / "vault.sqlite")
    with pytest.raises(VaultForged, match="earlier state"):
        DatasetBudget(fresh, "patients").claim().cover(ledger)
    del held


def test_work_that_is_repeated_after_a_kill_is_reserved_too(vault: Vault, tmp_path: Path) -> None:
    from sordino.accounting import plans

    ledger = begin(tmp_path / "a.sqlite", 10)
    draw(claim(vault, ledger), ledger, 6)
    plans.declare(ledger, plans.Plan(((SMALL, 14),), replaces=1, repeated=4))
    again = claim(vault, ledger)
    assert vault.state("patients").held == count_alike([(SMALL, 14)])
    draw(again, ledger, 8)


def test_one_that_goes_on_and_is_refused_more_ends_with_what_it_holds(vault: Vault) -> None:
    from sordino.accounting import plans

    ledger = begin(None, 10)
    draw(claim(vault, ledger), ledger, 6)
    plans.declare(ledger, plans.Plan(((SMALL, 100_000),), replaces=1))
    again = claim(vault, ledger)
    draw(again, ledger, 4)
    with pytest.raises(BudgetExhausted):
        draw(again, ledger, 1)


def test_what_was_drawn_without_the_vault_is_counted_whatever_the_budget(vault: Vault) -> None:
    ledger = begin(None, 2)
    held = claim(vault, ledger)
    draw(held, ledger, 2)
    for _ in range(300):
        ledger.charge(LARGE)
    held.settle(ledger)
    state = vault.state("patients")
    assert state.held == count_alike([(SMALL, 2), (LARGE, 300)])
    assert state.total > 3


def test_a_vault_put_back_to_an_earlier_state_counts_a_run_again_when_its_ledger_is_shown(
    vault: Vault, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backup = (tmp_path / "vault.sqlite").read_bytes()
    ledger = begin(None, 10)
    held = claim(vault, ledger)
    draw(held, ledger, 4)
    vault.store.release()
    (tmp_path / "vault.sqlite").write_bytes(backup)
    held.settle(ledger)
    assert "counts too little until" in caplog.text
    fresh = open_vault(tmp_path / "vault.sqlite")
    assert fresh.state("patients").held == {}
    settle(DatasetBudget(fresh, "patients"), ledger)
    assert fresh.state("patients").held == count_alike([(SMALL, 4)])
    assert "computed again" in fresh.verify("patients")
    with pytest.raises(VaultForged, match="earlier state"):  # its old receipt is of a history that is gone
        claim(fresh, ledger)


def test_a_full_disk_refuses_in_one_line_and_leaves_the_vault_whole(vault: Vault, tmp_path: Path) -> None:
    import resource

    path = tmp_path / "vault.sqlite"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, resource.RLIM_INFINITY))
            for _ in range(200):
                claim(open_vault(path), begin(None, 1))
        except VaultError as error:
            status = 0 if "cannot be used" in str(error) and "\n" not in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    state = vault.state("patients")
    assert state.held == {text: len(state.runs) for text in state.held}
    assert "computed again" in vault.verify("patients")
    claim(vault, begin(None, 1))


def test_a_vault_that_can_only_be_read_is_read_and_refuses_in_one_line(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sordino.vault.sqlite import SqliteStore

    connect = SqliteStore._connect

    def connect_for_reading(self: SqliteStore) -> sqlite3.Connection:
        found = connect(self)
        found.execute("PRAGMA query_only = ON")
        return found

    monkeypatch.setattr(SqliteStore, "_connect", connect_for_reading)
    assert vault.state("patients").total == 0
    with pytest.raises(VaultError, match="readonly"):
        claim(vault, begin(None, 1))


def test_times_do_not_matter(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(vault, begin(None, 2))
    monkeypatch.setattr("sordino.vault.sqlite.now", lambda: "1970-01-01T00:00Z")
    claim(vault, begin(None, 2))
    history = open_vault(vault.store.place).history("patients")
    assert [entry.number for entry in history] == [1, 2, 3]
    assert history[-1].at < history[0].at
    assert "3 entries" in vault.verify("patients")


# -- trust ------------------------------------------------------------------------------------------------------------


def test_rows_can_be_added_but_never_changed(vault: Vault) -> None:
    claim(vault, begin(None, 2))
    with sqlite3.connect(vault.store.place) as connection:
        for change in ("UPDATE entries SET cost = '0'", "DELETE FROM entries", "DELETE FROM header"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                connection.execute(change)
    connection.close()


@pytest.mark.parametrize("change", ["UPDATE entries SET content = replace(content, '10', '1')", "DELETE"])
def test_an_edit_by_force_shows(vault: Vault, change: str) -> None:
    claim(vault, begin(None, 10))
    sql = "DELETE FROM entries WHERE number = 2" if change == "DELETE" else change
    with sqlite3.connect(vault.store.place) as connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute(sql)
        for _, text in triggers:
            connection.execute(text)
    connection.close()
    with pytest.raises(VaultForged):
        open_vault(vault.store.place).verify("patients")


def test_a_trigger_that_swallows_rows_is_noticed(vault: Vault) -> None:
    with sqlite3.connect(vault.store.place) as connection:
        connection.execute("CREATE TRIGGER eat BEFORE INSERT ON entries BEGIN SELECT RAISE(IGNORE); END")
    connection.close()
    with pytest.raises(VaultForged, match="as Sordino makes it"):
        claim(vault, begin(None, 2))


def test_a_price_that_sordino_did_not_compute_is_found(vault: Vault) -> None:
    """Whoever writes the file can add an entry of his own, with a right chain and a price that is too low."""
    ledger = begin(None, 2)
    claim(vault, ledger)
    entry = vault.history("patients")[-1]
    with vault.store.writing("patients") as transaction:
        said = entry.said | {"events": [[next(iter(count_alike([(SMALL, 1)]))), 100_000]]}
        transaction.append(Draft.write("patients", "reserve", said, run="forged", cost=0.0))
    with pytest.raises(VaultForged, match="not priced by Sordino"):
        vault.verify("patients")


@pytest.mark.parametrize("deed", ["return for another", "settle as nobody", "go on after the write-off"])
def test_an_entry_that_was_nobodys_to_make_is_found(vault: Vault, monkeypatch: pytest.MonkeyPatch, deed: str) -> None:
    """By whoever writes the file: right chain, right price, wrong person or moment."""
    ledger = begin(None, 2)
    claim(vault, ledger)
    entry = vault.history("patients")[-1]
    run, said, cost = ledger.run_id, entry.said | {"events": []}, -float(entry.cost)
    if deed == "settle as nobody":
        run, cost = "another", 0.0
    if deed == "go on after the write-off":
        vault.write_off("patients", run)
    else:
        monkeypatch.setenv("SORDINO_PERSON", "mallory")
    with vault.store.writing("patients") as transaction:
        transaction.append(Draft.write("patients", "settle", said, run=run, cost=cost))
    with pytest.raises(VaultForged, match=r"not theirs|written off before"):
        vault.verify("patients")


def test_receipts_are_signed_and_cannot_be_made_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SORDINO_LEDGER_KEY", KEY)
    vault = make_vault(tmp_path)
    vault.create("patients", Budget(3, 1e-5))
    ledger = begin(None, 2)
    claim(vault, ledger)
    receipt = vault.state("patients").runs[ledger.run_id].receipt
    assert receipt in "".join(ledger.declared("vault"))
    assert "every signature is right, every price was computed again, 1 receipts" in vault.verify(
        "patients", {"run": receipt}
    )
    dataset, number, chain, _ = parse_receipt(receipt)
    unsigned = f"sordino-vault-receipt-1 {dataset} {number} {chain.hex()} -"
    elsewhere = f"sordino-vault-receipt-1 {dataset} {number} {'0' * 64} {'0' * 64}"
    for forged in (unsigned, elsewhere):
        with pytest.raises(VaultForged):
            vault.verify("patients", {"run": forged})
    monkeypatch.delenv("SORDINO_LEDGER_KEY")
    unkeyed = open_vault(tmp_path / "vault.sqlite")
    assert "not checked" in unkeyed.verify("patients")
    with pytest.raises(VaultError, match="is signed by key"):
        claim(unkeyed, begin(None, 2))


def test_the_wrong_records_are_warned_of_and_their_digest_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vault = make_vault(tmp_path)
    vault.create("open", Budget(3, 1e-5))
    DatasetBudget(vault, "open", lambda: "digest").claim().cover(begin(None, 1))
    assert vault.state("open").fingerprints == {}  # without a key anybody could test for the records
    (tmp_path / "vault.sqlite").unlink()
    monkeypatch.setenv("SORDINO_LEDGER_KEY", KEY)
    vault = make_vault(tmp_path)
    vault.create("patients", Budget(3, 1e-5))
    for digest, warned in (("digest", False), ("digest", False), ("another", True)):
        caplog.clear()
        DatasetBudget(vault, "patients", lambda said=digest: said).claim().cover(begin(None, 1))  # type: ignore[misc]
        assert ("is it the right budget" in caplog.text) == warned
    assert list(vault.state("patients").fingerprints) == ["records"]
    assert b"digest" not in (tmp_path / "vault.sqlite").read_bytes()


def test_a_missing_or_foreign_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(VaultError, match="no vault at"):
        open_vault(tmp_path / "none.sqlite")
    (tmp_path / "text").write_text("not a database, and longer than a header of one would be" * 10)
    with pytest.raises(VaultError, match="cannot be used"):
        open_vault(tmp_path / "text")
    with Ledger.create(tmp_path / "ledger.sqlite"):
        pass
    with pytest.raises(VaultForged, match="not a vault"):
        open_vault(tmp_path / "ledger.sqlite")


def test_another_process_by_fork_has_a_connection_of_its_own(vault: Vault) -> None:
    vault.state("patients")
    child = os.fork()
    if child == 0:
        try:
            claim(vault, begin(None, 2))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert len(vault.state("patients").runs) == 1


# -- any interleaving -------------------------------------------------------------------------------------------------

ACTION = st.tuples(st.sampled_from(["begin", "draw", "settle", "crash", "show"]), st.integers(0, 3), st.integers(1, 40))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ACTION, min_size=4, max_size=24), st.sampled_from([0.3, 1.0]))
def test_any_interleaving_stays_within_the_budget_and_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int, int]], epsilon: float
) -> None:
    """Begin, draw, settle, crash and show in any order: total ≤ budget, and at the end the price of all ledgers."""
    vault = make_vault(tmp_path_factory.mktemp("vault"))
    vault.create("patients", Budget(epsilon, 1e-5))
    rule = vault.state("patients").rule
    live: dict[int, tuple[Ledger, object]] = {}
    dead: list[Ledger] = []
    settled: list[Ledger] = []
    for action, place, amount in actions:
        ledger, held = live.get(place, (None, None))
        if action == "begin" and ledger is None:
            new = begin(None, amount)
            try:
                live[place] = (new, claim(vault, new))
            except BudgetExhausted:
                assert not rule.allows({**vault.state("patients").held, "": 0} | _more(vault, amount))
        elif action == "draw" and ledger is not None:
            with_claim = live[place][1]
            try:
                draw(with_claim, ledger, amount)  # type: ignore[arg-type]
            except BudgetExhausted:
                assert len(ledger) >= 1
        elif action == "settle" and ledger is not None:
            held.settle(ledger)  # type: ignore[union-attr]
            settled.append(live.pop(place)[0])
        elif action == "crash" and ledger is not None:
            dead.append(live.pop(place)[0])
        elif action == "show" and dead:
            shown = dead.pop()
            settle(DatasetBudget(vault, "patients"), shown)
            settled.append(shown)
        state = vault.state("patients")
        assert rule.allows(state.held)
        everybody = [*(found for found, _ in live.values()), *dead, *settled]
        drawn = union(everybody)
        assert all(state.held.get(text, 0) >= count for text, count in drawn.items())
    for shown in [*(found for found, _ in live.values()), *dead]:
        settle(DatasetBudget(vault, "patients"), shown)
        settled.append(shown)
    state = vault.state("patients")
    assert state.held == {text: count for text, count in union(settled).items() if count}
    assert state.total == rule.price(union(settled))
    assert "computed again" in vault.verify("patients")


def _more(vault: Vault, amount: int) -> dict[str, int]:
    text = next(iter(count_alike([(SMALL, 1)])))
    return {text: vault.state("patients").held.get(text, 0) + amount}
