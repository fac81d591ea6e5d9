"""The rules, looked up by function: each runs one operation and says how its parameters' gradients are kept."""

from __future__ import annotations

from sordino.gradients.rules import (
    attention,
    conv,
    elementwise,
    embedding,
    grouped,
    indexing,
    linear,
    normalisation,
    products,
    recurrent,
)
from sordino.gradients.rules.base import Rules

RULES: Rules = {
    **linear.RULES,
    **grouped.RULES,
    **products.RULES,
    **conv.RULES,
    **elementwise.RULES,
    **normalisation.RULES,
    **embedding.RULES,
    **indexing.RULES,
    **attention.RULES,
    **recurrent.RULES,
}
