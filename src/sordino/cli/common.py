"""What every command shares: exit codes, where words go, and numbers that are rounded the honest way."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

UNSURE = {
    "unchecked": "signature not checked: the ledger is signed, and its key is not set (SORDINO_LEDGER_KEY)",
    "missing": "the ledger is not signed, though a key is set: if it ever was, somebody forged it",
}
"""What to say of a ledger whose signatures prove nothing."""
FOUND = 1
BAD_INPUT = 2
INTERRUPTED = 130


def console() -> Console:
    """For results."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def messages() -> Console:
    """For everything that is not a result: progress, cautions, errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def complain(message: str) -> None:
    """One line on stderr."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)


def caution(message: str) -> None:
    """Something the user should know, one line on stderr."""
    print(f"caution: {message}", file=sys.stderr)


def print_json(result: dict[str, Any]) -> None:
    """One JSON object on stdout, for machines; numbers that JSON has no word for become text."""
    print(json.dumps(result, default=str, allow_nan=False))


def keep_json(path: Path, result: dict[str, Any]) -> None:
    """The same object in a file of the run, for `sordino report`."""
    from sordino.books import write_durably

    try:
        write_durably(path, json.dumps(result, default=str, allow_nan=False, indent=1).encode())
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}") from None


def one_of(first: Any, second: Any, question: str) -> None:
    """Exactly one of two options must be given."""
    if (first is None) == (second is None):
        raise InvalidInput(question)


def sampling_rate(rate: float | None, batch_size: int | None, records: int | None) -> float:
    """The chance of a record to join a draw, given directly or as expected batch size over records."""
    if rate is not None and batch_size is None:
        return rate
    if batch_size is None or records is None or rate is not None:
        raise InvalidInput("the sampling rate is missing or given twice: use --rate, or --batch-size with --records")
    if not 1 <= batch_size <= records:
        raise InvalidInput(
            f"batch-size={batch_size} must be in 1..records={records}: it is the expected size of a draw"
        )
    return batch_size / records


def step_count(steps: int | None, epochs: float | None, rate: float) -> int:
    """The length of training in steps; an epoch is 1 / rate steps."""
    one_of(steps, epochs, "the length of training is missing or given twice: use --steps or --epochs")
    if steps is None:
        assert epochs is not None
        if not (epochs > 0 and math.isfinite(epochs)):
            raise InvalidInput(f"epochs={epochs} must be > 0 and finite")
        if not 0 < rate <= 1:
            raise InvalidInput(f"rate={rate} must be in (0, 1]: give expected draw size / number of records")
        steps = max(1, round(epochs / rate))
    if steps < 1:
        raise InvalidInput(f"steps={steps} must be >= 1")
    return steps


def delta_for(delta: float | None, records: int | None) -> float:
    """The δ asked for, which must be below 1 / records; or a power of ten at most a tenth of 1 / records."""
    if delta is None:
        if records is None:
            raise InvalidInput("delta is missing: use --delta, well below 1 / number of records")
        return min(1e-5, 10.0 ** math.floor(math.log10(0.1 / records) + 1e-9))
    if records is not None and delta >= 1 / records:
        raise InvalidInput(
            f"delta={delta:g} must be < 1/records = {1 / records:g}: a larger one allows to publish whole records"
        )
    return delta
