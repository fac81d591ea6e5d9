"""A run folder as untrusted data: small regular files inside it, and nothing behind a link."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino.accounting.events import fits
from sordino.books import LEDGER
from sordino.errors import InvalidInput, SordinoError
from sordino.names import parse_toml

MOST_BYTES = 8_000_000
"""No file that a report reads is larger than this: a recipe is a kilobyte, a history of 10,000 lines a megabyte."""
_UNFORESEEN = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,12})\.pt")


@dataclass(frozen=True)
class Folder:
    """The files of one run, each of which may be missing, damaged or hostile."""

    path: Path

    @property
    def name(self) -> str:
        """The folder's own name, in characters that can be written down."""
        return os.fsencode(self.path.resolve().name).decode("utf-8", "replace")

    @property
    def ledger(self) -> Path:
        """Return the place of the ledger, or raise an error if this folder has none."""
        path = self.path / LEDGER
        if not is_regular(path):
            raise InvalidInput(f"{self.path} holds no {LEDGER}: give the folder of a run of `sordino train`")
        return path

    def text(self, name: str) -> str | None:
        """Read a small UTF-8 file of the folder; None if there is none."""
        path = self.path / name
        if not is_regular(path):
            return None
        try:
            # A pipe put here after the look above must not block us, and a link must not lead elsewhere.
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
            with os.fdopen(descriptor, "rb") as file:
                content = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise InvalidInput(f"cannot read {path}: {error.strerror}") from None
        if len(content) > MOST_BYTES:
            raise InvalidInput(f"{path} has more than {MOST_BYTES:,} bytes: it is no {name} of a run")
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidInput(f"{path} is not UTF-8 text: it is no {name} of a run") from None

    def toml(self, name: str) -> dict[str, Any]:
        """Read a TOML file of the folder; empty if there is none."""
        return parse_toml(self.text(name) or "", str(self.path / name))

    def json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON object of the folder; None if there is none."""
        text = self.text(name)
        return None if text is None else parse_object(text, str(self.path / name))

    def history(self, field: str = "accuracy") -> list[tuple[float, float]]:
        """Read (step, held-out accuracy or another field) from `history.jsonl`, except a line that a crash cut off."""
        found: dict[float, float] = {}
        for line in (self.text("history.jsonl") or "").splitlines():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and _is_number(entry.get("step")) and _is_number(entry.get(field)):
                found[float(entry["step"])] = float(entry[field])
        return sorted(found.items())

    def holds_model(self) -> bool:
        """Whether training left anything to use: a checkpoint, a table's model, or that of a fine-tuning."""
        files = ("model.json", "averaged.pt")
        return (
            self.saved_step() is not None
            or any(map(is_regular, (self.path / name for name in files)))
            or (self.path / "model").is_dir()
        )

    def saved_step(self) -> int | None:
        """Return the step of the newest checkpoint, from its name: its content is not needed."""
        names = (_CHECKPOINT.fullmatch(entry.name) for entry in os.scandir(self.path))
        return max((int(found[1]) for found in names if found), default=None)


@contextmanager
def expect_anything(run: str | Path) -> Iterator[None]:
    """Turn any error into one line: a folder from elsewhere can hold things that nobody foresaw."""
    try:
        yield
    except SordinoError:
        raise
    except _UNFORESEEN as error:
        raise InvalidInput(f"{run} cannot be read ({type(error).__name__}): it was not written by Sordino") from error


def parse_object(text: str, name: str) -> dict[str, Any]:
    """Return the JSON object in `text`, or an error that calls the file by `name`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{name} is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{name} must hold a JSON object, not {type(value).__name__}")
    return value


def is_regular(path: Path) -> bool:
    """Whether `path` is a file itself: neither missing, nor a link, a pipe or a folder."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def _is_number(value: Any) -> bool:
    return fits(value, "float") and abs(value) < math.inf
