"""The server answers one person on one machine, and survives everybody else."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sordino.errors import InvalidInput
from sordino.report.server import MOST_AT_ONCE, Server
from tests.runs import make_run

PATIENCE = 120.0
Answer = tuple[int, dict[str, str], str]


def get(server: Server, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def send(server: Server, content: bytes) -> bytes:
    """What comes back for raw bytes; the server may also just hang up."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=PATIENCE) as client:
        try:
            client.sendall(content)
            client.shutdown(socket.SHUT_WR)
            parts = []
            while part := client.recv(65536):
                parts.append(part)
        except (ConnectionError, OSError):
            return b""
        return b"".join(parts)


def page_of(server: Server, name: str) -> str:
    links = re.findall(r'href="(run/[0-9a-f]{16})">([^<]*)<', get(server, f"/{server.token}/")[2])
    return next(link for link, shown in links if shown == name)


def tree(path: Path) -> dict[str, bytes]:
    """Every file but those that SQLite keeps for its readers."""
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.endswith(("-shm", "-wal")))
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def test_the_list_and_a_run(server: Server):
    end = time.monotonic() + PATIENCE
    status, _, body = get(server, f"/{server.token}/")
    while "is being priced" in body and time.monotonic() < end:
        status, _, body = get(server, f"/{server.token}/")
    assert status == 200
    assert [word in body for word in ("whole", "begun", "finished", "3.00 of 3", "40 of 40", "98.")] == [True] * 6
    status, _, body = get(server, f"/{server.token}/{page_of(server, 'whole')}")
    assert status == 200
    assert "The guarantee" in body
    assert 'id="spending"' in body


def test_headers_forbid_what_a_page_does_not_need(server: Server):
    for path in ("/", f"/{server.token}/"):
        headers = get(server, path)[1]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_nothing_without_the_token(server: Server):
    wrong = "x" * len(server.token)
    for path in (
        "/",
        "//",
        "/favicon.ico",
        f"/{wrong}/",
        f"/{server.token[:-1]}/",
        f"/{server.token}",
        f"/?{server.token}/",
    ):
        status, _, body = get(server, path)
        assert (status, body) == (404, "404 Not Found\n"), path


def test_tokens_are_long_and_fresh(runs: Path):
    with Server(runs) as first, Server(runs) as second:
        assert first.token != second.token
        assert min(len(first.token), len(second.token)) >= 32


def test_a_name_elsewhere_that_points_here_is_refused(server: Server):
    """DNS rebinding: the browser believes that this server belongs to another site."""
    assert get(server, f"/{server.token}/", Host="attacker.example")[0] == 404
    assert get(server, f"/{server.token}/", Host=f"localhost:{server.server_port}")[0] == 200


def test_only_this_machine_is_listened_to(server: Server):
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.2", server.server_port), timeout=PATIENCE)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "<script>"])
def test_only_reading_is_understood(server: Server, runs: Path, method: str):
    before = tree(runs)
    answer = send(server, f"{method} /{server.token}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.0 501")
    assert b"<script>" not in answer
    assert tree(runs) == before


def test_reading_changes_no_file(server: Server, runs: Path):
    before = tree(runs)
    get(server, f"/{server.token}/")
    get(server, f"/{server.token}/{page_of(server, 'begun')}")
    assert tree(runs) == before


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "../../../../../../etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/etc/passwd",
        "run/../../../etc/passwd",
        "run/..",
        "run/",
        "run/whole",
        "run/whole/ledger.sqlite",
        "run/0123456789abcdef",
        "run/" + "a" * 16 + "/../../x",
        "run/%00",
        "//etc/passwd",
        "\\..\\..\\windows",
        "file:///etc/passwd",
    ],
)
def test_no_path_leads_out(server: Server, path: str):
    status, _, body = get(server, f"/{server.token}/{path}")
    assert (status, body) == (404, "404 Not Found\n")


