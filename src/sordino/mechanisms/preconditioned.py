"""Preconditioning for free: gradients are clipped and noised in a geometry found without any record (DP-KFC).

Noise is equally strong in every direction, but gradients are not: a few directions of a layer's inputs and output
gradients carry most of their length, and decide what is clipped. With G and A the second moments of a layer's output
gradients and inputs,

    g̃_i = (G + γ)^(−1/2) · g_i · (A + γ)^(−1/2),      Σ_i g̃_i · min(1, C / ‖g̃‖) + noise

clips and noises gradients that are about equally long in every direction. The moments come from synthetic records that
are sent through the current model: pink noise for images, Zipf's law for tokens, white noise for anything else, all
with random labels (Molina Van den Bosch et al., ICML 2026). No record is looked at, so the price is that of DP-SGD
(docs/proofs/preconditioned.md).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from sordino.accounting.guarantee import CONDITION
from sordino.combinations import Needs
from sordino.errors import InvalidInput, UnsupportedModel
from sordino.gradients import BookKeeping
from sordino.gradients.engine import Batch
from sordino.gradients.moments import Moments
from sordino.gradients.rules.base import NoRule, name_of
from sordino.gradients.stretch import Stretches
from sordino.mechanisms import Mechanism
from sordino.noise import Independent
from sordino.parts import Always, Foreign, Poisson, Stretching, evaluating
from sordino.recipe import Common, Optimizer, Recipe

if TYPE_CHECKING:
    from sordino.step import Bench

_log = logging.getLogger("sordino")

ONE_SHAPE = "every record is collated to the shape of the first, but for texts of tokens"
"""What must hold if a user's own collate function makes batches, because synthetic records have that shape."""
CHUNK = 32
"""How many synthetic records go through the model together."""
INPUTS = ("auto", "pink", "white")
MOVES = frozenset(
    (
        *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "view_as", "contiguous"),
        *("transpose", "t", "permute", "movedim", "swapaxes", "roll", "flip"),
        *("__getitem__", "split", "chunk", "unbind", "narrow", "select", "index_select"),
        *("to", "long", "int", "type", "cpu", "cuda", "detach", "clone"),
    )
)
"""Operations that leave integers as they are, wherever they put them."""
_UNPROVEN = "{{slot}}={{part!r}} has no proof with stretched gradients: use {}"
TABLES, CLASSES = frozenset({"embedding", "embedding_bag", "one_hot"}), frozenset({"cross_entropy", "nll_loss"})


# -- synthetic records -------------------------------------------------------------------------------------------------


