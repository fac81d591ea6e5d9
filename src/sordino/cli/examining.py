"""Probe a user's model: its layers, what is wrong with it, which engine differentiates it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sordino import validation
from sordino.errors import InvalidInput, UnsupportedModel
from sordino.gradients import Batch, BookKeeping, Objective, Vmapped, find_engine
from sordino.gradients.bookkeeping.book import Book
from sordino.gradients.bookkeeping.keeper import UseCost
from sordino.gradients.engine import Loss
from sordino.lab.importing import import_function
from sordino.validation import fixing

EXAMPLES, MEASURED = 4, 64


@dataclass(frozen=True)
class LayerSize:
    """A module with its own parameters; shared ones are counted where they first appear."""

    name: str
    kind: str
    parameters: int
    trainable: int


@dataclass(frozen=True)
class Examined:
    """Everything that `sordino check` reports."""

    layers: list[LayerSize]
    findings: list[validation.Finding]
    fixes: list[fixing.Change]
    engine: str | None
    uses: list[UseCost]
    measured: int


def examine(name: str, shape: str | None) -> Examined:
    """Build what `name` says and probe it; with a model alone, on random inputs of `shape`."""
    model, loss, data = _build(name, shape)
    leaves = [leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not leaves or len({len(leaf) for leaf in leaves}) != 1:
        raise InvalidInput(f"the batch of {name!r} must hold tensors with one row per example, all of one length")
    objective = Objective(model, loss)
    trained = [p for p in model.parameters() if p.requires_grad]

    def fetch(indices: Sequence[int]) -> Batch:
        return _select_rows(data, list(indices))

    findings = validation.check(objective, trained, fetch, len(leaves[0]))
    batch = fetch(range(min(MEASURED, len(leaves[0]))))
    engine = None if findings else _find_engine(objective, trained, batch)
    uses = _measure_uses(objective, trained, batch) if engine == "book-keeping" else []
    return Examined(_list_layers(model), findings, fixing.plan(model) if findings else [], engine, uses, batch.size)


def _build(name: str, shape: str | None) -> tuple[nn.Module, Loss, Any]:
    build = import_function(name)
    if needed := _list_needed(build):
        raise InvalidInput(f"{name!r} needs {', '.join(needed)}: name a function that is called without arguments")
    made = build()
    if isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module):
        return made
    if isinstance(made, nn.Module):
        return (
            made,
            _measure_output,
            torch.randn(EXAMPLES, *_find_shape(made, shape), generator=torch.Generator().manual_seed(0)),
        )
    raise InvalidInput(f"{name!r} returned {type(made).__name__}, must return a model or (model, loss, batch)")


def _list_needed(function: Callable[..., Any]) -> list[str]:
    """List the arguments that a function requires; empty if that cannot be told."""
    try:
        known = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in known if each.default is each.empty and each.kind not in free]


def _measure_output(model: nn.Module, inputs: Tensor) -> Tensor:
    """A loss for a model that has none. It depends on the whole output for an example."""
    output = model(inputs)
    if not isinstance(output, Tensor):
        raise UnsupportedModel(
            f"the model returns {type(output).__name__}, not a tensor: let the function return (model, loss, batch)"
        )
    return output.flatten(1).square().mean(1)


def _find_shape(model: nn.Module, shape: str | None) -> list[int]:
    if shape is not None:
        try:
            sizes = [int(part) for part in shape.split(",")]
        except ValueError:
            sizes = []
        if not sizes or min(sizes) < 1:
            raise InvalidInput(f"input={shape!r} must be sizes with commas between them, such as 1,28,28")
        return sizes
    first = next((m for m in model.modules() if any(True for _ in m.parameters(recurse=False))), None)
    if isinstance(first, nn.Linear):
        return [first.in_features]
    raise InvalidInput("the shape of an input is unknown: use --input 1,28,28, or return (model, loss, batch)")


def _select_rows(data: Any, indices: list[int]) -> Batch:
    def pick(rows: list[int]) -> Any:
        return tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf, data)

    return Batch(pick(indices), len(indices), lambda i: pick([indices[i]]))


def _find_engine(objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> str:
    """Find the engine that is chosen automatically; the log says why faster ones were not."""
    if isinstance(find_engine("auto").differentiate(objective, parameters, batch), Book):
        return "book-keeping"
    try:
        Vmapped().differentiate(objective, parameters, batch)
    except (RuntimeError, NotImplementedError, TypeError, UnsupportedModel):
        return "loop"
    return "vmap"


def _measure_uses(objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> list[UseCost]:
    """Measure the cost of each use of a parameter, on the second run, because the first run has to choose methods."""
    engine = BookKeeping()
    engine.describe(objective, parameters, batch)
    return engine.describe(objective, parameters, batch)


def _list_layers(model: nn.Module) -> list[LayerSize]:
    seen: set[int] = set()
    layers = []
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(id(p) for p in own)
        if own:
            trainable = sum(p.numel() for p in own if p.requires_grad)
            layers.append(LayerSize(name or "model", type(module).__name__, sum(p.numel() for p in own), trainable))
    return layers
