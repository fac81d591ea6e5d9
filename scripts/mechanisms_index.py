"""A hook of mkdocs: pages that say ``<!-- every mechanism: ... -->`` get what the registry knows of all of them.

A mechanism that is added as one file is thereby in the documentation's index and in its reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sordino import __version__
from sordino.mechanisms import Mechanism, find_all

TABLE, REFERENCE = "<!-- every mechanism: table -->", "<!-- every mechanism: reference -->"


def write_table(mechanisms: Iterable[Mechanism]) -> str:
    """One row for each: how to call it, what it does, and where it is published."""
    rows = [f"| `recipes.{each.name}` | {each.title}: {each.summary} | {each.paper} |" for each in mechanisms]
    return "\n".join(["| recipe | what it does | published in |", "|---|---|---|", *rows])


def write_reference(mechanisms: Iterable[Mechanism]) -> str:
    """What mkdocstrings turns into the reference: each file that has mechanisms, once."""
    files = dict.fromkeys(each.recipe.__module__ for each in mechanisms)
    options = "    options: { show_root_heading: false, show_root_toc_entry: false }"
    return "\n".join(f"::: {file}\n{options}" for file in files)


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Called by mkdocs for every page; those of the reference say of which version they are."""
    if page is not None and page.file.src_uri.startswith("api/"):
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n\n*Sordino {__version__}. Other versions: [upgrading](../upgrading.md).*\n{rest}"
    if TABLE not in markdown and REFERENCE not in markdown:
        return markdown
    found = list(find_all().values())
    return markdown.replace(TABLE, write_table(found)).replace(REFERENCE, write_reference(found))
