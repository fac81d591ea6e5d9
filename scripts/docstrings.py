"""A griffe extension for the API reference: examples in docstrings become blocks of code.

Docstrings here are plain text with doctests and `::`, which Markdown would take for quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# A doctest: from a line with >>> to the next empty line.
DOCTEST = re.compile(r"^([ \t]*)>>>.*(?:\n(?![ \t]*$).*)*", re.MULTILINE)
# What is left of a literal block of reStructuredText: Markdown needs the indentation alone.
LITERAL = re.compile(r"^[ \t]*::[ \t]*$\n?", re.MULTILINE)


def readable(text: str) -> str:
    """The docstring as Markdown."""
    return DOCTEST.sub(lambda match: f"\n{match[1]}```pycon\n{match[0]}\n{match[1]}```", LITERAL.sub("", text))


class Examples(griffe.Extension):
    """Applies `readable` to every docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)
