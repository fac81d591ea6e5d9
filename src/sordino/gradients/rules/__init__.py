"""The rules, looked up by function: each runs one operation and says how its parameters' gradients are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sordino.gradients.rules import (
    attention,
    conv,
    conv_transpose,
    elementwise,
    embedding,
    embedding_bag,
    linear,
    normalisation,
    recurrent,
)

RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    **linear.RULES,
    **conv.RULES,
    **conv_transpose.RULES,
    **elementwise.RULES,
    **normalisation.RULES,
    **embedding.RULES,
    **embedding_bag.RULES,
    **attention.RULES,
    **recurrent.RULES,
}
