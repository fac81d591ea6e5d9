"""Checkpoints that survive a crash: written whole or not at all, verified when read, the last two kept.

A checkpoint is one file: a line with format, checksum, length, the number of events that the ledger held and its head,
then what torch.save wrote. The checksum covers all of it. It is written under a temporary name, synced and renamed, so
a torn or half-written file is never mistaken for a good one.
"""

from __future__ import annotations

import hashlib
import io
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sordino.accounting.ledger import Ledger
from sordino.books import CHECKPOINT, CHECKPOINTS, write_durably
from sordino.errors import CheckpointError

_BEFORE = "sordino-checkpoint-1"  # of version 0.1, which says nothing about the ledger in its first line
_KEPT = 2


def write(directory: Path, step: int, state: dict[str, Any]) -> Path:
    """Store `state` as the checkpoint of `step`, durably, and drop all but the last two."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    body = buffer.getvalue()
    seen = f"{state['events']} {state['head']}"
    header = f"{CHECKPOINT} {_checksum(body, seen)} {len(body)} {seen}\n".encode()
    path = directory / f"checkpoint-{step:09d}.pt"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for left_by_a_kill in directory.glob(f"{CHECKPOINTS}.partial"):
            left_by_a_kill.unlink()
        write_durably(path, header + body)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}; the run's earlier checkpoint stands") from error
    for old in _list_newest_first(directory)[_KEPT:]:
        old.unlink(missing_ok=True)
    return path


def describe_ledger(ledger: Ledger) -> dict[str, Any]:
    """Return what a checkpoint says about the ledger beside it."""
    head = ledger.head()
    return {"run_id": ledger.run_id, "events": head.events, "head": head.chain.hex()}


def read_newest_of(directory: Path, ledger: Ledger) -> dict[str, Any] | None:
    """Return the newest whole checkpoint, or None if there is none at all; it must belong to `ledger`."""
    state = read_newest(directory)
    if state is None:
        return None
    if state["run_id"] != ledger.run_id:
        raise CheckpointError(f"the checkpoint in {directory} belongs to run {state['run_id']}, not {ledger.run_id}")
    seen, head, held = state["events"], state.get("head"), ledger.head().events
    if seen > held or not (head is None or ledger.passed(seen, head)):
        raise CheckpointError(
            f"the checkpoint in {directory} saw {seen} events that its ledger, which holds {held}, does not "
            "have: the ledger was replaced, so what was spent is unknown"
        )
    return state


def read_newest(directory: Path) -> dict[str, Any] | None:
    """Return the newest whole checkpoint, or None if there is none at all.

    A damaged one is skipped in favour of the one before it; if all are damaged, that is an error.
    """
    paths = _list_newest_first(directory)
    problems = []
    for path in paths:
        try:
            return _read(path)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"{problems[0]}; no older checkpoint is whole either: start a new run")
    return None


def _list_newest_first(directory: Path) -> list[Path]:
    return sorted(directory.glob(CHECKPOINTS), reverse=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # opening a pipe would wait, and a link could lead anywhere
            raise CheckpointError(f"{path} is not a plain file, but a pipe, a link or a folder: remove it")
        header, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    fields = header.decode("ascii", "replace").split(" ")
    if (len(fields), fields[0]) not in ((5, CHECKPOINT), (3, _BEFORE)):
        raise CheckpointError(f"{path} is not a {CHECKPOINT} file")
    if fields[2] != str(len(body)) or fields[1] != _checksum(body, " ".join(fields[3:])):
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    with one_line(f"{path} holds objects that are not plain tensors and numbers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own message would stand above ours
        state = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    return _require_sound(state, path, fields[3:])


def _require_sound(state: Any, path: Path, seen: list[str]) -> dict[str, Any]:
    """Check that a checkpoint says what every one must, with the right types and consistently, and return it."""
    if not isinstance(state, dict) or not isinstance(state.get("run_id"), str):
        raise CheckpointError(f"{path} is not the checkpoint of a run: it names none")
    events, position = state.get("events"), state.get("position")
    if type(events) is not int or type(position) is not int or not 0 <= position <= events:
        raise CheckpointError(
            f"{path} cannot be: position {position!r} after {events!r} events, but every step is charged"[:300]
        )
    said = [str(events), *([state["head"]] if "head" in state else [])]
    if said != (seen or [str(events)]):
        raise CheckpointError(f"{path} contradicts itself: its first line and its content saw different ledgers")
    return state


def _checksum(body: bytes, seen: str) -> str:
    return hashlib.sha256(seen.encode() + body).hexdigest()


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """Turn any objection of torch to a file, which someone else may have written, into one line."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  # torch raises whatever the malformed part happens to trip over
        said = " ".join(str(error).split())[:200]
        raise CheckpointError(f"the checkpoint cannot be used: {what} ({type(error).__name__}: {said})") from None
