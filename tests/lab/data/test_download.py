"""The downloader against a loopback server that truncates, corrupts, stalls, ignores ranges or fails."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sordino.errors import InvalidInput
from sordino.lab.data.download import DataUnavailable, Remote, fetch

CONTENT = bytes(range(256)) * 1024
SHA256 = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Answers the n-th request by the n-th behaviour (the last one repeats) and keeps the ranges it was asked for."""

    daemon_threads = True

    def __init__(self, *behaviours: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviours = behaviours
        self.ranges: list[str | None] = []
        self.released = threading.Event()

    def handle_error(self, *connection: object) -> None:
        """A client that hangs up is part of the tests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/set/data.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        turn = min(len(self.server.ranges), len(self.server.behaviours)) - 1
        behaviour = self.server.behaviours[turn]
        if behaviour.isdigit():
            self.send_error(int(behaviour))
            return
        begin = int(re.findall(r"\d+", asked)[0]) if asked and behaviour != "no ranges" else 0
        if begin >= len(CONTENT):
            self.send_error(416)
            return
        body = CONTENT[begin:]
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(CONTENT) - 1}/{len(CONTENT)}")
        if behaviour != "no length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.send_body(body, behaviour)

    def send_body(self, body: bytes, behaviour: str) -> None:
        if behaviour == "corrupt":
            body = body[:100] + bytes([body[100] ^ 1]) + body[101:]
        if behaviour in ("truncate", "stall", "no length"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if behaviour == "stall":
                self.server.released.wait(10)
            return
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers: list[Server] = []

    def start(*behaviours: str) -> Server:
        server = Server(*behaviours)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.released.set()
        server.shutdown()
        server.server_close()


def quick(url: str, target: Path, checksum: str | None = SHA256, timeout: float = 20.0) -> Path:
    return fetch(Remote(url, checksum), target, timeout=timeout, attempts=2, pause=0.0, quiet=True)


def test_a_whole_file_arrives_and_nothing_else_is_left(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve("whole")
    path = quick(server.url, tmp_path / "deep" / "data.bin")
    assert path.read_bytes() == CONTENT
    assert not (tmp_path / "deep" / "data.bin.part").exists()
    assert quick(server.url, path) == path
    assert server.ranges == [None], "a file that is there is not asked for again"


@pytest.mark.parametrize("trouble", ["truncate", "stall"])
def test_a_broken_transfer_goes_on_where_it_stopped(serve: Callable[..., Server], tmp_path: Path, trouble: str) -> None:
    server = serve(trouble, "whole")
    timeout = 0.5 if trouble == "stall" else 20.0
    assert quick(server.url, tmp_path / "data.bin", timeout=timeout).read_bytes() == CONTENT
    assert server.ranges[:2] == [None, f"bytes={len(CONTENT) // 2}-"]


def test_progress_renews_the_attempts(serve: Callable[..., Server], tmp_path: Path) -> None:
    """Ten halvings need eleven requests, far more than two attempts, but each brings bytes."""
    server = serve(*["truncate"] * 10, "whole")
    assert quick(server.url, tmp_path / "data.bin").read_bytes() == CONTENT
    assert len(server.ranges) == 11


def test_what_a_killed_process_left_is_continued(serve: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(CONTENT[:1000])
    server = serve("whole")
    assert quick(server.url, tmp_path / "data.bin").read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-"]


def test_a_complete_part_is_only_checked(serve: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(CONTENT)
    server = serve("whole")
    assert quick(server.url, tmp_path / "data.bin").read_bytes() == CONTENT
    assert server.ranges == [f"bytes={len(CONTENT)}-"]


@pytest.mark.parametrize("left", [b"stale" * 10, CONTENT + b"too long"])
def test_a_wrong_part_is_thrown_away(serve: Callable[..., Server], tmp_path: Path, left: bytes) -> None:
    (tmp_path / "data.bin.part").write_bytes(left)
    server = serve("whole")
    assert quick(server.url, tmp_path / "data.bin").read_bytes() == CONTENT
    assert server.ranges[-1] is None


def test_a_server_without_ranges_starts_again(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve("truncate", "no ranges")
    assert quick(server.url, tmp_path / "data.bin").read_bytes() == CONTENT
    assert len(server.ranges) == 2


@pytest.mark.parametrize("trouble", ["corrupt", "no length"])
def test_wrong_bytes_are_fetched_once_more(serve: Callable[..., Server], tmp_path: Path, trouble: str) -> None:
    server = serve(trouble, "whole")
    assert quick(server.url, tmp_path / "data.bin").read_bytes() == CONTENT
    assert server.ranges == [None, None]


def test_bytes_that_stay_wrong_are_refused_and_never_take_the_name(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    server = serve("corrupt")
    with pytest.raises(DataUnavailable, match=r"^data.bin cannot be fetched .*wrong bytes.* must be .*SORDINO_DATA"):
        quick(server.url, tmp_path / "data.bin")
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert quick(server.url, tmp_path / "unchecked", checksum=None).read_bytes() != CONTENT, "the checksum did it"


@pytest.mark.parametrize(("trouble", "reason"), [("404", "HTTP 404"), ("503", "HTTP 503"), ("stall", "timed out")])
def test_trouble_that_stays_is_one_clear_line(
    serve: Callable[..., Server], tmp_path: Path, trouble: str, reason: str
) -> None:
    part = tmp_path / "data.bin.part"
    part.write_bytes(CONTENT[:-1])  # half of one byte is no byte: this stall brings nothing
    server = serve(trouble)
    with pytest.raises(DataUnavailable, match=reason) as caught:
        quick(server.url, tmp_path / "data.bin", timeout=0.5 if trouble == "stall" else 20.0)
    assert "\n" not in str(caught.value)
    assert len(server.ranges) == (1 if trouble == "404" else 2)
    assert part.read_bytes() == CONTENT[:-1], "what came is kept for the next time"


def test_a_server_error_that_passes_is_survived(serve: Callable[..., Server], tmp_path: Path) -> None:
    assert quick(serve("503", "whole").url, tmp_path / "data.bin").read_bytes() == CONTENT


def test_offline_is_one_clear_line(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve("whole")
    server.shutdown()
    server.server_close()
    with pytest.raises(DataUnavailable, match=r"refused.*: go online, or set SORDINO_DATA to a folder") as caught:
        quick(server.url, tmp_path / "data.bin")
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_one_clear_line(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve("whole")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(
        InvalidInput, match=r"^cache folder .*file/deep cannot be written .*set SORDINO_CACHE"
    ) as caught:
        quick(server.url, tmp_path / "file" / "deep" / "data.bin")
    assert "\n" not in str(caught.value)
    assert server.ranges == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_a_full_disk_is_not_taken_for_a_broken_connection(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve("whole")
    (tmp_path / "data.bin.part").symlink_to("/dev/full")
    with pytest.raises(InvalidInput, match=r"cannot be written .*No space left on device.*: make room"):
        quick(server.url, tmp_path / "data.bin")
    assert server.ranges == [None], "to ask again would fill no less"


def test_several_at_once_fetch_once(serve: Callable[..., Server], tmp_path: Path) -> None:
    """The lock belongs to the open file, so threads exclude each other as processes do."""
    server = serve("whole")
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(quick, [server.url] * 4, [tmp_path / "data.bin"] * 4))
    assert server.ranges == [None]
    assert {path.read_bytes() for path in paths} == {CONTENT}


def test_the_progress_bar_goes_to_stderr(
    serve: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the captured stream for a terminal
    for quiet in (False, True):
        fetch(Remote(serve("whole").url, SHA256), tmp_path / f"{quiet}.bin", quiet=quiet)
        said = capsys.readouterr()
        assert said.out == ""
        assert ("False.bin" in said.err and "262.1/262.1 kB" in said.err) != quiet
        assert bool(said.err) != quiet
