"""Texts from files, and their tokens: each record by itself, nothing learnt from them, nothing of them told."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from sordino.errors import InvalidInput
from sordino.finetuning.choice import CAUSAL, Lora, TextChoice, parse_lora
from sordino.finetuning.text_files import find_owners, read_texts, split_texts
from sordino.tables.table import Table

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
from sordino.finetuning import models, tokens  # noqa: E402

ROWS = [
    {"who": "a", "note": "first, with a comma", "code": "1"},
    {"who": "b", "note": "second\nline", "code": "2"},
    {"who": "a", "note": "ünïcode ✓", "code": "1"},
]


def write(path: Path) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([{**row, "code": int(row["code"])} for row in ROWS]), path
        )
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({**row, "code": int(row["code"])}) for row in ROWS) + "\n\n")
    else:
        cells = (",".join(f'"{cell}"' for cell in row.values()) for row in ROWS)
        path.write_text("\n".join(["who,note,code", *cells]) + "\n")
    return path


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_every_kind_of_file_says_the_same(tmp_path: Path, ending: str) -> None:
    table = read_texts(write(tmp_path / f"notes.{ending}"), ["note", "code"])
    assert {name: list(cells) for name, cells in table.columns.items()} == {
        "note": [row["note"] for row in ROWS],
        "code": [row["code"] for row in ROWS],
    }
    with pytest.raises(InvalidInput, match="notes has no column 'letter': it has who, note, code"):
        read_texts(tmp_path / f"notes.{ending}", ["letter"])


def test_a_missing_key_is_an_empty_cell_and_a_list_is_refused_without_its_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x", "n": 1}\n{"n": null}\n')
    assert list(read_texts(path, ["text", "n"]).columns["text"]) == ["x", ""]
    path.write_text('{"text": "x"}\n{"text": {"private": "words"}}\n')
    with pytest.raises(InvalidInput, match="line 2: column 'text' holds an object") as error:
        read_texts(path, ["text"])
    assert "private" not in str(error.value)


def owned(count: int) -> Table:
    return Table("t", {"text": [f"text {i}" for i in range(count)], "who": [f"user {i % 40}" for i in range(count)]})


def test_an_owner_is_held_out_whole_or_not_at_all() -> None:
    choice = TextChoice(CAUSAL, "text", unit="who")
    sheet = split_texts(owned(400), choice, None, 0.5)
    here, there = (set(find_owners(part, "who")) for part in (sheet.train, sheet.held_out))
    assert here
    assert there
    assert not here & there


def test_one_record_more_moves_no_other() -> None:
    choice = TextChoice(CAUSAL, "text")
    few, more = (split_texts(owned(count), choice, None, 0.3) for count in (300, 301))
    assert list(more.train.columns["text"])[: len(few.train)] == list(few.train.columns["text"])
    assert len(few.train) + len(few.held_out) == 300


def test_a_record_without_an_owner_is_named_by_its_number() -> None:
    table = Table("t", {"text": ["x", "y"], "who": ["ann", " "]})
    with pytest.raises(InvalidInput, match="record 2 has no 'who'"):
        find_owners(table, "who")


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        ("8", Lora(8, 16.0)),
        ("r=4", Lora(4, 8.0)),
        ("r=4,alpha=32", Lora(4, 32.0)),
        ("r=4, alpha=1.5, targets=q_proj+v_proj", Lora(4, 1.5, ("q_proj", "v_proj"))),
    ],
)
def test_adapters_are_spelled_and_read_back(text: str, lora: Lora) -> None:
    assert parse_lora(text) == lora == parse_lora(str(lora))


@pytest.mark.parametrize("text", ["", "big", "r=x", "r=8,beta=2", "r=8 and more"])
def test_other_words_are_no_adapters(text: str) -> None:
    with pytest.raises(InvalidInput, match="lora="):
        parse_lora(text)


@pytest.fixture(scope="module")
def bytewise() -> object:
    return tokens.load_tokenizer(Path("/nowhere"))


@pytest.mark.parametrize("generative", [False, True])
def test_tokens_of_a_text_depend_on_no_other(bytewise: object, generative: bool) -> None:
    texts = ["short", "", "a longer text, cut somewhere", "ü" * 40]
    together = tokens.encode_texts(bytewise, texts, 20, generative=generative)
    alone = [tokens.encode_texts(bytewise, [text], 20, generative=generative)[0] for text in texts]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    assert all(1 <= len(row) <= 20 for row in together)


def test_bytes_are_256_values_and_three_marks_whatever_the_texts(bytewise: object) -> None:
    assert len(bytewise) == 259  # type: ignore[arg-type]  # of transformers
    (row,) = tokens.encode_texts(bytewise, ["\x00añ"], 20, generative=True)
    assert row.tolist() == [1, *(byte + 3 for byte in "\x00añ".encode()), 1], "start, bytes, end"


def test_padding_is_hidden_and_has_no_label(bytewise: object) -> None:
    rows = tokens.encode_texts(bytewise, ["abc", "a"], 20, generative=True)
    batch = tokens.Pad(0)([tokens.Texts(rows)[i] for i in range(2)])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["labels"][1].tolist() == [1, 100, 1, -100, -100]
    labelled = tokens.Pad(0)([tokens.Texts(rows, torch.tensor([1, 0]))[i] for i in range(2)])
    assert labelled["labels"].tolist() == [1, 0]


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path: Path, bytewise: object) -> None:
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, n_positions=16, vocab_size=100)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    origin = models.find_origin(str(tmp_path))
    with pytest.raises(InvalidInput, match="has 100 tokens, its tokenizer 259"):
        models.load_config(origin, TextChoice(CAUSAL), bytewise, ())


def test_no_code_of_a_folder_is_run(tmp_path: Path, bytewise: object) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\nclass Evil: ...\n")
    mapped = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": mapped}))
    origin = models.find_origin(str(tmp_path / "config.json"))
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        models.load_config(origin, TextChoice(CAUSAL), bytewise, ())
