"""Synthetic texts from a fine-tuned causal model: post-processing, so that any number of them costs nothing more.

Each text is a function of the released model, the prompt and random numbers. The guarantee of the run covers all texts
together, however many are drawn. It does not cover a prompt, so a prompt must not be private.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sordino.errors import InvalidInput
from sordino.finetuning.choice import LONGEST
from sordino.finetuning.low_precision import autocast
from sordino.finetuning.models import quiet
from sordino.finetuning.tokens import find_padding, find_start
from sordino.finetuning.tuned import Tuned

AT_ONCE = 32
MOST_RECORDS = 100_000_000


@dataclass(frozen=True)
class Sampling:
    """How texts are drawn. `top_p` keeps the likeliest tokens up to that chance; `length` counts new tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    length: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (0 < self.temperature <= 100 and math.isfinite(self.temperature)):
            raise InvalidInput(
                f"temperature={self.temperature:g} must be in (0, 100]: 1 draws as the model was trained, less is tamer"
            )
        if not 0 < self.top_p <= 1:
            raise InvalidInput(f"top-p={self.top_p:g} must be in (0, 1]: 1 keeps every token")
        if self.length is not None and not 1 <= self.length <= LONGEST:
            raise InvalidInput(f"length={self.length} must be >= 1: it is how many tokens are written at most")


def generate(tuned: Tuned, records: int, sampling: Sampling, prompt: str = "") -> Iterator[list[str]]:
    """Yield `records` texts, some at a time; each begins with the `prompt`. The caller's random state is kept."""
    if not 1 <= records <= MOST_RECORDS:
        raise InvalidInput(f"records={records} must be in 1..{MOST_RECORDS:,}")
    tokenizer = tuned.tokenizer
    start = [find_start(tokenizer), *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    room = tuned.choice.length - len(start)
    if room < 1:
        raise InvalidInput(
            f"the prompt has {len(start) - 1} tokens, must have < {tuned.choice.length - 1}: "
            "the model was trained on texts of that length"
        )
    settings = _describe(tuned, sampling, min(room, sampling.length or room))
    generator_state = None
    for done in range(0, records, AT_ONCE):
        count = min(AT_ONCE, records - done)
        running = autocast(tuned.choice.dtype, tuned.model)
        with quiet(), torch.random.fork_rng(), torch.no_grad(), running:
            if generator_state is not None:
                torch.set_rng_state(generator_state)
            elif sampling.seed is not None:
                torch.manual_seed(sampling.seed)
            else:
                torch.seed()
            ids = torch.tensor([start] * count)
            written: Any = tuned.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)  # type: ignore[operator]  # a model of transformers
            generator_state = torch.get_rng_state()
        yield [_decode(tokenizer, row) for row in written[:, 1:].tolist()]


def _describe(tuned: Tuned, sampling: Sampling, most: int) -> dict[str, Any]:
    tokenizer = tuned.tokenizer
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,  # transformers' own default would cut off all but fifty tokens
        "max_new_tokens": most,
        "pad_token_id": find_padding(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }


def _decode(tokenizer: Any, ids: list[int]) -> str:
    """Decode up to the end mark; bytes that make no character are left out."""
    if tokenizer.eos_token_id in ids:
        ids = ids[: ids.index(tokenizer.eos_token_id)]
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text
