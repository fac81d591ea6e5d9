"""Write the tables of what each training argument means under privacy into docs/finetuning.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sordino.integrations.arguments import MEANINGS, OF_SEQ2SEQ, OF_SFT, Meaning

PAGE = Path(__file__).parent.parent / "docs" / "finetuning.md"


def render(meanings: Mapping[str, Meaning]) -> str:
    """One row for each verdict and reason; the arguments that share them stand together."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, meaning in meanings.items():
        rows.setdefault((meaning.verdict, meaning.why), []).append(f"`{name}`")
    lines = ["| arguments | | what it means |", "|---|---|---|"]
    order = ("refused", "changed", "accepted")
    for (verdict, why), names in sorted(rows.items(), key=lambda row: order.index(row[0][0])):
        lines.append(f"| {', '.join(names)} | {verdict} | {why} |")
    return "\n".join(lines)


def fill(text: str) -> str:
    """The page with its tables as they are in the code."""
    tables = {"TrainingArguments": MEANINGS, "Seq2SeqTrainingArguments": OF_SEQ2SEQ, "SFTConfig": OF_SFT}
    for mark, meanings in tables.items():
        pattern = re.compile(rf"(<!-- {mark}: [^>]*-->\n).*?(\n<!-- end of {mark} -->)", re.DOTALL)
        text, found = pattern.subn(lambda match, rows=render(meanings): match[1] + rows + match[2], text)
        assert found == 1, f"{PAGE} has no place for the table of {mark}"
    return text


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
