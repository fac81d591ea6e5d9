"""Functions that no mode sees, such as an autograd.Function: their graph says what they made of parameters.

Their results come to the next operation with a way back to a parameter that was not recorded. Made from parameters
alone (a rounded weight), a result is a tensor like any that is derived from parameters. Otherwise it is a use of them,
by one operation that can only be run backwards. Where its backward function provably treats each example alone, that
function is run by vmap on what it saved of each example (`written`); otherwise it is run once for each example, on the
output gradient of that example alone. Nothing else of the model is run more than once. A recording looks for them only
after a first backward pass has left gradients on parameters, so that other models do not pay for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.bookkeeping.written import Alone, BackwardOnly
from sordino.gradients.rules.base import Examples, Formed, NoRule, ParameterShare, PerExample, Unproven, precise
from sordino.gradients.rules.linear import FORM_BYTES

UNSEEN = "autograd.Function"

WHOLE_BYTES = 4 * FORM_BYTES
"""Gradients that can only be formed while the backward pass stands before their function may take so much together."""


class Bypassed(NoRule):
    """A gradient reached a parameter past the recording."""


class Sightings:
    """Knows the nodes of the graph that were made by operations which the recording saw."""

    def __init__(self) -> None:
        self.nodes: set[Any] = set()

    def note(self, results: Iterable[Tensor]) -> None:
        """These are the results of an operation that was seen."""
        self.nodes.update(result.grad_fn for result in results if result.grad_fn is not None)

    def find(self, tensor: Tensor, tracks: Callable[[object], bool]) -> tuple[list[Tensor], bool]:
        """The tracked tensors that a tensor was made from unseen, and whether it was made from activations, too.

        Only by functions written in Python: vmap runs what torch.jit has compiled.
        """
        roots: dict[int, Tensor] = {}
        activations, written, seen = False, False, set[Any]()
        ahead = [tensor.grad_fn] if tensor.grad_fn not in self.nodes else []
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            written |= node not in self.nodes and isinstance(node, torch.autograd.function.BackwardCFunction)
            leaf: Tensor | None = getattr(node, "variable", None)
            if leaf is not None and tracks(leaf):
                roots[id(leaf)] = leaf
            elif leaf is not None or node in self.nodes:
                activations = True
            else:
                ahead += [each for each, _ in node.next_functions]
        self.note([tensor])
        return (list(roots.values()) if written else []), activations


def share_unseen(
    output: Tensor,
    roots: list[Tensor],
    quietly: Callable[[], AbstractContextManager[None]],
    is_shared: Callable[[Tensor], bool],
    is_known: Callable[[Any], bool],
) -> list[ParameterShare]:
    """The shares of the parameters that a function was given beside activations.

    They are settled while the backward pass stands before this function, whose graph is not there any more afterwards,
    and `quietly`: these gradients are not those of the losses.
    """
    backward = BackwardOnly.of(output, roots, is_shared, is_known)

    def share(parameter: Tensor) -> ParameterShare:
        def settle(g: Tensor, at: Examples) -> PerExample:
            with quietly():
                kept = None if backward is None else backward.settle(parameter, g, at)
                return pull_each(output, parameter, g, at) if kept is None else kept

        return ParameterShare(parameter, settle)

    return [share(parameter) for parameter in roots]


def pull_each(output: Tensor, parameter: Tensor, g: Tensor, at: Examples) -> Formed:
    """gradient_i by running backwards from the output to the parameter with the gradients of example i alone."""
    if 4 * at.size * parameter.numel() > WHOLE_BYTES:
        raise NoRule(f"{UNSEEN}: the gradients of a large parameter would have to be formed")
    owners, numbers = at.owners(g), torch.arange(at.size, device=g.device)
    formed = precise(torch.stack([pull(output, parameter, g.where(owners == number, 0)) for number in numbers]))
    if not bool(torch.isfinite(formed).all()):  # a bad example's infinity, times zero, is in all the others
        raise Unproven(f"{UNSEEN}: something that is not finite reaches every example")
    return Formed(formed)


def pull(output: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
    """One vector-Jacobian product."""
    (pulled,) = torch.autograd.grad(output, parameter, gradient, retain_graph=True, allow_unused=True)
    return torch.zeros_like(parameter) if pulled is None else pulled


def sum_all(kept: PerExample, ones: Tensor) -> Tensor:
    """What autograd should have found of these gradients."""
    if isinstance(kept, Alone) and kept.total is not None:
        return kept.total
    return kept.weighted_sum(ones)


def compare_sums(bypassed: dict[int, Tensor], found: Mapping[int, Tensor]) -> None:
    """Refuse unless what autograd found for all examples together is the sum of what it found for each."""
    for key, whole in bypassed.items():
        if not bool(torch.isfinite(whole).all()):
            raise Unproven(f"{UNSEEN}: something that is not finite hides whether all ways to a parameter are known")
        total = found[key].to(whole.dtype).expand_as(whole)
        if not torch.allclose(total, whole, rtol=1e-2, atol=1e-3 * float(whole.abs().max())):
            raise NoRule("autograd.Function: not all ways to a parameter are known")
