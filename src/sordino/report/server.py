"""`sordino serve`: a small web server for one person. It is loopback only, read-only, and behind a random token.

Its pages are the list of runs, and one run with its charts; both follow the runs as they change.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from sordino.errors import InvalidInput
from sordino.report import page
from sordino.report.page import Page
from sordino.report.run_folder import Folder
from sordino.report.run_page import describe_run
from sordino.report.runs_page import SORTS, View, arrange, read_view, set_side_by_side
from sordino.report.shelf import Listed, Shelf
from sordino.report.vault_page import render_page
from sordino.vault import Vault

HOST = "127.0.0.1"
MOST_AT_ONCE = 64
DEADLINE = 10.0
"""A request must arrive within this many seconds, however slow the client."""
PATIENCE = 3.0
"""How many seconds a list may take; runs that are not priced by then are priced at the next look."""
_RUN = re.compile(r"run/([0-9a-f]{16})")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Handler(BaseHTTPRequestHandler):
    """Answers GET below the token; everything else is not found."""

    server: Server
    timeout = 10  # per read, and for the whole of an answer
    server_version = "sordino"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self._deadline = threading.Timer(self.server.deadline, self._hang_up)
        self._deadline.daemon = True
        self._deadline.start()

    def finish(self) -> None:
        self._deadline.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with suppress(OSError):  # gone already
            self.request.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        self._deadline.cancel()
        self.server.note_heard(self.request)
        query = self.path.partition("?")[2]
        found = find_page(self.server.shelf, self._find_route(), self.server.vault, query)
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        content = found.html.encode("utf-8", "replace")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Security-Policy", f"{found.policy}; frame-ancestors 'none'")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _find_route(self) -> str | None:
        """Return the path below the token, or None if the request does not know the token."""
        if self.headers.get("Host") not in self.server.names:  # another site whose name was made to point here
            return None
        token, slash, rest = self.path.partition("?")[0].removeprefix("/").partition("/")
        known = hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        return rest if known and slash else None

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send only the number: no answer repeats anything from a request."""
        content = f"{HTTPStatus(code).value} {HTTPStatus(code).phrase}\n".encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class calls it so
        return  # addresses hold the token


class Server(ThreadingHTTPServer):
    """At most `MOST_AT_ONCE` connections, each with a request that arrives within `deadline` seconds.

    Beyond that number, the newest connection takes the place of the one that has been silent longest. A browser sends
    its request at once, so clients that send nothing, however many, keep nobody out.
    """

    daemon_threads = True
    request_queue_size = 256
    allow_reuse_address = False

    def __init__(self, root: Path, port: int = 0, *, deadline: float = DEADLINE, vault: Vault | None = None) -> None:
        self.shelf, self.vault = Shelf(root), vault
        self.token = secrets.token_urlsafe(24)
        self.deadline = deadline
        self._silent: dict[Any, None] = {}  # those that have sent no request yet, oldest first
        self._served: set[Any] = set()
        self._lock = threading.Lock()
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise InvalidInput(f"port={port} cannot be used ({error}): leave it out to have a free one") from None
        self.names = {f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"}

    @property
    def url(self) -> str:
        """The address with the token: anyone who has it can read the runs, but only from this machine."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve in a new thread; if there are too many, the client that has been silent longest makes room."""
        if not self._admit(request):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def _admit(self, request: Any) -> bool:
        with self._lock:
            if len(self._silent) + len(self._served) >= MOST_AT_ONCE:
                if not self._silent:
                    return False
                oldest = next(iter(self._silent))
                del self._silent[oldest]
                with suppress(OSError):  # gone already
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes up and ends
            self._silent[request] = None
            return True

    def note_heard(self, request: Any) -> None:
        """Note that this client has sent its request, and is served."""
        with self._lock:
            if request in self._silent:
                del self._silent[request]
                self._served.add(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._silent.pop(request, None)
                self._served.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that hangs up or stalls: it is no error."""
        return


# -- pages ------------------------------------------------------------------------------------------------------------


def find_page(shelf: Shelf, route: str | None, vault: Vault | None = None, query: str = "") -> Page | None:
    """Find the page at `route` below the token; None if there is none."""
    if route == "":
        return _render_list(shelf, read_view(query), vault is not None)
    if route == "compare":
        return _render_two(shelf, read_view(query))
    if route == "vault" and vault is not None:
        listed = shelf.list_runs(PATIENCE)
        links = {row.facts.run_id: row.entry.ident for row in listed if row.facts is not None}
        ties = ((row.entry.name, row.facts.dataset) for row in listed if row.facts is not None)
        receipts = [(name, str(tie["dataset"]), str(tie["receipt"])) for name, tie in ties if tie is not None]
        return render_page(vault, links=links, receipts=receipts, live=True)
    named = _RUN.fullmatch(route or "")
    entry = shelf.find_entries().get(named[1]) if named else None
    if entry is None:
        return None
    try:
        return page.render("live.html", live=True, **describe_run(shelf.read_facts(entry)))
    except InvalidInput as error:
        return page.render("problem.html", live=True, name=entry.name, problem=str(error), up="../")
    except Exception as error:  # noqa: BLE001  # a folder can hold anything, and its page must say so
        return page.render(
            "problem.html",
            live=True,
            name=entry.name,
            problem=f"this run cannot be shown: {type(error).__name__}",
            up="../",
        )


def _render_list(shelf: Shelf, view: View, vault: bool) -> Page:
    listed = shelf.list_runs(PATIENCE)
    groups = arrange(listed, view)
    for group in groups:
        group["rows"] = [_describe_row(row) for row in group["rows"]]
    facts = {"name": Folder(shelf.root).name, "root": str(shelf.root.resolve()), "count": len(listed), "vault": vault}
    return page.render("runs.html", live=True, groups=groups, sorting=view, sorts=SORTS, **facts)


def _render_two(shelf: Shelf, view: View) -> Page:
    """Show two runs of the list side by side, or say what is missing for a comparison."""
    listed = {row.entry.ident: row for row in shelf.list_runs(PATIENCE)}
    chosen = [listed[ident] for ident in dict.fromkeys(view.chosen) if ident in listed]
    two = [(row.entry, row.facts) for row in chosen if row.facts is not None]
    if len(two) != 2:
        words = f"{len(two)} of the chosen runs can be read, must be 2: go back, and tick two of them"
        return page.render("problem.html", live=True, name="two runs", problem=words, up="./")
    lines = set_side_by_side(two[0], two[1])
    return page.render("two.html", live=True, first=two[0][0], second=two[1][0], lines=lines)


def _describe_row(row: Listed) -> dict[str, Any]:
    spent = row.facts.spent if row.facts is not None else 0.0
    return {"run": row, "facts": row.facts, "spent": f"{100 * spent:.1f}%", "state": _name_state(row)}


def _name_state(row: Listed) -> str:
    if row.problem:
        return "cannot be read"
    if row.facts is None:
        return "is being priced"
    if row.facts.finished:
        return "finished"
    return "running" if row.live else "stopped"
