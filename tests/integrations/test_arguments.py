"""Every training argument has a meaning under privacy, and the page says the same as the code."""

from __future__ import annotations

import dataclasses
import difflib
import re
from pathlib import Path

import pytest

from scripts.write_arguments import PAGE, fill, render
from sordino import InvalidInput
from sordino.integrations.arguments import MEANINGS, OF_SEQ2SEQ, OF_SFT, require_private

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-integrations")
from transformers import TrainingArguments  # noqa: E402


def test_every_argument_of_the_trainer_has_a_meaning() -> None:
    assert set(MEANINGS) == {each.name for each in dataclasses.fields(TrainingArguments)}


def test_every_argument_of_the_trainer_that_generates_has_a_meaning() -> None:
    ours = {each.name for each in dataclasses.fields(transformers.Seq2SeqTrainingArguments)} - set(MEANINGS)
    assert set(OF_SEQ2SEQ) == ours


def test_every_argument_that_trl_adds_has_a_meaning() -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed: make test-integrations")
    ours = {each.name for each in dataclasses.fields(trl.SFTConfig)} - set(MEANINGS)
    assert set(OF_SFT) == ours


def test_the_defaults_are_accepted(tmp_path: Path) -> None:
    require_private(TrainingArguments(str(tmp_path), use_cpu=True))


def test_an_argument_that_nobody_sorted_is_refused_unless_it_asks_for_nothing(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Newer(TrainingArguments):  # type: ignore[misc]
        share_batches: bool = False

    require_private(Newer(str(tmp_path), use_cpu=True))
    with pytest.raises(InvalidInput, match=r"share_batches=True is refused .* does not know it"):
        require_private(Newer(str(tmp_path), use_cpu=True, share_batches=True))


def test_the_page_shows_the_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert fill(text) == text, "run: python scripts/write_arguments.py"
    assert render(MEANINGS) in text
    assert render(OF_SEQ2SEQ) in text
    assert render(OF_SFT) in text


def test_five_lines_make_a_script_private() -> None:
    """The ordinary script and the private one on the page differ in so many lines."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    ordinary, private = (block.splitlines() for block in blocks[:2])
    changes = [line[2:].strip() for line in difflib.ndiff(ordinary, private) if line.startswith("+ ")]
    assert changes == [
        "from sordino import Budget",
        "from sordino.integrations.transformers import PrivateTrainer",
        "trainer = PrivateTrainer(",
        "budget=Budget(epsilon=3, delta=1e-3),",
        "print(trainer.guarantee())",
    ]
