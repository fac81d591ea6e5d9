"""The choices of a fine-tuning run, as data: the task, the column of texts, their length, which weights are trained.

They are the table ``[finetuning]`` of a run's ``config.toml``, which also marks the folder as a fine-tuning run::

    [finetuning]
    task = "classify"           # or "causal-lm"
    text = "review"             # the column
    length = 256                # tokens of a text that are read
    lora = "r=8,alpha=16"       # without it every weight is trained
    random = true               # the weights began at random
    dtype = "bfloat16"          # what is frozen is kept so, what is trained in float32
    chat = true                 # the column holds conversations
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sordino.errors import InvalidInput

CLASSIFY, CAUSAL = "classify", "causal-lm"
TASKS = (CLASSIFY, CAUSAL)
LENGTH = 256
"""Tokens of a text that are read, unless the model takes fewer or the user says otherwise."""
LONGEST = 1_000_000
FLOAT, HALF, BYTES = "float32", "bfloat16", "int8"
DTYPES = (FLOAT, HALF, BYTES)
"""How frozen weights are kept: `sordino.finetuning.low_precision`."""


@dataclass(frozen=True)
class Lora:
    """Low-rank changes of a frozen model: W + (alpha / rank) · B A (Hu et al. 2021).

    `targets` are the name endings of the layers that get one. If it is empty, these are the layers that PEFT knows for
    the architecture, or every linear layer outside its head.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 4096:
            raise InvalidInput(f"lora: r={self.rank} must be in 1..4096: it is the rank of the change of a layer")
        if not 0 < self.alpha < 1e6:
            raise InvalidInput(f"lora: alpha={self.alpha:g} must be > 0: a change is multiplied by alpha / r")

    def __str__(self) -> str:
        targets = f",targets={'+'.join(self.targets)}" if self.targets else ""
        return f"r={self.rank},alpha={self.alpha:g}{targets}"


def parse_lora(text: str) -> Lora:
    """Read ``8``, ``r=8`` or ``r=8,alpha=16,targets=q_proj+v_proj``."""
    given = {"r": text} if text.strip().isdecimal() else _split_pairs(text)
    targets = tuple(name.strip() for name in str(given.get("targets", "")).split("+") if name.strip())
    try:
        rank = int(given.get("r", Lora.rank))
        return Lora(rank, float(given.get("alpha", 2 * rank)), targets)
    except ValueError as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"lora={text!r} must hold numbers: r=8,alpha=16") from None


def _split_pairs(text: str) -> dict[str, str]:
    pairs = dict(re.findall(r"(\w+)\s*=\s*([^,\s]+)", text))
    if set(pairs) - {"r", "alpha", "targets"} or re.sub(r"(\w+)\s*=\s*([^,\s]+)|[,\s]", "", text) or not pairs:
        raise InvalidInput(f"lora={text!r} must look like r=8, or r=8,alpha=16,targets=q_proj+v_proj")
    return pairs


@dataclass(frozen=True)
class TextChoice:
    """How texts are read and learnt from. All of it is public."""

    task: str = CLASSIFY
    text: str = "text"
    length: int = LENGTH
    lora: str | None = None
    random: bool = False
    unit: str | None = None
    per_unit: int | None = None
    dtype: str = FLOAT
    chat: bool = False

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise InvalidInput(f"task={self.task!r} must be one of {', '.join(TASKS)}")
        if not 2 <= self.length <= LONGEST:
            raise InvalidInput(f"length={self.length} must be in 2..{LONGEST:,}: how many tokens of a text are read")
        if self.dtype not in DTYPES:
            raise InvalidInput(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if self.dtype == BYTES and self.lora is None:
            raise InvalidInput(f"dtype={BYTES} is for frozen weights, and here every one is trained: give --lora r=8")

    @property
    def conversations(self) -> str | None:
        """The column of conversations, if there is one."""
        return self.text if self.chat else None

    @property
    def adapter(self) -> Lora | None:
        return None if self.lora is None else parse_lora(self.lora)
