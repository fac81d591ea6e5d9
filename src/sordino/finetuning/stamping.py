"""Puts the model's guarantee beside a file that a private model made: what the file is, and what it cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sordino.accounting.guarantee import read_versions
from sordino.books import write_durably
from sordino.errors import InvalidInput
from sordino.figures import to_plain
from sordino.report.facts import gather

ENDING = ".guarantee.json"
FREE = "post-processing of the released model: it spends nothing, however often it is repeated"


def find_stamp(path: Path) -> Path:
    """Return the place of a file's guarantee: beside the file, under its name."""
    return path.with_name(path.name + ENDING)


def describe_guarantee(run: Path, what: str, **settings: Any) -> dict[str, Any]:
    """Describe a file made by the model of `run`, as plain data: what it holds, how it was made, and its guarantee."""
    facts = gather(run, brief=True)
    guarantee = {**facts.guarantee.to_dict(), "epsilon": to_plain(facts.guarantee.epsilon)}
    return {
        "what": what,
        "cost": FREE,
        "guarantee": guarantee,
        "in_words": str(facts.guarantee),
        "run": facts.name,
        "step": facts.saved_step,
        "ledger": facts.proof.fingerprint,
        **settings,
        "versions": read_versions(),
    }


def write_stamp(path: Path, stamp: dict[str, Any]) -> Path:
    """Put the stamp beside the file at `path`."""
    beside = find_stamp(path)
    try:
        write_durably(beside, json.dumps(stamp, default=str, indent=1, ensure_ascii=False).encode())
    except OSError as error:
        raise InvalidInput(f"cannot write {beside}: {error.strerror}") from None
    return beside
