"""The backward function of an autograd.Function, run for each example on what it saved of that example.

Its node in the graph holds what ``forward`` saved and the function that goes back. Rows of what was saved belong to the
examples of the output gradient's rows, perhaps; parameters and buffers belong to all. That this is right is not
believed but checked, on every batch: for weights r of the examples, the function on all examples at once, with output
gradients r_i g_i, must give the sum of r_i times what it gave for each example alone. With weights drawn at random,
and with a random half of them zero, an example that another one has part in shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sordino.gradients.rules.base import Examples, Formed, Kind, PerExample, precise, squares, zero_rows
from sordino.gradients.rules.generic import FormedInBlocks
from sordino.gradients.rules.linear import FORM_BYTES

CLOSE = 1e-4
"""What rounding may change, relative to the largest entry."""


class Saved:
    """Stands for the context of a backward function: what was saved, or one example's part of it."""

    def __init__(self, node: Any, saved: tuple[Tensor, ...], attributes: dict[str, Any]) -> None:
        self.saved_tensors, self.needs_input_grad = saved, node.needs_input_grad
        vars(self).update(attributes)


@dataclass(frozen=True)
class BackwardOnly:
    """A function of which only the way back is known; `places` has the place of each parameter among its inputs."""

    node: Any
    places: dict[int, int]
    is_shared: Callable[[Tensor], bool]

    @staticmethod
    def of(
        output: Tensor, roots: list[Tensor], is_shared: Callable[[Tensor], bool], is_known: Callable[[Any], bool]
    ) -> BackwardOnly | None:
        """The function that made this output alone, directly from these parameters and from tensors that were seen."""
        node: Any = output.grad_fn
        by_hand = isinstance(node, torch.autograd.function.BackwardCFunction)
        if not by_hand or len(node._input_metadata) != 1:
            return None
        wanted = [place for place, needed in enumerate(node.needs_input_grad) if needed]
        before = [each for each, _ in node.next_functions if each is not None]
        leaves = [getattr(each, "variable", None) for each in before]
        places = {id(leaf): place for leaf, place in zip(leaves, wanted, strict=False) if leaf is not None}
        seen = all(leaf is not None or is_known(each) for leaf, each in zip(leaves, before, strict=True))
        once = len(places) == sum(leaf is not None for leaf in leaves)
        if len(before) != len(wanted) or not seen or not once or not all(id(root) in places for root in roots):
            return None
        return BackwardOnly(node, places, is_shared)

    def settle(self, parameter: Tensor, g: Tensor, at: Examples) -> PerExample | None:
        """The parameter's gradients; None where the function does not treat examples alone, or vmap cannot run it."""
        if at.layout.kind not in (Kind.DIMENSION, Kind.MAJOR) or at.layout.dim:
            return None
        leaves, spec = tree_flatten((tuple(self.node.saved_tensors), dict(vars(self.node))))
        tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim()]
        rows = [i for i, leaf in tensors if len(leaf) == len(g) and not self.is_shared(leaf)]
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        versions = [leaf._version for _, leaf in tensors]
        run = Rerun(self.node, self.places[id(parameter)], parameter.shape, leaves, spec, rows)
        try:
            found = check_alone(run, g, at)
        except Exception:  # noqa: BLE001 – it is the user's function, given something else than it expects
            return None
        return found if versions == [leaf._version for _, leaf in tensors] else None


@dataclass(frozen=True, repr=False)  # vmap asks for it, and there is much in it
class Rerun:
    """The backward function's gradient of the parameter at `place` among its inputs.

    `leaves` is all that was saved, flattened; those at `rows` have rows that belong to examples.
    """

    node: Any
    place: int
    shape: torch.Size
    leaves: list[Any]
    spec: TreeSpec
    rows: list[int]

    def __call__(self, g: Tensor, *rows: Tensor) -> Tensor:
        """For this output gradient, with these rows of what was saved."""
        leaves = list(self.leaves)
        for i, each in zip(self.rows, rows, strict=True):
            leaves[i] = each
        function = self.node._forward_cls
        backward = function.backward if function.vjp is torch.autograd.Function.vjp else function.vjp
        with torch.no_grad():
            results = backward(Saved(self.node, *tree_unflatten(leaves, self.spec)), g)
        result = (results if isinstance(results, tuple) else (results,))[self.place]
        return g.new_zeros(self.shape) if result is None else result.reshape(self.shape)


