"""The random numbers that a loss draws: noted, repeated, and on demand the same for every example of a batch.

Only what torch's default generator gives is repeated and shared: a step seeds it with a secret. What a loss draws from
a generator that it seeded or holds itself stays as it is. If it differs from place to place in a batch, the probe sees
an example change when it moves, and refuses.

Two runs can only be compared if an example has the same coins in both. Equal seeds do this as long as batches have
equal shapes. In a smaller batch, or if a router sends an example to another place of a smaller part, the numbers of
torch's generators move from one example to another. *Shared* coins do not move: they depend only on the last dimension
of what is drawn, so all examples have the same coins, whatever the size of the batch.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sordino.gradients.engine import HALVES

FIRST_SEED = 2_718_281_828
"""The probe uses the seeds from this one on, because nobody seeds a loss with them."""

WIDTH = 1024
"""How many different shared coins there are; wider rows repeat them."""

MASKS = ("bernoulli_", "native_dropout")
"""The operations with which torch draws dropout's masks."""

COARSE = 64
"""A mask has at least this many coins for an example: fewer may decide about the example as a whole."""

DECISIVE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Operations that hand a value to Python, or to the shape of a result."""


class Randomness(TorchDispatchMode):
    """Notes what is drawn inside it; if `shared`, replaces it by coins that are the same for all rows.

    `drawn` lists torch's operations with the shapes of their results, `unshared` those without a rule. `known` says
    whether the loss drew from its own torch.Generator or after it seeded torch itself, `reseeds` whether it left torch
    seeded, and `replays` whether it drew the same numbers twice by putting torch back. Python's and NumPy's generators
    are seeded too; `outside` is their state at the end.
    It sees every operation. It also says whether any was `halved` (had a result in half precision), how many `entries`
    the operations made, and whether coins were `decisive` (may have chosen what was computed).
    """

    def __init__(self, seed: int, shared: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for modes
        self.seed, self.shared = seed, shared
        self.drawn: list[tuple[str, tuple[int, ...]]] = []
        self.unshared: set[str] = set()
        self.known = self.reseeds = self.replays = self.halved = self.repeated = False
        self._starts: set[bytes] = set()
        self.entries = 0
        self.decisive = False
        self._touched: set[int] = set()
        self._row = torch.rand(WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self._start = self.outside = _read_generators()
        self._begun = torch.default_generator.get_state()

    def __enter__(self) -> Randomness:
        self._start = self.outside = _read_generators()
        self._begun = torch.default_generator.get_state()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.outside = _read_generators()
        self.reseeds |= self._is_reseeded()
        drawn = bool(self.drawn) and not self.reseeds
        self.repeated |= drawn and torch.equal(torch.default_generator.get_state(), self._begun)

    @property
    def used(self) -> bool:
        """Whether any random number was drawn."""
        return bool(self.drawn) or self.outside_used

    @property
    def common(self) -> bool:
        """Whether all examples share a coin: a single number, or one from Python or NumPy, as LayerDrop draws it.

        The same holds if all passes share their coins, as within ``torch.random.fork_rng``.
        """
        single = any(math.prod(shape) == 1 for _, shape in self.drawn)
        return single or self.outside_used or self.repeated

    @property
    def outside_used(self) -> bool:
        """Whether Python's or NumPy's generator was used."""
        return self.outside != self._start

    def is_fixed(self, other: Randomness) -> bool:
        """Whether Python or NumPy end in the same state after a run from `other` seeds: then the loss seeded them."""
        mine, theirs = ((run.outside[:1], run.outside[1:]) for run in (self, other))
        return any(one == another for one, another in zip(mine, theirs, strict=True))

    @property
    def masks(self) -> bool:
        """Whether all randomness is in masks like dropout's, which drop single entries and choose nothing.

        Whatever the coins, such a loss does the same operations on the same examples. If masks touched an operation
        that compares, sorts, counts or hands a value to Python, they may choose, and the answer is no.
        """
        fine = all(name in MASKS and math.prod(shape[1:]) >= COARSE for name, shape in self.drawn)
        return bool(self.drawn) and fine and not (self.decisive or self.known or self.outside_used)

    def equals(self, other: Randomness) -> bool:
        """Whether two runs from one seed drew the same numbers in the same order."""
        return self.drawn == other.drawn and self.outside == other.outside

    def comparable(self, other: Randomness) -> bool:
        """Whether, with shared coins, an example had the same coins in both runs."""
        return not self.unshared and not other.unshared and self.outside == other.outside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            result = func(*args, **kwargs)
            made = result[0] if isinstance(result, tuple | list) and result else result
            if isinstance(made, Tensor):
                self.halved |= made.dtype in HALVES
                self.entries += made.numel()
            if not self.decisive:
                self._follow(func, (args, kwargs), result)
            return result
        if kwargs.get("generator") not in (None, torch.default_generator) or self._is_reseeded():
            self.known = True
            return func(*args, **kwargs)
        start = b"" if self.shared else _read_state()
        if self.shared:
            torch.default_generator.manual_seed(self.seed)  # coins that cannot be shared at least start over
        result = func(*args, **kwargs)
        if start and _read_state() != start:  # it took some numbers
            self.replays |= start in self._starts
            self._starts.add(start)
        name = func.overloadpacket.__name__
        first = result if isinstance(result, Tensor) else result[0]
        self.drawn.append((name, tuple(first.shape)))
        self._follow(func, first, first)
        self.decisive |= sum(isinstance(x, Tensor) for x in args) > 1  # probabilities that were computed
        if self.shared and name != "randperm":  # equal coins would make no permutation
            self._share(name, _name_arguments(func, args, kwargs), result)
        return result

    def _follow(self, func: Any, given: Any, result: Any) -> None:
        """Note which memory depends on coins, from the draw on, and whether its values may choose something."""
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        try:
            touched = drawn or any(
                x.untyped_storage()._cdata in self._touched for x in tree_leaves(given) if isinstance(x, Tensor)
            )
            for x in made:  # reused memory no longer depends on what it held before
                change = self._touched.add if touched else self._touched.discard
                change(x.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # it has no memory of the usual kind
            self.decisive = True
            return
        chooses = any(tag in func.tags for tag in DECISIVE) or any(not x.is_floating_point() for x in made)
        self.decisive |= touched and not drawn and (chooses or not made)

    def _is_reseeded(self) -> bool:
        """Whether somebody else seeded torch since."""
        return torch.default_generator.initial_seed() != self.seed

    def _share(self, name: str, given: dict[str, Any], result: Any) -> None:
        if name == "native_dropout":
            out, mask = result
            mask.copy_(self._uniform(mask) >= given["p"])
            out.copy_(given["input"] * mask / max(1 - given["p"], torch.finfo(torch.float32).tiny))
            return
        values = self._values(name, given, result) if isinstance(result, Tensor) else None
        if values is None:
            self.unshared.add(name)
        else:
            result.copy_(values)

    def _values(self, name: str, given: dict[str, Any], result: Tensor) -> Any:
        """Return what an operation draws with shared coins; nothing if it has no rule."""
        uniform = self._uniform(result)
        match name.removesuffix("_").removesuffix("_like"):
            case "rand":
                return uniform
            case "uniform":
                return given["from"] + (given["to"] - given["from"]) * uniform
            case "randn":
                return torch.special.ndtri(uniform)
            case "normal" | "normal_functional":
                return given.get("mean", 0.0) + given.get("std", 1.0) * torch.special.ndtri(uniform)
            case "bernoulli":
                return uniform < given.get("p", given["self"])
            case "exponential":
                return -uniform.log() / given["lambd"]
            case "randint":
                low = given.get("low", 0)
                return (low + (given["high"] - low) * uniform).floor()
        return None

    def _uniform(self, like: Tensor) -> Tensor:
        """Draw one row for all, as wide as the last dimension; a vector has one number per row, so one for all."""
        width = like.shape[-1] if like.dim() > 1 else 1
        row = self._row.repeat(-(-width // WIDTH))[:width].clamp(1e-6, 1 - 1e-6)
        return (row if like.dim() else row[0]).to(like.device).expand(like.shape)


def _name_arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments of an operation as its schema does."""
    wanted = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in wanted if argument.has_default_value()}
    return {**defaults, **{argument.name: value for argument, value in zip(wanted, args, strict=False)}, **kwargs}


def _read_state() -> bytes:
    """Read the state of torch's generator."""
    return torch.default_generator.get_state().numpy().tobytes()


def _read_generators() -> tuple[Any, ...]:
    """Read the states of Python's and NumPy's generators."""
    state: Any = np.random.get_state()  # noqa: NPY002 - users draw from it
    return hash(random.getstate()), state[1].tobytes(), *state[2:]
