"""A hook of mkdocs: formulas between ``$$`` become MathML, which browsers set themselves, with nothing to load.

A small part of TeX is enough here: letters, numbers, operators, indices and powers, fractions, roots, sums, names. What
it does not know ends the build.
"""

from __future__ import annotations

import re
from typing import Any
from xml.sax.saxutils import escape

FORMULA = re.compile(r"^\$\$(.+?)\$\$$", re.MULTILINE | re.DOTALL)
TOKEN = re.compile(r"\\[A-Za-z]+|\\[{}|,;]|\d+(?:\.\d+)?|[A-Za-z]|\s+|.")
GREEK = ("alpha", "beta", "gamma", "delta", "kappa", "lambda", "mu", "rho", "sigma", "tau", "phi")
LETTERS = {
    **dict(zip(GREEK, "αβγδκλμρστφ", strict=True)),
    "varepsilon": "ε",
    "Phi": "Φ",
    "infty": "∞",
    "nabla": "∇",
    "ell": "ℓ",
}
SIGNS = ("cdot", "times", "le", "ge", "ne", "approx", "in", "to", "dots", "|", "{", "}", "sum", "prod", "int", "sim")
OPERATORS = dict(zip(SIGNS, "·×≤≥≠≈∈→…‖{}∑∏∫∼", strict=True))
NAMES = ("ln", "log", "exp", "min", "max", "Pr")
SPACES = {",", ";", "quad"}
LARGE = ("sum", "prod")


class Reader:
    """Reads the tokens of one formula, from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [token for token in TOKEN.findall(text) if token.strip()]
        self.at = 0

    def read_row(self, end: str = "") -> str:
        """Everything up to `end`."""
        parts = []
        while self.at < len(self.tokens) and self.tokens[self.at] != end:
            parts.append(self.read_part())
        if end:
            self.expect(end)
        return "".join(parts)

    def expect(self, token: str) -> None:
        if self.at >= len(self.tokens) or self.tokens[self.at] != token:
            raise ValueError(f"{token!r} is missing in the formula {self.text.strip()!r}")
        self.at += 1

    def read_part(self) -> str:
        """One thing with its index and its power."""
        large = self.tokens[self.at][1:] in LARGE
        base, below, above = self.read_one(), "", ""
        while self.at < len(self.tokens) and self.tokens[self.at] in "_^":
            mark = self.tokens[self.at]
            self.at += 1
            below, above = (self.read_one(), above) if mark == "_" else (below, self.read_one())
        if not below and not above:
            return base
        low, high, both = ("munder", "mover", "munderover") if large else ("msub", "msup", "msubsup")
        if below and above:
            return f"<{both}>{base}{below}{above}</{both}>"
        return f"<{low}>{base}{below}</{low}>" if below else f"<{high}>{base}{above}</{high}>"

    def read_group(self) -> str:
        """What stands between braces."""
        self.expect("{")
        return f"<mrow>{self.read_row('}')}</mrow>"

    def read_one(self) -> str:
        """One letter, number, operator, group or command."""
        if self.at >= len(self.tokens):
            raise ValueError(f"the formula {self.text.strip()!r} ends too early")
        token = self.tokens[self.at]
        if token == "{":
            return self.read_group()
        self.at += 1
        if token.startswith("\\"):
            return self.read_command(token[1:])
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        if token.isalpha():
            return f"<mi>{token}</mi>"
        plain = " stretchy='false'" if token in "()[]|" else ""  # as high as letters, whatever stands beside them
        return f"<mo{plain}>{escape('−' if token == '-' else token)}</mo>"

    def read_command(self, name: str) -> str:
        if name in LETTERS:
            return f"<mi>{LETTERS[name]}</mi>"
        if name in OPERATORS:
            return f"<mo>{OPERATORS[name]}</mo>"
        if name in NAMES:
            return f"<mi>{name}</mi><mspace width='0.17em'/>"
        if name in SPACES:
            return f"<mspace width='{'1em' if name == 'quad' else '0.17em'}'/>"
        if name == "frac":
            return f"<mfrac>{self.read_group()}{self.read_group()}</mfrac>"
        if name == "binom":
            rows = f"<mfrac linethickness='0'>{self.read_group()}{self.read_group()}</mfrac>"
            return f"<mrow><mo>(</mo>{rows}<mo>)</mo></mrow>"
        if name == "sqrt":
            return f"<msqrt>{self.read_group()}</msqrt>"
        if name == "text":
            start = self.at
            self.read_group()
            return f"<mtext>{escape(self.words(start))}</mtext>"
        raise ValueError(f"\\{name} is not known here, in the formula {self.text.strip()!r}")

    def words(self, start: int) -> str:
        """The words of ``\\text{...}`` with their spaces, which tokens have lost."""
        number = sum(token == "\\text" for token in self.tokens[:start])
        return re.findall(r"\\text\{([^}]*)\}", self.text)[number - 1]


def to_mathml(formula: str) -> str:
    """One formula on a line of its own, with its TeX for those who copy it."""
    reader = Reader(formula)
    row = reader.read_row()
    source = f"<annotation encoding='application/x-tex'>{escape(formula.strip())}</annotation>"
    return f"<math display='block'><semantics><mrow>{row}</mrow>{source}</semantics></math>"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return FORMULA.sub(lambda found: to_mathml(found[1]), markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page: one with formulas takes the font along, which other pages need not read."""
    if "<math" not in html:
        return html
    return f'<link rel="stylesheet" href="{"../" * page.url.count("/")}assets/math.css">\n{html}'