def make_pink(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Make images [..., height, width] whose power falls as 1/f², as in natural ones; each of mean 0 and variance 1."""
    rows, columns = torch.fft.fftfreq(shape[-2]), torch.fft.rfftfreq(shape[-1])
    frequency = (rows.square().unsqueeze(1) + columns.square()).sqrt()
    frequency[0, 0] = 1 / max(shape[-2:])
    white = torch.fft.rfft2(torch.randn(*shape, generator=generator))
    pink: Tensor = torch.fft.irfft2(white / frequency, s=tuple(shape[-2:]))
    return pink / pink.square().mean((-2, -1), keepdim=True).sqrt().clamp_min(1e-12)


def make_tokens(shape: Sequence[int], vocabulary: int, generator: torch.Generator) -> Tensor:
    """Make tokens by Zipf's law: the r-th is drawn in proportion to 1/r."""
    chances = torch.arange(1, vocabulary + 1, dtype=torch.float64).reciprocal()
    return torch.multinomial(chances, math.prod(shape), replacement=True, generator=generator).reshape(*shape)


@dataclass(frozen=True)
class _Leaf:
    """One tensor of a batch: its shape for `CHUNK` examples and its dtype, which are public, and none of its content.

    `within` bounds integers from above, if a table or a loss over classes was seen to take them; `classes` says that
    only such a loss took them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    within: int | None = None
    classes: bool = False

    def make(self, inputs: str, held: bool, generator: torch.Generator) -> Tensor:
        """Make values. Integers of unknown meaning are 1: valid as mask, length or class; `held` is a mask's."""
        if self.dtype == torch.bool:
            return torch.full(self.shape, held)
        if self.dtype.is_floating_point:
            pink = inputs == "pink" or (inputs == "auto" and len(self.shape) == 4)
            make = make_pink if pink and len(self.shape) > 2 else _make_white
            return make(self.shape, generator).to(self.dtype)
        if self.dtype == torch.uint8 and len(self.shape) > 2:  # an image that nobody has scaled yet
            return (128 + 64 * make_pink(self.shape, generator)).clamp(0, 255).to(torch.uint8)
        if self.within is None:
            return torch.ones(self.shape, dtype=self.dtype)
        if self.classes:
            return torch.randint(0, self.within, self.shape, generator=generator).to(self.dtype)
        return make_tokens(self.shape, self.within, generator).to(self.dtype)


def _make_white(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator)


def describe_leaves(bench: Bench, length: int) -> tuple[list[_Leaf], Any]:
    """Describe shapes and dtypes of a batch from one record, collated once and twice; its values are not used.

    A user's own collate function may pad texts to the longest: then sequences have `length`. Its other sizes are those
    of the first record, and a guarantee says that all records must have them.
    """
    batches = (bench.records.gather([0] * count, torch.device("cpu")).data for count in (1, 2))
    plain = (dict(each) if isinstance(each, Mapping) else each for each in batches)
    (once, structure), (twice, _) = map(tree_flatten, plain)
    leaves = []
    for one, two in zip(once, twice, strict=True):
        if not isinstance(one, Tensor) or one.is_complex() or one.dim() != two.dim():
            raise InvalidInput(
                f"a batch holds a {type(one).__name__}: synthetic records are made of tensors that count examples; "
                "collate the others into tensors, or use recipes.dpsgd"
            )
        grown = [dim for dim in range(one.dim()) if two.shape[dim] == 2 * one.shape[dim] and one.shape[dim] == 1]
        if not grown:
            raise InvalidInput(
                f"a batch holds a tensor of {one.dim()} dimensions of which none counts examples: synthetic records "
                "cannot be made of it; leave it out of the records, or use recipes.dpsgd"
            )
        shape = list(one.shape)
        sequence = one.dim() == 3 or (one.dim() == 2 and not one.is_floating_point())
        if bench.records.collate is not None and sequence:
            shape = [length if dim == (1 if grown[0] == 0 else 0) else extent for dim, extent in enumerate(shape)]
        shape[grown[0]] = CHUNK
        leaves.append(_Leaf(tuple(shape), one.dtype))
        if bench.records.collate is not None and one.dim() > 1 + (sequence and one.dim() == 2):
            bench.ledger.declare(CONDITION, ONE_SHAPE)  # the first record decides this size
    return leaves, structure


class RangeWatch(TorchFunctionMode):
    """Watches what happens to the integers of a batch, to find the sizes of the tables and classes they choose from."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        super().__init__()
        self.origins: dict[int, tuple[Tensor, int]] = {
            id(leaf): (leaf, place) for place, leaf in enumerate(leaves) if not leaf.is_floating_point()
        }
        self.within: dict[int, int] = {}
        self.tables: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), name_of(func)
        if name in MOVES and args and isinstance(args[0], Tensor) and id(args[0]) in self.origins:
            place = self.origins[id(args[0])][1]
            for made in result if isinstance(result, tuple | list) else (result,):
                if isinstance(made, Tensor) and not made.is_floating_point():
                    self.origins[id(made)] = (made, place)
        elif name in TABLES | CLASSES:
            self._bound(name, [*args, *kwargs.values()], kwargs)
        return result

    def _bound(self, name: str, given: list[Any], named: dict[str, Any]) -> None:
        """Bound the first tensor of integers, which chooses; the first other one, or a number, says from how many."""
        tensors = [each for each in given if isinstance(each, Tensor)]
        chosen = next((each for each in tensors if id(each) in self.origins), None)
        if chosen is None:
            return
        others = [each for each in tensors if each.is_floating_point()]
        sizes = [len(each) if name in TABLES else each.shape[min(1, each.dim() - 1)] for each in others[:1]]
        if name == "one_hot":
            sizes = [each for each in given if isinstance(each, int) and each > 0][:1]
        place = self.origins[id(chosen)][1]
        for size in sizes:
            self.within[place] = min(size, self.within.get(place, size))
            if name in TABLES:
                self.tables.add(place)


# -- the part ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probed(Stretching):
    """Exact norms of gradients stretched by what `probes` synthetic records show about the model.

    `inputs` is "pink" or "white" noise, or "auto" for pink if records look like images. `damping` is γ over the mean
    eigenvalue of the moments: a larger value is closer to DP-SGD. The model is probed when training begins and, with
    `every`, again after that many steps. `balanced` evens out the entries of all parameters together, not only those
    within each parameter. `natural` stretches the released gradient once more, so that steps follow the natural
    gradient; the paper uses the released gradient as it is. `length` sets the length of synthetic texts if the user's
    own collate function pads. `seed` is for the synthetic records.

    Guarantees: synthetic records depend on no record, only on shapes and dtypes; the map is public, and the price is
    that of a Gaussian. Edge cases: parameters that nothing was found about are not stretched, and no parameter is if
    the model cannot be book-kept; a resumed run probes the model as it then is.
    """

    inputs: str = "auto"
    probes: int = 256
    damping: float = 0.1
    every: int | None = None
    natural: bool = False
    balanced: bool = True
    length: int = 64
    seed: int = 0
    needs: ClassVar[tuple[Needs, ...]] = (
        Needs("sampler", _UNPROVEN.format("Poisson draws"), (Poisson, Foreign)),
        Needs("noise", _UNPROVEN.format("Independent()"), (Independent,)),
        Needs("selection", _UNPROVEN.format("Always()"), (Always,)),
    )

    def __post_init__(self) -> None:
        if self.inputs not in INPUTS:
            raise InvalidInput(f"inputs={self.inputs!r} must be one of {', '.join(INPUTS)}")
        for name in ("probes", "length"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name}={getattr(self, name)} must be >= 1")
        if not (self.damping > 0 and math.isfinite(self.damping)):
            raise InvalidInput(f"damping={self.damping} must be > 0 and finite: 0.1 is the usual value")
        if self.every is not None and self.every < 1:
            raise InvalidInput(f"every={self.every} must be >= 1, or None to probe the model once")

    def is_due(self, step: int) -> bool:
        return self.every is not None and step > 0 and step % self.every == 0

    def probe(self, bench: Bench, step: int) -> Stretches:
        """Send synthetic records through the model as it is now, and find the maps of its parameters."""
        parameters = bench.parameters()
        moments = Moments(parameters)
        with evaluating(bench.objective), torch.random.fork_rng():
            synthetic = Synthetic(bench, self, step)
            engine = BookKeeping()
            for _ in range(math.ceil(self.probes / CHUNK)):
                batch = synthetic.make()
                try:
                    engine.watch(bench.objective, parameters, batch, moments)
                except NoRule as reason:
                    _log.warning("this model cannot be probed (%s): its gradients are not stretched", reason)
                    return Stretches(parameters, [None] * len(parameters))
        return Stretches(parameters, moments.find_stretches(self.damping, self.balanced))


class Synthetic:
    """Makes batches of synthetic records that look like those of a bench to its loss."""

    def __init__(self, bench: Bench, settings: Probed, step: int) -> None:
        self.objective, self.device, self.inputs = bench.objective, bench.device, settings.inputs
        self.leaves, self.structure = describe_leaves(bench, settings.length)
        self.generator = torch.Generator().manual_seed(1_000_003 * settings.seed + step)
        self.held = True
        self._survey()

    def make(self) -> Batch:
        """Make the next batch."""
        made = [leaf.make(self.inputs, self.held, self.generator).to(self.device) for leaf in self.leaves]
        data = tree_unflatten(made, self.structure)
        return Batch(data, CHUNK, _refuse_single, by_rows=False)

    def _survey(self) -> None:
        """Run the loss once to find the ranges of integers, and which mask value lets something through."""
        for held in (True, False):
            self.held = held
            made = [leaf.make(self.inputs, held, self.generator).to(self.device) for leaf in self.leaves]
            survey = RangeWatch(made)
            if bool(torch.isfinite(self._try(made, survey)).all()):
                break
        else:
            raise UnsupportedModel(
                "the loss of synthetic records is not finite: the model cannot be probed; use recipes.dpsgd"
            )
        self.leaves = [
            leaf
            if place not in survey.within
            else _Leaf(leaf.shape, leaf.dtype, survey.within[place], place not in survey.tables)
            for place, leaf in enumerate(self.leaves)
        ]

    def _try(self, made: list[Tensor], survey: RangeWatch) -> Tensor:
        try:
            with torch.no_grad(), survey:
                return self.objective.losses(tree_unflatten(made, self.structure), CHUNK)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
            raise UnsupportedModel(
                f"the loss cannot run on synthetic records ({type(error).__name__}): give inputs, or a length that the "
                "model accepts; or use recipes.dpsgd"
            ) from error


def _refuse_single(place: int) -> Any:
    raise UnsupportedModel("synthetic records are made by the batch")


def preconditioned(
    *,
    inputs: str = "auto",
    probes: int = 256,
    damping: float = 0.1,
    every: int | None = None,
    natural: bool = False,
    balanced: bool = True,
    length: int = 64,
    clip: float = 1.0,
    lr: float = 0.5,
    momentum: float = 0.0,
    **common: Unpack[Common],
) -> Recipe:
    """DP-SGD in a geometry found from synthetic records, at the price of DP-SGD (DP-KFC).

    `inputs`, `probes`, `damping`, `every`, `natural`, `balanced` and `length` are those of `Probed`.

    >>> from sordino import recipes
    >>> recipes.preconditioned(batch_size=64, epochs=1).norms.damping
    0.1
    """
    norms = Probed(inputs, probes, damping, every, natural, balanced, length)
    return Recipe(name="preconditioned", clip=clip, norms=norms, optimizer=Optimizer("sgd", lr, momentum), **common)


MECHANISMS = (
    Mechanism(
        "preconditioned",
        title="DP-KFC",
        summary="gradients are clipped and noised in a geometry found from synthetic records",
        paper="Molina Van den Bosch et al., DP-KFC: Data-Free Preconditioning for Privacy-Preserving Deep Learning, "
        "ICML 2026",
        recipe=preconditioned,
        parts={"Norms": {"probed": Probed}},
        example={"probes": 32},
    ),
)