def test_links_out_of_the_folder_are_not_followed(server: Server, runs: Path, recipe, tmp_path: Path):
    outside = make_run(tmp_path / "private", recipe, name="secret-run")
    (runs / "link").symlink_to(outside, target_is_directory=True)
    (runs / "half").mkdir()
    (runs / "half" / "ledger.sqlite").symlink_to(outside / "ledger.sqlite")
    secret = tmp_path / "secret.toml"
    secret.write_text('[data]\nsource = "very-secret-name"\n')
    (runs / "whole" / "config.toml").unlink()
    (runs / "whole" / "config.toml").symlink_to(secret)
    body = get(server, f"/{server.token}/")[2]
    assert ("link" in re.findall(r">([^<]*)</a>", body), "half" in body, "secret-run" in body) == (False,) * 3
    page = get(server, f"/{server.token}/{page_of(server, 'whole')}")[2]
    assert "The guarantee" in page
    assert "very-secret-name" not in page


GARBAGE = {
    "nothing": b"",
    "zeros": b"\0" * 5000,
    "noise": bytes(range(256)) * 64,
    "half a request": b"GET /",
    "no version": b"GET\r\n\r\n",
    "odd version": b"GET / HTTP/9.9\r\n\r\n",
    "text version": b"GET / HTTP/x\r\n\r\n",
    "long line": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
    "huge header": b"GET / HTTP/1.1\r\nA: " + b"b" * 2_000_000 + b"\r\n\r\n",
    "bad header": b"GET / HTTP/1.1\r\n\xff\xfe\r\n: :\r\n\r\n",
    "not text": b"GET /\xff\xfe\x80 HTTP/1.1\r\nHost: \xff\r\n\r\n",
    "tls": bytes.fromhex("16030100a5010000a10303") + b"\x11" * 160,
    "injected": b"GET /%0d%0aSet-Cookie:x HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_survived(server: Server, kind: str, capfd):
    answer = send(server, GARBAGE[kind])
    assert not answer.startswith((b"HTTP/1.0 200", b"HTTP/1.1 200"))
    assert b"Set-Cookie" not in answer
    assert get(server, f"/{server.token}/")[0] == 200
    assert capfd.readouterr().err == ""


def test_silent_clients_do_not_keep_others_out(server: Server):
    silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(MOST_AT_ONCE + 8)]
    end = time.monotonic() + PATIENCE
    while True:
        try:
            assert get(server, f"/{server.token}/")[0] == 200
            break
        except (ConnectionError, http.client.HTTPException):
            assert time.monotonic() < end
            time.sleep(0.1)
    for client in silent:
        client.close()


def test_a_client_that_trickles_is_hung_up_on(server: Server):
    """A byte now and then beats every time-out per read, but not the deadline."""
    client = socket.create_connection(("127.0.0.1", server.server_port), timeout=PATIENCE)
    with client, pytest.raises(ConnectionError):
        trickle(client, PATIENCE)


def trickle(client: socket.socket, seconds: float) -> None:
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        client.sendall(b"A")
        time.sleep(0.1)


def test_a_client_that_does_not_read_harms_nobody(server: Server):
    clients = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(8)]
    for client in clients:
        client.sendall(f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
    assert get(server, f"/{server.token}/")[0] == 200
    for client in clients:
        client.close()


def test_a_damaged_run_is_shown_as_damaged(server: Server, runs: Path):
    (runs / "broken").mkdir()
    (runs / "broken" / "ledger.sqlite").write_text("no database")
    (runs / "whole" / "history.jsonl").write_bytes(b"\xff\xfe")
    body = get(server, f"/{server.token}/")[2]
    assert body.count("cannot be read") == 2
    status, _, page = get(server, f"/{server.token}/{page_of(server, 'broken')}")
    assert status == 200
    assert "This run cannot be read" in page


def test_a_name_that_is_no_text_can_be_shown(server: Server, runs: Path, recipe):
    os.rename(make_run(runs, recipe, name="odd", events=1), os.fsencode(runs) + b"/odd-\xff")  # noqa: PTH104
    status, _, body = get(server, f"/{server.token}/")
    assert status == 200
    assert "odd-\N{REPLACEMENT CHARACTER}" in body


def test_a_folder_or_a_port_that_cannot_be_used(tmp_path: Path, server: Server):
    with pytest.raises(InvalidInput, match="is not a folder"):
        Server(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="cannot be used"):
        Server(tmp_path, server.server_port)


def test_the_command_serves_until_it_is_interrupted(runs: Path):
    # A shell lets what it starts in the background ignore interrupts, and children inherit that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heard}; from sordino.cli import main; main()", "serve", str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/", url)
        assert found
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=PATIENCE)
        connection.request("GET", f"/{found[2]}/")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "")
