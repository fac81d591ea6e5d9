"""Clipping block by block: each layer of an example's gradient has its own bound, fixed or adaptive.

If the layers of a gradient have very different lengths, flat clipping is decided by the longest layer, and the others
shrink with it. With bounds C_1, …, C_K for K blocks of parameters, each block is clipped separately,

    g_k ← g_k · min(1, C_k / ‖g_k‖),        Σ_k C_k² = C²,

so the whole contribution is no longer than C, and the price is that of flat clipping (McMahan et al. 2018; He et al.
2023). The adaptive variant lets every C_k follow a quantile of its block's norms (Andrew et al. 2021): each drawn
example votes +1/2 in the blocks that are within their bounds and −1/2 in the others. The sums of votes are released
with noise of deviation σ_b, about the same draw as the gradient: both are one Gaussian of the recipe's multiplier z,
which leaves

    z_Δ = (z⁻² − (K/4)/σ_b²)^(−1/2)        for the gradient (one example moves the votes by √K/2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
from torch import Tensor

from sordino.combinations import Needs
from sordino.errors import InvalidInput
from sordino.mechanisms import Mechanism
from sordino.noise import Independent, add_noise
from sordino.parts import (
    ROUNDING,
    Always,
    Blockwise,
    Constant,
    Draw,
    Exact,
    Poisson,
    State,
    Stretching,
    Terms,
    factor_at,
)
from sordino.recipe import Common, Optimizer, Recipe

if TYPE_CHECKING:
    from sordino.step import Attempt

WAYS = ("parameter", "layer", "block")
VOTE = 0.5
LEAST_NOISE = 4.0
"""Noise on the votes over their sensitivity, in noise multipliers: the gradient then needs 3 % more noise."""
REACH = 1e3
"""How far a bound may move from its start, up or down."""


def sort_names(names: Sequence[str], by: str) -> list[int]:
    """Sort parameters into blocks: each by itself, by the module that owns it, or by its numbered block.

    >>> sort_names(["0.weight", "0.bias", "2.weight"], "layer")
    [0, 0, 1]
    >>> sort_names(["wte.weight", "h.0.attn.weight", "h.0.mlp.weight", "h.1.attn.weight"], "block")
    [0, 1, 1, 2]
    """
    places: dict[str, int] = {}
    return [places.setdefault(_find_owner(name, by), len(places)) for name in names]


def _find_owner(name: str, by: str) -> str:
    parts = name.split(".")
    if by == "parameter" or len(parts) == 1:
        return name
    if by == "layer":
        return ".".join(parts[:-1])
    numbered = next((place for place, part in enumerate(parts[:-1]) if part.isdigit()), 0)
    return ".".join(parts[: numbered + 1])


@dataclass(frozen=True)
class PerBlock(Blockwise):
    """Clip each block of parameters to its own bound; all bounds are equal, and together they are C.

    `by` is "layer", the module that owns a parameter; "parameter", each one separately; or "block", the first numbered
    part of its name, such as a transformer's layers, or its topmost module if there is none.

    Guarantees: contributions no longer than C. Edge cases: an example that is not finite anywhere has weight 0 in all
    blocks; a block without gradient has weight 1.
    """

    by: str = "layer"
    needs: ClassVar[tuple[Needs, ...]] = (
        Needs(
            "norms",
            "norms={part!r} are of whole gradients: clipping by blocks needs Exact()",
            (Exact, Stretching),
            subclasses=True,
        ),
    )

    def __post_init__(self) -> None:
        if self.by not in WAYS:
            raise InvalidInput(f"by={self.by!r} must be one of {', '.join(WAYS)}")

    def find_blocks(self, names: Sequence[str], state: Any) -> list[int]:
        return sort_names(names, self.by)

    def weigh(self, norms: Tensor, clip: float, draw: Draw, state: Any) -> Tensor:
        bounds = norms.new_full((len(norms), 1), clip / math.sqrt(len(norms)))
        return clip_blocks(norms, bounds)


def clip_blocks(norms: Tensor, bounds: Tensor) -> Tensor:
    """Return min(1, bound / norm) for every block of every example; 0 in all blocks of one that is not finite."""
    weights = (bounds * (1 - ROUNDING) / norms).clamp(max=1.0)
    return torch.where(torch.isfinite(norms).all(0), weights, torch.zeros_like(weights))


@dataclass(frozen=True)
class Bounds:
    """The current bounds, over the recipe's clipping bound: only released values, and so public."""

    shares: tuple[float, ...]

    @property
    def length(self) -> float:
        """The bound on the whole gradient."""
        return math.hypot(*self.shares)


