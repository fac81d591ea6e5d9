"""The writer's lock of a ledger: one writer at a time, freed by the kernel however its process ends.

On POSIX it is held on an open file description (flock), not by the process: a lock of the process (lockf) would be
dropped as soon as the process opened and closed the file once more, as it does when it copies its own folder. A file
beside the ledger can be deleted, so the ledger itself is locked as well, in a byte that SQLite does not use, where the
system has such locks (Linux). On Windows an open file cannot be deleted.
"""

from __future__ import annotations

import os
import struct
import sys
import weakref
from contextlib import suppress
from pathlib import Path

from sordino.errors import LedgerError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_FAR = 2**62
"""Far behind every byte of the file and behind those that SQLite locks (from 2**30)."""


class WriterLock:
    """Held from the moment it is made until `close`, or until the process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptors: list[int] = []
        _held.add(self)
        try:
            # Not through a link: the folder may be somebody's who wants a file made elsewhere.
            self._hold(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0))
        except BaseException:
            self.close()
            raise

    def hold_file(self) -> None:
        """Lock the ledger itself too, once it is there, where the file system can."""
        if sys.platform == "linux":
            with suppress(OSError):
                self._hold(self._path, os.O_RDWR)

    def _hold(self, file: Path, flags: int) -> None:
        descriptor = os.open(file, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
        self._descriptors.append(descriptor)
        try:
            if sys.platform == "win32":
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            elif sys.platform == "linux" and file == self._path:
                region = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _FAR, 1, 0)
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, region)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise LedgerError(
                f"ledger {self._path} is being written by another process: wait for it or stop it"
            ) from error

    def close(self) -> None:
        """Free the lock."""
        while self._descriptors:
            os.close(self._descriptors.pop())


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _let_go() -> None:
    """A forked process must not keep the lock alive when the one that took it is gone."""
    for lock in list(_held):
        lock.close()  # closes this process's descriptors; the lock stays with the other's


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
