"""Hostile folders and slow clients: every run is shown as what it is, in bounded time, to whoever asks properly."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sordino import Recipe
from sordino.report import reader, shelf
from sordino.report.reader import Reader
from sordino.report.server import Server
from tests.runs import make_run

ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n AS {} FROM c"


@pytest.fixture(scope="module")
def warm() -> Iterator[Reader]:
    quick = Reader(5.0)
    quick.warm_up()
    yield quick
    quick.stop()


@pytest.fixture
def lists(warm: Reader, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """The reader of lists, with little patience."""
    monkeypatch.setattr(reader, "start_for_lists", lambda: warm)
    return warm


def hostile_folders(runs: Path, recipe: Recipe) -> dict[str, Path]:
    """Folders that broke the list, or could."""
    names = ("toml", "json", "classes", "view", "pipes", "zeros", "types", "link", "steps")
    made = {name: make_run(runs, recipe, name=f"hostile-{name}", events=3) for name in names}
    (made["toml"] / "recipe.toml").write_text("optimizer = " + 5000 * "{a=" + "1" + 5000 * "}")
    (made["json"] / "outcome.json").write_text(200_000 * "[")
    (made["classes"] / "recipe.toml").write_text('[weighing]\npart = "cli.__main__.X"\n')
    with sqlite3.connect(made["view"] / "ledger.sqlite") as ledger:
        ledger.execute("DROP TABLE charges")
        ledger.execute("DROP TABLE kinds")
        ledger.execute("CREATE VIEW kinds AS SELECT 1 AS kind, '' AS event")
        ledger.execute(
            "CREATE VIEW charges AS SELECT n AS sequence, n AS kind, '' AS note, '' AS time, x'' AS chain, "
            f"x'' AS signature FROM ({ENDLESS.format('n')})"
        )
    (made["pipes"] / "recipe.toml").unlink()
    os.mkfifo(made["pipes"] / "recipe.toml")
    for name in ("history.jsonl", "config.toml"):
        with (made["zeros"] / name).open("wb") as file:
            file.truncate(2**40)
    (made["types"] / "outcome.json").write_text('{"assumptions": 3, "versions": [], "held_out_accuracy": 1e999}')
    (made["types"] / "audit.json").write_text('{"attacks": [[]], "passed": 1' + 300 * "0" + ', "confidence": {}}')
    shutil.rmtree(made.pop("link"))
    (runs / "hostile-link").symlink_to("/")
    text = (made["steps"] / "recipe.toml").read_text().replace("steps = 40", f"steps = {2**62}")
    (made["steps"] / "recipe.toml").write_text(text)
    return made


def test_every_folder_is_shown_as_what_it_is(lists: Reader, runs: Path, recipe: Recipe) -> None:
    made = hostile_folders(runs, recipe)
    found = shelf.Shelf(runs)
    began, rows = time.monotonic(), []
    while time.monotonic() < began + 60:
        asked = time.monotonic()
        rows = found.list_runs(2.0)
        assert time.monotonic() - asked < 2 + 25, "a list takes its patience, and at most the start of a new reader"
        if all(row.facts is not None or row.problem for row in rows):
            break
    shown = {row.entry.name: row for row in rows}
    assert set(shown) == {"whole", "begun"} | {path.name for path in made.values()}
    assert shown["whole"].facts is not None
    assert shown["begun"].facts is not None
    for name in ("toml", "json", "classes", "view", "zeros"):
        row = shown[f"hostile-{name}"]
        assert row.problem, name
        assert "\n" not in row.problem
        assert len(row.problem) < 600
    assert shown["hostile-types"].facts is not None or shown["hostile-types"].problem


def test_a_reader_that_dies_or_is_late_is_replaced(lists: Reader, runs: Path) -> None:
    assert not isinstance(lists.ask(runs / "whole", brief=True).result(60), str)
    lists.stop()
    assert not isinstance(lists.ask(runs / "whole", brief=True).result(60), str), "it was started anew"
    lists.deadline, patience = 0.0, lists.deadline
    assert "could not be read within 0 seconds" in str(lists.ask(runs / "whole", brief=True).result(60))
    lists.deadline = patience


def ask(server: Server) -> int:
    """The status of the list, or 0 where the server hung up."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.request("GET", f"/{server.token}/")
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (ConnectionError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def time_requests(server: Server, count: int) -> list[float]:
    """The seconds that each of `count` requests takes, one after the other; all of them are answered."""
    times = []
    for _ in range(count):
        began = time.monotonic()
        assert ask(server) == 200
        times.append(time.monotonic() - began)
    return times


def check_real_clients(server: Server, slow: int, real: int) -> None:
    """`real` requests are answered while `slow` clients hold their connections, half of them mid-request.

    None takes five seconds longer than on this machine, as busy as it is, without the slow clients.
    """
    assert ask(server) == 200  # everything is priced and at hand
    before = time_requests(server, real)
    clients = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(slow)]
    for client in clients[::2]:
        client.sendall(b"GET / HTTP/1.1\r\nHost: ")
    beside = time_requests(server, real)
    for client in clients:
        client.close()
    after = time_requests(server, real)
    assert max(beside) < 5 + 10 * max(before + after)


def test_slow_clients_keep_nobody_out(lists: Reader, server: Server) -> None:
    """Each real request is answered at the first try; 32 silent clients locked the server for seconds."""
    check_real_clients(server, slow=64, real=10)


@pytest.mark.slow
def test_two_hundred_slow_clients_and_real_ones_at_once(lists: Reader, server: Server) -> None:
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(server))) for _ in range(32)]
    check_real_clients(server, slow=200, real=20)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 32


def test_many_real_clients_at_once_are_all_answered(lists: Reader, server: Server) -> None:
    """Whoever says what it wants is served, also when the server is nearly full."""
    assert ask(server) == 200
    clients = [socket.create_connection(("127.0.0.1", server.server_port), timeout=60) for _ in range(60)]
    request = f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode()
    for client in clients:
        client.sendall(request)
    heads = [client.recv(12) for client in clients]
    for client in clients:
        client.close()
    assert heads == [b"HTTP/1.0 200"] * len(clients)
