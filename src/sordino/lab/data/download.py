"""Fetch a file over HTTP with the standard library: resumed where it stopped, checked before it is used."""

from __future__ import annotations

import hashlib
import http.client
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from sordino.errors import InvalidInput, SordinoError

CHUNK = 1 << 16
Advance = Callable[[int, int | None], None]


class DataUnavailable(SordinoError):
    """A dataset is neither on this machine nor available from its source."""


@dataclass(frozen=True)
class Remote:
    """A file at its official address with the checksum published for it, as ``"md5:..."`` or ``"sha256:..."``."""

    url: str
    checksum: str | None = None

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    def verify(self, path: Path) -> None:
        """Refuse a file whose checksum is not the published one."""
        if self.checksum is None:
            return
        algorithm, expected = self.checksum.split(":")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, algorithm).hexdigest()
        if found != expected:
            raise DataUnavailable(f"{path} has {algorithm} {found}, must be {expected}: delete it and load again")


def fetch(
    remote: Remote, target: Path, *, timeout: float = 30.0, attempts: int = 5, pause: float = 1.0, quiet: bool = False
) -> Path:
    """Download `remote` to `target` and return it; a second process waits for the first.

    Bytes arrive in ``<target>.part``, which survives a kill and is continued with an HTTP range. `attempts` counts
    tries in a row that bring no new byte. The file gets its name only once its checksum is right; a wrong one is
    fetched once more from the start.
    """
    part = target.with_name(target.name + ".part")
    with explain_failed_writes(target.parent), hold_lock(target.with_name(target.name + ".lock")):
        if target.exists():
            return target
        with _show_progress(quiet) as progress:
            task = progress.add_task(target.name, total=None)

            def advance(done: int, total: int | None) -> None:
                progress.update(task, completed=done, total=total)

            for last in (False, True):
                _complete(remote, part, timeout, attempts, pause, advance)
                try:
                    remote.verify(part)
                except DataUnavailable as error:
                    part.unlink()
                    if last:
                        raise _refuse(remote, f"wrong bytes: {error}") from error
                else:
                    break
        part.replace(target)
    return target


@contextmanager
def explain_failed_writes(folder: Path) -> Iterator[None]:
    """Turn a failure to write into the cache into one line that says where, and how to choose another place."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(
            f"cache folder {folder} cannot be written ({error}): make room, or set SORDINO_CACHE to another folder"
        ) from error


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the operating system lets go when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _complete(remote: Remote, part: Path, timeout: float, attempts: int, pause: float, advance: Advance) -> None:
    """Try until `part` is complete, or until `attempts` tries in a row brought nothing new."""
    fruitless = 0
    while True:
        before = _count_bytes(part)
        try:
            _continue(remote.url, part, timeout, advance)
            return
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500:
                raise _refuse(remote, f"HTTP {error.code}") from error
            reason = f"HTTP {error.code}"
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        fruitless = 0 if _count_bytes(part) > before else fruitless + 1
        if fruitless >= attempts:
            raise _refuse(remote, reason)
        time.sleep(pause * fruitless)


def _continue(url: str, part: Path, timeout: float, advance: Advance) -> None:
    """Ask for what is missing and append it; raises if the connection ends early."""
    have = _count_bytes(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is missing; the checksum decides whether the bytes are right
            error.close()
            return
        raise
    with response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with explain_failed_writes(part.parent), part.open("ab" if resumed else "wb") as file:
            for chunk in _chunks(response):
                file.write(chunk)
                have += len(chunk)
                advance(have, total)
    if total is not None and have < total:
        raise ConnectionError(f"the connection ended after {have} of {total} bytes")


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the bytes that arrive. A broken connection raises no OSError, so that it is not taken for a full disk."""
    try:
        while chunk := response.read1(CHUNK):
            yield chunk
    except OSError as error:
        raise http.client.HTTPException(str(error) or type(error).__name__) from error


def _count_bytes(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _refuse(remote: Remote, reason: str) -> DataUnavailable:
    return DataUnavailable(
        f"{remote.name} cannot be fetched from {remote.url} ({reason}): "
        "go online, or set SORDINO_DATA to a folder that holds the datasets"
    )


def _show_progress(quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=quiet, transient=True)
