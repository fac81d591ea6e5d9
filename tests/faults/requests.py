"""Hostile requests to `sordino serve`, many at once, beside hostile folders; honest ones between them are answered."""

from __future__ import annotations

import random
import re
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.faults import folders, hostile
from tests.faults.serving import START, Target, serving
from tests.faults.tally import CODE, HANG, LEAK, TRACEBACK, UNREADABLE, Book, Tally, in_time

AT_ONCE = 64
BURST = 200
BOUND = 8.0
"""Seconds within which an honest request is answered, also when it has to knock again."""
SLOW = 48
"""Clients that never finish what they say, all the time."""
BESIDE = ("ledger: endless view of charges", "configuration nested", "outcome nested", "recipe with wrong kinds")


# -- what strangers send ----------------------------------------------------------------------------------------------


def noise(target: Target, dice: random.Random) -> bytes:
    return dice.randbytes(dice.choice((0, 1, 50, 5000, 100_000)))


def half(target: Target, dice: random.Random) -> bytes:
    whole = target.honest()
    return whole[: dice.randrange(len(whole))]


def long_line(target: Target, dice: random.Random) -> bytes:
    return b"GET /" + b"a" * dice.choice((70_000, 500_000)) + b" HTTP/1.1\r\n\r\n"


def long_header(target: Target, dice: random.Random) -> bytes:
    return target.honest()[:-2] + b"X: " + b"b" * dice.choice((70_000, 300_000)) + b"\r\n\r\n"


def many_headers(target: Target, dice: random.Random) -> bytes:
    return target.honest()[:-2] + b"X: y\r\n" * dice.choice((101, 5000)) + b"\r\n"


def wrong_token(target: Target, dice: random.Random) -> bytes:
    wrong = list(target.token)
    wrong[dice.randrange(len(wrong))] = "~"
    return f"GET /{''.join(wrong)}/ HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\n\r\n".encode()


def no_token(target: Target, dice: random.Random) -> bytes:
    path = dice.choice(("/", "//", "/favicon.ico", f"/{target.token}", f"/?{target.token}/", f"/{target.token[:-1]}/"))
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\n\r\n".encode()


def traversal(target: Target, dice: random.Random) -> bytes:
    step = dice.choice(("../", "..%2f", "%2e%2e/", "..\\", "....//", "%c0%ae%c0%ae/", "run/../../"))
    return target.honest(step * dice.randint(1, 9) + dice.choice(("etc/passwd", "good/ledger.sqlite", "%00", "")))


def wrong_host(target: Target, dice: random.Random) -> bytes:
    host = dice.choice(("attacker.example", "", "127.0.0.1", "[::1]", "\xff", f"127.0.0.1:{target.port + 1}"))
    return f"GET /{target.token}/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin-1")


