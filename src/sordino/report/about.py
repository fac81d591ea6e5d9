"""Whose model it is and what it is for: the first questions of a reader, which no ledger can answer.

::

    owner = "Example Hospital"
    owner_kind = "Nonprofit"            # Government, Industry or Nonprofit
    purpose = "Which patients to call back first"
    description = "A model of readmission within 30 days"
    region = "Denmark"
    sector = "Healthcare"               # Technology, Healthcare, Education, Government, Energy or Finance
    contact = "privacy@hospital.example"
    authors = ["A. Nurse"]              # who fills in an entry of the registry
    published = "2026-03-01"

The file is `about.toml` in a run's folder, or the one that ``sordino report --about`` names. Nothing in it is checked:
a page shows these words as the owner's own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.errors import InvalidInput

if TYPE_CHECKING:
    from sordino.report.run_folder import Folder

FILE = "about.toml"
MOST_LETTERS = 2000
KINDS = ("Government", "Industry", "Nonprofit")
SECTORS = ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance")


@dataclass(frozen=True)
class About:
    """What the owner of a model says about it; empty where nothing was said."""

    owner: str = ""
    owner_kind: str = ""
    purpose: str = ""
    description: str = ""
    region: str = ""
    sector: str = ""
    contact: str = ""
    authors: tuple[str, ...] = ()
    published: str = ""

    def with_given(self, **given: str | None) -> About:
        """Return the same, with a user's own values on top."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        return About(**{**known, **{name: value for name, value in given.items() if value is not None}})


def read_about(folder: Folder) -> About:
    """Read the words in a run's folder, which may come from anybody; none if there is no file."""
    text = folder.text(FILE)
    return About() if text is None else parse_about(text, str(folder.path / FILE))


def read_about_file(path: Path) -> About:
    """Read the words in a file that the user names."""
    try:
        return parse_about(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise InvalidInput(f'{path} does not exist: give a TOML file with lines such as owner = "..."') from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read {path}: {error}") from None


def parse_about(text: str, name: str) -> About:
    """Read the words in a TOML document; an error names the mistake in one line."""
    try:
        table: Mapping[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput(f"{name} is not a TOML document: {' '.join(str(error).split())[:200]}") from None
    known = {f.name for f in fields(About)}
    if unknown := sorted(set(table) - known):
        raise InvalidInput(f"{name} has no key {unknown[0]!r}: it has {', '.join(sorted(known))}")
    words: dict[str, Any] = {}
    for key, value in table.items():
        if key == "authors":
            if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
                raise InvalidInput(f"{name}: authors={value!r} must be a list of names")
            words[key] = tuple(each[:MOST_LETTERS] for each in value[:50])
            continue
        if isinstance(value, date):
            value = value.isoformat()
        if not isinstance(value, str):
            raise InvalidInput(f"{name}: {key}={value!r} must be text")
        words[key] = value[:MOST_LETTERS]
    _require_known(words, name)
    return About(**words)


def _require_known(words: Mapping[str, Any], name: str) -> None:
    for key, known in (("owner_kind", KINDS), ("sector", SECTORS)):
        if words.get(key) and words[key] not in known:
            raise InvalidInput(f"{name}: {key}={words[key]!r} must be one of {', '.join(known)}")
    try:
        date.fromisoformat(words.get("published") or "2000-01-01")
    except ValueError:
        raise InvalidInput(f"{name}: published={words['published']!r} must be a date, such as 2026-03-01") from None
