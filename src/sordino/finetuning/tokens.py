"""From texts to tokens, record by record: with the tokenizer of the model's folder, or by bytes.

A tokenizer learnt from private texts reveals them: if a rare name is one token, someone wrote it, and no ε pays for
that. So none is learnt here. A model without a tokenizer reads bytes: the 256 values of a byte and three marks,
whatever the texts are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from sordino.errors import InvalidInput
from sordino.finetuning.losses import IGNORED

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A folder with one of these files has its own tokenizer."""
_AT_ONCE = 1000
Record = dict[str, Tensor]


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder brings a tokenizer."""
    return any((folder / name).is_file() for name in FILES)


def load_tokenizer(folder: Path) -> Any:
    """Load the folder's own tokenizer, or one of bytes; without a network, and without running code in the folder."""
    from transformers import AutoTokenizer, ByT5Tokenizer

    if not has_tokenizer(folder):
        return ByT5Tokenizer(extra_ids=0)
    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  # whatever the files of a folder make transformers raise
        reason = " ".join(str(error).split())[:200]
        raise InvalidInput(f"the tokenizer in {folder} cannot be loaded ({type(error).__name__}: {reason})") from None
    if found.eos_token_id is None and found.pad_token_id is None:
        raise InvalidInput(f"the tokenizer in {folder} has neither a pad nor an eos token: give it one of them")
    return found


def find_padding(tokenizer: Any) -> int:
    """Find the token that fills rows up; the attention mask hides it."""
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return int(padding)


def find_start(tokenizer: Any) -> int:
    """Find the token before the first of a text: a model that writes texts begins with it."""
    marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return int(next(mark for mark in marks if mark is not None))


def encode_texts(tokenizer: Any, texts: Sequence[str], length: int, *, generative: bool) -> list[Tensor]:
    """Encode each text as at most `length` tokens, which depend on no other text.

    A classifier gets the tokenizer's own marks around a text. A causal model gets its start mark, the text and the end
    mark, so that it learns where texts begin and end. A text that is too long loses its end.
    """
    rows: list[Tensor] = []
    for place in range(0, len(texts), _AT_ONCE):
        part = list(texts[place : place + _AT_ONCE])
        if generative:
            found = tokenizer(part, add_special_tokens=False, truncation=True, max_length=length)["input_ids"]
            start, end = [find_start(tokenizer)], [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
            found = [[*start, *ids, *end][:length] for ids in found]
        else:
            found = tokenizer(part, truncation=True, max_length=length)["input_ids"]
            found = [ids or [find_start(tokenizer)] for ids in found]  # no marks and no text: there must be a token
        rows.extend(torch.tensor(ids, dtype=torch.int32) for ids in found)
    return rows


def require_template(tokenizer: Any, column: str, model: str) -> None:
    """Refuse conversations if the model's tokenizer does not say how to write them."""
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInput(
            f"column {column!r} holds conversations, but the tokenizer of {model} has no chat template: "
            "add chat_template.jinja to its folder, or join each conversation to one text"
        )


def encode_conversations(tokenizer: Any, cells: Sequence[str], length: int) -> list[Tensor]:
    """Encode each conversation as the tokenizer's template writes it, between a start and an end mark.

    Marks that the template sets itself are not set twice. One conversation is one record, however long it is.
    """
    start, end, rows = find_start(tokenizer), tokenizer.eos_token_id, []
    for number, cell in enumerate(cells, 1):
        try:
            text = tokenizer.apply_chat_template(json.loads(cell), tokenize=False)
        except Exception as error:  # noqa: BLE001  # a template may raise anything; its words may quote the record
            raise InvalidInput(
                f"conversation {number} does not fit the tokenizer's chat template ({type(error).__name__}): "
                "correct its roles, or leave it out of the file"
            ) from None
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ids if ids[:1] == [start] else [start, *ids]
        ids = ids if end is None or ids[-1:] == [end] else [*ids, end]
        rows.append(torch.tensor(ids[:length], dtype=torch.int32))
    return rows


@dataclass(frozen=True, eq=False)
class Texts(Dataset[Record]):
    """Tokenised texts as records: each with a class or, for a causal model, with the text itself as its label."""

    rows: Sequence[Tensor]
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:
        ids = self.rows[index].long()
        return {"input_ids": ids, "labels": ids if self.labels is None else self.labels[index]}


@dataclass(frozen=True)
class Pad:
    """Fills the texts of a batch up to the longest of them, on the right, behind an attention mask."""

    padding: int

    def __call__(self, records: Sequence[Record]) -> Record:
        ids = [record["input_ids"] for record in records]
        batch = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.padding),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        }
        labels = [record["labels"] for record in records]
        if labels[0].dim():
            batch["labels"] = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
        else:
            batch["labels"] = torch.stack(labels)
        return batch
