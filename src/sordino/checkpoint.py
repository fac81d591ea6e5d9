"""Checkpoints that survive a crash: written whole or not at all, verified when read, the last two kept.

A checkpoint is one file: a line with format, checksum and length, then what torch.save wrote. It is written beside its
final name, synced and renamed, so that a torn or half-written file is never taken for a good one.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from sordino.errors import CheckpointError

_FORMAT = "sordino-checkpoint-1"
_KEPT = 2


def write(directory: Path, step: int, state: dict[str, Any]) -> Path:
    """Store `state` as the checkpoint of `step`, durably, and drop all but the last two."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    body = buffer.getvalue()
    header = f"{_FORMAT} {hashlib.sha256(body).hexdigest()} {len(body)}\n".encode()
    path = directory / f"checkpoint-{step:09d}.pt"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for left_by_a_kill in directory.glob("checkpoint-*.pt.partial"):
            left_by_a_kill.unlink()
        write_durably(path, header + body)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}; the run's earlier checkpoint stands") from error
    for old in _newest_first(directory)[_KEPT:]:
        old.unlink(missing_ok=True)
    return path


def exists(directory: Path) -> bool:
    """Whether there is any checkpoint, whole or not."""
    return bool(_newest_first(directory))


def read_newest(directory: Path) -> dict[str, Any] | None:
    """The newest checkpoint that is whole, or None where there is none at all.

    A damaged one is passed over for the one before it; if all are damaged, that is an error.
    """
    paths = _newest_first(directory)
    problems = []
    for path in paths:
        try:
            return _read(path)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"{problems[0]}; no older checkpoint is whole either: start a new run")
    return None


def write_durably(path: Path, content: bytes) -> None:
    """Write, sync, rename, sync the directory: after a crash the file is the old one or the new one.

    The directory may come from somebody else: nothing is written through a link, neither `path` nor what lies beside.
    """
    beside = path.with_name(path.name + ".partial")
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, which could lead anywhere: remove it", str(path))
    try:
        beside.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        with os.fdopen(os.open(beside, flags, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _newest_first(directory: Path) -> list[Path]:
    return sorted(directory.glob("checkpoint-*.pt"), reverse=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        header, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    fields = header.decode("ascii", "replace").split(" ")
    if len(fields) != 3 or fields[0] != _FORMAT:
        raise CheckpointError(f"{path} is not a {_FORMAT} file")
    if fields[2] != str(len(body)) or fields[1] != hashlib.sha256(body).hexdigest():
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} holds objects that are not plain tensors and numbers: {error}") from None
    return state
