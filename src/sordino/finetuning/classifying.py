"""Predicts the classes of new texts by a fine-tuned classifier: post-processing of a released model, so it is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor
from torch.nn.functional import softmax

from sordino.finetuning.low_precision import autocast
from sordino.finetuning.tokens import Pad, Texts, encode_texts, find_padding
from sordino.finetuning.tuned import Tuned

AT_ONCE = 32


@torch.no_grad()
def predict_probabilities(
    tuned: Tuned, texts: Sequence[str], told: Callable[[int], None] = lambda done: None
) -> Tensor:
    """Return one row per text and one column per class. `told` is called with the number of texts that are done.

    Texts are processed in order of length, so that few tokens are padding; the rows are in the order of the texts.
    """
    rows = encode_texts(tuned.tokenizer, texts, tuned.choice.length, generative=False)
    records = Texts(rows, torch.zeros(len(rows), dtype=torch.int64))
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    pad, found = Pad(find_padding(tuned.tokenizer)), torch.zeros(len(rows), len(tuned.classes))
    for start in range(0, len(order), AT_ONCE):
        places = order[start : start + AT_ONCE]
        batch = pad([records[place] for place in places])
        del batch["labels"]
        with autocast(tuned.choice.dtype, tuned.model):
            logits = tuned.model(**batch).logits
        found[places] = softmax(logits.float(), dim=1)
        told(start + len(places))
    return found


def tabulate(tuned: Tuned, texts: Sequence[str], told: Callable[[int], None] = lambda done: None) -> Any:
    """Return an arrow table of predictions: the likeliest class, and the probability of each."""
    chances = predict_probabilities(tuned, texts, told)
    named = pa.array([tuned.classes[number] for number in chances.argmax(1).tolist()], pa.string())
    each = {f"probability of {name}": chances[:, place].numpy() for place, name in enumerate(tuned.classes)}
    return pa.table({"predicted": named, **each})


def predict(tuned: Tuned, texts: Sequence[str], told: Callable[[int], None] = lambda done: None) -> list[str]:
    """Predict the most probable class of each text, by its name."""
    return [tuned.classes[number] for number in predict_probabilities(tuned, texts, told).argmax(1).tolist()]