class Alone(FormedInBlocks):
    """Gradients by a backward function on each example alone, for a block of examples at a time by vmap.

    `lengths` are squared norms and `total` is the plain sum, both found while the function was checked.
    """

    manner = "its backward by vmap"

    def __init__(self, run: Rerun, given: list[Tensor]) -> None:
        self.run, self.given, self.size, self.shape = run, given, len(given[0]), run.shape
        self.lengths: Tensor | None = None
        self.total: Tensor | None = None

    def form(self, start: int, stop: int) -> Tensor:
        copies = [each[start:stop].clone() for each in self.given]  # the function may change what it is given
        formed: Tensor = torch.func.vmap(self.run)(*copies)
        return precise(formed)

    def squared_norms(self) -> Tensor:
        return self.measure_formed() if self.lengths is None else self.lengths

    def without(self, bad: Tensor) -> Alone:
        return Alone(self.run, [zero_rows(each, bad) for each in self.given])


def check_alone(run: Rerun, g: Tensor, at: Examples) -> PerExample | None:
    """The gradients of each example alone; None if those of all at once are not their sum, whatever their weights."""
    saved = [run.leaves[i] for i in run.rows]
    kept = Alone(run, [at.items(each) for each in (g, *saved)])
    finite = torch.stack([torch.isfinite(each.reshape(kept.size, -1)).all(1) for each in kept.given]).all(0)
    weights = draw_weights(torch.linalg.vector_norm(precise(kept.given[0]).reshape(kept.size, -1), dim=1), finite)
    sums, blocks = weights.new_zeros(len(weights), kept.shape.numel()), []
    small = 4 * kept.size * kept.shape.numel() <= FORM_BYTES
    for start, stop in [(0, kept.size)] if small else kept.blocks():
        formed = kept.form(start, stop).reshape(stop - start, -1)
        safe = formed if bool(finite[start:stop].all()) else zero_rows(formed, ~finite[start:stop])
        sums.addmm_(weights[:, start:stop], safe.to(weights.dtype))
        blocks.append(formed if small else squares(formed))
    for drawn, apart in zip(weights[1:], sums[1:], strict=True):
        # Not by a product: a bad example's rows are zero, so that no infinity of theirs is in the others.
        whole = [each.masked_fill(~finite[at.owners(each)], 0) for each in (g, *saved)]
        together = precise(run(whole[0] * drawn.to(g.dtype)[at.owners(g)], *whole[1:])).flatten()
        if not torch.allclose(together, apart.to(together), rtol=CLOSE, atol=CLOSE * float(together.abs().max())):
            return None
    if small:
        return Formed(blocks[0].reshape(kept.size, *kept.shape))
    kept.lengths, kept.total = torch.cat(blocks), sums[0].reshape(kept.shape)
    return kept


def draw_weights(lengths: Tensor, finite: Tensor) -> Tensor:
    """Ones, and two rows that make examples about equally long: at random, and with about half of them zero.

    Examples that are not finite have none.
    """
    chance = torch.Generator().manual_seed(len(lengths))
    sizes = torch.rand(2, len(lengths), generator=chance) + 0.5
    signs = torch.randint(2, sizes.shape, generator=chance) * 2 - 1
    signs[1] *= torch.randint(2, lengths.shape, generator=chance)
    drawn = (sizes * signs).to(lengths) / torch.where(finite & (lengths > 0), lengths, torch.inf)
    return torch.cat([finite.to(lengths).unsqueeze(0), drawn])