@dataclass
class Followed(State):
    """The released bounds, and the votes of the current draw, which are private."""

    bounds: Bounds | None = field(default=None, metadata={"public": Bounds})
    votes: Tensor | None = None


@dataclass(frozen=True)
class QuantileBlocks(PerBlock):
    """Clip each block to a private quantile of its norms: C_k ← C_k · exp(−rate·(f_k − target)) after a step.

    f_k is the noised share of drawn examples within C_k, relative to the public batch size. `vote_noise` is the
    deviation of the noise on each sum of votes; unless given, a twentieth of the batch size or four noise multipliers
    of the votes' sensitivity, whichever is more. All bounds begin at C/√K.

    Guarantees: it costs nothing beyond the recipe's price. Votes and gradient are one Gaussian about the same draw (law
    3); in return, the gradient has more noise.
    Edge cases: an example that is not finite votes −1/2 in the blocks where it is not; bounds stay within a factor of
    1000 of where they began; if the parameters change, the bounds start over.
    """

    target: float = 0.5
    rate: float = 0.2
    vote_noise: float | None = None
    needs: ClassVar[tuple[Needs, ...]] = (
        Needs("sampler", "sampler={part!r} has no proof with bounds that follow votes: use Poisson draws", (Poisson,)),
        Needs("noise", "noise={part!r} has no proof with bounds that follow votes: use Independent()", (Independent,)),
        Needs("selection", "selection={part!r} has no proof with bounds that follow votes: use Always()", (Always,)),
        Needs("clip_schedule", "clip_schedule={part!r} must be Constant(): the bounds move by themselves", (Constant,)),
        Needs("rdp_filter", "rdp_filter={part!r} must be None: noise is fixed in advance", (type(None),)),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.target < 1:
            raise InvalidInput(f"target={self.target} must lie in (0, 1): it is the share of norms within the bound")
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise InvalidInput(f"rate={self.rate} must be > 0 and finite: 0.2 is the usual value")
        if self.vote_noise is not None and not (self.vote_noise > 0 and math.isfinite(self.vote_noise)):
            raise InvalidInput(f"vote_noise={self.vote_noise} must be > 0 and finite: without noise the votes leak")

    def start(self) -> Followed:
        return Followed()

    def find_blocks(self, names: Sequence[str], state: Followed) -> list[int]:
        blocks = super().find_blocks(names, state)
        count = max(blocks) + 1
        if state.bounds is None or len(state.bounds.shares) != count:
            state.bounds = Bounds((1 / math.sqrt(count),) * count)
        state.votes = torch.zeros(count, dtype=torch.float64)
        return blocks

    def deviate(self, terms: Terms, count: int) -> float:
        """Return σ_b for `count` blocks."""
        if self.vote_noise is not None:
            return self.vote_noise
        return max(terms.divisor / 20, LEAST_NOISE * VOTE * math.sqrt(count) * terms.noise_multiplier)

    def terms(self, terms: Terms, state: Followed) -> Terms:
        if state.bounds is None:  # the model is not known yet, but the event does not depend on it
            return terms
        count = len(state.bounds.shares)
        paid = (VOTE * math.sqrt(count) / self.deviate(terms, count)) ** 2
        left = terms.noise_multiplier**-2 - paid
        if not left > 0:
            raise InvalidInput(
                f"vote_noise={self.vote_noise} must be > {VOTE * math.sqrt(count) * terms.noise_multiplier:.4g}: "
                f"the votes on {count} blocks alone would spend the budget; leave it out"
            )
        return replace(terms, clip=terms.clip * state.bounds.length, noise_multiplier=left**-0.5)

    def weigh(self, norms: Tensor, clip: float, draw: Draw, state: Followed) -> Tensor:
        assert state.bounds is not None
        assert state.votes is not None
        shares = torch.tensor(state.bounds.shares, dtype=torch.float64) * (clip / state.bounds.length)
        bounds = shares.to(norms).unsqueeze(1)
        within = (norms <= bounds).sum(1).cpu().double()
        state.votes += within * VOTE - (norms.shape[1] - within) * VOTE
        return clip_blocks(norms, bounds)

    def release(self, attempt: Attempt, state: Followed) -> None:
        """Release the noised votes of all processes on the receipt of the step, and let them move the bounds."""
        assert state.bounds is not None
        assert state.votes is not None
        bench, count = attempt.bench, len(state.bounds.shares)
        planned = replace(attempt.terms, noise_multiplier=_find_noise(bench.recipe, attempt.terms.step))
        votes, state.votes = state.votes, None
        if bench.team.leads:
            votes = add_noise(bench.team.secret(bench.source), attempt.receipt, votes, self.deviate(planned, count))
        shares = (bench.team.sum([votes])[0] / attempt.terms.divisor + 0.5).clamp(0.0, 1.0).tolist()
        least, most = (reach / math.sqrt(count) for reach in (1 / REACH, REACH))
        moved = (
            old * math.exp(-self.rate * (share - self.target))
            for old, share in zip(state.bounds.shares, shares, strict=True)
        )
        state.bounds = Bounds(tuple(min(max(bound, least), most) for bound in moved))


def _find_noise(recipe: Recipe, step: int) -> float:
    """Find the noise multiplier that gradient and votes have together."""
    assert recipe.noise_multiplier is not None
    assert recipe.steps is not None
    return recipe.noise_multiplier * factor_at(recipe.noise_schedule, step, recipe.steps)


def blockwise(
    *,
    by: str = "layer",
    adaptive: bool = False,
    target: float = 0.5,
    rate: float = 0.2,
    vote_noise: float | None = None,
    clip: float = 1.0,
    lr: float = 0.5,
    momentum: float = 0.0,
    **common: Unpack[Common],
) -> Recipe:
    """Clip every layer of a gradient to its own bound, at the price of DP-SGD (He et al. 2023).

    `by` is "layer", "parameter" or "block". `adaptive` lets the bounds follow the `target` quantile of their blocks'
    norms, which is paid for with slightly more noise on the gradient.

    >>> from sordino import recipes
    >>> recipes.blockwise(by="block", batch_size=64, epochs=1).weighing
    PerBlock(by='block')
    """
    weighing = QuantileBlocks(by, target, rate, vote_noise) if adaptive else PerBlock(by)
    optimizer = Optimizer("sgd", lr=lr, momentum=momentum)
    return Recipe(name="blockwise", clip=clip, weighing=weighing, optimizer=optimizer, **common)


MECHANISMS = (
    Mechanism(
        "blockwise",
        title="Per-layer clipping",
        summary="every layer of a gradient is clipped separately, to fixed or adaptive bounds",
        paper="He et al., Exploring the Limits of Differentially Private Deep Learning with Group-wise Clipping, ICLR "
        "2023; Andrew et al., Differentially Private Learning with Adaptive Clipping, NeurIPS 2021",
        recipe=blockwise,
        parts={"Weighing": {"per-block": PerBlock, "quantile-blocks": QuantileBlocks}},
    ),
)
