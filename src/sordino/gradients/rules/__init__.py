"""The rules, looked up by function: each runs one operation and says how its parameters' gradients are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sordino.gradients.rules import conv, elementwise, embedding, linear, norms

RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    **linear.RULES,
    **conv.RULES,
    **elementwise.RULES,
    **norms.RULES,
    **embedding.RULES,
}