def wrong_method(target: Target, dice: random.Random) -> bytes:
    method = dice.choice(("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "<script>", "GET\0"))
    return target.honest().replace(b"GET", method.encode() or b"X", 1) + dice.randbytes(100)


def wrong_version(target: Target, dice: random.Random) -> bytes:
    version = dice.choice((b"HTTP/9.9", b"HTTP/x", b"", b"HTTP/1.1 HTTP/1.1", b"\xff"))
    return target.honest().replace(b"HTTP/1.1", version, 1)


def injection(target: Target, dice: random.Random) -> bytes:
    return target.honest(dice.choice(("%0d%0aSet-Cookie:x", "run/<script>", "run/' OR 1=1", "run/{{7*7}}")))


KINDS: tuple[Callable[[Target, random.Random], bytes], ...] = (
    *(noise, half, long_line, long_header, many_headers, wrong_token, no_token),
    *(traversal, wrong_host, wrong_method, wrong_version, injection),
)

STRANGERS = (noise, wrong_token, no_token, traversal, wrong_host)
"""Who does not know the token and the right name of the server gets no page."""


# -- the siege --------------------------------------------------------------------------------------------------------


def attack(target: Target, dice: random.Random, row: Tally, number: int) -> None:
    """`number` hostile requests at once."""
    clients = []
    for _ in range(number):
        kind = dice.choice(KINDS)
        content = kind(target, dice)
        row.done += 1
        try:
            client = target.connect(0.5)
            client.sendall(content)
            client.shutdown(socket.SHUT_WR)
        except OSError:
            continue  # hung up on, or kept waiting: both are fair
        clients.append((client, content, kind not in STRANGERS))
    for client, content, knows in clients:
        answer = _answer(client, 1.0)
        if b" 200 " in answer[:20] and not knows:
            row.find(LEAK, f"a page was given for {content[:200]!r}")
        if b"Set-Cookie" in answer or b"Traceback" in answer:
            row.find(TRACEBACK, f"{answer[:300]!r} for {content[:200]!r}")


def _answer(client: socket.socket, timeout: float) -> bytes:
    parts = []
    client.settimeout(timeout)
    with client, suppress(OSError):
        while part := client.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def knock(target: Target, path: str = "") -> tuple[float, bytes]:
    """An honest request, which knocks again when it is hung up on: how long it took, and the answer."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < BOUND:
        with suppress(OSError):
            client = target.connect(BOUND - passed)
            client.sendall(target.honest(path))
            answer = _answer(client, BOUND - passed)
            if answer:
                return time.monotonic() - began, answer
        time.sleep(0.02)
    return time.monotonic() - began, b""


def visit(target: Target, row: Tally) -> float:
    """Somebody looks at the list and at the good run; how long the slower of them took."""
    row.done += 1
    seconds, listed = knock(target)
    found = re.search(rb'href="(run/[0-9a-f]{16})">good<', listed)
    if found is None:
        kind = HANG if not listed else UNREADABLE
        row.find(kind, f"the list was not served in {seconds:.1f} s: {listed[:200]!r}")
        return seconds
    more, page = knock(target, found[1].decode())
    if b" 200 " not in page[:20]:
        row.find(HANG if not page else UNREADABLE, f"the run was not served in {more:.1f} s: {page[:200]!r}")
    return max(seconds, more)


def crowd(target: Target, row: Tally) -> None:
    """So many honest requests at once; each knocks again when it is hung up on."""
    end = time.monotonic() + BOUND
    waiting = BURST
    while waiting and time.monotonic() < end:
        clients = []
        for _ in range(waiting):
            with suppress(OSError):
                client = target.connect(1.0)
                clients.append(client)
                client.sendall(target.honest())
        waiting -= sum(b" 200 " in _answer(client, max(0.01, end - time.monotonic()))[:20] for client in clients)
    row.done += BURST
    for _ in range(waiting):
        row.find(HANG, f"one of {BURST} honest requests at once was not served in {BOUND:g} s")


def keep_slow(target: Target, slow: list[socket.socket]) -> None:
    """Clients that say a byte now and then, always as many of them."""
    for client in list(slow):
        try:
            client.sendall(b"A")
        except OSError:
            client.close()
            slow.remove(client)
    while len(slow) < SLOW:
        try:
            slow.append(target.connect(1.0))
        except OSError:
            return


def furnish(place: Path) -> Path:
    """A good run and hostile folders beside it."""
    folders.train(place / "made")
    good = place / "made" / "run"
    for name in ("good", *BESIDE):
        copied = folders.copy(good, place / "runs" / re.sub(r"\W+", "-", name))
        if name in hostile.FOLDERS:
            hostile.FOLDERS[name](copied, place / "marker")
    shutil.rmtree(place / "made")
    return place / "runs"


def run(place: Path, count: int, seed: int) -> Book:
    """`count` hostile requests and some honest ones."""
    book, dice, errors = Book(), random.Random(seed), place / "errors"
    bad, good = book.row("hostile requests to `sordino serve`"), book.row("honest requests between them")
    with serving(furnish(place), errors) as target:
        rows = [row for row in target.get(timeout=START).split("<tr>") if ">good<" in row]
        target.page(rows[0], START)  # the first page starts a reader of its own, which is not what is timed
        slow: list[socket.socket] = []
        slowest = visit(target, good)
        while bad.done < count and in_time():
            keep_slow(target, slow)
            attack(target, dice, bad, min(AT_ONCE, count - bad.done))
            slowest = max(slowest, visit(target, good))
        for client in slow:
            client.close()
        crowd(target, good)
        if target.process.poll() is not None:
            bad.find(TRACEBACK, "the server has ended")
    if text := errors.read_text().strip():
        bad.find(TRACEBACK, text[-1500:])
    if (place / "marker").exists():
        bad.find(CODE, "a folder in the list was executed")
    good.notes.append(f"slowest honest answer: {slowest:.2f} s")
    return book
