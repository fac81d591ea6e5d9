"""examples/finetune: the invented reviews are those that the script makes, and the configurations are tiny models."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "finetune"


def test_the_script_makes_the_table(tmp_path: Path) -> None:
    made = tmp_path / "reviews.csv"
    runpy.run_path(str(EXAMPLES / "make_reviews.py"))["main"](made)
    assert made.read_bytes() == (EXAMPLES / "reviews.csv").read_bytes()


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-gpt2"])
def test_the_models_are_tiny(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    settings = json.loads((EXAMPLES / name / "config.json").read_text())
    config = transformers.AutoConfig.for_model(**{**settings, "vocab_size": 259})
    model = transformers.AutoModel.from_config(config)
    assert sum(p.numel() for p in model.parameters()) < 50_000
